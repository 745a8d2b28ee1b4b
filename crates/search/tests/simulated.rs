//! What the search predicts, against the simulator.

mod encoder;
mod towers;

use encoder::encoder;
use proptest::prelude::*;
use rannc_cost::Cluster;
use rannc_ir::Graph;
use rannc_plan::{
    Action, BUCKET_BYTES, Batch, Buckets, CheckError, FIRST_BUCKET_BYTES, Holding, Interval, LARGEST_BUCKET_BYTES,
    Order, Partition, Plan, Program, Promises, Schedule, Sharding, Trained, build, check, check_memory, in_flight,
    split_even,
};
use rannc_search::{PlanCosts, Savers, SearchError, Settings};
use rannc_sim::{Timeline, simulate};
use towers::towers;

/// How far a prediction may be from the simulated step, and from its memory: bytes are whole there.
const TOLERANCE: f64 = 1e-6;

fn simulated(graph: &Graph, cluster: &Cluster, settings: &Settings, plan: &Plan) -> Timeline {
    let (program, partition, costs) = program(graph, cluster, settings, plan);
    let promises = Promises::new(plan, graph, &partition);
    assert_eq!(check_memory(&program, &partition, &promises), Ok(()));
    simulate(&program, &costs).expect("runs")
}

fn program<'a>(
    graph: &'a Graph,
    cluster: &'a Cluster,
    settings: &Settings,
    plan: &'a Plan,
) -> (Program, Partition, PlanCosts<'a>) {
    let partition = plan.partition(graph).expect("the search cuts where it may");
    let rows_per_rank = split_even(plan.batch_rows, plan.world_size as usize).into_iter().map(Interval::rows).collect();
    let batch = Batch { rows_per_rank, gather_inputs: true };
    let costs = PlanCosts::new(graph, cluster, &[], settings, plan).expect("its own plan");
    let placement = plan.placement();
    let buckets = Buckets::of(graph, &partition, &placement, &Trained::captured(graph));
    let program = build(&placement, &partition, &buckets, &batch, costs.call()).expect("a program");
    (program, partition, costs)
}

/// A step to plan, of an encoder with so many layers.
#[derive(Clone, Debug)]
struct Case {
    layers: u32,
    replicas: Vec<u32>,
    microbatches: u32,
    loss_inside: bool,
    /// Rows of a microbatch by those that all Replicas can share equally.
    rows: u64,
    device: &'static str,
    nodes: u32,
    /// Of links inside a node; those between nodes have a quarter. `None` for the device's own.
    bytes_per_s: Option<f64>,
    /// What several Replicas divide.
    sharding: Sharding,
    split_backward: bool,
}

impl Case {
    fn world_size(&self) -> u32 {
        self.replicas.iter().sum()
    }

    fn cluster(&self) -> Cluster {
        let devices = self.world_size().div_ceil(self.nodes);
        let mut cluster = Cluster::preset(self.device, self.nodes, devices).expect("devices");
        for (level, share) in cluster.levels.iter_mut().zip([1.0, 0.25]) {
            level.send.bytes_per_s = self.bytes_per_s.map_or(level.send.bytes_per_s, |bytes_per_s| share * bytes_per_s);
        }
        cluster
    }

    fn settings(&self) -> Settings {
        Settings {
            world_size: self.world_size(),
            batch_rows: u64::from(self.world_size() * self.microbatches) * 12 * self.rows,
            replicas: Some(self.replicas.clone()),
            microbatches: Some(self.microbatches),
            loss_inside: self.loss_inside,
            split_backward: self.split_backward,
            savers: Savers { sharding: self.sharding, least_sharding: self.sharding, ..Savers::default() },
            ..Settings::default()
        }
    }
}

/// Random Stages (as many as asked for), Replicas, microbatches, Schedules, devices and links, from such that nobody
/// sees to such that take longer than all computation. Equal rows everywhere.
fn cases() -> impl Strategy<Value = Case> {
    let ways = (any::<bool>(), prop::bool::weighted(0.1));
    let batch = (prop::collection::vec(1..5_u32, 1..9), 0..4_u32, ways, 1..3_u64);
    let links = (1..3_u32, prop::option::of((9.0..10.5_f64).prop_map(|exponent| 10.0_f64.powf(exponent))));
    let levels = [vec![Sharding::None; 2], Sharding::ALL.to_vec()].concat();
    let devices = prop::sample::select(vec!["H200", "A100-40G", "V100-32G"]);
    (8..16_u32, batch, devices, links, prop::sample::select(levels)).prop_map(
        |(
            layers,
            (replicas, doublings, (loss_inside, split_backward), rows),
            device,
            (nodes, bytes_per_s),
            sharding,
        )| Case {
            layers,
            microbatches: 4 << doublings,
            loss_inside,
            rows,
            device,
            nodes,
            bytes_per_s,
            // Orders of many Stages take long in debug builds.
            split_backward: split_backward && replicas.len() <= 4,
            // One Replica alone has nobody to divide with.
            sharding: if replicas.iter().all(|&count| count == 1) { Sharding::None } else { sharding },
            replicas,
        },
    )
}

/// Four equal Stages: weights fill the bubbles of 1F1B, and where the criterion is outside, those of the drain.
#[test]
fn weights_fill_bubbles() {
    let graph = encoder(16, 1024, 256, 8000);
    for (loss_inside, least_gain) in [(true, 1.1), (false, 1.06)] {
        let case = Case {
            layers: 16,
            replicas: vec![1; 4],
            microbatches: 8,
            loss_inside,
            rows: 1,
            device: "H200",
            nodes: 1,
            bytes_per_s: None,
            sharding: Sharding::None,
            split_backward: false,
        };
        let (cluster, whole) = (case.cluster(), case.settings());
        let parts = Case { split_backward: true, ..case }.settings();
        let plan = |settings: &Settings| rannc_search::plan(&graph, &cluster, &[], settings).expect("fits").plan;
        let [whole, split] = [&whole, &parts].map(plan);
        let gain = whole.predicted.step_us / split.predicted.step_us;
        assert!(gain > least_gain, "{gain}");
        let Schedule::Explicit(orders) = &split.schedule else { panic!("{}", split.schedule) };
        assert!(
            orders.iter().any(Order::splits_backward) && orders.iter().all(|order| order.fault_of_stage(8).is_none())
        );
        let (program, partition, _) = program(&graph, &cluster, &parts, &split);
        let buckets = Buckets::of(&graph, &partition, &split.placement(), &Trained::captured(&graph));
        assert_eq!(check(&program, &partition, &buckets.gradients), Ok(()));
        let timeline = simulated(&graph, &cluster, &parts, &split);
        assert!((split.predicted.step_us / timeline.step_us - 1.0).abs() < TOLERANCE);
        // Less memory than that needs: fewer microbatches wait.
        let limit = peak_bytes(&whole).max(Some(1)).map(|bytes| bytes + (64 << 20));
        let tight = Settings { memory_limit_bytes: limit, memory_margin: 0.0, ..parts.clone() };
        let tight = rannc_search::plan(&graph, &cluster, &[], &tight).expect("fits").plan;
        assert!(peak_bytes(&tight) <= limit, "{:?} {limit:?}", peak_bytes(&tight));
        assert!(tight.predicted.step_us <= whole.predicted.step_us);
    }
}

/// The slower links are, the smaller are the last buckets, whose sums show; others hide under the backward.
#[test]
fn last_buckets_are_as_links_are() {
    let graph = encoder(12, 1024, 128, 50);
    let stage = |ranks: u32, gb_per_s: f64| {
        let mut cluster = Cluster::preset("H200", 1, ranks).expect("devices");
        cluster.kinds[0].collective_slowdown = 0.0;
        cluster.levels[0].collective.bytes_per_s = gb_per_s * 1e9;
        let settings = Settings { world_size: ranks, batch_rows: 256, stages: Some(1), ..Settings::default() };
        let mut plan = rannc_search::plan(&graph, &cluster, &[], &settings).expect("fits").plan;
        assert!(
            (simulated(&graph, &cluster, &settings, &plan).step_us / plan.predicted.step_us - 1.0).abs() < TOLERANCE
        );
        plan.stages.remove(0)
    };
    let sizes = [1e-3, 100.0, 300.0, 1e6].map(|gb_per_s| stage(4, gb_per_s).bucket_bytes.expect("links are known"));
    assert_eq!((sizes[0], sizes[3]), (FIRST_BUCKET_BYTES, LARGEST_BUCKET_BYTES));
    assert!(sizes.is_sorted_by(|less, more| less < more), "{sizes:?}");
    assert_eq!(stage(1, 100.0).bucket_bytes, Some(BUCKET_BYTES), "one alone sums nothing");
    // Where the backward hides all but the last sum, that takes twice as long as nothing would.
    let ratio = stage(4, 300.0).predicted.reduce_us / stage(4, 1e9).predicted.reduce_us;
    assert!((1.0..2.1).contains(&ratio), "{ratio}");
}

/// A large word table has the gradient that comes last, and all of its sum shows.
#[test]
fn the_sum_of_a_word_table_shows() {
    let stage = |vocabulary: i64| {
        let graph = encoder(12, 1024, 128, vocabulary);
        let mut cluster = Cluster::preset("H200", 1, 4).expect("devices");
        cluster.kinds[0].collective_slowdown = 0.0;
        let settings = Settings { world_size: 4, batch_rows: 256, stages: Some(1), ..Settings::default() };
        let mut plan = rannc_search::plan(&graph, &cluster, &[], &settings).expect("fits").plan;
        let group = rannc_cost::RankGroup { members: 4, nodes: 1, least_per_node: 4, level: 0 };
        (plan.stages.remove(0).predicted.reduce_us, cluster.all_reduce_us(group, (vocabulary * 1024 * 4) as f64))
    };
    let (large_us, table_us) = stage(32_000);
    assert!((large_us / table_us - 1.0).abs() < 1e-9, "{large_us} {table_us}");
    let (small_us, table_us) = stage(50);
    assert!(small_us > table_us);
    assert!(small_us < 0.2 * large_us, "{small_us} {large_us}");
}

/// One rank has 33 rows: one microbatch of two rows and 31 of one.
#[test]
fn a_row_too_many_costs_a_row() {
    let (graph, cluster) = (encoder(4, 1024, 256, 8000), Cluster::preset("H200", 1, 1).expect("a device"));
    let plan = |batch_rows| {
        let settings = Settings { batch_rows, microbatches: Some(32), min_microbatches: 32, ..Settings::default() };
        rannc_search::plan(&graph, &cluster, &[], &settings).expect("fits").plan
    };
    let (even, uneven) = (plan(32), plan(33));
    let (even_us, uneven_us) = (even.predicted.step_us, uneven.predicted.step_us);
    assert!(uneven_us > even_us && uneven_us < even_us * 1.04, "{even_us} {uneven_us}");
    assert!(uneven.predicted.lower_bound_us <= uneven_us && uneven.predicted.lower_bound_us > uneven_us * 0.99);
    let settings = Settings { batch_rows: 33, ..Settings::default() };
    let simulated_us = simulated(&graph, &cluster, &settings, &uneven).step_us;
    assert!((uneven_us / simulated_us - 1.0).abs() < TOLERANCE, "{uneven_us} {simulated_us}");
    // Nothing but the reduction and the optimizer is beside the computation, and memory is that of two rows.
    let stage = &uneven.stages[0].predicted;
    let idle_us = uneven.predicted.bubble * uneven_us - stage.reduce_us - stage.update_us;
    assert!(idle_us.abs() < 1e-6 * uneven_us, "{idle_us}");
    let [two, one] = stage.sizes[..] else { panic!("{:?}", stage.sizes) };
    assert_eq!((two.rows, one.rows, two.forward_us, two.backward_us), (2, 1, stage.forward_us, stage.backward_us));
    let computing_us = two.forward_us + two.backward_us + 31.0 * (one.forward_us + one.backward_us);
    assert!((computing_us + stage.reduce_us + stage.update_us - uneven_us).abs() < 1e-6 * uneven_us);
    assert!(even.stages[0].predicted.sizes.is_empty());
    assert!(stage.memory.activations_bytes > 19 * even.stages[0].predicted.memory.activations_bytes / 10);
}

#[test]
fn each_microbatch_in_flight_counts_by_its_own_size() {
    let (graph, cluster) = (encoder(8, 1024, 256, 8000), Cluster::preset("H200", 1, 2).expect("devices"));
    for (loss_inside, split_backward, batch_rows) in
        [(true, false, 33), (false, false, 33), (false, true, 34), (true, true, 39)]
    {
        let settings = Settings {
            world_size: 2,
            batch_rows,
            stages: Some(2),
            microbatches: Some(8),
            loss_inside,
            split_backward,
            ..Settings::default()
        };
        let plan = rannc_search::plan(&graph, &cluster, &[], &settings).expect("fits").plan;
        assert_holds_what_was_planned(&graph, &cluster, &settings, &plan);
    }
}

/// With so many rows beside those that can be shared equally; nothing where that does not fit.
#[track_caller]
fn assert_uneven_rows_agree(case: &Case, more_rows: u64) {
    let even = case.settings();
    let settings = Settings { batch_rows: even.batch_rows / 12 + more_rows, ..even };
    let (graph, cluster) = (encoder(case.layers, 1024, 256, 8000), case.cluster());
    let plan = match rannc_search::plan(&graph, &cluster, &[], &settings) {
        Err(SearchError::DoesNotFit(_)) => return,
        found => found.expect("fits").plan,
    };
    let (predicted_us, simulated_us) = (plan.predicted.step_us, simulated(&graph, &cluster, &settings, &plan).step_us);
    let error = predicted_us / simulated_us - 1.0;
    assert!(error.abs() <= TOLERANCE, "{error:+}: {predicted_us} {simulated_us}");
    assert!(plan.predicted.lower_bound_us <= simulated_us * (1.0 + TOLERANCE));
}

/// Microbatches of 34 and of 31 rows: which Replicas of two Stages have rows in common differs.
#[test]
fn messages_of_some_microbatches_alone_are_not_waited_for_in_others() {
    let case = Case {
        layers: 11,
        replicas: vec![1, 4, 1, 1, 4, 2, 4],
        microbatches: 4,
        loss_inside: true,
        rows: 1,
        device: "A100-40G",
        nodes: 2,
        bytes_per_s: Some(4e9),
        sharding: Sharding::None,
        split_backward: false,
    };
    assert_uneven_rows_agree(&case, 65);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn uneven_rows_agree_with_the_simulator(case in cases(), more_rows in 1..200_u64) {
        assert_uneven_rows_agree(&case, more_rows);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn predictions_agree_with_the_simulator(case in cases()) {
        let (graph, cluster, settings) = (encoder(case.layers, 1024, 256, 8000), case.cluster(), case.settings());
        let found = rannc_search::plan(&graph, &cluster, &[], &settings);
        prop_assume!(!matches!(found, Err(SearchError::DoesNotFit(_))));
        let plan = found.expect("fits").plan;
        let told = PlanCosts::new(&graph, &cluster, &[], &settings, &plan).expect("its own plan").predicted().expect("figures");
        prop_assert!((told.predicted.step_us / plan.predicted.step_us - 1.0).abs() < 1e-9);
        prop_assert_eq!(told.stages, plan.stages.clone());
        let timeline = simulated(&graph, &cluster, &settings, &plan);
        let (predicted_us, simulated_us) = (plan.predicted.step_us, timeline.step_us);
        let error = predicted_us / simulated_us - 1.0;
        prop_assert!(error.abs() <= TOLERANCE, "{error:+.3}: {predicted_us} {simulated_us}");
        for (stage, planned) in (0..).zip(&plan.stages) {
            let peak = timeline.ranks.iter().filter(|rank| rank.seats[0].stage == stage).map(|rank| rank.peak_bytes).max();
            let (predicted, simulated) = (planned.predicted.memory.total_bytes() as f64, peak.expect("a rank") as f64);
            prop_assert!((predicted / simulated - 1.0).abs() <= TOLERANCE, "memory {predicted} {simulated}");
        }
    }
}

/// Of what Replicas divide, no more is whole at a time than the search says.
#[test]
fn what_is_whole_for_too_long_is_found() {
    let (graph, cluster) = (encoder(6, 256, 64, 1000), Cluster::preset("H200", 1, 2).expect("devices"));
    let sharding = Sharding::Params;
    let settings = Settings {
        world_size: 2,
        batch_rows: 16,
        replicas: Some(vec![2]),
        microbatches: Some(2),
        savers: Savers { sharding, least_sharding: sharding, ..Savers::default() },
        ..Settings::default()
    };
    let plan = rannc_search::plan(&graph, &cluster, &[], &settings).expect("fits").plan;
    let (program, partition, _) = program(&graph, &cluster, &settings, &plan);
    let promises = Promises::new(&plan, &graph, &partition);
    assert_eq!(check_memory(&program, &partition, &promises), Ok(()));
    let changed = |change: fn(&mut [Action])| {
        let mut program = program.clone();
        program.ranks.iter_mut().for_each(|own| change(&mut own.forward));
        match check_memory(&program, &partition, &promises) {
            Err(CheckError::Memory { what, .. }) => what,
            other => panic!("{other:?}"),
        }
    };
    let gathers_first = |actions: &mut [Action]| {
        actions.sort_by_key(|action| !matches!(action, Action::AllGather { .. }));
    };
    assert_eq!(changed(gathers_first), Holding::Params);
    let sums_in_reverse = |actions: &mut [Action]| {
        let is_sum = |action: &&mut Action| matches!(action, Action::ReduceScatter { mb: 0, .. });
        let mut sums: Vec<&mut Action> = actions.iter_mut().filter(is_sum).collect();
        let reversed: Vec<Action> = sums.iter().rev().map(|sum| (**sum).clone()).collect();
        sums.iter_mut().zip(reversed).for_each(|(place, sum)| **place = sum);
    };
    assert_eq!(changed(sums_in_reverse), Holding::Gradients);
}

/// What the search takes a Plan to hold is what its Program holds.
#[track_caller]
fn assert_holds_what_was_planned(graph: &Graph, cluster: &Cluster, settings: &Settings, plan: &Plan) {
    let (program, _, _) = program(graph, cluster, settings, plan);
    let orders = plan.orders().expect("the search tells which Stages feed which");
    let held = in_flight(&program).expect("it ends");
    for (rank, held) in program.ranks.iter().zip(held) {
        assert_eq!(held, orders[rank.seats[0].stage as usize].in_flight(), "rank {}", rank.rank);
    }
    let timeline = simulated(graph, cluster, settings, plan);
    for rank in &timeline.ranks {
        let planned_bytes = plan.stages[rank.seats[0].stage as usize].predicted.memory.total_bytes() as f64;
        assert!((planned_bytes / rank.peak_bytes as f64 - 1.0).abs() <= TOLERANCE, "{planned_bytes} {rank:?}");
    }
    assert!(plan.predicted.lower_bound_us <= timeline.step_us * (1.0 + TOLERANCE));
}

fn peak_bytes(plan: &Plan) -> Option<u64> {
    plan.stages.iter().map(|stage| stage.predicted.memory.total_bytes()).max()
}

/// Each tower may be a Stage that no other tower waits for: it holds one microbatch more than the head, wherever it stands
/// in the chain.
fn assert_towers_hold_what_the_machine_says(layers: &[(u32, bool)], stages: u32, microbatches: u32) {
    let graph = towers(layers, 256);
    let mut cluster = Cluster::preset("cpu", 1, stages).expect("devices");
    cluster.kinds[0].framework_bytes = 0;
    let settings = Settings {
        world_size: stages,
        batch_rows: u64::from(microbatches * stages) * 64,
        stages: Some(stages),
        microbatches: Some(microbatches),
        memory_margin: 0.0,
        ..Settings::default()
    };
    let plan = match rannc_search::plan(&graph, &cluster, &[], &settings) {
        Err(SearchError::TooFewBlocks { .. }) => return,
        found => found.expect("fits").plan,
    };
    assert_holds_what_was_planned(&graph, &cluster, &settings, &plan);
    // With no more memory than that, it is found again, or one that holds less.
    let tight = Settings { memory_limit_bytes: peak_bytes(&plan).map(|bytes| bytes + 1024), ..settings };
    let tighter = rannc_search::plan(&graph, &cluster, &[], &tight).expect("the first Plan fits").plan;
    assert!(peak_bytes(&tighter) <= tight.memory_limit_bytes);
    assert_holds_what_was_planned(&graph, &cluster, &tight, &tighter);
}

/// The first tower's input has gradients from several Stages, which a division that fits without them does not hold.
#[test]
fn a_limit_holds_with_what_several_stages_send_back() {
    assert_towers_hold_what_the_machine_says(&[(1, false), (3, false), (1, true), (1, false)], 5, 8);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn stages_beside_each_other_hold_what_the_machine_says(
        layers in prop::collection::vec((1..4_u32, any::<bool>()), 2..5), stages in 2..6_u32, microbatches in 2..9_u32,
    ) {
        assert_towers_hold_what_the_machine_says(&layers, stages, microbatches);
    }
}
