//! Traces of simulated steps.

use std::collections::{BTreeMap, BTreeSet};

use rannc_ir::testing::mlp;
use rannc_ir::{OpRun, ValueId};
use rannc_plan::{Batch, Buckets, Call, Partition, Placement, Program, ScheduleKind, Trained, build};
use rannc_report::{TracedStep, chrome_trace};
use rannc_sim::{Costs, Timeline, simulate};
use serde_json::Value;

const MICROBATCHES: u32 = 4;
const LIMIT_BYTES: u64 = 1 << 20;

/// Two Replicas that send to one, and back.
fn step() -> (Program, Timeline) {
    let runs = [OpRun { first: 0, end: 2 }, OpRun { first: 2, end: 5 }];
    let graph = mlp(2, 4);
    let partition = Partition::new(&graph, &runs).expect("the cut is allowed");
    let schedule = ScheduleKind::OneForwardOneBackward.into();
    let placement = Placement {
        ranks: vec![vec![0, 1], vec![2]],
        microbatches: MICROBATCHES,
        schedule,
        sharding: Vec::new(),
        bucket_bytes: Vec::new(),
    };
    let batch = Batch { rows_per_rank: vec![8, 8, 8], gather_inputs: true };
    let buckets = Buckets::of(&graph, &partition, &placement, &Trained::captured(&graph));
    let program = build(&placement, &partition, &buckets, &batch, Call::Whole).expect("the case is sound");
    let timeline = simulate(&program, &Rows).expect("the program runs");
    (program, timeline)
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
    fn backward_input_us(&self, _: u32, rows: u64) -> f64 {
        rows as f64
    }
    fn backward_weight_us(&self, _: u32, rows: u64) -> f64 {
        rows as f64
    }
    fn waiting_bytes(&self, _: u32, rows: u64) -> u64 {
        rows
    }
    fn send_us(&self, _: u32, _: u32, bytes: u64) -> f64 {
        0.1 * bytes as f64
    }
    fn value_bytes(&self, _: ValueId, rows: u64) -> u64 {
        rows
    }
    fn reduce_us(&self, _: u32, _: u64) -> f64 {
        3.0
    }
    fn reduce_scatter_us(&self, _: u32, _: u64) -> f64 {
        1.5
    }
    fn gather_us(&self, _: u32, _: u64) -> f64 {
        0.0
    }
    fn reduce_tied_us(&self, _: &[u32], _: u64) -> f64 {
        0.0
    }
    fn update_us(&self, _: u32) -> f64 {
        1.0
    }
    fn fixed_bytes(&self, _: u32) -> u64 {
        100
    }
    fn framework_bytes(&self, _: u32) -> u64 {
        10
    }
    fn microbatch_bytes(&self, _: u32, rows: u64) -> u64 {
        rows
    }
    fn workspace_bytes(&self, _: u32, rows: u64) -> u64 {
        rows
    }
}

fn entries() -> Vec<Value> {
    let (program, timeline) = step();
    let modules = ["layers.0".to_owned(), "layers.1".to_owned()];
    let step = TracedStep {
        program: &program,
        costs: &Rows,
        timeline: &timeline,
        modules: &modules,
        limit_bytes: LIMIT_BYTES,
    };
    serde_json::from_str(&chrome_trace(step)).expect("the trace is a JSON array")
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
    assert_eq!(
        processes.collect::<Vec<_>>(),
        [(Some(1), Some("stage 0: layers.0")), (Some(2), Some("stage 1: layers.1"))]
    );
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
        assert_eq!((counts[&*format!("forward {mb}")], counts[&*format!("backward {mb}")]), (3, 3));
        assert_eq!(counts[&*format!("values {mb} to rank 2")], 2);
        assert_eq!(counts[&*format!("gradients {mb} from rank 2")], 2);
    }
    assert_eq!((counts["reduce"], counts["optimizer"]), (2, 3), "a reduction without time is left out");
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
    for rank in step().1.ranks {
        let name = format!("memory of rank {} (limit 1.00 MiB)", rank.rank);
        let counter = of_phase(&entries, "C").into_iter().filter(|entry| entry["name"] == name);
        let levels: Vec<[u64; 2]> = counter
            .map(|entry| ["bytes", "free_bytes"].map(|key| entry["args"][key].as_u64().expect("bytes")))
            .collect();
        assert_eq!(levels.iter().map(|[used, _]| used).max(), Some(&rank.peak_bytes));
        assert_eq!(levels.last(), Some(&[100, LIMIT_BYTES - 100]));
        assert!(levels.iter().all(|[used, free]| used + free == LIMIT_BYTES));
    }
}

#[test]
fn slices_say_what_they_are_about() {
    let entries = entries();
    let slice = |name: &str, rank: u32| {
        let found = |slice: &&Value| slice["name"] == name && slice["args"]["rank"] == rank;
        of_phase(&entries, "X").into_iter().find(found).expect("it is there").clone()
    };
    let forward = slice("forward 1", 2);
    assert_eq!(forward["cat"], "forward");
    // Of 24 rows in 4 microbatches.
    let about = serde_json::json!(
        { "stage": 1, "rank": 2, "replica": 0, "microbatch": 1, "rows": 6, "modules": "layers.1" }
    );
    assert_eq!(forward["args"], about);
    let message = slice("values 1 from rank 0", 2);
    assert_eq!(message["cat"], "message");
    let about = serde_json::json!({ "stage": 1, "rank": 2, "microbatch": 1, "from_rank": 0, "to_rank": 2, "bytes": 3 });
    assert_eq!(message["args"], about);
    assert_eq!(
        (slice("reduce", 0)["cat"].as_str(), slice("optimizer", 0)["cat"].as_str()),
        (Some("reduce"), Some("optimizer"))
    );
}

#[test]
fn idle_time_has_a_cause_and_fills_the_step() {
    let entries = entries();
    let timeline = step().1;
    for rank in &timeline.ranks {
        let own = of_phase(&entries, "X").into_iter();
        let own = own.filter(|slice| slice["args"]["rank"] == rank.rank && slice["cat"] != "message");
        let own: Vec<&Value> = own.collect();
        let sum_us: f64 = own.iter().map(|slice| us(slice, "dur")).sum();
        assert!((sum_us - timeline.step_us).abs() < 1e-6, "rank {}: {sum_us}", rank.rank);
        let idle: f64 = own.iter().filter(|slice| slice["cat"] == "idle").map(|slice| us(slice, "dur")).sum();
        assert!((idle - rank.waiting_us - rank.bubble_us).abs() < 1e-6);
    }
    let causes: Vec<&str> =
        of_phase(&entries, "X").into_iter().filter_map(|slice| slice["args"]["cause"].as_str()).collect();
    for cause in ["wait for values 0 from rank", "is not ready for gradients", "other ranks end the step"] {
        assert!(causes.iter().any(|known| known.contains(cause)), "{cause}: {causes:?}");
    }
}
