//! `rannc explain` and `whatif`.

use insta::assert_snapshot;

use crate::folder::{Folder, TWO_NODES};

/// The text without the time of the search.
fn timeless(text: &str) -> String {
    let line = text.lines().find(|line| line.starts_with("Searched: ")).expect("the search is told about");
    let (before, after) = line.split_once(" measured) in ").expect("its time");
    let (_, after) = after.split_once(';').expect("its gap");
    text.replace(line, &format!("{before} measured) in [time];{after}"))
}

#[test]
fn a_plan_is_explained() {
    let folder = Folder::new("explain");
    let line = "explain graph.json --cluster cluster.toml --batch 512 --memory-gb 0.78 --runners-up 3";
    assert_snapshot!(timeless(&folder.rannc(line).output()));
}

#[test]
fn an_explanation_for_programs_says_the_same() {
    let folder = Folder::new("explain-json");
    let line = "explain graph.json --cluster cluster.toml --batch 512 --memory-gb 0.78 --runners-up 3 --json";
    let json: serde_json::Value = serde_json::from_str(&folder.rannc(line).output()).expect("JSON");
    let stages = json["plan"]["stages"].as_array().expect("a list").len();
    assert_eq!(json["stages"].as_array().map(Vec::len), Some(stages));
    assert_eq!(json["cuts"].as_array().map(Vec::len), Some(stages - 1));
    assert_eq!(json["runners_up"].as_array().map(Vec::len), Some(3));
    let share = |name: &str| json["step"][name].as_f64().expect("a number");
    assert!((share("work") + share("fill_and_drain") + share("end") - 1.0).abs() < 1e-9);
    let best_us = json["plan"]["predicted"]["step_us"].as_f64().expect("a number");
    assert!(json["unlimited_step_us"].as_f64().expect("a number") <= best_us);
    for other in json["runners_up"].as_array().expect("a list") {
        assert!(other["step_us"].as_f64().expect("a number") >= best_us);
    }
}

#[test]
fn cases_stand_side_by_side() {
    let folder = Folder::new("whatif");
    let line = "whatif graph.json --cluster cluster.toml --batch 64,512 --devices 1,2,6 --memory-gb 0.8,16";
    assert_snapshot!(folder.rannc(line).output());
    assert_snapshot!(
        folder.rannc("whatif graph.json --cluster cluster.toml --batch 64 --memory-gb 0.6,16 --json").output()
    );
}

#[test]
fn one_node_grows_by_what_its_preset_says() {
    let folder = Folder::new("grown");
    let seen = folder.rannc("whatif graph.json --cluster H200x2 --batch 64 --devices 1,8");
    assert!(seen.output().contains(" 8 "));
    let one_node = TWO_NODES.replace("count = 2", "count = 1");
    let (one_node, _) = one_node.split_once("[[level]]\nname = \"between\"").expect("two levels");
    folder.write("node.toml", one_node);
    assert_snapshot!(folder.errors(&["whatif graph.json --cluster node.toml --batch 64 --devices 4"]));
}

#[test]
fn what_the_runtime_cannot_do_may_be_assumed() {
    let folder = Folder::new("assume");
    let line = "plan graph.json --cluster cluster.toml --batch 512 --memory-gb 0.7";
    assert!(folder.rannc(line).error().contains("cannot run yet"));
    assert_eq!(folder.rannc(&format!("{line} --assume recompute,zero3,offload")).code, 0);
}
