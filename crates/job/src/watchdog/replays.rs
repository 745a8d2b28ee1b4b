//! At which place of a replay the GPU is: it writes the place's number to memory that is a file here.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::mem::replace;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// The names of the places of all recordings, and where the GPU is.
#[derive(Default)]
pub struct Replays {
    file: Option<File>,
    /// By the number of a recording's first place, from 1 on; the others' follow.
    names: BTreeMap<u32, Vec<String>>,
    /// What the GPU has written last, as far as somebody has looked: 0 where no replay runs.
    number: u32,
}

impl Replays {
    /// Opens the file that holds the number.
    pub fn follow(&mut self, path: &Path) -> io::Result<()> {
        self.file = Some(File::open(path)?);
        Ok(())
    }

    /// Takes note of a recording's places.
    pub fn add(&mut self, first: u32, names: Vec<String>) {
        self.names.insert(first, names);
    }

    /// The recording is gone.
    pub fn remove(&mut self, first: u32) {
        self.names.remove(&first);
    }

    /// Looks where the GPU is; true when that is elsewhere than at the last look.
    pub fn look(&mut self) -> bool {
        let mut bytes = [0; 4];
        let read = self.file.as_ref().is_some_and(|file| file.read_exact_at(&mut bytes, 0).is_ok());
        let number = if read { u32::from_ne_bytes(bytes) } else { 0 };
        replace(&mut self.number, number) != number
    }

    /// The name of the place where the GPU was at the last look.
    pub fn place(&self) -> Option<&String> {
        let (first, names) = self.names.range(..=self.number).next_back()?;
        names.get((self.number - first) as usize)
    }
}
