//! A folder with the files of one test, and the command run on them.

use std::ffi::OsString;
use std::fs;
use std::path::PathBuf;

use rannc_ir::testing::mlp;

/// Removed at the end of the test.
pub struct Folder(PathBuf);

/// What the user sees of a command.
pub struct Seen {
    pub code: i32,
    pub out: String,
    pub err: String,
}

impl Seen {
    /// The output of a command that succeeds and has nothing to remark.
    pub fn output(self) -> String {
        assert_eq!((self.code, self.err.as_str()), (0, ""));
        self.out
    }

    /// The message of a command that fails.
    pub fn error(self) -> String {
        assert_eq!((self.code, self.out.as_str()), (1, ""), "{}", self.err);
        assert_eq!(self.err.lines().count(), 1, "{}", self.err);
        self.err
    }
}

impl Folder {
    /// A folder with `graph.json`: a network of six layers.
    pub fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("rannc-cli-{}-{name}", std::process::id()));
        fs::create_dir_all(&path).expect("the temporary folder can be written");
        let folder = Self(path);
        folder.write("graph.json", &mlp(6, 64).to_json());
        folder
    }

    pub fn write(&self, file: &str, text: &str) {
        fs::write(self.0.join(file), text).expect("the temporary folder can be written");
    }

    pub fn read(&self, file: &str) -> String {
        fs::read_to_string(self.0.join(file)).expect("the command has written it")
    }

    /// Runs a command line whose words with a dot are files of this folder; their folder is not shown.
    pub fn rannc(&self, line: &str) -> Seen {
        let folder = format!("{}/", self.0.display());
        let args = line
            .split(' ')
            .map(|word| if word.contains(".json") { format!("{folder}{word}") } else { word.to_owned() });
        let seen = rannc(args);
        let shown = |text: String| text.replace(&folder, "");
        Seen { out: shown(seen.out), err: shown(seen.err), ..seen }
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Runs a command.
pub fn rannc(args: impl Iterator<Item = String>) -> Seen {
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let args = std::iter::once("rannc".to_owned()).chain(args).map(OsString::from);
    let code = rannc_cli::run(args, &mut out, &mut err);
    let text = |bytes| String::from_utf8(bytes).expect("text");
    Seen { code, out: text(out), err: text(err) }
}
