//! `rannc simulate`.

use insta::assert_snapshot;
use serde_json::Value;

use crate::folder::Folder;
use crate::plan_files::{write_plan, write_shared_plan};

const LINE: &str = "simulate plan.json graph.json --cluster cluster.toml";

/// A folder with a plan of two Stages.
fn planned(name: &str) -> Folder {
    let folder = Folder::new(name);
    write_plan(&folder, "plan.json", &[(6, 1), (13, 2)], |plan| plan.batch_rows = 256);
    folder
}

#[test]
fn a_step_is_simulated() {
    let folder = planned("simulate");
    assert_snapshot!(folder.rannc(LINE).output());
}

#[test]
fn a_step_of_shared_ranks_is_simulated() {
    let folder = Folder::new("simulate-shared");
    write_shared_plan(&folder, "plan.json");
    assert_snapshot!(folder.rannc(&format!("{LINE} --timeline --trace trace.json")).out);
    let trace: Value = serde_json::from_str(&folder.read("trace.json")).expect("JSON");
    let of = |name: &str, key: &str| -> Vec<Value> {
        let events = trace.as_array().expect("a list").iter().filter(|event| event["name"] == name);
        events.map(|event| event["args"][key].clone()).collect()
    };
    assert_eq!(of("forward 0 of stage 3", "stage"), [3]);
    assert_eq!(of("values 0 to rank 0, stage 2 to 3", "stage"), [2]);
    assert_eq!(of("process_name", "name").len(), 2);
    let json: Value = serde_json::from_str(&folder.rannc(&format!("{LINE} --json")).output()).expect("JSON");
    assert_eq!((&json["ranks"][0]["stage"], &json["ranks"][0]["more_stages"][0]), (&0.into(), &3.into()));
}

#[test]
fn times_of_a_rank_add_up() {
    let folder = planned("simulate-json");
    let json: Value = serde_json::from_str(&folder.rannc(&format!("{LINE} --json")).output()).expect("JSON");
    let us = |value: &Value, name: &str| value[name].as_f64().expect("a number");
    let ranks = json["ranks"].as_array().expect("a list");
    assert_eq!(ranks.len(), 3);
    for rank in ranks {
        let sum: f64 =
            ["busy_us", "waiting_us", "reduce_us", "update_us", "bubble_us"].iter().map(|name| us(rank, name)).sum();
        assert!((sum / us(&json, "step_us") - 1.0).abs() < 1e-9, "{rank}");
    }
}

#[test]
fn more_rows_take_longer() {
    let folder = planned("simulate-rows");
    let step_us = |rows: u32| {
        let seen = folder.rannc(&format!("{LINE} --batch {rows} --json"));
        let json: Value = serde_json::from_str(&seen.output()).expect("JSON");
        json["step_us"].as_f64().expect("a number")
    };
    assert!(step_us(512) > step_us(256));
}

#[test]
fn a_trace_is_written() {
    let folder = planned("trace");
    let seen = folder.rannc(&format!("{LINE} --trace trace.json"));
    assert_eq!(seen.code, 0);
    assert_eq!(seen.err, "Trace written to trace.json; open it in ui.perfetto.dev or chrome://tracing\n");
    let trace: Value = serde_json::from_str(&folder.read("trace.json")).expect("JSON");
    let forwards = trace.as_array().expect("a list").iter().filter(|event| event["name"] == "forward 0");
    assert_eq!(forwards.count(), 3);
}

#[test]
fn steps_that_cannot_be_simulated() {
    let folder = planned("simulate-errors");
    write_plan(&folder, "wide.json", &[(6, 2), (13, 4)], |_| ());
    write_plan(&folder, "other.json", &[(6, 1), (13, 2)], |plan| plan.graph_hash = "0".repeat(64));
    assert_snapshot!(folder.errors(&[
        "simulate wide.json graph.json --cluster cluster.toml",
        "simulate other.json graph.json --cluster cluster.toml",
        "simulate plan.json graph.json --cluster cluster.toml --profile missing.json",
        "simulate plan.json graph.json --cluster cluster.toml --trace nowhere/trace.json",
    ]));
}
