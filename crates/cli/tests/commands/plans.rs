//! `rannc plan`, `show` and `diff`.

use insta::assert_snapshot;
use rannc_plan::Plan;

use crate::folder::Folder;

/// A folder with two plans of its graph for four devices.
fn planned(name: &str) -> Folder {
    let folder = Folder::new(name);
    for (file, more) in [("three.json", "--stages 3 --microbatches 4"), ("one.json", "--stages 1")] {
        let seen = folder.rannc(&format!("plan graph.json --cluster cluster.toml --batch 24 {more} -o {file}"));
        assert_eq!((seen.code, seen.err), (0, format!("Written to {file}\n")));
    }
    folder
}

#[test]
fn a_plan_is_written_and_shown() {
    let folder = planned("show");
    let shown = folder.rannc("show three.json").output();
    assert_snapshot!(shown);
    let json = folder.rannc("show three.json --json").output();
    assert_eq!(Plan::from_json(&json).expect("a plan").stages.len(), 3);
    assert_eq!(json, folder.read("three.json"));
}

#[test]
fn the_plan_is_the_output_of_the_search() {
    let folder = Folder::new("plan");
    let line = "plan graph.json --cluster cluster.toml --batch 24 --stages 3 --memory-gb 1.5";
    assert_snapshot!(folder.rannc(line).output());
    let json = folder.rannc(&format!("{line} --json")).output();
    assert_eq!(Plan::from_json(&json).expect("a plan").batch_rows, 24);
}

#[test]
fn a_batch_is_divided() {
    let folder = planned("batch");
    assert_snapshot!(folder.rannc("show three.json --batch 25").output());
    assert_snapshot!(folder.rannc("show three.json --batch 25 --json").output());
}

#[test]
fn plans_differ() {
    let folder = planned("diff");
    assert_snapshot!(folder.rannc("diff three.json one.json").output());
    assert_snapshot!(folder.rannc("diff three.json one.json --json").output());
    assert_eq!(folder.rannc("diff one.json one.json").output(), "The plans are the same.\n");
}
