//! Where a rank says that it is, with a GPU that replays.

use std::fs::{File, remove_file};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use rannc_job::watchdog::Position;

/// A file that a GPU would write to.
struct Written {
    path: PathBuf,
    file: File,
}

impl Written {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("rannc-{}-{name}", std::process::id()));
        let file = File::create(&path).expect("a temporary file");
        Self { path, file }
    }

    fn write(&self, number: u32) {
        self.file.write_all_at(&number.to_ne_bytes(), 0).expect("four bytes");
    }
}

impl Drop for Written {
    fn drop(&mut self) {
        let _ = remove_file(&self.path);
    }
}

fn names(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|text| (*text).to_owned()).collect()
}

#[test]
fn the_place_of_the_gpu_follows_the_rank_s() {
    let (position, written) = (Position::default(), Written::new("place"));
    let place = || position.beat().place();
    position.follow(&written.path).expect("it is there");
    assert_eq!(place(), "outside of any collective call");
    position.recorded(3, names(&["before", "forward"]));
    position.recorded(9, names(&["backward"]));
    for (number, at) in [(4, "forward"), (9, "backward"), (3, "before")] {
        written.write(number);
        assert_eq!(place(), format!("outside of any collective call, its GPU at \"{at}\""));
    }
    position.begin("model(...)", true);
    assert_eq!(place(), "in model(...), its GPU at \"before\"");
    position.set_program(names(&["replay"]));
    position.enter(0);
    assert_eq!(place(), "in model(...), at \"replay\", its GPU at \"before\"");
    position.leave(true);
    position.end(true);
    written.write(0);
    assert_eq!(place(), "outside of any collective call");
    assert_eq!(position.failed_at(), "in model(...), at \"replay\", its GPU at \"before\"");
}

#[test]
fn unknown_numbers_are_no_places() {
    let (position, written) = (Position::default(), Written::new("unknown"));
    position.recorded(3, names(&["before", "forward"]));
    position.follow(&written.path).expect("it is there");
    // Nothing has been written.
    assert_eq!(position.beat().device, None);
    for number in [0, 1, 5, u32::MAX] {
        written.write(number);
        assert_eq!(position.beat().device, None);
    }
    written.write(3);
    assert_eq!(position.beat().device.as_deref(), Some("before"));
    position.forgotten(3);
    assert_eq!(position.beat().device, None);
    assert!(position.follow(&written.path.join("none")).is_err());
}

#[test]
fn a_gpu_that_comes_to_another_place_is_progress() {
    let (position, written) = (Position::default(), Written::new("progress"));
    position.follow(&written.path).expect("it is there");
    let mut seen = position.beat().progress;
    for (number, forward) in [(0, false), (3, true), (3, false), (4, true), (0, true), (0, false)] {
        written.write(number);
        let progress = position.beat().progress;
        assert_eq!(progress > seen, forward);
        seen = progress;
    }
}
