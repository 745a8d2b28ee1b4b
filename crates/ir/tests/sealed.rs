//! Sealed files: what is refused, and that writing leaves nothing half done.

use std::fs;
use std::path::PathBuf;

use rannc_ir::sealed::{SealError, Sealed, from_json, seal, to_json, write};
use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Note {
    schema: u32,
    words: Vec<String>,
    checksum: String,
}

impl Sealed for Note {
    const SCHEMA: u32 = 3;

    fn checksum(&mut self) -> &mut String {
        &mut self.checksum
    }
}

fn note() -> Note {
    seal(Note { schema: 3, words: vec!["a".to_owned(), "b".to_owned()], checksum: String::new() })
}

fn refused(text: &str) -> SealError {
    from_json::<Note>(text).expect_err("must be refused")
}

/// An empty folder for one test.
fn folder(name: &str) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).expect("a folder");
    folder
}

#[test]
fn only_what_was_sealed_is_read() {
    let text = to_json(&note());
    assert_eq!(from_json::<Note>(&text).expect("just sealed"), note());
    let changed = refused(&text.replace("\"b\"", "\"c\""));
    assert!(matches!(&changed, SealError::Checksum { found, .. } if *found == note().checksum), "{changed:?}");
    assert!(matches!(refused(&text[..20]), SealError::NotJson(_)));
    assert!(matches!(refused(&text.replace("words", "word")), SealError::Form(_)));
    assert!(matches!(refused(&text.replace(": 3", ": 4")), SealError::Schema { found } if found == "4"));
    assert!(matches!(refused("[]"), SealError::Schema { found } if found == "none"));
}

#[test]
fn a_file_is_replaced_as_a_whole() {
    let folder = folder("replaced");
    let path = folder.join("note.json");
    for text in ["long text\n", "text\n"] {
        write(&path, text).expect("a folder that may be written");
        assert_eq!(fs::read_to_string(&path).expect("just written"), text);
    }
    let names: Vec<_> =
        fs::read_dir(&folder).expect("the folder").map(|entry| entry.expect("an entry").file_name()).collect();
    assert_eq!(names, ["note.json"]);
}

#[test]
fn what_cannot_be_written_is_an_error() {
    let folder = folder("errors");
    assert!(write(&folder, "text").is_err());
    assert!(write(&folder.join("missing").join("note.json"), "text").is_err());
}

#[cfg(unix)]
#[test]
fn links_and_permissions_stay() {
    use std::os::unix::fs::{PermissionsExt, symlink};
    let folder = folder("links");
    let (path, link) = (folder.join("note.json"), folder.join("link.json"));
    fs::write(&path, "old").expect("a folder that may be written");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).expect("its owner");
    symlink(&path, &link).expect("a folder that may be written");
    write(&link, "by link").expect("a link to a file");
    assert_eq!(fs::read_to_string(&path).expect("still there"), "by link");
    assert!(fs::symlink_metadata(&link).expect("still there").is_symlink());
    write(&path, "new").expect("a file");
    assert_eq!(fs::metadata(&path).expect("still there").permissions().mode() & 0o777, 0o600);
}
