//! Plans of whole graphs.

mod encoder;

use encoder::encoder;
use proptest::prelude::*;
use rannc_cost::Cluster;
use rannc_ir::testing::{GraphBuilder, graphs, mlp};
use rannc_ir::{Analysis, DType, Dim, Graph, OpRun};
use rannc_plan::{Partition, Plan, ReduceDType, ScheduleKind};
use rannc_search::{Advice, Outcome, SearchError, Settings, Shortage};

fn cluster(name: &str, devices: u32) -> Cluster {
    Cluster::preset(name, devices.div_ceil(8), devices.min(8)).expect("devices")
}

fn search(graph: &Graph, cluster: &Cluster, settings: &Settings) -> Result<Outcome, SearchError> {
    rannc_search::plan(graph, cluster, &[], settings)
}

fn plan(graph: &Graph, cluster: &Cluster, settings: &Settings) -> Result<Plan, SearchError> {
    search(graph, cluster, settings).map(|outcome| outcome.plan)
}

fn settings(world_size: u32, batch_rows: u64) -> Settings {
    Settings { world_size, batch_rows, ..Settings::default() }
}

fn replicas(plan: &Plan) -> Vec<usize> {
    plan.stages.iter().map(|stage| stage.ranks.len()).collect()
}

#[test]
fn a_model_that_fits_gets_one_stage() {
    for devices in [1, 2, 4, 8] {
        let plan = plan(&mlp(10, 512), &cluster("NVIDIA H200", devices), &settings(devices, 64 * u64::from(devices)));
        let plan = plan.expect("fits");
        assert_eq!(replicas(&plan), [devices as usize]);
        assert_eq!(plan.microbatches, 1);
    }
}

#[test]
fn blocks_of_a_plan_are_those_of_its_graph() {
    let graph = mlp(4, 64);
    let plan = plan(&graph, &cluster("NVIDIA H200", 1), &settings(1, 8)).expect("fits");
    assert!(rannc_search::check_plan(&plan, &graph).is_ok());
    let mut edited = plan;
    edited.stages[0].blocks[2].hash = "0".repeat(64);
    let edited = edited.seal().expect("it is consistent");
    let error = rannc_search::check_plan(&edited, &graph).expect_err("a block is another one").to_string();
    assert!(error.starts_with("block 2 of the plan's stage 0, which begins at op"), "{error}");
    assert!(error.ends_with("make the plan again with this version"), "{error}");
}

#[test]
fn stages_feed_those_that_the_plan_says() {
    let graph = mlp(6, 64);
    let settings = Settings { stages: Some(3), ..settings(3, 24) };
    let mut plan = plan(&graph, &cluster("cpu", 3), &settings).expect("fits");
    let feeds: Vec<_> = plan.stages.iter().map(|stage| stage.feeds.clone()).collect();
    assert_eq!(feeds, [Some(vec![1]), Some(vec![2]), Some(vec![])]);
    assert!(plan.partition(&graph).is_ok());
    plan.stages[0].feeds = Some(vec![1, 2]);
    let error = plan.seal().expect("it is consistent").partition(&graph).expect_err("it feeds one").to_string();
    assert!(error.starts_with("stage 0 feeds stages [1], the plan says [1, 2]"), "{error}");
}

#[test]
fn a_model_that_does_not_fit_is_cut() {
    let graph = mlp(100, 5000);
    let limited = Settings { memory_limit_bytes: Some(40 << 30), loss_inside: false, ..settings(8, 512) };
    let plan = plan(&graph, &cluster("NVIDIA H200", 8), &limited).expect("fits in stages");
    assert!(plan.stages.len() > 1);
    assert_eq!(plan.schedule, ScheduleKind::FillDrain.into());
    let usable_bytes = (40_u64 << 30) * 9 / 10;
    for stage in &plan.stages {
        assert!(stage.predicted.memory.total_bytes() <= usable_bytes);
        assert!(stage.modules[0].starts_with("layers."), "{:?}", stage.modules);
    }
}

#[test]
fn ranks_have_memory_for_what_other_stages_give_them() {
    let mut builder = GraphBuilder::new("Layers");
    let input = builder.input(DType::Float32, &[Dim::rows(1), Dim::fixed(512)]);
    let output = (0..4).fold(input, |hidden, layer| builder.linear(hidden, 512, &format!("layers.{layer}")));
    let graph = builder.finish(&[output]);
    let comm_bytes = |gather_inputs, replays| {
        let forced = Settings { stages: Some(2), microbatches: Some(4), ..settings(2, 4096) };
        let forced = Settings { gather_inputs, replays, ..forced };
        let plan = plan(&graph, &cluster("NVIDIA H200", 2), &forced).expect("fits");
        assert_eq!(replicas(&plan), [1, 1]);
        plan.stages.iter().map(|stage| stage.predicted.memory.comm_bytes).collect::<Vec<_>>()
    };
    let (own_rows_bytes, arriving) = (2048 * 512 * 4, comm_bytes(true, false));
    assert_eq!(arriving[0] - comm_bytes(false, false)[0], own_rows_bytes);
    // What a replay gives is copied, on every rank.
    let replayed = comm_bytes(true, true);
    assert_eq!([replayed[0] - arriving[0], replayed[1] - arriving[1]], [own_rows_bytes; 2]);
}

#[test]
fn hidden_reductions_slow_the_backward_down() {
    let reduce_us = |slowdown: f64| {
        let mut cluster = cluster("NVIDIA H200", 8);
        cluster.kinds[0].collective_slowdown = slowdown;
        let forced = Settings { stages: Some(1), microbatches: Some(1), ..settings(8, 512) };
        plan(&encoder(24, 1024, 512, 30_000), &cluster, &forced).expect("fits").stages[0].predicted.reduce_us
    };
    let (none, half, all) = (reduce_us(0.0), reduce_us(0.5), reduce_us(1.0));
    assert!(none < half, "{none} {half}");
    assert!((all - half - (half - none)).abs() < 1e-6 * all, "{none} {half} {all}");
}

#[test]
fn messages_slow_computations_down() {
    let times_us = |stages: u32, slowdown: f64| {
        let mut cluster = cluster("NVIDIA H200", 4);
        cluster.kinds[0].message_slowdown = slowdown;
        let forced = Settings { stages: Some(stages), microbatches: Some(4), ..settings(4, 64) };
        let predicted =
            plan(&encoder(24, 1024, 512, 30_000), &cluster, &forced).expect("fits").stages[0].predicted.clone();
        [predicted.forward_us, predicted.backward_us]
    };
    let ([forward_us, backward_us], longer) = (times_us(2, 0.0), times_us(2, 0.25));
    assert!((longer[0] / forward_us - 1.25).abs() < 1e-9 && (longer[1] / backward_us - 1.25).abs() < 1e-9);
    assert_eq!(times_us(1, 0.25), times_us(1, 0.0));
}

#[test]
fn an_encoder_is_cut_between_its_layers() {
    let graph = encoder(24, 1024, 512, 30_000);
    let forced = Settings { stages: Some(2), ..settings(4, 64) };
    let plan = plan(&graph, &cluster("NVIDIA H200", 4), &forced).expect("fits");
    assert_eq!(plan.stages[0].modules, ["embeddings.word", "encoder.layer.0-12"]);
    assert_eq!(plan.stages[1].modules, ["encoder.layer.13-23", "head"]);
    assert!(plan.microbatches > 1);
    assert!(plan.stages[1].predicted.in_bytes > 0);
    assert!(plan.predicted.lower_bound_us <= plan.predicted.step_us);
    assert!((0.0..1.0).contains(&plan.predicted.bubble));
}

#[test]
fn forced_decisions_are_kept() {
    let forced = Settings { replicas: Some(vec![1, 3, 2]), microbatches: Some(5), ..settings(6, 30) };
    let plan = plan(&mlp(10, 64), &cluster("cpu", 6), &forced).expect("fits");
    assert_eq!(replicas(&plan), [1, 3, 2]);
    assert_eq!(plan.microbatches, 5);
}

#[test]
fn more_stages_than_pieces_are_refused() {
    let error = plan(&mlp(1, 8), &cluster("cpu", 8), &Settings { stages: Some(7), ..settings(8, 8) });
    let error = error.expect_err("there are three");
    assert!(matches!(error, SearchError::TooFewBlocks { wanted: 7, possible: 3, .. }));
    assert_eq!(
        error.to_string(),
        "7 stages were asked for, but what depends on the input can be cut into 3 pieces at most: each of them is one \
         op, and the largest, op0 aten.linear.default in layers.0 at model.py:1, is one operator. Ask for 3 stages at \
         most"
    );
}

#[test]
fn a_piece_that_is_not_cut_is_named_with_what_keeps_it_whole() {
    let mut graph = mlp(1, 8);
    for op in graph.ops.values_mut() {
        op.region = Some(7);
    }
    let error = plan(&graph, &cluster("cpu", 2), &Settings { stages: Some(2), ..settings(2, 8) });
    assert_eq!(
        error.expect_err("it is one piece").to_string(),
        "2 stages were asked for, but what depends on the input can be cut into 1 piece at most: layers.0 stays in one \
         piece: op0 to op2 must stay together: they stand in region 7 (op0 aten.linear.default in layers.0 at \
         model.py:1; op2 aten.mean.default at model.py:3). Put a block of autocast or a vmap round each layer rather \
         than one round all. Ask for 1 \
         stage at most"
    );
}

#[test]
fn an_empty_graph_is_refused() {
    let mut builder = GraphBuilder::new("Nothing");
    let input = builder.input(DType::Float32, &[Dim::rows(1)]);
    let error = plan(&builder.finish(&[input]), &cluster("cpu", 1), &settings(1, 1));
    assert!(matches!(error, Err(SearchError::Empty { .. })));
}

fn shortage(graph: &Graph, limits: &Settings) -> (String, u64, Advice) {
    match plan(graph, &cluster("cpu", 4), limits) {
        Err(SearchError::DoesNotFit(Shortage { block, short_bytes, advice, .. })) => (block, short_bytes, advice),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_shortage_names_the_block_and_what_helps() {
    let limits = Settings { memory_limit_bytes: Some(10 << 20), ..settings(4, 4) };
    let (block, short_bytes, advice) = shortage(&mlp(3, 1000), &limits);
    assert!(block.starts_with("layers."), "{block}");
    assert!(short_bytes > 5 << 20 && short_bytes < 30 << 20, "{short_bytes}");
    assert_eq!(advice, Advice::LargerDevice);
    let (_, _, advice) = shortage(&mlp(100, 500), &limits);
    assert_eq!(advice, Advice::MoreDevices);
    let wide_batch = Settings { memory_limit_bytes: Some(10 << 20), max_microbatches: 2, ..settings(4, 1 << 18) };
    let (_, _, advice) = shortage(&mlp(3, 100), &wide_batch);
    assert_eq!(advice, Advice::MoreMicrobatches);
    let one_microbatch = Settings { microbatches: Some(1), ..wide_batch };
    let (_, _, advice) = shortage(&mlp(3, 100), &one_microbatch);
    assert_eq!(advice, Advice::SmallerBatch);
}

/// Gradients of half precision that several microbatches add to are summed in float32.
#[test]
fn a_shortage_is_of_the_plan_that_misses_least() {
    let half = Graph::from_json(&mlp(30, 1000).to_json().replace("float32", "bfloat16")).expect("a graph");
    let limits = Settings { memory_limit_bytes: Some(64 << 20), reduce_dtype: ReduceDType::Param, ..settings(1, 32) };
    let alone = |microbatches| {
        let limits = Settings { microbatches: Some(microbatches), ..limits.clone() };
        plan(&half, &cluster("cpu", 1), &limits).expect_err("it is too large").to_string()
    };
    let told = plan(&half, &cluster("cpu", 1), &limits).expect_err("it is too large").to_string();
    assert_eq!(told, alone(1));
    assert_ne!(told, alone(32));
}

#[test]
fn a_search_is_repeatable() {
    let graph = encoder(12, 256, 64, 5000);
    let tight = Settings { memory_limit_bytes: Some(1 << 30), ..settings(16, 64) };
    let mut cluster = cluster("NVIDIA A100-SXM4-40GB", 16);
    cluster.kinds[0].framework_bytes = 0;
    let first = plan(&graph, &cluster, &tight).expect("fits");
    assert_eq!(first.to_json(), plan(&graph, &cluster, &tight).expect("fits").to_json());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn plans_of_any_graph_can_be_carried_out(graph in graphs(), devices in 1..5_u32, rows in 1..30_u64, loss in any::<bool>()) {
        let cluster = Cluster::preset("cpu", 1, devices).expect("devices");
        let wanted = Settings { loss_inside: loss, ..settings(devices, rows) };
        let analysis = Analysis::new(&graph);
        match plan(&graph, &cluster, &wanted) {
            Ok(plan) => {
                let cuts: Vec<OpRun> = plan.stages.iter().map(|stage| stage.ops).collect();
                prop_assert!(Partition::new(&graph, &cuts).is_ok());
                prop_assert_eq!(cuts[cuts.len() - 1].end as usize, analysis.main_ops.len());
                prop_assert_eq!(&Plan::from_json(&plan.to_json()).expect("sealed"), &plan);
            }
            Err(SearchError::Empty { .. }) => prop_assert!(analysis.main_ops.is_empty()),
            Err(error) => prop_assert!(false, "{}", error),
        }
    }
}
