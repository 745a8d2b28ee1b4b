//! Failures: one line, and exit code 1.

use insta::assert_snapshot;
use rannc_cost::Profile;
use rannc_ir::Graph;

use crate::folder::Folder;
use crate::plan_files::write_plan;

#[test]
fn files_that_cannot_be_used() {
    let folder = Folder::new("files");
    folder.write("empty.json", "");
    folder.write("cut.json", &folder.read("graph.json")[..100]);
    folder.write("old.json", r#"{"schema": 0}"#);
    folder.write("other.json", r#"{"schema": 3}"#);
    assert_snapshot!(folder.errors(&[
        "graph missing.json",
        "graph empty.json",
        "graph cut.json",
        "graph old.json",
        "show missing.json",
        "show empty.json",
        "show old.json",
        "show other.json",
        "diff missing.json missing.json",
        "plan graph.json --cluster cluster.toml --batch 24 -o nowhere/plan.json",
    ]));
}

#[test]
fn files_of_another_kind() {
    let folder = Folder::new("kinds");
    write_plan(&folder, "plan.json", &[(6, 1), (13, 2)], |_| ());
    let hash = Graph::from_json(&folder.read("graph.json")).expect("a graph").hash();
    folder.write("profile.json", &Profile::new(&hash, "Test GPU", "float32").seal().expect("consistent").to_json());
    let made = folder.rannc("simulate plan.json graph.json --cluster cluster.toml --trace trace.json");
    assert_eq!(made.code, 0, "{}", made.err);
    assert_snapshot!(folder.errors(&[
        "show graph.json",
        "show profile.json",
        "diff plan.json graph.json",
        "graph plan.json",
        "graph cluster.toml",
        "graph trace.json",
        "plan plan.json --cluster cluster.toml --batch 24",
        "plan graph.json --cluster plan.json --batch 24",
        "plan graph.json --cluster cluster.toml --batch 24 --profile plan.json",
        "explain cluster.toml --cluster graph.json --batch 24",
        "whatif profile.json --cluster cluster.toml --batch 24",
        "simulate graph.json plan.json --cluster cluster.toml",
        "cluster graph.json",
    ]));
}

#[test]
fn plans_that_cannot_be() {
    let folder = Folder::new("plans");
    assert_snapshot!(folder.errors(&[
        "plan graph.json --cluster cluster.toml --batch 24 --memory-gb 0.0001",
        "plan graph.json --cluster cluster.toml --batch 24 --stages 5",
        "plan graph.json --cluster cluster.toml --batch 24 --microbatches 25",
        "plan graph.json --cluster cluster.toml --batch 24 --memory-margin 1",
        "plan graph.json --cluster cluster.toml --batch 24 --optimizer-factor nan",
        "plan graph.json --cluster cluster.toml --cluster H200x4 --batch 24 -o plan.json",
        "whatif graph.json --cluster cluster.toml --batch 24 --price-per-device-hour 1,2",
    ]));
}

#[test]
fn profiles_that_cannot_be_used() {
    let folder = Folder::new("profiles");
    let hash = Graph::from_json(&folder.read("graph.json")).expect("a graph").hash();
    for (file, graph_hash, device) in [
        ("good.json", hash.as_str(), "Test GPU"),
        ("other-graph.json", "0000", "Test GPU"),
        ("other-device.json", hash.as_str(), "Another GPU"),
    ] {
        let profile = Profile::new(graph_hash, device, "float32").seal().expect("consistent");
        folder.write(file, &profile.to_json());
    }
    folder.write("cut.json", &folder.read("good.json")[..50]);
    folder.write("edited.json", &folder.read("good.json").replace("float32", "float64"));
    let line = "plan graph.json --cluster cluster.toml --batch 24 --profile";
    assert_eq!(folder.rannc(&format!("{line} good.json")).code, 0);
    assert_snapshot!(folder.errors(&[
        &format!("{line} missing.json"),
        &format!("{line} other-graph.json"),
        &format!("{line} other-device.json"),
        &format!("{line} cut.json"),
        &format!("{line} edited.json"),
    ]));
}
