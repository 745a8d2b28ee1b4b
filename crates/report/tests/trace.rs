//! Traces of simulated steps.

use std::collections::{BTreeMap, BTreeSet};

use rannc_ir::testing::mlp;
use rannc_ir::{OpRun, ValueId};
use rannc_plan::{Batch, Call, Partition, Placement, ScheduleKind, build};
use rannc_report::chrome_trace;
use rannc_sim::{Costs, Timeline, simulate};
use serde_json::Value;

const MICROBATCHES: u32 = 4;

/// Two Replicas that send to one, and back.
fn timeline() -> Timeline {
    let runs = [OpRun { first: 0, end: 2 }, OpRun { first: 2, end: 5 }];
    let partition = Partition::new(&mlp(2, 4), &runs).expect("the cut is allowed");
    let schedule = ScheduleKind::OneForwardOneBackward;
    let placement = Placement { ranks: vec![vec![0, 1], vec![2]], microbatches: MICROBATCHES, schedule };
    let batch = Batch { rows_per_rank: vec![8, 8, 8], gather_inputs: true };
    let program = build(&placement, &partition, &batch, Call::Whole).expect("the case is sound");
    simulate(&program, &Rows).expect("the program runs")
}

/// Everything takes as long, or as much, as it has rows; single ranks do not reduce.
struct Rows;

impl Costs for Rows {
    fn forward_us(&self, _: u32, rows: u64) -> f64 {
        rows as f64
    }
    fn backward_us(&self, _: u32, rows: u64) -> f64 {
        2.0 * rows as f64
    }
    fn send_us(&self, _: u32, _: u32, bytes: u64) -> f64 {
        0.1 * bytes as f64
    }
    fn value_bytes(&self, _: ValueId, rows: u64) -> u64 {
        rows
    }
    fn reduce_us(&self, stage: u32) -> f64 {
        if stage == 0 { 3.0 } else { 0.0 }
    }
    fn update_us(&self, _: u32) -> f64 {
        1.0
    }
    fn fixed_bytes(&self, _: u32) -> u64 {
        100
    }
    fn microbatch_bytes(&self, _: u32, rows: u64) -> u64 {
        rows
    }
    fn workspace_bytes(&self, _: u32, rows: u64) -> u64 {
        rows
    }
}

fn entries() -> Vec<Value> {
    serde_json::from_str(&chrome_trace(&timeline())).expect("the trace is a JSON array")
}

fn of_phase<'a>(entries: &'a [Value], phase: &str) -> Vec<&'a Value> {
    let found: Vec<&Value> = entries.iter().filter(|entry| entry["ph"] == phase).collect();
    assert!(!found.is_empty(), "the trace has entries of phase {phase}");
    found
}

fn us(entry: &Value, key: &str) -> f64 {
    entry[key].as_f64().expect("a time is a number")
}

/// Start and end of the slices of each thread, by increasing start.
fn slices(entries: &[Value]) -> BTreeMap<(u64, u64), Vec<(f64, f64)>> {
    let mut slices: BTreeMap<(u64, u64), Vec<(f64, f64)>> = BTreeMap::new();
    for slice in of_phase(entries, "X") {
        let start_us = us(slice, "ts");
        slices.entry(thread(slice)).or_default().push((start_us, start_us + us(slice, "dur")));
    }
    for slices in slices.values_mut() {
        slices.sort_by(|a, b| a.0.total_cmp(&b.0));
    }
    slices
}

fn thread(entry: &Value) -> (u64, u64) {
    (entry["pid"].as_u64().expect("a process"), entry["tid"].as_u64().expect("a thread"))
}

#[test]
fn nothing_overlaps_on_a_thread() {
    let slices = slices(&entries());
    assert_eq!(slices.keys().map(|(process, _)| *process).collect::<BTreeSet<_>>(), BTreeSet::from([1, 2]));
    for slices in slices.values() {
        assert!(slices.iter().all(|(start_us, end_us)| end_us > start_us));
        assert!(slices.windows(2).all(|pair| pair[0].1 <= pair[1].0 + 1e-9), "{slices:?}");
    }
}

#[test]
fn every_process_and_thread_has_a_name() {
    let entries = entries();
    let processes = of_phase(&entries, "M").into_iter().filter(|entry| entry["name"] == "process_name");
    let processes = processes.map(|entry| (entry["pid"].as_u64(), entry["args"]["name"].as_str()));
    assert_eq!(processes.collect::<Vec<_>>(), [(Some(1), Some("stage 0")), (Some(2), Some("stage 1"))]);
    let named = of_phase(&entries, "M").into_iter().filter(|entry| entry["name"] == "thread_name");
    let names: BTreeMap<(u64, u64), &str> =
        named.map(|entry| (thread(entry), entry["args"]["name"].as_str().expect("a name"))).collect();
    assert_eq!(
        names.values().copied().collect::<Vec<_>>(),
        [
            "rank 0",
            "rank 0 messages 1",
            "rank 1",
            "rank 1 messages 1",
            "rank 2",
            "rank 2 messages 1",
            "rank 2 messages 2"
        ]
    );
    assert_eq!(slices(&entries).into_keys().collect::<Vec<_>>(), names.into_keys().collect::<Vec<_>>());
}

#[test]
fn every_computation_is_there() {
    let entries = entries();
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for slice in of_phase(&entries, "X") {
        *counts.entry(slice["name"].as_str().expect("a name")).or_default() += 1;
    }
    for mb in 0..MICROBATCHES {
        assert_eq!((counts[&*format!("F{mb}")], counts[&*format!("B{mb}")]), (3, 3));
        assert_eq!(counts[&*format!("values {mb} to rank 2")], 2);
        assert_eq!(counts[&*format!("gradients {mb} from rank 2")], 2);
    }
    assert_eq!((counts["reduce"], counts["update"]), (2, 3), "a reduction without time is left out");
}

#[test]
fn arrows_lead_from_a_message_to_itself() {
    let entries = entries();
    let slices = slices(&entries);
    let ends = |phase| {
        let ends = of_phase(&entries, phase).into_iter().map(|end| {
            let ts = us(end, "ts");
            assert!(slices[&thread(end)].iter().any(|&(start_us, end_us)| start_us <= ts && ts < end_us));
            (end["id"].as_u64().expect("a number"), ts)
        });
        ends.collect::<Vec<_>>()
    };
    let (mut starts, mut finishes) = (ends("s"), ends("f"));
    starts.sort_by_key(|end| end.0);
    finishes.sort_by_key(|end| end.0);
    assert_eq!(starts, finishes);
    assert_eq!(starts.len(), 4 * MICROBATCHES as usize);
    assert!(starts.windows(2).all(|pair| pair[0].0 < pair[1].0), "no number stands for two messages");
}

#[test]
fn memory_reaches_its_peak() {
    let entries = entries();
    for rank in timeline().ranks {
        let name = format!("memory of rank {}", rank.rank);
        let counter = of_phase(&entries, "C").into_iter().filter(|entry| entry["name"] == name);
        let levels: Vec<u64> = counter.map(|entry| entry["args"]["bytes"].as_u64().expect("bytes")).collect();
        assert_eq!(levels.iter().max(), Some(&rank.peak_bytes));
        assert_eq!(levels.last(), Some(&100));
    }
}
