//! The formula of a step against the longest path through it.

use proptest::prelude::*;
use rannc_plan::ScheduleKind;

use crate::answer::links::ReplicaLink;
use crate::price::memory::StageMemory;
use crate::price::{End, Priced, StageCost, StepModel, StepTime};

fn step_us(model: &StepModel, stages: &[StageCost]) -> f64 {
    let fold = |(time, later), stage: &StageCost| (model.prepend(time, stage, later), later + 1);
    let (time, _) = stages.iter().rev().fold((StepTime::default(), 0), fold);
    model.step_us(time)
}

/// The longest path, where nothing at the end of the step waits for messages that are still under way.
fn path_us(model: &StepModel, stages: &[StageCost]) -> f64 {
    let priced = |&cost: &StageCost| Priced {
        cost,
        end: End { reduce_us: cost.end_us, ..End::default() },
        memory: StageMemory::default(),
    };
    let link = |(from, pair): (usize, &[StageCost])| ReplicaLink {
        from,
        to: from + 1,
        values_us: 2.0 * pair[0].out_us.max(pair[1].in_us),
        grads_us: Some(2.0 * pair[0].out_grad_us.max(pair[1].in_grad_us)),
    };
    let sends = |link: &ReplicaLink| link.values_us > 0.0;
    let links: Vec<ReplicaLink> = stages.windows(2).enumerate().map(link).filter(sends).collect();
    model.exact_us(
        &model.schedule.into(),
        &stages.iter().map(priced).collect::<Vec<_>>(),
        &vec![1; stages.len()],
        &links,
        &[],
    )
}

/// Stages whose times differ by up to `spread`, with transfers of up to `transfer` of a computation, of which each
/// end sees what its Replicas share. `linked` is how likely anything moves between two.
fn stages(spread: f64, transfer: f64, replicas: &[f64], linked: f64) -> impl Strategy<Value = Vec<StageCost>> {
    let replicas = prop::sample::select(replicas.to_vec());
    let shares = prop::array::uniform3(1e-9..=1.0_f64);
    let stage = (1.0 - spread..=1.0 + spread, 1.5..=2.5_f64, shares, (replicas, prop::bool::weighted(linked)));
    prop::collection::vec(stage, 1..9).prop_map(move |drawn| {
        let cost = |&(forward, ratio, [_, _, end], _): &(f64, f64, [f64; 3], _)| StageCost {
            forward_us: 10.0 * forward,
            backward_us: 10.0 * forward * ratio,
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
            (stages[before].out_us, stages[before].out_grad_us) = (values_us * sent, grads_us * sent);
            (stages[before + 1].in_us, stages[before + 1].in_grad_us) = (values_us * received, grads_us * received);
        }
        stages
    })
}

fn model() -> impl Strategy<Value = StepModel> {
    let schedules = prop::sample::select(vec![ScheduleKind::OneForwardOneBackward, ScheduleKind::FillDrain]);
    (schedules, 1..40_u64).prop_map(|(schedule, microbatches)| StepModel { schedule, microbatches })
}

#[test]
fn equal_stages_take_the_known_time() {
    let hardly_us = 1e-12;
    let sends = StageCost { out_us: hardly_us, out_grad_us: hardly_us, ..StageCost::default() };
    let stage = |sends| StageCost { forward_us: 1.0, backward_us: 2.0, ..sends };
    for schedule in [ScheduleKind::OneForwardOneBackward, ScheduleKind::FillDrain] {
        for (count, microbatches) in [(1, 1), (1, 7), (4, 1), (4, 2), (4, 8), (8, 32)] {
            let mut stages = vec![stage(sends); count - 1];
            stages.push(stage(StageCost::default()));
            let us = step_us(&StepModel { schedule, microbatches }, &stages);
            assert!((us - 3.0 * (count as f64 + microbatches as f64 - 1.0)).abs() < 1e-9, "{us}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn no_path_is_longer_than_the_longest(stages in stages(0.9, 2.0, &[1.0, 2.0, 4.0], 0.8), model in model()) {
        let (closed_us, path_us) = (step_us(&model, &stages), path_us(&model, &stages));
        prop_assert!(closed_us <= path_us * (1.0 + 1e-12), "{closed_us} {path_us}");
    }

    #[test]
    fn fill_drain_is_exact(stages in stages(0.9, 2.0, &[1.0, 2.0, 4.0], 0.8), microbatches in 1..40_u64) {
        let model = StepModel { schedule: ScheduleKind::FillDrain, microbatches };
        let (closed_us, path_us) = (step_us(&model, &stages), path_us(&model, &stages));
        prop_assert!((closed_us - path_us).abs() <= 1e-9 * path_us, "{closed_us} {path_us}");
    }

    #[test]
    fn balanced_steps_are_told_within_two_percent(
        stages in stages(0.1, 0.01, &[1.0, 2.0, 4.0], 1.0), model in model(),
    ) {
        let (closed_us, path_us) = (step_us(&model, &stages), path_us(&model, &stages));
        prop_assert!(closed_us >= path_us * 0.98, "{closed_us} {path_us}");
    }

    #[test]
    fn bounds_hold(stages in stages(0.9, 2.0, &[1.0, 2.0, 4.0], 0.8), model in model()) {
        for missing in 0..stages.len() {
            let (before, after) = stages.split_at(missing);
            let fold = |(time, later), stage: &StageCost| (model.prepend(time, stage, later), later + 1);
            let (time, _) = after.iter().rev().fold((StepTime::default(), 0), fold);
            let pass = |earlier_us, stage: &StageCost| stage.behind_us(earlier_us) + stage.pass_us();
            let pass_us = before.iter().fold(0.0, pass);
            prop_assert!(model.bound_us(time, pass_us) <= step_us(&model, &stages) * (1.0 + 1e-12));
        }
    }
}
