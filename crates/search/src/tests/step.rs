//! The formula of a step against the longest path through it.

use proptest::prelude::*;
use rannc_plan::{ScheduleKind, Sharding};

use crate::answer::links::{Moves, ReplicaLink};
use crate::price::{End, PassCost, ReplicaPass, StageCost, StepModel, StepTime, TimedStage};

/// The last Stages of a step, and how deep the first of them is.
type Last = (StepTime, usize);

/// More Stages, of which some feed the next one, before the last ones.
fn put_before(model: &StepModel, stages: &[StageCost], last: Last) -> Last {
    let prepend = |(time, behind): Last, stage: &StageCost| {
        let depth = 1 + if stage.smaller.out_us > 0.0 { behind } else { 0 };
        (model.prepend(time, stage, depth), depth)
    };
    stages.iter().rev().fold(last, prepend)
}

fn step_us(model: &StepModel, stages: &[StageCost]) -> f64 {
    model.step_us(put_before(model, stages, Last::default()).0)
}

/// The longest path, where nothing at the end of the step waits for messages that are still under way.
fn path_us(model: &StepModel, stages: &[StageCost]) -> f64 {
    let pass = |&PassCost { forward_us, backward_us, .. }: &PassCost| ReplicaPass {
        forward_us,
        backward_us,
        ..ReplicaPass::default()
    };
    let timed = |cost: &StageCost| TimedStage {
        // The one between is as small as the formula takes it to be.
        passes: vec![[&cost.larger, &cost.smaller, &cost.smaller].map(pass)],
        end: End {
            divides: if cost.wait_us > 0.0 { Sharding::Gradients } else { Sharding::None },
            reduce_us: cost.end_us,
            ..End::default()
        },
    };
    let both = |pair: &[StageCost], us: fn(&PassCost, &PassCost) -> f64| {
        let [larger_us, smaller_us] = [us(&pair[0].larger, &pair[1].larger), us(&pair[0].smaller, &pair[1].smaller)];
        [larger_us, smaller_us, smaller_us].map(|us| Some(2.0 * us))
    };
    let link = |(from, pair): (usize, &[StageCost])| ReplicaLink {
        from,
        to: from + 1,
        values_us: both(pair, |sender, receiver| sender.out_us.max(receiver.in_us)),
        grads_us: both(pair, |sender, receiver| sender.out_grad_us.max(receiver.in_grad_us)),
    };
    let sends = |link: &ReplicaLink| link.values_us[2] > Some(0.0);
    let links: Vec<ReplicaLink> = stages.windows(2).enumerate().map(link).filter(sends).collect();
    model.exact_us(
        &model.schedule.into(),
        &stages.iter().map(timed).collect::<Vec<_>>(),
        &Moves { links, ..Moves::default() },
    )
}

/// Stages whose times differ by up to `spread`, with transfers of up to `transfer` of a computation, of which each
/// end sees what its Replicas share. `linked` is how likely anything moves between two. A larger microbatch takes up to
/// `growth` more in each part.
fn stages(
    spread: f64,
    transfer: f64,
    replicas: &[f64],
    linked: f64,
    growth: f64,
) -> impl Strategy<Value = Vec<StageCost>> {
    let replicas = prop::sample::select(replicas.to_vec());
    let shares = prop::array::uniform3(1e-9..=1.0_f64);
    let stage = (1.0 - spread..=1.0 + spread, 1.5..=2.5_f64, shares, (replicas, prop::bool::weighted(linked)));
    let growths = prop::array::uniform6(1.0..=1.0 + growth);
    prop::collection::vec((stage, growths), 1..9).prop_map(move |drawn| {
        let (drawn, growths): (Vec<_>, Vec<_>) = drawn.into_iter().unzip();
        let cost = |&(forward, ratio, [_, _, end], _): &(f64, f64, [f64; 3], _)| StageCost {
            smaller: PassCost {
                forward_us: 10.0 * forward,
                backward_us: 10.0 * forward * ratio,
                ..PassCost::default()
            },
            end_us: 20.0 * end,
            ..StageCost::default()
        };
        let mut stages: Vec<StageCost> = drawn.iter().map(cost).collect();
        for (before, pair) in drawn.windows(2).enumerate() {
            let (_, _, [values, grads, _], (senders, linked)) = pair[0];
            let (_, _, _, (receivers, _)) = pair[1];
            let transfer = if linked { 30.0 * transfer } else { 0.0 };
            let (values_us, grads_us) = (transfer * values, transfer * grads);
            let (sent, received) = (senders.min(receivers) / senders, senders.min(receivers) / receivers);
            let sender = &mut stages[before].smaller;
            (sender.out_us, sender.out_grad_us) = (values_us * sent, grads_us * sent);
            let receiver = &mut stages[before + 1].smaller;
            (receiver.in_us, receiver.in_grad_us) = (values_us * received, grads_us * received);
        }
        for (StageCost { larger, smaller, .. }, growths) in stages.iter_mut().zip(growths) {
            let [forward, backward, values_in, grads_in, values_out, grads_out] = growths;
            *larger = PassCost {
                forward_us: forward * smaller.forward_us,
                backward_us: backward * smaller.backward_us,
                in_us: values_in * smaller.in_us,
                in_grad_us: grads_in * smaller.in_grad_us,
                out_us: values_out * smaller.out_us,
                out_grad_us: grads_out * smaller.out_grad_us,
            };
        }
        stages
    })
}

/// The same Stages, of which some have sums behind every backward.
fn some_divided(stages: impl Strategy<Value = Vec<StageCost>>) -> impl Strategy<Value = Vec<StageCost>> {
    (stages, prop::collection::vec(prop::bool::weighted(0.3), 9)).prop_map(|(mut stages, divided)| {
        for (stage, _) in stages.iter_mut().zip(divided).filter(|(_, divided)| *divided) {
            stage.wait_us = stage.end_us;
        }
        stages
    })
}

fn counts(microbatches: u64) -> impl Strategy<Value = [u64; 3]> {
    let first = prop_oneof![Just(0), 0..microbatches];
    (first, any::<bool>()).prop_map(move |(larger, between)| {
        let between = u64::from(between && larger > 0 && larger + 1 < microbatches);
        [larger, between, microbatches - larger - between]
    })
}

/// A Schedule with microbatches, and Stages for them: where all are equal, nothing takes more.
fn uneven_step() -> impl Strategy<Value = (StepModel, Vec<StageCost>)> {
    let schedules = prop::sample::select(vec![ScheduleKind::OneForwardOneBackward, ScheduleKind::FillDrain]);
    let stages = some_divided(stages(0.9, 2.0, &[1.0, 2.0, 4.0], 0.8, 1.0));
    (schedules, (1..40_u64).prop_flat_map(counts), stages).prop_map(|(schedule, counts, mut stages)| {
        if counts[0] == 0 {
            stages.iter_mut().for_each(|stage| stage.larger = stage.smaller);
        }
        (StepModel::new(schedule, counts), stages)
    })
}

fn even_model() -> impl Strategy<Value = StepModel> {
    let schedules = prop::sample::select(vec![ScheduleKind::OneForwardOneBackward, ScheduleKind::FillDrain]);
    (schedules, 1..40_u64).prop_map(|(schedule, count)| StepModel::new(schedule, [0, 0, count]))
}

#[test]
fn equal_stages_take_the_known_time() {
    let hardly_us = 1e-12;
    let sends = PassCost { out_us: hardly_us, out_grad_us: hardly_us, ..PassCost::default() };
    let stage = |sends| {
        let pass = PassCost { forward_us: 1.0, backward_us: 2.0, ..sends };
        StageCost { larger: pass, smaller: pass, ..StageCost::default() }
    };
    for schedule in [ScheduleKind::OneForwardOneBackward, ScheduleKind::FillDrain] {
        for (count, microbatches) in [(1, 1), (1, 7), (4, 1), (4, 2), (4, 8), (8, 32)] {
            let mut stages = vec![stage(sends); count - 1];
            stages.push(stage(PassCost::default()));
            let us = step_us(&StepModel::new(schedule, [0, 0, microbatches]), &stages);
            assert!((us - 3.0 * (count as f64 + microbatches as f64 - 1.0)).abs() < 1e-9, "{us}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn no_path_is_longer_than_the_longest((model, stages) in uneven_step()) {
        let (closed_us, path_us) = (step_us(&model, &stages), path_us(&model, &stages));
        prop_assert!(closed_us <= path_us * (1.0 + 1e-12), "{closed_us} {path_us}");
    }

    #[test]
    fn fill_drain_is_exact(
        stages in some_divided(stages(0.9, 2.0, &[1.0, 2.0, 4.0], 0.8, 0.0)), microbatches in 1..40_u64,
    ) {
        let model = StepModel::new(ScheduleKind::FillDrain, [0, 0, microbatches]);
        let (closed_us, path_us) = (step_us(&model, &stages), path_us(&model, &stages));
        prop_assert!((closed_us - path_us).abs() <= 1e-9 * path_us, "{closed_us} {path_us}");
    }

    #[test]
    fn balanced_steps_are_told_within_two_percent(
        stages in stages(0.1, 0.01, &[1.0, 2.0, 4.0], 1.0, 0.0), model in even_model(),
    ) {
        let (closed_us, path_us) = (step_us(&model, &stages), path_us(&model, &stages));
        prop_assert!(closed_us >= path_us * 0.98, "{closed_us} {path_us}");
    }

    /// Of balanced Stages that take in proportion to the rows, at least as many microbatches as Stages.
    #[test]
    fn uneven_steps_are_told_within_fifteen_percent(
        stages in stages(0.1, 0.01, &[1.0, 2.0, 4.0], 1.0, 0.0),
        schedule in prop::sample::select(vec![ScheduleKind::OneForwardOneBackward, ScheduleKind::FillDrain]),
        rows in 1..6_u32, counts in (8..40_u64).prop_flat_map(counts),
    ) {
        let growth = f64::from(rows + 1) / f64::from(rows);
        let more = |StageCost { smaller, wait_us, end_us, batch_us, .. }: StageCost| {
            let PassCost { forward_us, backward_us, .. } = smaller;
            let more = PassCost { forward_us: growth * forward_us, backward_us: growth * backward_us, ..smaller };
            StageCost { larger: if counts[0] > 0 { more } else { smaller }, smaller, wait_us, end_us, batch_us }
        };
        let (model, stages) = (StepModel::new(schedule, counts), stages.into_iter().map(more).collect::<Vec<_>>());
        let (closed_us, path_us) = (step_us(&model, &stages), path_us(&model, &stages));
        prop_assert!(closed_us >= path_us * 0.85, "{closed_us} {path_us}");
    }

    #[test]
    fn what_dominates_is_never_worse((model, stages) in uneven_step(), (first, length) in (0..6_usize, 1..4_usize)) {
        let length = length.min(stages.len());
        let first = first.min(stages.len() - length);
        let tail = |stages: &[StageCost]| put_before(&model, stages, Last::default());
        let (own, other) = (tail(&stages[..length]), tail(&stages[first..first + length]));
        if own.1 == other.1 && model.dominates(&own.0, &other.0) {
            let whole_us = |tail| model.step_us(put_before(&model, &stages, tail).0);
            prop_assert!(whole_us(own) <= whole_us(other) * (1.0 + 1e-12));
        }
    }

    #[test]
    fn bounds_hold((model, stages) in uneven_step()) {
        for missing in 0..stages.len() {
            let (before, after) = stages.split_at(missing);
            let (time, _) = put_before(&model, after, Last::default());
            let pass = |earlier_us, stage: &StageCost| stage.behind_us(earlier_us) + stage.pass_us();
            let pass_us = before.iter().fold(0.0, pass);
            prop_assert!(model.bound_us(time, pass_us, model.rounds(stages.len())) <= step_us(&model, &stages) * (1.0 + 1e-12));
        }
    }
}
