//! What the user types and sees.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use rannc_ir::testing::mlp;
use rannc_plan::Plan;

/// A folder of one test, removed at its end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("rannc-cli-{}-{name}", std::process::id()));
        fs::create_dir_all(&path).expect("the temporary folder can be written");
        Self(path)
    }

    fn path(&self, file: &str) -> String {
        self.0.join(file).display().to_string()
    }

    /// A graph file.
    fn graph(&self) -> String {
        let path = self.path("graph.json");
        fs::write(&path, mlp(6, 64).to_json()).expect("the temporary folder can be written");
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Exit code, output and messages of a command line.
fn rannc(args: &[&str]) -> (i32, String, String) {
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let args = ["rannc"].iter().chain(args).map(OsString::from);
    let code = rannc_cli::run(args, &mut out, &mut err);
    let text = |bytes| String::from_utf8(bytes).expect("text");
    (code, text(out), text(err))
}

fn planned(folder: &Folder, more: &[&str]) -> (i32, String, String) {
    let graph = folder.graph();
    let mut args = vec!["plan", &graph, "--devices", "3", "--device", "cpu", "--batch", "24"];
    args.extend(more);
    rannc(&args)
}

#[test]
fn help_teaches_by_examples() {
    let (code, out, _) = rannc(&["--help"]);
    assert_eq!(code, 0);
    for command in ["show", "graph", "plan"] {
        assert!(out.contains(command), "{out}");
        let (code, help, err) = rannc(&[command, "--help"]);
        assert_eq!((code, err.as_str()), (0, ""));
        assert!(help.contains(&format!("Example: rannc {command} ")), "{help}");
    }
}

#[test]
fn the_help_of_show() {
    let (_, out, _) = rannc(&["show", "--help"]);
    assert_eq!(
        out,
        "\
Shows a plan file: stages, ranks, predicted time and memory

Usage: rannc show [OPTIONS] <PLAN>

Arguments:
  <PLAN>  A plan, as RaNNCModule.save_deployment or `rannc plan` writes it

Options:
      --batch <ROWS>  Show how a global batch of so many rows is divided
      --json          Print the checked plan as JSON
  -h, --help          Print help

Example: rannc show plan.json --batch 256
"
    );
}

#[test]
fn a_plan_is_made_written_and_shown() {
    let folder = Folder::new("show");
    let file = folder.path("plan.json");
    let (code, out, err) = planned(&folder, &["--stages", "3", "--microbatches", "4", "-o", &file]);
    assert_eq!((code, err.as_str()), (0, ""));
    assert!(out.ends_with(&format!("Written to {file}\n")), "{out}");
    let (code, shown, _) = rannc(&["show", &file]);
    assert_eq!(code, 0);
    assert!(shown.contains("Memory of a device"), "{shown}");
    let (_, json, _) = rannc(&["show", &file, "--json"]);
    assert_eq!(Plan::from_json(&json).expect("a plan").stages.len(), 3);
    let (_, divided, _) = rannc(&["show", &file, "--batch", "25"]);
    assert_eq!(
        divided,
        "\
Plan of Mlp: 3 stages on 3 ranks, 25 rows in 4 microbatches, 1F1B
Rows of the microbatches: 7, 3 x 6
┌───────┬─────────────────┬──────────┬───────┬──────┐
│ Stage ┆ Modules         ┆ Replicas ┆ Ranks ┆ Rows │
╞═══════╪═════════════════╪══════════╪═══════╪══════╡
│ 0     ┆ layers.0-1      ┆        1 ┆     0 ┆    7 │
│       ┆ layers.2 (part) ┆          ┆       ┆      │
│ 1     ┆ layers.2 (part) ┆        1 ┆     1 ┆    7 │
│ 2     ┆ layers.3-5      ┆        1 ┆     2 ┆    7 │
└───────┴─────────────────┴──────────┴───────┴──────┘
"
    );
}

#[test]
fn a_graph_is_summed_up_or_printed() {
    let folder = Folder::new("graph");
    let (code, out, _) = rannc(&["graph", &folder.graph()]);
    assert_eq!(code, 0);
    assert!(out.starts_with("Graph         Mlp (training)\n"), "{out}");
    let (_, text, _) = rannc(&["graph", &folder.graph(), "--text"]);
    assert!(text.contains("aten.linear.default"), "{text}");
}

#[test]
fn failures_are_one_line_and_an_exit_code() {
    let folder = Folder::new("failures");
    let (code, out, err) = rannc(&["show", "/nowhere/plan.json"]);
    assert_eq!((code, out.as_str()), (1, ""));
    assert!(err.starts_with("error: cannot read the plan file /nowhere/plan.json"), "{err}");
    fs::write(Path::new(&folder.path("bad.json")), "{").expect("writable");
    let (code, _, err) = rannc(&["graph", &folder.path("bad.json")]);
    assert_eq!(code, 1);
    assert!(err.contains("not JSON") && err.lines().count() == 1, "{err}");
    let (code, _, err) = planned(&folder, &["--memory-gb", "0.0001"]);
    assert_eq!(code, 1);
    assert!(err.contains("does not fit into memory"), "{err}");
    let (code, _, err) = planned(&folder, &["--memory-gb", "-1"]);
    assert_eq!(code, 2, "{err}");
    let (code, _, err) = planned(&folder, &["--memory-gb=-1"]);
    assert_eq!((code, err.as_str()), (1, "error: --memory-gb must be a positive number, not -1\n"));
    assert_eq!(rannc(&["shwo"]).0, 2);
    assert_eq!(rannc(&[]).0, 2);
}
