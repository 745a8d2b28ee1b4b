//! The time of a step in closed form, Stage by Stage from the last to the first.
//!
//! A step is a graph of computations and messages: microbatches pass the Stages forward, then backward, and every
//! Stage computes in the order of its Schedule. Its time is the longest path ([`crate::answer`]). For a Stage with
//! forward f and backward b, t = f + b, w Stages after it and M microbatches, `round` is the way of a microbatch
//! from its forward to its backward through all later Stages, transfers included.
//!
//! *1F1B.* A Stage begins to receive one computation ahead: Values beside a backward, gradients beside a forward. It
//! takes p = max(t, f + Values, b + gradients) for a microbatch. Between the start of its first forward and the end
//! of its last backward lie these paths, of which the longest is `own`:
//! * the Stage works all the time, or waits for its receives: `(w + 1) t + (M - 1 - w) p`;
//! * n microbatches, at least w + 1 apart as only so many are in flight, take the round while the Stage
//!   waits, and it works in between: `n (t + round) + (M - 1 - (n - 1)(w + 1)) p`; where the first or
//!   the last of them is not the step's first or last microbatch, it forwards or backwards alone there.
//!
//! With V = max(own, t + V of the later Stages and the transfers to them), and the work u at the end
//! (what is left of the gradient reduction, the optimizer), X = max(V + u, f + transfer + X of the later
//! Stages); a step takes X of the first Stage. For equal Stages whose transfers take no time it is (S + M - 1) t.
//!
//! *Fill-drain* is a permutation flow shop of Stages and channels, forward and back: the sum of all computations and
//! transfers, and M - 1 times the longest of the forward and the longest of the backward.
//!
//! Where nothing is sent to the next Stage, the Stages before and after have their steps side by side, and the longer
//! one counts. Every term is a path, so nothing is overestimated as long as all that a Stage sends goes to the next one
//! and gradients come back for it. Values that pass over Stages travel beside the others: there the formula may be above
//! the truth. With only those transfers that surely are between neighbours ([`crate::chain::traffic::Traffic`]) it never is.

use rannc_plan::ScheduleKind;

/// What one Stage takes for a microbatch and at the end of a step. A transfer between two Stages takes as long as
/// the slower of them sees it.
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

    /// What the way of a microbatch through earlier Stages surely adds to the paths through this one.
    pub(crate) fn behind_us(&self, earlier_us: f64) -> f64 {
        if self.in_us > 0.0 { earlier_us } else { 0.0 }
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
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct StepTime {
    /// Half of the Values that the first of them receives from that Stage.
    in_us: f64,
    /// Half of the gradients that it sends back.
    in_grad_us: f64,
    /// The time of a step with no other Stages.
    step_us: f64,
    /// An [`Alternating`] or a [`Drained`], as the Schedule has it.
    paths_us: [f64; 5],
}

/// Paths of 1F1B.
#[derive(Clone, Copy, Default)]
struct Alternating {
    /// The longest one from the first forward of the first Stage to its last backward.
    span_us: f64,
    /// A microbatch's way to the last Stage and back.
    round_us: f64,
    /// The longest one from the first forward of the first Stage to the end of the step.
    all_us: f64,
}

/// Paths of fill-drain: sums and longest of the forwards and the transfers of Values, the same of the backwards and
/// the gradients, and the end of the step counted from the first backward.
#[derive(Clone, Copy, Default)]
struct Drained {
    forward_us: f64,
    longest_forward_us: f64,
    backward_us: f64,
    longest_backward_us: f64,
    end_us: f64,
}

impl From<[f64; 5]> for Alternating {
    fn from([span_us, round_us, all_us, ..]: [f64; 5]) -> Self {
        Self { span_us, round_us, all_us }
    }
}

impl From<Alternating> for [f64; 5] {
    fn from(Alternating { span_us, round_us, all_us }: Alternating) -> Self {
        [span_us, round_us, all_us, 0.0, 0.0]
    }
}

impl From<[f64; 5]> for Drained {
    fn from([forward_us, longest_forward_us, backward_us, longest_backward_us, end_us]: [f64; 5]) -> Self {
        Self { forward_us, longest_forward_us, backward_us, longest_backward_us, end_us }
    }
}

impl From<Drained> for [f64; 5] {
    fn from(paths: Drained) -> Self {
        let Drained { forward_us, longest_forward_us, backward_us, longest_backward_us, end_us } = paths;
        [forward_us, longest_forward_us, backward_us, longest_backward_us, end_us]
    }
}

impl StepTime {
    /// Of Stages that cannot be.
    pub(crate) const NEVER: Self =
        Self { in_us: f64::INFINITY, in_grad_us: f64::INFINITY, step_us: f64::INFINITY, paths_us: [f64::INFINITY; 5] };

    /// As good as either in every part.
    pub(crate) fn least(self, other: Self) -> Self {
        Self {
            in_us: self.in_us.min(other.in_us),
            in_grad_us: self.in_grad_us.min(other.in_grad_us),
            step_us: self.step_us.min(other.step_us),
            paths_us: std::array::from_fn(|path| self.paths_us[path].min(other.paths_us[path])),
        }
    }

    /// True when no Plan that goes on from `other` is better than from this one.
    pub(crate) fn dominates(&self, other: &Self) -> bool {
        self.in_us <= other.in_us
            && self.in_grad_us <= other.in_grad_us
            && self.step_us <= other.step_us
            && self.paths_us.iter().zip(&other.paths_us).all(|(own, other)| own <= other)
    }
}

impl StepModel {
    /// Numbers of microbatches that one of so many Stages may hold, increasing.
    pub(crate) fn held(&self, stages: usize) -> Vec<u64> {
        let mut held: Vec<u64> = (1..=stages).map(|from_end| self.in_flight(from_end)).collect();
        held.dedup();
        held
    }

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

    fn prepend_1f1b(&self, later: StepTime, stage: &StageCost, later_stages: usize) -> StepTime {
        let StepTime { in_us, in_grad_us, step_us, paths_us } = later;
        let values_us = 2.0 * stage.out_us.max(in_us);
        let grads_us = 2.0 * stage.out_grad_us.max(in_grad_us);
        let later = if values_us > 0.0 { paths_us.into() } else { Alternating::default() };
        let Alternating { span_us, round_us, all_us } = later;
        let transfer_us = values_us + grads_us;
        let round_us = round_us + transfer_us;
        let own_us = self.own_us(stage, grads_us, round_us, later_stages as u64);
        let span_us = own_us.max(stage.compute_us() + transfer_us + span_us);
        let all_us = (span_us + stage.end_us).max(stage.forward_us + values_us + all_us);
        let step_us = step_us.max(all_us);
        let round_us = round_us + stage.compute_us();
        let paths = Alternating { span_us, round_us, all_us };
        StepTime { in_us: stage.in_us, in_grad_us: stage.in_grad_us, step_us, paths_us: paths.into() }
    }

    /// The longest path that begins with the Stage's first forward and ends with its last backward.
    fn own_us(&self, stage: &StageCost, grads_us: f64, round_us: f64, later_stages: u64) -> f64 {
        let &StageCost { forward_us, backward_us, .. } = stage;
        let (last, apart) = (self.microbatches - 1, later_stages + 1);
        let (compute_us, rounds) = (stage.compute_us(), 1 + last / apart);
        let pass_us = compute_us + round_us;
        // What the receives of Values and of gradients take more than what is computed beside them.
        let values_us = (2.0 * stage.in_us - backward_us).max(0.0);
        let grads_us = (grads_us - forward_us).max(0.0);
        let period_us = compute_us + values_us.max(grads_us);
        let paired = last.saturating_sub(later_stages) as f64;
        let mut own_us = self.microbatches as f64 * compute_us + paired * (period_us - compute_us);
        for rounds in [1, rounds] {
            let rest = last - (rounds - 1) * apart;
            let paired = rest.saturating_sub(later_stages);
            let (rest, paired, unpaired) = (rest as f64, paired as f64, paired.saturating_sub(1) as f64);
            let begins_us = rest * backward_us + paired * forward_us + (paired * grads_us).max(unpaired * values_us);
            let ends_us = rest * forward_us + paired * backward_us + (paired * values_us).max(unpaired * grads_us);
            own_us = own_us.max(rounds as f64 * pass_us + begins_us.max(ends_us));
        }
        if rounds >= 2 {
            let rounds = if pass_us > apart as f64 * period_us { rounds } else { 2 };
            let between = last - (rounds - 1) * apart;
            own_us = own_us.max(rounds as f64 * pass_us + between as f64 * period_us);
        }
        own_us
    }

    fn prepend_fill_drain(&self, later: StepTime, stage: &StageCost) -> StepTime {
        let StepTime { in_us, in_grad_us, step_us, paths_us } = later;
        let values_us = 2.0 * stage.out_us.max(in_us);
        let grads_us = 2.0 * stage.out_grad_us.max(in_grad_us);
        let later = if values_us > 0.0 { paths_us.into() } else { Drained::default() };
        let Drained { forward_us, longest_forward_us, backward_us, longest_backward_us, end_us } = later;
        let forward_us = forward_us + values_us + stage.forward_us;
        let longest_forward_us = longest_forward_us.max(values_us).max(stage.forward_us);
        let backward_us = backward_us + grads_us + stage.backward_us;
        let longest_backward_us = longest_backward_us.max(grads_us).max(stage.backward_us);
        let end_us = end_us.max(backward_us + self.waits() * longest_backward_us + stage.end_us);
        StepTime {
            in_us: stage.in_us,
            in_grad_us: stage.in_grad_us,
            step_us: step_us.max(forward_us + self.waits() * longest_forward_us + end_us),
            paths_us: Drained { forward_us, longest_forward_us, backward_us, longest_backward_us, end_us }.into(),
        }
    }

    /// The time of a whole step.
    pub(crate) fn step_us(&self, time: StepTime) -> f64 {
        time.step_us
    }

    /// No step takes less that has these last Stages, and before them others through which a microbatch
    /// passes in at least `pass_us`.
    pub(crate) fn bound_us(&self, later: StepTime, pass_us: f64) -> f64 {
        let StepTime { in_us, in_grad_us, step_us, paths_us } = later;
        let pass_us = if in_us > 0.0 { pass_us } else { 0.0 };
        match self.schedule {
            ScheduleKind::OneForwardOneBackward => {
                let Alternating { span_us, all_us, .. } = paths_us.into();
                (in_us + in_grad_us + span_us + pass_us).max(in_us + all_us).max(step_us)
            }
            ScheduleKind::FillDrain => {
                let Drained { forward_us, longest_forward_us, backward_us, longest_backward_us, end_us } =
                    paths_us.into();
                let drained_us = in_grad_us + backward_us + pass_us + self.waits() * longest_backward_us;
                (in_us + forward_us + self.waits() * longest_forward_us + drained_us.max(end_us)).max(step_us)
            }
        }
    }
}
