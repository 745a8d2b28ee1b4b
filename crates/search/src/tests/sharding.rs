//! What Replicas divide: the arithmetic of its memory and time, and what the search makes of it.

use rannc_cost::Cluster;
use rannc_ir::testing::mlp;
use rannc_plan::{BUCKET_BYTES, Plan, ScheduleKind, Sharding, full_bytes};

use crate::answer::{HOST_US, plan};
use crate::chain::Chain;
use crate::chain::spec::{BlockSpec, ChainSpec, StateSpec};
use crate::price::{Priced, Pricing, Problem, RankOrder, Saver};
use crate::settings::{Savers, Settings};

const MIB: f64 = (1 << 20) as f64;

/// Four Blocks in two Spans; a parameter of each Span, with a working copy, and one that the first and the last Block use.
fn spec() -> ChainSpec {
    let block = |kind: u32| BlockSpec { kind, span: kind as usize / 2, ..BlockSpec::default() };
    let state = |mib: f64, copy_mib: f64, blocks: &[usize]| StateSpec {
        bytes: mib * MIB,
        message_bytes: mib * MIB,
        own_type_travels: true,
        accumulated_bytes: mib * MIB,
        copy_bytes: copy_mib * MIB,
        trainable: true,
        beside_spans: false,
        blocks: blocks.to_vec(),
        first_use: blocks[0],
    };
    ChainSpec {
        blocks: (0..4).map(block).collect(),
        states: vec![state(400.0, 200.0, &[0, 1]), state(800.0, 400.0, &[2]), state(160.0, 0.0, &[0, 3])],
        ..ChainSpec::default()
    }
}

/// Devices whose host takes no time, and whose collectives slow nothing down.
fn cluster() -> Cluster {
    let mut cluster = Cluster::preset("H200", 1, 4).expect("4 devices");
    (cluster.kinds[0].action_us, cluster.kinds[0].collective_slowdown) = (0.0, 0.0);
    cluster
}

fn priced(run: std::ops::Range<usize>, replicas: u32, microbatches: u64, sharding: Sharding) -> Priced {
    let cluster = cluster();
    let chain = Chain::new(spec(), &cluster.kinds);
    let settings = Settings { world_size: 4, batch_rows: 16, ..Settings::default() };
    let problem = Problem::new(&chain, &cluster, &[None], &settings);
    let pricing = Pricing::new(problem, ScheduleKind::FillDrain, microbatches);
    let order = RankOrder::packed(&cluster, 4, None, 4);
    let at = pricing.at(order.place(0, replicas));
    pricing.stage(run, &at, Saver { sharding, ..Saver::PLAIN }, 0.0)
}

#[test]
fn each_level_divides_what_it_says() {
    let mib = |sharding: Sharding| {
        let memory = priced(0..4, 4, 2, sharding).memory;
        [memory.params_bytes, memory.grads_bytes, memory.optimizer_bytes].map(|bytes| bytes / MIB)
    };
    assert_eq!(mib(Sharding::None), [1960.0, 1360.0, 2720.0]);
    assert_eq!(mib(Sharding::Optimizer), [1960.0, 1360.0, 680.0]);
    // Two buckets on their way, each with a parameter more than a full one, and the part that arrives of a sum.
    let bucket_mib = full_bytes((1360.0 * MIB) as u64, BUCKET_BYTES) as f64 / MIB + 800.0;
    let arriving = bucket_mib.min(1360.0) / 4.0;
    assert_eq!(mib(Sharding::Gradients), [1960.0, 340.0 + (2.0 * bucket_mib).min(1360.0) + arriving, 680.0]);
    // What both Spans use is whole, of the others the copies are gathered.
    let gathered = (2.0 * 400.0_f64).min(200.0 + 400.0);
    // What both Spans use counts with each of them.
    let grads = 340.0 + 1360.0 + (800.0 + 160.0) / 4.0;
    assert_eq!(mib(Sharding::Params), [160.0 + 1200.0 / 4.0 + gathered, grads, 680.0]);
    let kept = 200.0 + 400.0;
    assert_eq!(mib(Sharding::KeptParams), [160.0 + 1200.0 / 4.0 + kept, grads, 680.0]);
}

#[test]
fn gradients_take_memory_in_each_type_that_they_are_summed_in() {
    let sizes = |bytes: f64, message_bytes: f64, own_type_travels: bool| {
        let state =
            StateSpec { bytes, message_bytes, own_type_travels, accumulated_bytes: 4.0, ..StateSpec::default() };
        ([false, true].map(|several| state.grad_bytes(several)), state.message_copy_bytes())
    };
    // Of a parameter in float32, summed over ranks as it is, and in bfloat16.
    assert_eq!(sizes(4.0, 4.0, true), ([4.0, 4.0], 0.0));
    assert_eq!(sizes(4.0, 2.0, false), ([4.0, 4.0], 2.0));
    // In bfloat16, summed over ranks in float32, and as it is; in float16 and bfloat16.
    assert_eq!(sizes(2.0, 4.0, false), ([6.0, 6.0], 0.0));
    assert_eq!(sizes(2.0, 2.0, true), ([2.0, 6.0], 0.0));
    assert_eq!(sizes(2.0, 2.0, false), ([2.0, 6.0], 2.0));
}

#[test]
fn what_other_stages_use_too_stays_whole() {
    let memory = priced(0..2, 4, 2, Sharding::Params).memory;
    let mib = [memory.params_bytes, memory.optimizer_bytes].map(|bytes| bytes / MIB);
    assert_eq!(mib, [160.0 + 400.0 / 4.0 + 200.0, 2.0 * (160.0 + 400.0 / 4.0)]);
}

#[test]
fn one_replica_divides_nothing() {
    for microbatches in [1, 4] {
        let plain = priced(0..4, 1, microbatches, Sharding::None);
        for sharding in Sharding::ALL {
            let divided = priced(0..4, 1, microbatches, sharding);
            assert_eq!((divided.cost, divided.end, divided.memory), (plain.cost, plain.end, plain.memory));
        }
    }
}

#[test]
fn gradients_of_copies_add_up_in_more_digits() {
    let backward_us = |microbatches: u64| {
        let cost = priced(0..4, 1, microbatches, Sharding::None).cost;
        cost.larger.backward_us * microbatches as f64
    };
    // The first microbatch writes what the others add to: of each copy, as much is read and written beyond its own type.
    let device = &cluster().kinds[0];
    let us = |mib: f64| device.efficiency.pointwise.at_peak(2.0 * mib * MIB) / device.memory_bytes_per_s * 1e6;
    let each_us = us(400.0 - 200.0) + us(800.0 - 400.0);
    assert_eq!(backward_us(1), 0.0);
    for microbatches in [2, 4] {
        let added_us = (microbatches - 1) as f64 * each_us;
        assert!((backward_us(microbatches) - added_us).abs() < 1e-6 * added_us);
    }
}

#[test]
fn collectives_happen_as_often_as_each_level_says() {
    let cluster = cluster();
    let order = RankOrder::packed(&cluster, 4, None, 4);
    let group = order.place(0, 4).group;
    let gather_us = cluster.all_gather_us(group, 1360.0 * MIB);
    let [none, optimizer, gradients, kept, params] = Sharding::ALL.map(|sharding| priced(0..4, 4, 4, sharding));
    // The Blocks compute nothing: all that is seen of a pass is sent beside it.
    assert_eq!(none.cost.larger, optimizer.cost.larger);
    assert_eq!(none.end.reduce_us, optimizer.end.reduce_us);
    let saved_us = none.end.update_us - optimizer.end.update_us + gather_us;
    assert!(saved_us > 0.0 && optimizer.end.update_us > gather_us);
    assert_eq!(gradients.end.update_us, optimizer.end.update_us);
    let sums_us = cluster.reduce_scatter_us(group, 1360.0 * MIB);
    // The last sum of a microbatch stands behind its backward, the others beside it.
    assert!((gradients.cost.larger.backward_us + gradients.end.reduce_us - sums_us).abs() < sums_us / 100.0);
    assert_eq!(gradients.cost.wait_us, gradients.end.reduce_us);
    assert_eq!(gradients.cost.larger.forward_us, none.cost.larger.forward_us);
    // Copies travel instead of parameters; gradients do not. What both Spans use is gathered when it is updated.
    let copies_us = 2.0 * cluster.all_gather_us(group, (200.0 + 400.0) / 2.0 * MIB);
    assert!((params.cost.larger.forward_us - copies_us).abs() < copies_us / 100.0);
    assert!(params.cost.larger.backward_us + params.end.reduce_us > copies_us + sums_us);
    let shared_us = cluster.all_gather_us(group, 160.0 * MIB);
    assert!((optimizer.end.update_us - gather_us - (params.end.update_us - shared_us)).abs() < shared_us / 100.0);
    // Kept ones travel once, whatever the microbatches.
    assert_eq!(kept.cost.larger.forward_us, none.cost.larger.forward_us);
    assert!((kept.end.update_us - params.end.update_us - copies_us).abs() < copies_us / 100.0);
    assert!(kept.cost.larger.backward_us + kept.end.reduce_us < params.cost.larger.backward_us + params.end.reduce_us);
    // The sums of one microbatch have the end of the step.
    let one = priced(0..4, 4, 1, Sharding::Gradients);
    assert_eq!(one.cost.larger, priced(0..4, 4, 1, Sharding::None).cost.larger);
    assert!((one.end.reduce_us - sums_us).abs() < sums_us / 100.0);
}

fn planned(savers: Savers, memory_mib: Option<u64>) -> Plan {
    planned_of(2048, savers, memory_mib)
}

fn planned_of(width: i64, savers: Savers, memory_mib: Option<u64>) -> Plan {
    let mut cluster = Cluster::preset("H200", 1, 4).expect("devices");
    cluster.kinds[0].framework_bytes = 0;
    let memory_limit_bytes = memory_mib.map(|mib| mib << 20);
    let settings = Settings { world_size: 4, batch_rows: 64, memory_limit_bytes, savers, ..Settings::default() };
    plan(&mlp(12, width), &cluster, &[], &settings).expect("it fits").plan
}

#[test]
fn plans_divide_what_was_asked_for() {
    for level in Sharding::ALL {
        let exactly = planned(Savers { sharding: level, least_sharding: level, ..Savers::default() }, None);
        for stage in &exactly.stages {
            assert_eq!(stage.sharding, if stage.ranks.len() > 1 { level } else { Sharding::None });
        }
    }
    let refused =
        Settings { savers: Savers { least_sharding: Sharding::Params, ..Savers::default() }, ..Settings::default() };
    let refused = refused.check(&Cluster::preset("cpu", 1, 1).expect("a device")).expect_err("nothing is as much");
    assert!(refused.to_string().contains("least_sharding"), "{refused}");
}

#[test]
fn replicas_divide_no_more_than_serves() {
    let savers = Savers { sharding: Sharding::Params, ..Savers::default() };
    let levels = |plan: &Plan| plan.stages.iter().map(|stage| stage.sharding).max();
    let (free, tight) = (planned(savers, None), planned(savers, Some(400)));
    // With one microbatch half of an all-reduce is saved; parameters would be gathered twice.
    assert!(levels(&free) <= Some(Sharding::Gradients), "{:?}", levels(&free));
    assert!(levels(&tight) >= levels(&free));
    // Among Stages, the objective tells steps to so much; what is shorter than the host's part lasts as long as that.
    let lasts_us = |plan: &Plan| plan.predicted.step_us.max(HOST_US);
    assert!(lasts_us(&tight) >= 0.98 * lasts_us(&free));
}

#[test]
fn nothing_is_divided_to_save_what_the_host_takes_anyway() {
    let savers = Savers { sharding: Sharding::Params, ..Savers::default() };
    let (short, long) = (planned(savers, None), planned_of(8192, savers, None));
    assert!(short.predicted.step_us < HOST_US && long.predicted.step_us > HOST_US);
    assert!(short.stages.iter().all(|stage| stage.sharding == Sharding::None));
    assert!(short.predicted.step_us <= 1.02 * short.predicted.lower_bound_us);
    assert!(long.stages.iter().any(|stage| stage.sharding > Sharding::None));
}
