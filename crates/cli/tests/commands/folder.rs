//! A folder with the files of one test, and the command run on them.

use std::ffi::OsString;
use std::fs;
use std::path::PathBuf;

use rannc_cli::{Around, Terminal};
use rannc_ir::testing::mlp;

/// A cluster of two nodes with figures of its own: what the presets say may change.
pub const TWO_NODES: &str = r#"name = "test"

[device.gpu]
name = "Test GPU"
memory_gib = 16
framework_gib = 0.5
fp64_tflops = 5
fp32_tflops = 10
tf32_tflops = 50
half_tflops = 100
memory_gb_per_s = 1000
host_gb_per_s = 20
launch_us = 5
action_us = 20
efficiency.matrix.fp32 = []
efficiency.matrix.bytes = []
efficiency.pointwise = []
efficiency.optimizer = []

[[node]]
device = "gpu"
devices = 2
count = 2

[[level]]
name = "inside"
nodes = 1
latency_us = 10
gb_per_s = 200

[[level]]
name = "between"
latency_us = 20
gb_per_s = 40
"#;

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
    /// A folder with the network `graph.json`, six layers of 2,048 features, and `cluster.toml`, four devices.
    pub fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("rannc-cli-{}-{name}", std::process::id()));
        fs::create_dir_all(&path).expect("the temporary folder can be written");
        let folder = Self(path);
        folder.write("graph.json", &mlp(6, 2048).to_json());
        folder.write("cluster.toml", TWO_NODES);
        folder
    }

    pub fn write(&self, file: &str, text: &str) {
        fs::write(self.0.join(file), text).expect("the temporary folder can be written");
    }

    pub fn read(&self, file: &str) -> String {
        fs::read_to_string(self.0.join(file)).expect("the command has written it")
    }

    /// Runs a command line as [`Folder::rannc_at`] does, with its output in a file.
    pub fn rannc(&self, line: &str) -> Seen {
        self.rannc_at(None, line)
    }

    /// Runs a command line whose JSON and TOML files are in this folder; the folder is not shown.
    pub fn rannc_at(&self, columns: Option<usize>, line: &str) -> Seen {
        let folder = format!("{}/", self.0.display());
        let is_file = |word: &str| word.ends_with(".json") || word.ends_with(".toml");
        let args = line.split(' ').map(|word| if is_file(word) { format!("{folder}{word}") } else { word.to_owned() });
        let seen = rannc_at(columns, args);
        let shown = |text: String| text.replace(&folder, "");
        Seen { out: shown(seen.out), err: shown(seen.err), ..seen }
    }

    /// Where a file of the folder is.
    pub fn path(&self, file: &str) -> PathBuf {
        self.0.join(file)
    }

    /// The messages of several command lines.
    pub fn errors(&self, lines: &[&str]) -> String {
        lines.iter().map(|line| format!("$ rannc {line}\n{}", self.rannc(line).error())).collect()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Runs a command with its output in a file.
pub fn rannc(args: impl Iterator<Item = String>) -> Seen {
    rannc_at(None, args)
}

/// Runs a command in a terminal with so many columns.
fn rannc_at(columns: Option<usize>, args: impl Iterator<Item = String>) -> Seen {
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let args = std::iter::once("rannc".to_owned()).chain(args).map(OsString::from);
    let terminal = Terminal::new(columns);
    let code = rannc_cli::run(args, Around { out: &mut out, err: &mut err, terminal, interrupted: &|| false });
    let text = |bytes| String::from_utf8(bytes).expect("text");
    Seen { code, out: text(out), err: text(err) }
}
