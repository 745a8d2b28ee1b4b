//! Graphs as text with what is known of them inside the file: `tests/text/*.txt`.
//!
//! A case is a line `case: name`, a Graph, a line `then:` and what [`facts`] tells. `RANNC_BLESS=1` writes what it
//! tells into the files.

use std::fs;
use std::path::{Path, PathBuf};

use rannc_ir::{Analysis, Graph, RowDim};

const CASE: &str = "case: ";
const THEN: &str = "then:\n";

/// Where rows lie, which Ops are batch-free and where cuts are refused; or why it is no Graph.
fn facts(text: &str) -> String {
    let graph = match Graph::from_text(text) {
        Ok(graph) => graph,
        Err(error) => return format!("refused: {error}\n"),
    };
    let analysis = Analysis::new(&graph);
    let mut facts = String::new();
    let mut line = |name: &str, items: Vec<String>| {
        if !items.is_empty() {
            facts += &format!("{name}: {}\n", items.join(", "));
        }
    };
    let rows = |rows: &RowDim| match rows.per_row {
        1 => format!("dim {}", rows.dim),
        per_row => format!("dim {} by {per_row}", rows.dim),
    };
    let with_rows =
        analysis.row_dims.iter().filter_map(|(value, dim)| Some(format!("{value} {}", rows(dim.as_ref()?))));
    line("rows", with_rows.collect());
    let without = analysis.row_dims.iter().filter(|(_, rows)| rows.is_none());
    line("no rows", without.map(|(value, _)| value.to_string()).collect());
    let free = analysis.batch_free.iter().filter(|&(_, &free)| free);
    line("batch-free", free.map(|(op, _)| op.to_string()).collect());
    for (place, refusal) in analysis.cuts.iter().enumerate() {
        line(&format!("no cut at {place}"), refusal.iter().map(ToString::to_string).collect());
    }
    facts
}

/// The file with what its cases tell now.
fn told(path: &Path, text: &str) -> String {
    let mut parts = text.split(CASE);
    let mut told = parts.next().unwrap_or_default().to_owned();
    for case in parts {
        let (name, rest) = case.split_once('\n').unwrap_or((case, ""));
        let graph = rest.split_once(THEN).map_or(rest, |(graph, _)| graph);
        assert!(!graph.trim().is_empty(), "{}: the case {name} has no graph", path.display());
        told += &format!("{CASE}{name}\n{}\n{THEN}{}\n", graph.trim_end(), facts(graph));
    }
    told.trim_end().to_owned() + "\n"
}

#[test]
fn graphs_are_what_their_files_say() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/text");
    let entries = fs::read_dir(&folder).expect("the folder of cases");
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.expect("an entry").path()).collect();
    paths.sort();
    assert!(paths.len() >= 4, "cases are missing: {paths:?}");
    for path in paths {
        let text = fs::read_to_string(&path).expect("a readable file");
        let told = told(&path, &text);
        if std::env::var_os("RANNC_BLESS").is_some() {
            fs::write(&path, told).expect("a writable file");
        } else {
            assert_eq!(told, text, "{}; RANNC_BLESS=1 writes what is told now", path.display());
        }
    }
}
