//! A closed formula for 1F1B with one Replica a Stage: never above the simulated step, and near it.
//!
//! The formula is the longest of some paths through the grid of Stages and microbatches: all microbatches of
//! one Stage; round trips from a Stage to the last one and back, with the other microbatches of the Stage
//! before, between or after them; and the same beginning one Stage earlier.

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use rannc_plan::{Call, ScheduleKind};

use crate::cases::{StageCosts, TableCosts, chain};

/// What the later Stages add to a path.
#[derive(Clone, Copy, Default)]
struct Later {
    /// Forward, backward and messages of one microbatch.
    trip_us: f64,
    /// From the first forward to the last backward.
    span_us: f64,
    /// From the first forward to the end of the step.
    end_us: f64,
}

fn formula_us(costs: &TableCosts, microbatches: u32) -> f64 {
    let stages = costs.stages.len();
    let message_us = |src: usize, dst: usize| costs.latency_us[dst] + costs.byte_us[src];
    let mut later = Later::default();
    for stage in (0..stages).rev() {
        let StageCosts { forward_us, backward_us, reduce_us, update_us, .. } = costs.stages[stage];
        let own_us = forward_us + backward_us;
        let after = u32::try_from(stages - 1 - stage).expect("few stages");
        let mut span_us = f64::from(microbatches) * own_us;
        let mut trip_us = own_us;
        let mut passed_us: f64 = 0.0;
        if after > 0 {
            let (out_us, back_us) = (message_us(stage, stage + 1), message_us(stage + 1, stage));
            trip_us += out_us + back_us + later.trip_us;
            let trips = trips_us(forward_us, backward_us, trip_us, microbatches, microbatches.min(after));
            span_us = span_us.max(trips).max(own_us + out_us + back_us + later.span_us);
            passed_us = forward_us + out_us + later.end_us;
        }
        later = Later { trip_us, span_us, end_us: passed_us.max(span_us + reduce_us + update_us) };
    }
    later.end_us
}

/// The longest path with round trips. A trip begins `warm_up + 1` microbatches after the one before.
fn trips_us(forward_us: f64, backward_us: f64, trip_us: f64, microbatches: u32, warm_up: u32) -> f64 {
    let own_us = forward_us + backward_us;
    let most = 1 + (microbatches - 1) / (warm_up + 1);
    let rest = |trips: u32| microbatches - 1 - (trips - 1) * (warm_up + 1);
    let mut longest_us: f64 = 0.0;
    for trips in [1, most] {
        let (all, steady) = (f64::from(rest(trips)), f64::from(rest(trips).saturating_sub(warm_up)));
        let ends_us = (all * backward_us + steady * forward_us).max(all * forward_us + steady * backward_us);
        longest_us = longest_us.max(f64::from(trips) * trip_us + ends_us);
    }
    if most >= 2 {
        let waits = trip_us - own_us > f64::from(warm_up) * own_us;
        let trips = if waits { most } else { 2 };
        longest_us = longest_us.max(f64::from(trips) * trip_us + f64::from(rest(trips)) * own_us);
    }
    longest_us
}

/// Stages whose times differ by up to `spread` of the longest; messages of up to `message_us`, as long as a
/// forward at 1.
fn instances(spread: f64, message_us: f64) -> impl Strategy<Value = (TableCosts, u32)> {
    (1..=8_usize, 1..=32_u32).prop_flat_map(move |(stages, microbatches)| {
        let share = move || 1.0 - spread..=1.0;
        let stage = (share(), share(), 0.0..3.0).prop_map(|(forward, backward, end_us)| StageCosts {
            forward_us: forward,
            backward_us: 2.0 * backward,
            update_us: end_us,
            ..StageCosts::default()
        });
        let latency_us = vec((0.0..=1.0).prop_map(move |share| share * message_us), stages);
        (vec(stage, stages), latency_us).prop_map(move |(stages, latency_us)| {
            let byte_us = vec![0.0; stages.len()];
            (TableCosts { stages, tied_us: 0.0, latency_us, byte_us }, microbatches)
        })
    })
}

/// By how much the formula is below the simulator, as shares of the step: mean and most.
fn errors(spread: f64, message_us: f64) -> (f64, f64) {
    let instances = instances(spread, message_us);
    let mut runner = TestRunner::deterministic();
    let errors = (0..500).map(|_| {
        let (costs, microbatches) = instances.new_tree(&mut runner).expect("nothing is rejected").current();
        let program = chain(
            &vec![1; costs.stages.len()],
            microbatches,
            u64::from(microbatches),
            (Call::Whole, ScheduleKind::OneForwardOneBackward),
        );
        let step_us = costs.run(&program).step_us;
        let error = 1.0 - formula_us(&costs, microbatches) / step_us;
        assert!(error > -1e-9, "the formula is {error} above the simulated step of {costs:?}");
        error
    });
    let errors: Vec<f64> = errors.collect();
    (errors.iter().sum::<f64>() / errors.len() as f64, errors.iter().copied().fold(0.0, f64::max))
}

#[test]
fn near_the_simulated_step() {
    for (spread, message_us, mean, most) in [
        (0.0, 0.0, 1e-9, 1e-9),
        (0.2, 0.0, 0.0002, 0.02),
        (0.2, 0.1, 0.0015, 0.02),
        (0.2, 1.0, 0.01, 0.06),
        (1.0, 0.0, 0.003, 0.07),
        (1.0, 0.1, 0.0035, 0.06),
        (1.0, 3.0, 0.04, 0.3),
    ] {
        let errors = errors(spread, message_us);
        assert!(errors.0 <= mean && errors.1 <= most, "spread {spread}, messages of {message_us}: {errors:?}");
    }
}
