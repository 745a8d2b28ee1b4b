//! Measured Blocks in the place of the roofline: their memory, what they share, and what did not fit.

mod encoder;

use std::collections::BTreeSet;
use std::slice::from_ref;

use encoder::encoder;
use rannc_cost::{BlockPoint, BlockProfile, Blocks, Cluster, Profile};
use rannc_ir::testing::GraphBuilder;
use rannc_ir::{Analysis, Arg, DType, Dim, Graph, OpId, OpRun};
use rannc_plan::{Partition, Plan, Recompute};
use rannc_search::{PlanCosts, SearchError, Settings, plan, whole_spans};

const ROWS: u64 = 8;

fn point(rows: u64, saved_bytes: u64, workspace_bytes: u64) -> BlockPoint {
    BlockPoint {
        rows,
        fits: true,
        forward_us: 100.0,
        backward_us: 200.0,
        forward_host_us: 1.0,
        backward_host_us: 2.0,
        backward_input_us: 100.0,
        backward_weight_us: 100.0,
        saved_bytes,
        workspace_bytes,
    }
}

fn out_of_memory(rows: u64) -> BlockPoint {
    BlockPoint {
        fits: false,
        forward_us: 0.0,
        backward_us: 0.0,
        forward_host_us: 0.0,
        backward_host_us: 0.0,
        backward_input_us: 0.0,
        backward_weight_us: 0.0,
        ..point(rows, 0, 0)
    }
}

/// A Profile in which every kind of Block has these points.
fn profile(graph: &Graph, cluster: &Cluster, points: &[BlockPoint]) -> Profile {
    let blocks = Blocks::new(graph, &Analysis::new(graph));
    let mut profile = Profile::new(&graph.hash(), &cluster.kinds[0].name, "float32");
    for hash in blocks.hashes {
        profile.blocks.insert(hash, BlockProfile::new(points.to_vec()));
    }
    profile.seal().expect("figures agree")
}

fn one_stage() -> Settings {
    Settings { batch_rows: ROWS, stages: Some(1), microbatches: Some(1), ..Settings::default() }
}

fn planned(graph: &Graph, points: &[BlockPoint]) -> Plan {
    let cluster = Cluster::preset("H200", 1, 1).expect("a device");
    let measured = profile(graph, &cluster, points);
    plan(graph, &cluster, &[measured], &one_stage()).expect("fits").plan
}

#[test]
fn measured_memory_counts() {
    let graph = encoder(2, 256, 64, 1000);
    let memory = |saved_bytes, workspace_bytes| {
        planned(&graph, &[point(ROWS, saved_bytes, workspace_bytes)]).stages[0].predicted.memory
    };
    let (little, more, temporary) = (memory(1 << 24, 1000), memory(1 << 26, 1000), memory(1 << 24, 123_456));
    let blocks = Blocks::new(&graph, &Analysis::new(&graph));
    let difference = (blocks.blocks.len() as u64) * ((1 << 26) - (1 << 24));
    assert_eq!(more.activations_bytes - little.activations_bytes, difference);
    assert_eq!((little.workspace_bytes, temporary.workspace_bytes), (1000, 123_456));
}

/// What runs as one is priced as one, wherever it stands in a Stage.
#[test]
fn spans_are_priced_as_they_were_measured() {
    let graph = encoder(2, 256, 64, 1000);
    let analysis = Analysis::new(&graph);
    let blocks = Blocks::new(&graph, &analysis);
    let spans = whole_spans(&graph, &analysis, &blocks);
    let longer: Vec<&String> = spans
        .blocks
        .iter()
        .map(|span| &spans.hashes[span.kind as usize])
        .filter(|hash| !blocks.hashes.contains(hash))
        .collect();
    assert!(longer.len() >= 2, "{longer:?}");
    let cluster = Cluster::preset("H200", 1, 1).expect("a device");
    let predicted = |forward_us: f64, saved_bytes: u64, workspace_bytes: u64| {
        let mut measured = profile(&graph, &cluster, &[point(ROWS, 1 << 20, 1000)]);
        for &hash in &longer {
            let whole = BlockPoint { forward_us, ..point(ROWS, saved_bytes, workspace_bytes) };
            measured.blocks.insert(hash.clone(), BlockProfile::new(vec![whole]));
        }
        let measured = measured.seal().expect("figures agree");
        plan(&graph, &cluster, &[measured], &one_stage()).expect("fits").plan.stages[0].predicted.clone()
    };
    let (fast, slow) = (predicted(10.0, 1 << 24, 1 << 20), predicted(90.0, 1 << 25, 1 << 21));
    let count = longer.len();
    assert!((slow.forward_us - fast.forward_us - 80.0 * count as f64).abs() < 1e-6);
    assert_eq!(slow.memory.activations_bytes - fast.memory.activations_bytes, (count as u64) << 24);
    assert_eq!((fast.memory.workspace_bytes, slow.memory.workspace_bytes), (1 << 20, 1 << 21));
}

/// Stages run the functions that were measured, batch-free Ops of theirs included, wherever the cuts are.
#[test]
fn what_is_measured_is_what_runs() {
    let b = Dim::rows(1);
    let wide = [b, Dim::fixed(8)];
    let mut builder = GraphBuilder::new("Masked");
    let mut hidden = builder.input_with_grad(&wide);
    let zeros = |builder: &mut GraphBuilder| {
        builder.op("aten.zeros.default", vec![Arg::List(vec![Arg::Dim(b), Arg::Int(8)])], &wide)
    };
    let shared = zeros(&mut builder);
    for layer in 0..3 {
        builder.module(&format!("layers.{layer}"));
        let mask = builder.pointwise("aten.exp.default", &[shared]);
        let filled = zeros(&mut builder);
        builder.in_place("aten.fill_.Scalar", filled);
        hidden = builder.pointwise("aten.mul.Tensor", &[hidden, mask]);
        hidden = builder.pointwise("aten.mul.Tensor", &[hidden, filled]);
    }
    let graph = builder.finish(&[hidden]);
    let analysis = Analysis::new(&graph);
    let blocks = Blocks::new(&graph, &analysis);
    let spans = whole_spans(&graph, &analysis, &blocks).blocks;
    let alone: Vec<OpRun> = spans.iter().map(|span| span.ops).collect();
    let alone = Partition::new(&graph, &alone).expect("cuts are allowed");
    let measured = alone.stages.iter().zip(spans).map(|(part, span)| part.function(&graph, &analysis, span.own_ops));
    let measured: BTreeSet<String> = measured.map(|span| span.hash).collect();
    assert_eq!(measured.len(), 1, "all layers are one function");
    let blocks: Vec<_> = blocks.blocks.iter().map(|block| (block.ops, Recompute::None)).collect();
    for cuts in [&[0, 6][..], &[0, 2, 6], &[0, 4, 6], &[0, 2, 4, 6]] {
        let stages: Vec<OpRun> = cuts.windows(2).map(|ends| OpRun { first: ends[0], end: ends[1] }).collect();
        let partition = Partition::new(&graph, &stages).expect("cuts are allowed");
        let partition = partition.with_spans(&graph, &blocks).expect("its blocks");
        for part in &partition.stages {
            let (shared, layers): (Vec<_>, Vec<_>) = part.spans.iter().partition(|span| span.ops.contains(&OpId(0)));
            assert_eq!(
                (shared.len(), layers.len()),
                (1, part.ops.iter().filter(|op| analysis.main_index[**op].is_some()).count() / 2)
            );
            assert!(layers.iter().all(|span| measured.contains(&span.hash)));
        }
    }
}

/// What a measurement has decided stands in the Plan.
#[test]
fn plans_name_the_spans_that_were_measured_as_they_are() {
    let graph = encoder(2, 256, 64, 1000);
    let cluster = Cluster::preset("H200", 1, 1).expect("a device");
    assert!(planned(&graph, &[point(ROWS, 1000, 1000)]).eager_spans.is_empty());
    let mut measured = profile(&graph, &cluster, &[point(ROWS, 1000, 1000)]);
    measured.eager_spans.extend(["s2".to_owned(), "s1".to_owned()]);
    let measured = measured.seal().expect("figures agree");
    let read = Profile::from_json(&measured.to_json()).expect("the text is a profile");
    let other = Profile { device: "another".to_owned(), eager_spans: ["s3".to_owned()].into(), ..read.clone() };
    let other = other.seal().expect("figures agree");
    let settings = Settings { runners_up: 2, ..one_stage() };
    let found = plan(&graph, &cluster, &[other, read.clone()], &settings).expect("fits");
    assert_eq!(found.plan.eager_spans, ["s1", "s2"]);
    // At the same prices a Plan that was found by others names them, and without measurements keeps what it names.
    let estimated = plan(&graph, &cluster, &[], &settings).expect("fits").plan;
    let repriced = |profiles: &[Profile], plan: &Plan| {
        let costs = PlanCosts::new(&graph, &cluster, profiles, &settings, plan).expect("it is of this graph");
        costs.predicted().expect("figures").eager_spans
    };
    assert!(estimated.eager_spans.is_empty());
    assert_eq!(repriced(&[read], &estimated), ["s1", "s2"]);
    assert_eq!(repriced(&[], &found.plan), ["s1", "s2"]);
    assert!(found.runners_up.iter().all(|plan| plan.eager_spans == found.plan.eager_spans));
}

/// So does under which budget of memory Spans were compiled: the least of all devices.
#[test]
fn plans_have_the_memory_budget_that_was_measured() {
    let graph = encoder(2, 256, 64, 1000);
    let cluster = Cluster::preset("H200", 1, 1).expect("a device");
    let full = profile(&graph, &cluster, &[point(ROWS, 1000, 1000)]);
    let lean = Profile { memory_budget_percent: Some(80), ..full.clone() }.seal().expect("figures agree");
    let lean = Profile::from_json(&lean.to_json()).expect("the text is a profile");
    let settings = one_stage();
    let found = |profile: &Profile| plan(&graph, &cluster, from_ref(profile), &settings).expect("fits").plan;
    assert_eq!(found(&full).memory_budget_percent, None);
    assert_eq!(found(&lean).memory_budget_percent, Some(80));
    let repriced = |profiles: &[Profile], plan: &Plan| {
        let costs = PlanCosts::new(&graph, &cluster, profiles, &settings, plan).expect("it is of this graph");
        costs.predicted().expect("figures").memory_budget_percent
    };
    assert_eq!(repriced(from_ref(&full), &found(&lean)), None);
    assert_eq!(repriced(&[], &found(&lean)), Some(80));
    assert!(Profile { memory_budget_percent: Some(101), ..full }.seal().is_err());
}

#[test]
fn what_was_measured_for_some_devices_serves_any_number() {
    let graph = encoder(48, 256, 64, 1000);
    let points: Vec<BlockPoint> = [1, 4, 16].map(|rows| point(rows, 1000 * rows, 1000)).into();
    let measured = profile(&graph, &Cluster::preset("H200", 1, 2).expect("two devices"), &points);
    for (nodes, devices, batch_rows) in [(1, 2, 32), (1, 4, 64), (1, 4, 20), (16, 8, 1024)] {
        let cluster = Cluster::preset("H200", nodes, devices).expect("devices");
        let settings = Settings { world_size: nodes * devices, batch_rows, ..Settings::default() };
        let report = plan(&graph, &cluster, std::slice::from_ref(&measured), &settings).expect("fits").report;
        assert_eq!(report.measured_kinds, report.block_kinds);
    }
}

/// Several Blocks use the sum of two parameters, which each Stage computes once for each microbatch.
#[test]
fn shared_batch_free_ops_are_priced_beside_measured_blocks() {
    let shared = |extra: bool| {
        let mut builder = GraphBuilder::new("Shared");
        let width = [Dim::fixed(4096), Dim::fixed(4096)];
        let (first, second) = (builder.param("first", &[4096, 4096]), builder.param("second", &[4096, 4096]));
        let mut weight = builder.op("aten.add.Tensor", vec![Arg::Value(first), Arg::Value(second)], &width);
        for _ in 0..if extra { 50 } else { 0 } {
            weight = builder.op("aten.exp.default", vec![Arg::Value(weight)], &width);
        }
        let mut state = builder.input(DType::Float32, &[Dim::rows(1), Dim::fixed(4096)]);
        let shape = builder.shape(state);
        for layer in 0..3 {
            builder.module(&format!("layers.{layer}"));
            state = builder.op("aten.linear.default", vec![Arg::Value(state), Arg::Value(weight)], &shape);
        }
        builder.finish(&[state])
    };
    let step_us = |extra| planned(&shared(extra), &[point(ROWS, 1000, 1000)]).stages[0].predicted.forward_us;
    assert!(step_us(true) > 1.5 * step_us(false), "{} {}", step_us(true), step_us(false));
}

#[test]
fn what_ran_out_of_memory_stays_excluded_and_is_told() {
    let graph = encoder(2, 256, 64, 1000);
    let cluster = Cluster::preset("H200", 1, 1).expect("a device");
    for points in [vec![out_of_memory(ROWS)], vec![point(1, 1000, 1000), out_of_memory(ROWS)]] {
        let measured = profile(&graph, &cluster, &points);
        let Err(SearchError::DoesNotFit(shortage)) =
            plan(&graph, &cluster, std::slice::from_ref(&measured), &one_stage())
        else {
            panic!("nothing fits");
        };
        assert!(shortage.short_bytes > 0 && shortage.needed_bytes >= cluster.kinds[0].memory_bytes, "{shortage}");
        assert_eq!(shortage.measured_rows.map(u64::from), Some(ROWS));
        assert!(shortage.to_string().contains("has 8 rows of a microbatch, but "), "{shortage}");
        let free = Settings { microbatches: None, stages: None, ..one_stage() };
        let fitting = plan(&graph, &cluster, &[measured], &free);
        assert_eq!(fitting.is_ok(), points[0].fits || fitting.is_ok());
    }
}

/// What goes to the next Stage is a view of what this one saves, or was made of it in place.
#[test]
fn views_and_results_in_place_are_kept_once() {
    let model = |between: fn(&mut GraphBuilder, rannc_ir::ValueId) -> rannc_ir::ValueId| {
        let mut builder = GraphBuilder::new("Model");
        let input = builder.input(DType::Float32, &[Dim::rows(1), Dim::fixed(1024)]);
        builder.module("first");
        let hidden = builder.linear(input, 1024, "first");
        let saved = builder.pointwise("aten.tanh.default", &[hidden]);
        let sent = between(&mut builder, saved);
        let result = builder.linear(sent, 1024, "second");
        builder.finish(&[result])
    };
    let activations = |graph: &Graph| {
        let cluster = Cluster::preset("cpu", 1, 2).expect("devices");
        let two =
            Settings { world_size: 2, batch_rows: 64, stages: Some(2), microbatches: Some(1), ..Settings::default() };
        let found = plan(graph, &cluster, &[], &two).expect("fits").plan;
        let stages = found.stages.iter().map(|stage| stage.predicted.memory.activations_bytes);
        stages.collect::<Vec<_>>()
    };
    let plain = activations(&model(|_, saved| saved));
    let viewed = activations(&model(|builder, saved| {
        let shape = builder.shape(saved);
        builder.view(saved, &shape)
    }));
    let changed = activations(&model(|builder, saved| builder.in_place("aten.relu_.default", saved)));
    assert_eq!(viewed, plain);
    assert_eq!(changed, plain);
}
