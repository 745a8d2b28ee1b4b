//! The time of a step in closed form, Stage by Stage from the last to the first.
//!
//! A step is a graph of computations: microbatches pass the Stages forward, then backward, and every
//! Stage computes in the order of its Schedule. Its time is the longest path. For a Stage with forward f
//! and backward b, t = f + b, w Stages after it and M microbatches, `round` is the way of a microbatch
//! from its forward to its backward through all later Stages, transfers included.
//!
//! *1F1B.* Between the start of the Stage's first forward and the end of its last backward lie these
//! paths, of which the longest is `own`:
//! * the Stage works all the time: `M t`;
//! * n microbatches, at least w + 1 apart as only so many are in flight, take the round while the Stage
//!   waits, and it works in between: `n (t + round) + (M - 1 - (n - 1)(w + 1)) t`; where the first or
//!   the last of them is not the step's first or last microbatch, it forwards or backwards alone there.
//!
//! With V = max(own, t + V of the later Stages and the transfers to them), and the work u at the end
//! (what is left of the gradient reduction, the optimizer), X = max(V + u, f + transfer + X of the later
//! Stages); a step takes X of the first Stage. Every term is a path, so nothing is ever overestimated;
//! for equal Stages without transfers it is (S + M - 1) t.
//!
//! *Fill-drain* is a permutation flow shop, forward and back: the sum of all Stages and transfers, and
//! M - 1 times the longest forward and the longest backward.

use rannc_plan::{Compute, ScheduleKind};

/// What one Stage takes for a microbatch and at the end of a step. A transfer between two Stages counts
/// half as either of them sees it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct StageCost {
    pub(crate) forward_us: f64,
    pub(crate) backward_us: f64,
    /// Half of the Values from earlier Stages.
    pub(crate) in_us: f64,
    /// Half of the gradients for them.
    pub(crate) in_grad_us: f64,
    /// Half of the Values for later Stages.
    pub(crate) out_us: f64,
    /// Half of the gradients from them.
    pub(crate) out_grad_us: f64,
    /// Gradient reduction that the backward does not hide, and the optimizer.
    pub(crate) end_us: f64,
}

impl StageCost {
    /// Forward and backward.
    pub(crate) fn compute_us(&self) -> f64 {
        self.forward_us + self.backward_us
    }

    /// Its share of all transfers.
    pub(crate) fn transfer_us(&self) -> f64 {
        self.in_us + self.in_grad_us + self.out_us + self.out_grad_us
    }

    /// The way of one microbatch through it.
    pub(crate) fn pass_us(&self) -> f64 {
        self.compute_us() + self.transfer_us()
    }
}

/// The Schedule of a step and its number of microbatches.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct StepModel {
    pub(crate) schedule: ScheduleKind,
    pub(crate) microbatches: u64,
}

/// The last Stages of a step, as the Stage before them sees them. A smaller number is never worse.
///
/// 1F1B: V, the round, X. Fill-drain: sum and longest of the forwards, sum and longest of the backwards,
/// and the end of the step counted from the first backward.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct StepTime([f64; 5]);

impl StepTime {
    /// True when no Plan that goes on from `other` is better than from this one.
    pub(crate) fn dominates(&self, other: &Self) -> bool {
        self.0.iter().zip(&other.0).all(|(own, other)| own <= other)
    }
}

impl StepModel {
    /// Microbatches that a Stage holds, `from_end` Stages from the end, itself included.
    pub(crate) fn in_flight(&self, from_end: usize) -> u64 {
        self.schedule.in_flight(from_end as u64, self.microbatches)
    }

    /// Computation of a Stage in a step.
    pub(crate) fn busy_us(&self, stage: &StageCost) -> f64 {
        self.microbatches as f64 * stage.compute_us()
    }

    fn waits(&self) -> f64 {
        (self.microbatches - 1) as f64
    }

    /// The step with one more Stage before its last `later_stages` ones.
    pub(crate) fn prepend(&self, later: StepTime, stage: &StageCost, later_stages: usize) -> StepTime {
        match self.schedule {
            ScheduleKind::OneForwardOneBackward => self.prepend_1f1b(later, stage, later_stages),
            ScheduleKind::FillDrain => self.prepend_fill_drain(later, stage),
        }
    }

    fn prepend_1f1b(
        &self,
        StepTime([span_us, round_us, all_us, ..]): StepTime,
        stage: &StageCost,
        later_stages: usize,
    ) -> StepTime {
        let transfer_us = stage.out_us + stage.out_grad_us;
        let round_us = round_us + transfer_us;
        let own_us = self.own_us(stage.forward_us, stage.backward_us, round_us, later_stages as u64);
        let span_us = own_us.max(stage.compute_us() + transfer_us + span_us);
        let all_us = (span_us + stage.end_us).max(stage.forward_us + stage.out_us + all_us);
        let before_us = stage.in_us + stage.in_grad_us;
        StepTime([span_us + before_us, round_us + stage.compute_us() + before_us, all_us + stage.in_us, 0.0, 0.0])
    }

    /// The longest path that begins with the Stage's first forward and ends with its last backward.
    fn own_us(&self, forward_us: f64, backward_us: f64, round_us: f64, later_stages: u64) -> f64 {
        let (last, apart) = (self.microbatches - 1, later_stages + 1);
        let (compute_us, rounds) = (forward_us + backward_us, 1 + last / apart);
        let pass_us = compute_us + round_us;
        let mut own_us = self.microbatches as f64 * compute_us;
        for rounds in [1, rounds] {
            let rest = last - (rounds - 1) * apart;
            let (rest, paired) = (rest as f64, rest.saturating_sub(later_stages) as f64);
            let begins_us = rest * backward_us + paired * forward_us;
            let ends_us = rest * forward_us + paired * backward_us;
            own_us = own_us.max(rounds as f64 * pass_us + begins_us.max(ends_us));
        }
        if rounds >= 2 {
            let rounds = if round_us > later_stages as f64 * compute_us { rounds } else { 2 };
            let between = last - (rounds - 1) * apart;
            own_us = own_us.max(rounds as f64 * pass_us + between as f64 * compute_us);
        }
        own_us
    }

    fn prepend_fill_drain(&self, StepTime(later): StepTime, stage: &StageCost) -> StepTime {
        let [forward_us, longest_forward_us, backward_us, longest_backward_us, end_us] = later;
        let forward_us = forward_us + stage.forward_us + stage.out_us + stage.in_us;
        let own_backward_us = backward_us + stage.backward_us + stage.out_grad_us;
        let longest_backward_us = longest_backward_us.max(stage.backward_us);
        let own_end_us = own_backward_us + self.waits() * longest_backward_us + stage.end_us;
        StepTime([
            forward_us,
            longest_forward_us.max(stage.forward_us),
            own_backward_us + stage.in_grad_us,
            longest_backward_us,
            end_us.max(own_end_us),
        ])
    }

    /// The time of a whole step.
    pub(crate) fn step_us(&self, StepTime(whole): StepTime) -> f64 {
        match self.schedule {
            ScheduleKind::OneForwardOneBackward => whole[2],
            ScheduleKind::FillDrain => whole[0] + self.waits() * whole[1] + whole[4],
        }
    }

    /// No step takes less that has these last Stages, and before them others through which a microbatch
    /// passes in at least `pass_us` and of which one computes for at least `longest_us`.
    pub(crate) fn bound_us(&self, StepTime(later): StepTime, pass_us: f64, longest_us: f64) -> f64 {
        match self.schedule {
            ScheduleKind::OneForwardOneBackward => {
                (later[0] + pass_us).max(later[2]).max(self.microbatches as f64 * longest_us)
            }
            ScheduleKind::FillDrain => {
                later[0] + later[2] + pass_us + self.waits() * (later[1] + later[3]).max(longest_us)
            }
        }
    }
}

impl StepModel {
    /// The time of a step, computation by computation: what the closed formula is a lower bound of. A transfer
    /// takes as long as it does for the slower of its ends.
    pub(crate) fn longest_path_us(&self, stages: &[StageCost]) -> f64 {
        let number = |place: usize| u32::try_from(place).expect("fewer than 2^32");
        let microbatches = usize::try_from(self.microbatches).expect("as many as fit into a plan");
        let order = |stage| self.schedule.order(number(stage), number(stages.len()), number(microbatches));
        let mut lines: Vec<Line<_>> = (0..stages.len()).map(|stage| Line::new(order(stage), microbatches)).collect();
        let mut moved = true;
        while moved {
            moved = false;
            for stage in 0..stages.len() {
                while let Some(compute) = lines[stage].next {
                    let mb = compute.microbatch() as usize;
                    let ready_us = match compute {
                        Compute::Forward(_) if stage == 0 => 0.0,
                        Compute::Forward(_) => {
                            lines[stage - 1].forward_us[mb] + 2.0 * stages[stage - 1].out_us.max(stages[stage].in_us)
                        }
                        Compute::Backward(_) if stage + 1 == stages.len() => 0.0,
                        Compute::Backward(_) => {
                            let transfer_us = stages[stage + 1].in_grad_us.max(stages[stage].out_grad_us);
                            lines[stage + 1].backward_us[mb] + 2.0 * transfer_us
                        }
                    };
                    if ready_us.is_nan() {
                        break;
                    }
                    lines[stage].run(compute, ready_us, &stages[stage]);
                    moved = true;
                }
            }
        }
        lines.iter().zip(stages).map(|(line, stage)| line.clock_us + stage.end_us).fold(0.0, f64::max)
    }
}

/// What a Stage has computed so far; NaN is what it has not.
struct Line<I> {
    order: I,
    next: Option<Compute>,
    clock_us: f64,
    forward_us: Vec<f64>,
    backward_us: Vec<f64>,
}

impl<I: Iterator<Item = Compute>> Line<I> {
    fn new(mut order: I, microbatches: usize) -> Self {
        let next = order.next();
        let unknown = vec![f64::NAN; microbatches];
        Self { order, next, clock_us: 0.0, forward_us: unknown.clone(), backward_us: unknown }
    }

    fn run(&mut self, compute: Compute, ready_us: f64, stage: &StageCost) {
        let (us, ended_us) = match compute {
            Compute::Forward(_) => (stage.forward_us, &mut self.forward_us),
            Compute::Backward(_) => (stage.backward_us, &mut self.backward_us),
        };
        self.clock_us = self.clock_us.max(ready_us) + us;
        ended_us[compute.microbatch() as usize] = self.clock_us;
        self.next = self.order.next();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn step_us(model: &StepModel, stages: &[StageCost]) -> f64 {
        let fold = |(time, later), stage: &StageCost| (model.prepend(time, stage, later), later + 1);
        let (time, _) = stages.iter().rev().fold((StepTime::default(), 0), fold);
        model.step_us(time)
    }

    /// Stages whose times differ by up to `spread`, with transfers of up to `transfer` of a computation.
    fn stages(spread: f64, transfer: f64) -> impl Strategy<Value = Vec<StageCost>> {
        let stage = (1.0 - spread..=1.0 + spread, 1.5..=2.5_f64, prop::array::uniform3(0.0..=1.0_f64));
        prop::collection::vec(stage, 1..9).prop_map(move |drawn| {
            let cost = |&(forward, ratio, [out, out_grad, end]): &(f64, f64, [f64; 3])| StageCost {
                forward_us: 10.0 * forward,
                backward_us: 10.0 * forward * ratio,
                out_us: 30.0 * transfer * out,
                out_grad_us: 30.0 * transfer * out_grad,
                end_us: 20.0 * end,
                ..StageCost::default()
            };
            let mut stages: Vec<StageCost> = drawn.iter().map(cost).collect();
            let last = stages.len() - 1;
            (stages[last].out_us, stages[last].out_grad_us) = (0.0, 0.0);
            for stage in 0..last {
                (stages[stage + 1].in_us, stages[stage + 1].in_grad_us) =
                    (stages[stage].out_us, stages[stage].out_grad_us);
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
        let stage = StageCost { forward_us: 1.0, backward_us: 2.0, ..StageCost::default() };
        for schedule in [ScheduleKind::OneForwardOneBackward, ScheduleKind::FillDrain] {
            for (count, microbatches) in [(1, 1), (1, 7), (4, 1), (4, 2), (4, 8), (8, 32)] {
                let us = step_us(&StepModel { schedule, microbatches }, &vec![stage; count]);
                assert!((us - 3.0 * (count as f64 + microbatches as f64 - 1.0)).abs() < 1e-9, "{us}");
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(600))]

        #[test]
        fn no_path_is_longer_than_the_longest(stages in stages(0.9, 0.3), model in model()) {
            let (closed_us, path_us) = (step_us(&model, &stages), model.longest_path_us(&stages));
            prop_assert!(closed_us <= path_us * (1.0 + 1e-12), "{closed_us} {path_us}");
        }

        #[test]
        fn fill_drain_is_exact(stages in stages(0.9, 0.3), microbatches in 1..40_u64) {
            let model = StepModel { schedule: ScheduleKind::FillDrain, microbatches };
            let (closed_us, path_us) = (step_us(&model, &stages), model.longest_path_us(&stages));
            prop_assert!((closed_us - path_us).abs() <= 1e-9 * path_us, "{closed_us} {path_us}");
        }

        #[test]
        fn balanced_steps_are_told_within_two_percent(stages in stages(0.2, 0.01), model in model()) {
            let (closed_us, path_us) = (step_us(&model, &stages), model.longest_path_us(&stages));
            prop_assert!(closed_us >= path_us * 0.98, "{closed_us} {path_us}");
        }

        #[test]
        fn bounds_hold(stages in stages(0.9, 0.3), model in model()) {
            for missing in 0..stages.len() {
                let (before, after) = stages.split_at(missing);
                let fold = |(time, later), stage: &StageCost| (model.prepend(time, stage, later), later + 1);
                let (time, _) = after.iter().rev().fold((StepTime::default(), 0), fold);
                let pass_us = before.iter().map(StageCost::pass_us).sum();
                let longest_us = before.iter().map(StageCost::compute_us).fold(0.0, f64::max);
                prop_assert!(model.bound_us(time, pass_us, longest_us) <= step_us(&model, &stages) * (1.0 + 1e-12));
            }
        }
    }
}
