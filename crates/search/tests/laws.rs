//! What every answer of the search keeps to. Laws of its best time (more memory, faster links, more
//! devices, its bounds) are beside the brute force in `src/tests/brute_force.rs`.

mod encoder;

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use encoder::encoder;
use proptest::prelude::*;
use rannc_cost::Cluster;
use rannc_ir::testing::mlp;
use rannc_ir::{Analysis, Graph, OpRun};
use rannc_plan::{Batch, Buckets, Call, Partition, Plan, Schedule, ScheduleKind, Sharding, Trained, build};
use rannc_search::{Limits, Outcome, Savers, SearchError, Settings, Stop, plan, plan_until};

/// Two nodes of devices without framework memory, so that small models are tight.
fn two_nodes(devices: u32) -> Cluster {
    let mut cluster = Cluster::preset("V100-32G", 2, devices / 2).expect("devices");
    cluster.kinds[0].framework_bytes = 0;
    cluster
}

fn settings(world_size: u32, batch_rows: u64, memory_mib: u64) -> Settings {
    let memory_limit_bytes = Some(memory_mib << 20);
    Settings { world_size, batch_rows, memory_limit_bytes, runners_up: 5, ..Settings::default() }
}

/// Settings where a small encoder is cut, or computed again, or left on one Stage.
fn cases() -> impl Strategy<Value = (u32, Settings)> {
    let flags = any::<(bool, bool)>();
    (2..8_u32, 1..4_u32, 30..400_u64, 1..5_u64, flags).prop_map(|(layers, pairs, memory_mib, rows, flags)| {
        let (loss_inside, recompute) = flags;
        let savers = Savers { recompute, ..Savers::default() };
        let settings = settings(2 * pairs, 8 * rows, memory_mib);
        (layers, Settings { loss_inside, savers, ..settings })
    })
}

fn json(outcome: &Outcome) -> Vec<String> {
    std::iter::once(&outcome.plan).chain(&outcome.runners_up).map(Plan::to_json).collect()
}

/// What tells Plans apart for a person.
fn shape(plan: &Plan) -> (Vec<usize>, u32, Option<Schedule>) {
    let replicas: Vec<usize> = plan.stages.iter().map(|stage| stage.ranks.len()).collect();
    let schedule = (replicas.len() > 1 && plan.microbatches > 1).then(|| plan.schedule.clone());
    (replicas, plan.microbatches, schedule)
}

/// Carries a Plan through to what the ranks do, and holds its memory against the limit.
fn assert_valid(graph: &Graph, plan: &Plan, settings: &Settings) {
    let cuts: Vec<OpRun> = plan.stages.iter().map(|stage| stage.ops).collect();
    let partition = Partition::new(graph, &cuts).expect("the search cuts where it may");
    assert_eq!(cuts.last().map(|ops| ops.end as usize), Some(Analysis::new(graph).main_ops.len()));
    let ranks = u64::from(plan.world_size);
    let rows_per_rank = (0..ranks).map(|rank| (plan.batch_rows + ranks - 1 - rank) / ranks).collect();
    let batch = Batch { rows_per_rank, gather_inputs: true };
    let buckets = Buckets::of(graph, &partition, &plan.placement(), &Trained::captured(graph));
    for call in [Call::Forward, Call::Whole, Call::Halves] {
        build(&plan.placement(), &partition, &buckets, &batch, call).expect("a program");
    }
    let limit_bytes = settings.memory_limit_bytes.expect("limited");
    for stage in &plan.stages {
        assert!(stage.predicted.memory.total_bytes() <= limit_bytes * 9 / 10);
    }
}

#[test]
fn threads_do_not_show() {
    let graph = encoder(8, 256, 64, 5000);
    let savers = Savers { recompute: true, sharding: Sharding::Params, ..Savers::default() };
    let limited = Limits { candidates: 2000, ..Limits::default() };
    for (memory_mib, limits) in [(150, Limits::default()), (150, limited), (800, Limits::default())] {
        let with_threads = |threads: usize| {
            let settings =
                Settings { threads: Some(threads), savers, limits, gains: true, ..settings(8, 32, memory_mib) };
            plan(&graph, &two_nodes(8), &[], &settings).expect("fits")
        };
        let one = with_threads(1);
        for threads in [2, 4] {
            let more = with_threads(threads);
            assert_eq!((json(&more), &more.gains), (json(&one), &one.gains));
            assert_eq!((more.report.lower_bound_us, more.report.stop), (one.report.lower_bound_us, one.report.stop));
        }
    }
}

#[test]
fn a_limited_search_says_so_and_gives_what_it_has() {
    let graph = encoder(12, 256, 64, 5000);
    let settings = settings(8, 32, 130);
    let complete = plan(&graph, &two_nodes(8), &[], &settings).expect("fits");
    assert_eq!(complete.report.stop, Stop::Complete);
    let few = |candidates: u64| (Limits { candidates, time_ms: None }, Stop::Candidates);
    let no_time = (Limits { time_ms: Some(0), ..Limits::default() }, Stop::Time);
    for (limits, stop) in [few(1), few(10), few(100), no_time] {
        let limited = Settings { limits, ..settings.clone() };
        let outcome = plan(&graph, &two_nodes(8), &[], &limited).expect("a first plan");
        assert_eq!(outcome.report.stop, stop);
        assert!(outcome.report.lower_bound_us <= complete.plan.predicted.step_us);
        assert!(outcome.plan.predicted.step_us >= complete.report.lower_bound_us);
        assert!(outcome.report.gap >= 0.0);
        assert_valid(&graph, &outcome.plan, &limited);
    }
}

/// More time would not help.
#[test]
fn a_limited_search_tells_what_is_short_where_nothing_fits() {
    let limits = Limits { time_ms: Some(0), ..Limits::default() };
    let found = plan(&encoder(12, 256, 64, 5000), &two_nodes(8), &[], &Settings { limits, ..settings(8, 32, 10) });
    assert!(matches!(found, Err(SearchError::DoesNotFit(_))));
}

/// Four Stages, with everything asked for that follows the search.
#[test]
fn what_follows_the_search_ends_in_time_too() {
    let (graph, cluster) = (encoder(12, 1024, 128, 5000), Cluster::preset("H200", 1, 4).expect("devices"));
    let settings = Settings {
        split_backward: true,
        gains: true,
        replicas: Some(vec![1; 4]),
        savers: Savers { recompute: true, ..Savers::default() },
        ..settings(4, 512, 100_000)
    };
    let timed = |time_ms: Option<u64>| {
        let limited = Settings { limits: Limits { time_ms, ..Limits::default() }, ..settings.clone() };
        let outcome = plan(&graph, &cluster, &[], &limited).expect("a first plan");
        assert_valid(&graph, &outcome.plan, &limited);
        outcome
    };
    let complete = timed(None);
    assert!(complete.plan.schedule.splits_backward() && complete.runners_up.len() > 1 && complete.gains.len() > 1);
    let first = timed(Some(0));
    assert!(!first.plan.schedule.splits_backward() && first.runners_up.is_empty() && first.gains.is_empty());
    assert_eq!((complete.report.stop, first.report.stop), (Stop::Complete, Stop::Time));
    for time_ms in [1, 3, 10, 30, 100, 300] {
        let some = timed(Some(time_ms));
        assert!(some.plan.predicted.step_us >= 0.95 * complete.plan.predicted.step_us);
        assert!(some.runners_up.len() <= complete.runners_up.len() && some.gains.len() <= complete.gains.len());
        let all = some.gains.len() == complete.gains.len();
        assert!(all || some.report.stop == Stop::Time, "{time_ms}");
    }
}

/// Far from its end, it ends soon after nobody waits for it any more.
#[test]
fn a_search_ends_when_it_is_told_to() {
    let graph = encoder(48, 256, 64, 5000);
    let cluster = Cluster::preset("H200", 32, 8).expect("256 devices");
    let settings = Settings { gains: true, ..settings(256, 4096, 4000) };
    let told = AtomicBool::new(false);
    let (answer, since_told) = thread::scope(|scope| {
        let search = scope.spawn(|| plan_until(&graph, &cluster, &[], &settings, &told).map(|_| ()));
        thread::sleep(Duration::from_millis(300));
        told.store(true, Ordering::Relaxed);
        let since = Instant::now();
        (search.join().expect("no panic"), since.elapsed())
    });
    assert!(matches!(answer, Err(SearchError::Told)), "{answer:?}");
    assert!(since_told < Duration::from_secs(10), "{since_told:?}");
    let before = plan_until(&graph, &cluster, &[], &settings, &AtomicBool::new(true)).map(|_| ());
    assert!(matches!(before, Err(SearchError::Told)), "{before:?}");
}

/// By the formula of the search such a step is told shorter than it is, and every capability would seem to gain.
#[test]
fn what_changes_nothing_gains_nothing() {
    let mut cluster = Cluster::preset("H200", 1, 4).expect("devices");
    cluster.levels[0].send.bytes_per_s = 2e9;
    let graph = encoder(10, 512, 128, 5000);
    let forced = Settings {
        world_size: 4,
        batch_rows: 64,
        stages: Some(4),
        microbatches: Some(8),
        gains: true,
        ..Settings::default()
    };
    let outcome = plan(&graph, &cluster, &[], &forced).expect("fits");
    let recomputed = outcome.gains.iter().find(|gain| gain.what == "recomputation").expect("it is one");
    assert_eq!(recomputed.step_us, Some(outcome.plan.predicted.step_us));
}

/// With whole backwards, computing again would be no faster here than the Plan, whose backwards come in two parts.
#[test]
fn gains_are_told_with_backwards_in_two_parts() {
    let (graph, cluster) = (encoder(16, 1024, 256, 8000), Cluster::preset("H200", 1, 4).expect("devices"));
    let free = Settings {
        world_size: 4,
        batch_rows: 1536,
        replicas: Some(vec![1; 4]),
        microbatches: Some(8),
        memory_margin: 0.0,
        ..Settings::default()
    };
    let best = |settings: &Settings| plan(&graph, &cluster, &[], settings).expect("fits");
    let stages = best(&free).plan.stages;
    let peak_bytes = stages.iter().map(|stage| stage.predicted.memory.total_bytes()).max().expect("four stages");
    let tight = Settings { memory_limit_bytes: Some(peak_bytes / 10 * 7), gains: true, ..free };
    let recomputed = |outcome: &Outcome| {
        let gain = outcome.gains.iter().find(|gain| gain.what == "recomputation").expect("it is one");
        gain.step_us.expect("it fits")
    };
    let (whole, split) = (best(&tight), best(&Settings { split_backward: true, ..tight.clone() }));
    let planned_us = split.plan.predicted.step_us;
    assert!(recomputed(&whole) > planned_us);
    assert!(recomputed(&split) < 0.95 * planned_us, "{} {planned_us}", recomputed(&split));
}

/// Two Stages would be a little faster than one.
#[test]
fn the_simpler_of_plans_that_are_as_good_is_taken() {
    let graph = encoder(12, 768, 64, 50);
    let mut simpler = 0;
    for batch_rows in (8..200).step_by(16) {
        let settings = Settings { world_size: 4, batch_rows, ..Settings::default() };
        let outcome = plan(&graph, &two_nodes(4), &[], &settings).expect("fits");
        let Some(other) = outcome.report.passed_over else { continue };
        simpler += 1;
        assert!((0.0..0.05).contains(&other.faster));
        let taken = (outcome.plan.stages.len(), outcome.plan.microbatches);
        assert!(taken <= (other.replicas.len(), other.microbatches));
        // The gap is that of the Plan that was taken.
        assert!(
            (outcome.report.gap - (outcome.plan.predicted.step_us / outcome.report.lower_bound_us - 1.0)).abs() < 1e-12
        );
        assert!(outcome.report.lower_bound_us <= other.step_us * (1.0 + 1e-9));
    }
    assert!(simpler > 0);
}

/// With all microbatches in flight messages hide a little better, which is not worth the memory.
#[test]
fn what_holds_fewer_microbatches_is_taken_when_it_is_as_good() {
    let graph = encoder(12, 256, 64, 50);
    let forced = Settings { stages: Some(2), microbatches: Some(8), ..settings(2, 64, 4000) };
    let outcome = plan(&graph, &two_nodes(4), &[], &forced).expect("fits");
    assert_eq!(outcome.plan.schedule, Schedule::Named(ScheduleKind::OneForwardOneBackward));
    let outside = Settings { loss_inside: false, ..forced };
    let outcome = plan(&graph, &two_nodes(4), &[], &outside).expect("fits");
    assert_eq!(outcome.plan.schedule, Schedule::Named(ScheduleKind::FillDrain));
}

#[test]
fn no_devices_are_refused_and_one_is_enough() {
    let refused = plan(&mlp(4, 64), &two_nodes(2), &[], &settings(0, 8, 1000)).map(|_| ());
    assert!(matches!(refused, Err(SearchError::Settings { field: "world_size", .. })), "{refused:?}");
    let one = plan(&mlp(4, 64), &two_nodes(2), &[], &settings(1, 8, 1000)).expect("fits");
    assert_eq!(shape(&one.plan), (vec![1], 1, None));
    assert_eq!(one.plan.stages[0].predicted.transfer_us, 0.0);
}

#[test]
fn fewer_rows_than_devices_are_divided_all_the_same() {
    let graph = encoder(4, 256, 64, 5000);
    for batch_rows in [1, 3, 7] {
        for may_idle in [false, true] {
            let settings = Settings { may_idle, ..settings(8, batch_rows, 1000) };
            let outcome = plan(&graph, &two_nodes(8), &[], &settings).expect("fits");
            assert_valid(&graph, &outcome.plan, &settings);
            assert!(outcome.plan.world_size == 8 || may_idle);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20))]

    #[test]
    fn runners_up_are_others_and_no_better((layers, settings) in cases()) {
        let graph = encoder(layers, 128, 32, 3000);
        let Ok(outcome) = plan(&graph, &two_nodes(settings.world_size), &[], &settings) else { return Ok(()) };
        let all: Vec<&Plan> = std::iter::once(&outcome.plan).chain(&outcome.runners_up).collect();
        prop_assert!(all.len() <= 1 + settings.runners_up);
        prop_assert!(all.windows(2).all(|pair| pair[0].predicted.step_us <= pair[1].predicted.step_us));
        for (place, plan) in all.iter().enumerate() {
            prop_assert!(all[..place].iter().all(|other| shape(other) != shape(plan)));
            assert_valid(&graph, plan, &settings);
        }
    }

    #[test]
    fn a_runtime_that_can_do_more_is_never_worse((layers, settings) in cases()) {
        let graph = encoder(layers, 128, 32, 3000);
        let settings = Settings { gains: true, runners_up: 0, ..settings };
        let Ok(outcome) = plan(&graph, &two_nodes(settings.world_size), &[], &settings) else { return Ok(()) };
        prop_assert!(!outcome.gains.is_empty());
        for gain in &outcome.gains {
            let step_us = gain.step_us.expect("what fits goes on to fit");
            prop_assert!(step_us <= outcome.plan.predicted.step_us * (1.0 + 1e-8), "{}", gain.what);
        }
    }
}
