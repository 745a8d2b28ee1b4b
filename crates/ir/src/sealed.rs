//! JSON files with a schema number and a checksum: Plans and Profiles.
//!
//! What is wrong with a file is told as data; whose file it is words it.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::hash::text_hash;

/// What such a file holds. It has a field `schema`, which is [`Sealed::SCHEMA`], and a checksum.
pub trait Sealed: Clone + Serialize + DeserializeOwned {
    /// Version of the file format that is written and read.
    const SCHEMA: u32;

    /// The field with the SHA-256, in hex, of the compact JSON with an empty checksum.
    fn checksum(&mut self) -> &mut String;
}

/// Why a text is not what was sealed.
#[derive(Debug)]
pub enum SealError {
    /// It is not JSON.
    NotJson(serde_json::Error),
    /// Another version of the file format.
    Schema {
        /// What the text says.
        found: String,
    },
    /// The JSON does not have the right form.
    Form(serde_json::Error),
    /// The content is not what was written.
    Checksum {
        /// What the text says.
        found: String,
        /// What the content gives.
        computed: String,
    },
}

/// Computes the checksum.
pub fn seal<T: Sealed>(mut content: T) -> T {
    *content.checksum() = compute_checksum(&content);
    content
}

/// The file's text. The same content gives the same bytes.
pub fn to_json(content: &impl Sealed) -> String {
    let mut text = serde_json::to_string_pretty(content).expect("it holds only strings, numbers and lists");
    text.push('\n');
    text
}

/// Reads a file's text and checks schema, form and checksum.
///
/// # Errors
/// The first of these that is not right.
pub fn from_json<T: Sealed>(text: &str) -> Result<T, SealError> {
    let json: Value = serde_json::from_str(text).map_err(SealError::NotJson)?;
    let schema = json.get("schema").unwrap_or(&Value::Null);
    if *schema != T::SCHEMA {
        let found = if schema.is_null() { "none".to_owned() } else { schema.to_string() };
        return Err(SealError::Schema { found });
    }
    let mut content: T = serde_json::from_str(text).map_err(SealError::Form)?;
    let computed = compute_checksum(&content);
    if *content.checksum() != computed {
        return Err(SealError::Checksum { found: content.checksum().clone(), computed });
    }
    Ok(content)
}

/// Writes the whole text, or leaves the file as it was.
///
/// # Errors
/// Those of [`fs::write`].
pub fn write(path: &Path, text: &str) -> io::Result<()> {
    let may_replace = match fs::symlink_metadata(path) {
        // A file that may not be written may not be replaced either.
        Ok(found) => found.is_file() && OpenOptions::new().write(true).open(path).is_ok(),
        Err(error) => error.kind() == ErrorKind::NotFound,
    };
    match beside(path).filter(|_| may_replace) {
        Some((mut file, unfinished)) => {
            let written = file.write_all(text.as_bytes()).and_then(|()| replace(path, &unfinished));
            if written.is_err() {
                // The first error tells more.
                let _ = fs::remove_file(&unfinished);
            }
            written
        }
        // Links, terminals, and files in folders that take no other.
        None => fs::write(path, text),
    }
}

fn compute_checksum(content: &impl Sealed) -> String {
    let mut unsigned = content.clone();
    unsigned.checksum().clear();
    text_hash(&serde_json::to_string(&unsigned).expect("it holds only strings, numbers and lists"))
}

/// A new file in the same folder, if it takes one.
fn beside(path: &Path) -> Option<(File, PathBuf)> {
    let name = path.file_name()?.to_string_lossy();
    let unfinished = path.with_file_name(format!(".{name}.{}", process::id()));
    Some((File::create_new(&unfinished).ok()?, unfinished))
}

fn replace(path: &Path, unfinished: &Path) -> io::Result<()> {
    if let Ok(found) = fs::metadata(path) {
        fs::set_permissions(unfinished, found.permissions())?;
    }
    fs::rename(unfinished, path)
}
