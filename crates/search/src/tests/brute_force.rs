//! Tests that hold the sums and the dynamic program against what they stand for.

use std::ops::Range;
use std::sync::atomic::AtomicBool;

use proptest::prelude::*;
use rannc_cost::{Cluster, FlopRates, OpWork, Poly, Work};
use rannc_plan::Sharding;

use crate::answer::links::Linker;
use crate::chain::Chain;
use crate::chain::spec::{Affine, BlockSpec, ChainSpec, CrossingSpec, KeptSpec, StateSpec};
use crate::price::{CHEAPER, Pricing, Problem, RankOrder, Replicas, Saver, StepTime};
use crate::settings::{Limits, Savers, Settings};
use crate::solve::relax::{Relaxation, with_best_sends};
use crate::solve::table::Entry;
use crate::solve::{FoundStage, Grain, SearchCase, Solved, Solver};
use crate::stop::{Clock, Deadline, Stop};
use crate::tests::drawn::{cluster, linked_spec, settings, spec};

fn solve(problem: Problem<'_>, orders: &[RankOrder]) -> (Vec<SearchCase>, Result<Solved, Stop>) {
    solve_with(Grain::FINE, problem, orders)
}

/// A bound that tells hardly anything apart, as with thousands of ranks.
fn grain() -> impl Strategy<Value = Grain> {
    (1..3_usize, 1..4_u32, 1..4_usize).prop_map(|(counted, many_ranks, units)| Grain { counted, many_ranks, units })
}

fn solve_with(grain: Grain, problem: Problem<'_>, orders: &[RankOrder]) -> (Vec<SearchCase>, Result<Solved, Stop>) {
    let rough = RankOrder::packed(problem.cluster, problem.settings.world_size, None, 2);
    let told = AtomicBool::new(false);
    let solver = Solver { problem, orders, rough: &rough, grain, clock: Clock::new(&told) };
    let cases = solver.cases(&problem.settings.microbatch_candidates().expect("free microbatches"));
    let solved = solver.solve(&cases);
    (cases, solved)
}

/// The time of the best Plan that the search finds; infinite when nothing fits.
fn best_us(spec: &ChainSpec, cluster: &Cluster, settings: &Settings) -> f64 {
    let chain = Chain::new(spec.clone(), &cluster.kinds);
    let measured = vec![None; cluster.kinds.len()];
    let problem = Problem::new(&chain, cluster, &measured, settings);
    let orders = RankOrder::all(cluster, settings.world_size, None, 64, Deadline::never());
    solve(problem, &orders).1.map_or(f64::INFINITY, |solved| solved.best.found.step_us)
}

/// What the best Plan may be worse by, since Plans that are better by less are not looked for.
const SLACK: f64 = 1.0 + 1e-8;

/// A cluster whose times are `factor` times as long.
fn slower(cluster: &Cluster, factor: f64) -> Cluster {
    let mut slower = cluster.clone();
    for device in &mut slower.kinds {
        let FlopRates { fp64, fp32, tf32, half } = &mut device.flops_per_s;
        let rates = [fp64, fp32, tf32, half, &mut device.memory_bytes_per_s, &mut device.host_bytes_per_s];
        rates.into_iter().for_each(|per_s| *per_s /= factor);
        device.launch_us *= factor;
        device.action_us *= factor;
    }
    for link in slower.levels.iter_mut().flat_map(|level| [&mut level.send, &mut level.collective]) {
        link.bytes_per_s /= factor;
        link.latency_us *= factor;
    }
    slower
}

/// All ways to write `total` as a sum of `parts` positive numbers.
fn compositions(total: usize, parts: usize) -> Vec<Vec<usize>> {
    if parts == 0 {
        return if total == 0 { vec![Vec::new()] } else { Vec::new() };
    }
    let with_first =
        |first: usize| compositions(total - first, parts - 1).into_iter().map(move |rest| [vec![first], rest].concat());
    (1..=total).flat_map(with_first).collect()
}

/// A division, from the last Stage to the first: lengths of the runs, Replicas, ways to run them.
struct Division<'a> {
    pricing: &'a Pricing<'a>,
    order: &'a RankOrder,
    lengths: &'a [usize],
    replicas: &'a [usize],
    spec: &'a ChainSpec,
    told: Told,
}

/// What tells times.
#[derive(Clone, Copy, PartialEq)]
enum Told {
    ByFormula,
    Exactly,
}

/// The last Stages of a division.
#[derive(Clone, Default)]
struct Later {
    time: StepTime,
    /// The first of them first.
    stages: Vec<FoundStage>,
    /// Of each the Stages on the longest way from it.
    depths: Vec<usize>,
}

impl Division<'_> {
    fn told_us(&self, Later { time, stages, .. }: &Later) -> f64 {
        let &Self { pricing, order, spec: ChainSpec { crossings, states, batch, .. }, told, .. } = self;
        if told == Told::ByFormula {
            return pricing.step.step_us(*time);
        }
        let timed = |FoundStage { run, positions, saver }: &FoundStage| {
            let place = order.place_at(positions);
            let at = pricing.at(place);
            let workspace_bytes = pricing.run_workspace_bytes(run.clone(), &at);
            let priced = pricing.stage(run.clone(), &at, *saver, workspace_bytes);
            let (run, sharding, again) = (run.clone(), saver.sharding, priced.again);
            pricing.timed(&Replicas { run, place, sharding, again, splits_backward: false }, priced.end)
        };
        let times: Vec<_> = stages.iter().map(timed).collect();
        let linker = Linker::new(crossings, states, batch, order, pricing, stages);
        pricing.step.exact_us(&pricing.step.schedule.into(), &times, &linker.moves())
    }

    /// The number of Stages on the longest way from a run through the later ones, itself included.
    fn depth(&self, run: &Range<usize>, later: &Later) -> usize {
        let feeds = |to: &FoundStage| {
            let mut uses = self.spec.crossings.iter().filter(|value| run.contains(&value.made_by));
            uses.any(|value| value.used_by.iter().any(|user| to.run.contains(user)))
        };
        let fed = later.stages.iter().zip(&later.depths).filter(|(to, _)| feeds(to));
        1 + fed.map(|(_, &depth)| depth).max().unwrap_or(0)
    }

    /// The least time over all ways to run the Stages, if there is one that fits.
    fn step_us(&self, savers: &[Saver], place: usize, end: usize, last: u32, later: &Later) -> Option<f64> {
        let step = &self.pricing.step;
        let Some(&length) = self.lengths.get(place) else { return Some(self.told_us(later)) };
        let replicas = u32::try_from(self.replicas[place]).expect("few devices");
        let (first, unit) = (end - length, last - replicas);
        let at = self.pricing.at(self.order.place(unit, replicas));
        let workspace_bytes = self.pricing.run_workspace_bytes(first..end, &at);
        let depth = self.depth(&(first..end), later);
        let in_flight = step.in_flight(depth);
        let asked = self.pricing.problem.settings.savers.least_sharding;
        let with = |&saver: &Saver| {
            let may_be = if replicas == 1 { saver.sharding == Sharding::None } else { saver.sharding >= asked };
            if !may_be {
                return None;
            }
            let entry = Entry::new(self.pricing, first..end, &at, saver, workspace_bytes);
            if !saver.serves(&(in_flight..=in_flight)) || entry.max_in_flight < in_flight {
                return None;
            }
            let stage = FoundStage { run: first..end, positions: self.order.range(unit, last), saver };
            let time = step.prepend(later.time, &entry.cost, depth);
            let stages = [vec![stage], later.stages.clone()].concat();
            let later = Later { time, stages, depths: [vec![depth], later.depths.clone()].concat() };
            self.step_us(savers, place + 1, first, unit, &later)
        };
        savers.iter().filter_map(with).min_by(f64::total_cmp)
    }
}

/// Counted in partial Plans, not in time.
#[test]
fn many_forced_stages_behind_slow_links_are_searched_to_the_end() {
    let work = |place: u32| OpWork {
        forward: Work { flops: Poly::affine(0.0, f64::from(1 + place % 5) * 1e7), launches: 1.0, ..Work::default() },
        ..OpWork::default()
    };
    let block = |kind: u32| BlockSpec { kind, work: vec![work(kind)], ..BlockSpec::default() };
    let link = |made_by: usize| CrossingSpec {
        bytes: Affine { fixed: 0.0, per_row: (1 + made_by % 3) as f64 * 1e4 },
        requires_grad: true,
        made_by,
        used_by: vec![made_by + 1],
    };
    let spec = ChainSpec {
        blocks: (0..16).map(block).collect(),
        crossings: (0..15).map(link).collect(),
        ..ChainSpec::default()
    };
    let mut cluster = Cluster::preset("cpu", 1, 8).expect("8 devices");
    cluster.levels[0].send.bytes_per_s = 1e7;
    let settings = Settings {
        world_size: 8,
        batch_rows: 64,
        stages: Some(6),
        limits: Limits { candidates: 4_000, ..Limits::default() },
        ..Settings::default()
    };
    let chain = Chain::new(spec.clone(), &cluster.kinds);
    let measured = &[None][..];
    let problem = Problem::new(&chain, &cluster, measured, &settings);
    let orders = RankOrder::all(&cluster, 8, None, 64, Deadline::never());
    assert_eq!(solve(problem, &orders).1.map(|solved| solved.stop), Ok(Stop::Complete));
}

/// One row on up to four Replicas: they take as long as one, and one alone sums nothing over ranks in a copy.
#[test]
fn a_model_that_fits_on_one_replica_alone_is_found() {
    let work = Work { flops: Poly::affine(1e6, 1e6), launches: 1.0, ..Work::default() };
    let spec = ChainSpec {
        blocks: vec![BlockSpec { work: vec![OpWork { forward: work, ..OpWork::default() }], ..BlockSpec::default() }],
        states: vec![StateSpec {
            bytes: 2e6,
            message_bytes: 2e6,
            accumulated_bytes: 4e6,
            trainable: true,
            blocks: vec![0],
            ..StateSpec::default()
        }],
        ..ChainSpec::default()
    };
    let cluster = Cluster::preset("cpu", 1, 4).expect("4 devices");
    let settings = Settings {
        world_size: 4,
        may_idle: true,
        batch_rows: 1,
        memory_limit_bytes: Some(5_000_000),
        savers: Savers { offload: true, ..Savers::default() },
        ..Settings::default()
    };
    let chain = Chain::new(spec.clone(), &cluster.kinds);
    let problem = Problem::new(&chain, &cluster, &[None], &settings);
    let orders = RankOrder::all(&cluster, 4, None, 64, Deadline::never());
    let (cases, solved) = solve(problem, &orders);
    assert!(brute_force(problem, &orders, &cases, &spec, Told::ByFormula).is_some());
    assert_eq!(solved.map(|solved| solved.stop), Ok(Stop::Complete));
}

/// The time of the best Plan.
fn brute_force(
    problem: Problem<'_>,
    orders: &[RankOrder],
    cases: &[SearchCase],
    spec: &ChainSpec,
    told: Told,
) -> Option<f64> {
    let Problem { chain, settings, .. } = problem;
    let devices = settings.world_size as usize;
    let most = settings.max_stages.map_or(devices, |stages| stages as usize);
    let counts = settings.stages.map_or(1..=most, |stages| stages as usize..=stages as usize);
    let mut best: Option<f64> = None;
    for case in cases {
        let pricing = Pricing::new(problem, case.schedule, case.microbatches);
        let savers = Saver::all(&settings.savers, &pricing.step.held(devices));
        for stages in counts.clone() {
            for used in if settings.may_idle { stages..=devices } else { devices..=devices } {
                for lengths in compositions(chain.len(), stages) {
                    for replicas in compositions(used, stages) {
                        let order = &orders[case.order.expect("a real order")];
                        let (pricing, lengths, replicas) = (&pricing, &lengths, &replicas);
                        let division = Division { pricing, order, lengths, replicas, spec, told };
                        let none = Later::default();
                        let us = division.step_us(&savers, 0, chain.len(), settings.world_size, &none);
                        best = best.into_iter().chain(us).min_by(f64::total_cmp);
                    }
                }
            }
        }
    }
    best
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn the_search_equals_brute_force(spec in spec(5), settings in settings(4), cluster in cluster()) {
        let chain = Chain::new(spec.clone(), &cluster.kinds);
        let measured = vec![None; cluster.kinds.len()];
        let problem = Problem::new(&chain, &cluster, &measured, &settings);
        let orders = RankOrder::all(&cluster, settings.world_size, None, 64, Deadline::never());
        let (cases, solved) = solve(problem, &orders);
        let expected = brute_force(problem, &orders, &cases, &spec, Told::ByFormula);
        match (&expected, &solved) {
            (Some(expected), Ok(Solved { best, lower_bound_us, stop, .. })) => {
                let us = best.found.step_us;
                prop_assert!((us - expected).abs() <= 1e-8 * expected, "{us} {expected}");
                prop_assert!(*lower_bound_us <= us);
                prop_assert_eq!(*stop, Stop::Complete);
            }
            (None, Err(Stop::Complete)) => {}
            _ => prop_assert!(false, "{expected:?} {solved:?}"),
        }
    }

    #[test]
    fn sums_count_every_tensor_once(spec in spec(7), rows in 1..9_u64) {
        let devices = Cluster::preset("cpu", 1, 1).expect("one device").kinds;
        let chain = Chain::new(spec.clone(), &devices);
        let times = chain.times(0, &devices[0], None, rows);
        for first in 0..chain.len() {
            for end in first + 1..=chain.len() {
                let holds = |places: &[usize]| places.iter().any(|place| (first..end).contains(place));
                let clones: f64 = spec.clones.iter().filter(|clone| holds(&clone.blocks)).map(|clone| {
                    clone.work.at(&devices[0], 1).forward_us / if clone.once { 4.0 } else { 1.0 }
                }).sum();
                let all_us = chain.run_cost(&times, first, end, 4).forward_us;
                prop_assert!((all_us - times.blocks(first, end).forward_us - clones).abs() <= 1e-6 * all_us);
                let states: f64 = spec.states.iter().filter(|s| holds(&s.blocks)).map(|s| s.bytes).sum();
                prop_assert!((chain.state_bytes.at(first, end) - states).abs() < 1.0);
                let received = |made_by: usize, used_by: &[usize]| made_by < first && holds(used_by);
                let into = spec.crossings.iter().filter(|c| received(c.made_by, &c.used_by));
                let into: f64 = into.map(|c| c.bytes.at(rows)).sum();
                prop_assert!((chain.traffic.in_bytes.at(first, end, rows) - into).abs() < 1.0);
                let sent = |c: &&CrossingSpec| holds(&[c.made_by]) && c.used_by.iter().any(|&user| user >= end);
                let out: f64 = spec.crossings.iter().filter(sent).map(|c| c.bytes.at(rows)).sum();
                prop_assert!((chain.traffic.out_bytes.at(first, end, rows) - out).abs() < 1.0);
                let kept = |k: &KeptSpec| {
                    let Some(made_by) = k.made_by else { return if holds(&k.saved_by) { k.bytes.at(rows) } else { 0.0 } };
                    let whole = if holds(&[made_by]) && (holds(&k.saved_by) || k.crossings.iter().any(|c| sent(&c))) {
                        k.bytes.at(rows)
                    } else {
                        0.0
                    };
                    let into = k.crossings.iter().filter(|c| received(c.made_by, &c.used_by));
                    whole + into.map(|c| c.bytes.at(rows)).sum::<f64>()
                };
                let private: f64 = spec.blocks[first..end].iter().map(|b| b.private_bytes.at(rows)).sum();
                let kept: f64 = spec.kept.iter().map(kept).sum::<f64>() + private;
                let times = chain.times(0, &devices[0], None, rows);
                prop_assert!((chain.kept_bytes([&times].into_iter(), first, end, rows) - kept.max(into)).abs() < 1.0);
                let outputs: f64 = spec.blocks[first..end].iter().map(|b| b.output_bytes.at(rows)).sum();
                prop_assert!((chain.output_bytes.at(first, end, rows) - outputs).abs() < 1.0);
            }
        }
    }

    #[test]
    fn more_memory_is_never_worse(
        spec in spec(5), settings in settings(4), cluster in cluster(), more in 1.0..3.0_f64,
    ) {
        let larger = |bytes: u64| (bytes as f64 * more) as u64;
        let with_more = Settings { memory_limit_bytes: settings.memory_limit_bytes.map(larger), ..settings.clone() };
        let before_us = best_us(&spec, &cluster, &settings);
        prop_assert!(best_us(&spec, &cluster, &with_more) <= before_us * SLACK / CHEAPER);
        let mut larger_devices = cluster;
        larger_devices.kinds.iter_mut().for_each(|device| device.memory_bytes = larger(device.memory_bytes));
        prop_assert!(best_us(&spec, &larger_devices, &settings) <= before_us * SLACK / CHEAPER);
    }

    #[test]
    fn faster_links_are_never_worse(
        spec in spec(5), settings in settings(4), cluster in cluster(),
        which in 0..4_usize, faster in any::<(bool, bool)>(), factor in 1.0..1000.0_f64,
    ) {
        let before_us = best_us(&spec, &cluster, &settings);
        let mut with_faster = cluster;
        let links = with_faster.levels.iter_mut().flat_map(|level| [&mut level.send, &mut level.collective]);
        let links: Vec<_> = links.collect();
        let count = links.len();
        let link = links.into_iter().nth(which % count).expect("one of them");
        link.latency_us /= if faster.0 { factor } else { 1.0 };
        link.bytes_per_s *= if faster.1 { factor } else { 1.0 };
        prop_assert!(best_us(&spec, &with_faster, &settings) <= before_us * SLACK);
    }

    #[test]
    fn faster_devices_are_never_worse(
        spec in spec(5), settings in settings(4), cluster in cluster(), factor in 1.0..10.0_f64, which in 0..5_usize,
    ) {
        let before_us = best_us(&spec, &cluster, &settings);
        let mut with_faster = cluster;
        for device in &mut with_faster.kinds {
            match which {
                0 => device.flops_per_s.fp32 *= factor,
                1 => device.memory_bytes_per_s *= factor,
                2 => device.host_bytes_per_s *= factor,
                3 => device.launch_us /= factor,
                _ => device.action_us /= factor,
            }
        }
        prop_assert!(best_us(&spec, &with_faster, &settings) <= before_us * SLACK / CHEAPER);
    }

    /// On one node, where every place of so many devices is as good as another; with ranks that may be left out,
    /// and rows that do not depend on the number of ranks.
    #[test]
    fn more_devices_of_a_node_are_never_worse(spec in spec(5), settings in settings(2), devices in 1..5_u32) {
        let settings = Settings { may_idle: true, gather_inputs: false, ..settings };
        let with = |devices: u32| {
            let cluster = Cluster::preset("cpu", 1, devices).expect("devices");
            best_us(&spec, &cluster, &Settings { world_size: devices, ..settings.clone() })
        };
        prop_assert!(with(devices + 1) <= with(devices) * SLACK);
    }

    /// By powers of two, which leave no trace in the digits.
    #[test]
    fn the_best_step_scales_with_all_times(
        spec in spec(5), settings in settings(4), cluster in cluster(), power in -3..4_i32,
    ) {
        let factor = 2.0_f64.powi(power);
        let slower_us = best_us(&spec, &slower(&cluster, factor), &settings);
        prop_assert_eq!(slower_us, best_us(&spec, &cluster, &settings) * factor);
    }

    #[test]
    fn no_plan_beats_the_bounds(
        spec in spec(5), settings in settings(4), cluster in cluster(), faster_between in 1.0..10_000.0_f64,
        coarse in grain(),
    ) {
        let told = AtomicBool::new(false);
        let mut cluster = cluster;
        if let Some(between) = cluster.levels.get_mut(1) {
            for link in [&mut between.send, &mut between.collective] {
                link.latency_us /= faster_between;
                link.bytes_per_s *= faster_between;
            }
        }
        let chain = Chain::new(spec.clone(), &cluster.kinds);
        let measured = vec![None; cluster.kinds.len()];
        let problem = Problem::new(&chain, &cluster, &measured, &settings);
        let orders = RankOrder::all(&cluster, settings.world_size, None, 64, Deadline::never());
        let (cases, _) = solve(problem, &orders);
        let ideal_cluster = with_best_sends(&cluster);
        for case in cases {
            let Some(least_us) = brute_force(problem, &orders, &[case], &spec, Told::ByFormula) else { continue };
            let ideal = Problem { cluster: &ideal_cluster, in_parts: true, direct: true, ..problem };
            let pricing = Pricing::new(ideal, case.schedule, case.microbatches);
            for best_us in [f64::INFINITY, 2.0 * least_us, SLACK * least_us] {
                for grain in [Grain::FINE, coarse] {
                    let deadline = Deadline::only_told(Clock::new(&told));
                    let bound_us = Relaxation::new(&pricing, best_us, grain, deadline).bound_us();
                    prop_assert!(bound_us <= least_us * SLACK, "{case:?} {bound_us} {least_us}");
                }
            }
        }
    }

    #[test]
    fn a_limited_search_tells_the_truth(
        spec in spec(5), settings in settings(4), cluster in cluster(), candidates in 1..300_u64,
    ) {
        let settings = Settings { limits: Limits { candidates, ..settings.limits }, ..settings };
        let chain = Chain::new(spec.clone(), &cluster.kinds);
        let measured = vec![None; cluster.kinds.len()];
        let problem = Problem::new(&chain, &cluster, &measured, &settings);
        let orders = RankOrder::all(&cluster, settings.world_size, None, 64, Deadline::never());
        let (cases, solved) = solve(problem, &orders);
        let least_us = brute_force(problem, &orders, &cases, &spec, Told::ByFormula).unwrap_or(f64::INFINITY);
        match solved {
            Ok(Solved { best, lower_bound_us, stop, .. }) => {
                prop_assert!(lower_bound_us <= least_us * SLACK && least_us <= best.found.step_us * SLACK);
                prop_assert!(stop == Stop::Candidates || best.found.step_us <= least_us * SLACK);
            }
            Err(stop) => prop_assert!(stop == Stop::Candidates || least_us.is_infinite()),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// The best Plan of few units may be worse; no Plan is better than the bound.
    #[test]
    fn no_plan_beats_the_bound_of_a_coarse_search(
        spec in spec(4), settings in settings(4), cluster in cluster(), grain in grain(), units in 1..4_u32,
    ) {
        let settings = Settings { max_microbatches: 3, stages: None, ..settings };
        let chain = Chain::new(spec.clone(), &cluster.kinds);
        let measured = vec![None; cluster.kinds.len()];
        let problem = Problem::new(&chain, &cluster, &measured, &settings);
        let (cases, solved) = solve_with(grain, problem, &RankOrder::all(&cluster, settings.world_size, None, units, Deadline::never()));
        let orders = RankOrder::all(&cluster, settings.world_size, None, 64, Deadline::never());
        if let Ok(Solved { best, lower_bound_us, .. }) = solved {
            let least_us = brute_force(problem, &orders, &cases, &spec, Told::ByFormula).expect("one was found");
            prop_assert!(lower_bound_us <= least_us * SLACK && least_us <= best.found.step_us * SLACK);
        }
    }

    /// Whatever was looked at when time was over, no Plan is better than the bound.
    #[test]
    fn a_search_without_time_tells_the_truth(spec in spec(4), settings in settings(4), cluster in cluster()) {
        let settings = Settings { max_microbatches: 3, ..settings };
        let chain = Chain::new(spec.clone(), &cluster.kinds);
        let measured = vec![None; cluster.kinds.len()];
        let problem = Problem::new(&chain, &cluster, &measured, &settings);
        let orders = RankOrder::all(&cluster, settings.world_size, None, 64, Deadline::never());
        let (cases, solved) = solve(problem, &orders);
        let limited = Settings { limits: Limits { time_ms: Some(0), ..settings.limits }, ..settings.clone() };
        let (_, quick) = solve(Problem { settings: &limited, ..problem }, &orders);
        let least_us = brute_force(problem, &orders, &cases, &spec, Told::ByFormula).unwrap_or(f64::INFINITY);
        if let Ok(Solved { best, lower_bound_us, stop, .. }) = quick {
            prop_assert!(lower_bound_us <= least_us * SLACK && least_us <= best.found.step_us * SLACK);
            prop_assert!(stop == Stop::Time || best.found.step_us <= least_us * SLACK);
            prop_assert!(solved.is_ok());
        }
    }

    #[test]
    fn no_plan_is_told_shorter_than_the_bound(spec in linked_spec(4), settings in settings(4), cluster in cluster()) {
        let settings = Settings { max_microbatches: 3, ..settings };
        let chain = Chain::new(spec.clone(), &cluster.kinds);
        let measured = vec![None; cluster.kinds.len()];
        let problem = Problem::new(&chain, &cluster, &measured, &settings);
        let orders = RankOrder::all(&cluster, settings.world_size, None, 64, Deadline::never());
        let (cases, solved) = solve(problem, &orders);
        if let Ok(Solved { lower_bound_us, .. }) = solved {
            let least_us = brute_force(problem, &orders, &cases, &spec, Told::Exactly).expect("one was found");
            prop_assert!(lower_bound_us <= least_us * SLACK, "{lower_bound_us} {least_us}");
        }
    }
}
