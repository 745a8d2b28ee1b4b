//! The time of a step in closed form, Stage by Stage from the last to the first.
//!
//! A step is a graph of computations and messages: microbatches pass the Stages forward, then backward, and every
//! Stage computes in the order of its Schedule. Its time is the longest path ([`crate::answer`]). For a Stage with
//! forward f and backward b, t = f + b and M microbatches, w + 1 Stages on the longest way from it to one that feeds no
//! other, itself included, `round` is the way of a microbatch from its forward to its backward through all later Stages,
//! transfers included.
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
//! Microbatches have two sizes at most here, the larger ones first (see [`super::sizes`]). Rounds are those of the
//! smaller ones, but for the first microbatch's; all other paths go through what they are: the first microbatch on the
//! way in, the last one on the way out, and all of a Stage that works all the time.
//!
//! Beside these stands what a Stage waits for of exchanges with the ranks' own batches (see [`super::batch`]).
//!
//! Where nothing is sent to the next Stage, the Stages before and after have their steps side by side, and the longer
//! one counts. Every term is a path, so nothing is overestimated as long as all that a Stage sends goes to the next one
//! and gradients come back for it. Values that pass over Stages travel beside the others: there the formula may be above
//! the truth. With only those transfers that surely are between neighbours ([`crate::chain::traffic::Traffic`]) it never is.

use rannc_plan::{Compute, Order, ScheduleKind};

use super::sizes::{BETWEEN, BySize, LARGER, SMALLER};

/// What one Stage takes for one microbatch. A transfer between two Stages takes as long as the slower of them sees it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct PassCost {
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
}

impl PassCost {
    /// Forward and backward.
    pub(crate) fn compute_us(&self) -> f64 {
        self.forward_us + self.backward_us
    }

    /// True when no part of it takes more than that of another one.
    fn is_within(&self, other: &Self) -> bool {
        self.forward_us <= other.forward_us
            && self.backward_us <= other.backward_us
            && self.in_us <= other.in_us
            && self.in_grad_us <= other.in_grad_us
            && self.out_us <= other.out_us
            && self.out_grad_us <= other.out_grad_us
    }

    /// Its share of all transfers.
    pub(crate) fn transfer_us(&self) -> f64 {
        self.in_us + self.in_grad_us + self.out_us + self.out_grad_us
    }
}

/// What one Stage takes for its microbatches and at the end of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct StageCost {
    /// For one of the first microbatches, which are at least as large as the others.
    pub(crate) larger: PassCost,
    /// For the last one.
    pub(crate) smaller: PassCost,
    /// Before another backward, for the sums of the one before it.
    pub(crate) wait_us: f64,
    /// Gradient reduction that the backward does not hide, and the optimizer.
    pub(crate) end_us: f64,
    /// What a step takes at least for what the Stage exchanges with the ranks' own batches.
    pub(crate) batch_us: f64,
}

impl StageCost {
    /// True when it takes a finite time.
    pub(crate) fn is_finite(&self) -> bool {
        self.larger.compute_us().is_finite()
    }

    /// True when no part of it takes more than that of another one.
    pub(crate) fn is_within(&self, other: &Self) -> bool {
        self.larger.is_within(&other.larger)
            && self.smaller.is_within(&other.smaller)
            && self.wait_us <= other.wait_us
            && self.end_us <= other.end_us
            && self.batch_us <= other.batch_us
    }

    /// What the way of a microbatch through earlier Stages surely adds to the paths through this one.
    pub(crate) fn behind_us(&self, earlier_us: f64) -> f64 {
        if self.smaller.in_us > 0.0 { earlier_us } else { 0.0 }
    }

    /// The way of the first microbatch forward through it, and of the last one back.
    pub(crate) fn pass_us(&self) -> f64 {
        let Self { larger, smaller, .. } = self;
        larger.forward_us
            + smaller.in_us
            + larger.out_us
            + smaller.backward_us
            + smaller.in_grad_us
            + smaller.out_grad_us
    }
}

/// The Schedule of a step and its microbatches.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct StepModel {
    pub(crate) schedule: ScheduleKind,
    pub(crate) microbatches: u64,
    /// How many there are of each size; the one between counts as a smaller one where only two are told apart.
    counts: BySize<u64>,
}

/// Comparisons of times that are numbers: `f64::max` and `f64::min` also look for what is none.
trait Time {
    fn longer(self, other: Self) -> Self;
    fn shorter(self, other: Self) -> Self;
}

impl Time for f64 {
    #[inline]
    fn longer(self, other: Self) -> Self {
        if self > other { self } else { other }
    }

    #[inline]
    fn shorter(self, other: Self) -> Self {
        if self < other { self } else { other }
    }
}

/// A message's time between two Stages.
#[derive(Clone, Copy, Debug)]
struct Transfer {
    larger_us: f64,
    smaller_us: f64,
}

impl Transfer {
    /// What a Stage sends or gets back as the slower end sees it, who each tell a half. Of larger microbatches, the later
    /// end is not known, which takes at least as long as with a smaller one.
    #[inline]
    fn new(larger_us: f64, smaller_us: f64, later_us: f64) -> Self {
        Self { larger_us: 2.0 * larger_us.longer(later_us), smaller_us: 2.0 * smaller_us.longer(later_us) }
    }
}

/// The last Stages of a step, as the Stage before them sees them. A smaller number is never worse.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct StepTime {
    /// Half of the Values that the first of them receives from that Stage for the last microbatch.
    in_us: f64,
    /// Half of the gradients that it sends back for it.
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
    /// The last microbatch's way to the last Stage and back.
    round_us: f64,
    /// The same of the first one.
    first_round_us: f64,
    /// The longest one from the first forward of the first Stage to the end of the step.
    all_us: f64,
}

/// Paths of fill-drain.
#[derive(Clone, Copy, Default)]
struct Drained {
    /// The last microbatch's forwards and Values.
    last_forward_us: f64,
    /// The longest one from the first forward of the first Stage to the last one of the last Stage.
    forwards_us: f64,
    /// The first microbatch's backwards and gradients.
    first_backward_us: f64,
    /// The longest one from the first backward of the last Stage to the last one of the first Stage.
    backwards_us: f64,
    /// The end of the step, counted from the first backward.
    end_us: f64,
}

impl From<[f64; 5]> for Alternating {
    fn from([span_us, round_us, all_us, first_round_us, ..]: [f64; 5]) -> Self {
        Self { span_us, round_us, first_round_us, all_us }
    }
}

impl From<Alternating> for [f64; 5] {
    fn from(Alternating { span_us, round_us, first_round_us, all_us }: Alternating) -> Self {
        [span_us, round_us, all_us, first_round_us, 0.0]
    }
}

impl From<[f64; 5]> for Drained {
    fn from([last_forward_us, forwards_us, first_backward_us, backwards_us, end_us]: [f64; 5]) -> Self {
        Self { last_forward_us, forwards_us, first_backward_us, backwards_us, end_us }
    }
}

impl Drained {
    /// True when no path through a step takes more: each goes through one of the forward and one of the backward.
    fn is_within(self, other: Self) -> bool {
        let backward = |Self { first_backward_us, backwards_us, end_us, .. }| [first_backward_us, backwards_us, end_us];
        let forward = |Self { last_forward_us, forwards_us, .. }| [last_forward_us, forwards_us];
        forward(self).into_iter().zip(forward(other)).all(|(own_us, other_us)| {
            backward(self).into_iter().zip(backward(other)).all(|(own, other)| own_us + own <= other_us + other)
        })
    }
}

impl From<Drained> for [f64; 5] {
    fn from(paths: Drained) -> Self {
        let Drained { last_forward_us, forwards_us, first_backward_us, backwards_us, end_us } = paths;
        [last_forward_us, forwards_us, first_backward_us, backwards_us, end_us]
    }
}

impl StepTime {
    /// Of Stages that cannot be.
    pub(crate) const NEVER: Self =
        Self { in_us: f64::INFINITY, in_grad_us: f64::INFINITY, step_us: f64::INFINITY, paths_us: [f64::INFINITY; 5] };

    /// As good as either in every part.
    pub(crate) fn least(self, other: Self) -> Self {
        Self {
            in_us: self.in_us.shorter(other.in_us),
            in_grad_us: self.in_grad_us.shorter(other.in_grad_us),
            step_us: self.step_us.shorter(other.step_us),
            paths_us: std::array::from_fn(|path| self.paths_us[path].shorter(other.paths_us[path])),
        }
    }
}

impl StepModel {
    pub(crate) fn new(schedule: ScheduleKind, counts: BySize<u64>) -> Self {
        Self { schedule, microbatches: counts.iter().sum(), counts }
    }

    /// The size of a microbatch.
    pub(crate) fn size_of(&self, microbatch: u64) -> usize {
        let [larger, between, _] = self.counts;
        if microbatch < larger {
            LARGER
        } else if microbatch < larger + between {
            BETWEEN
        } else {
            SMALLER
        }
    }

    /// The most that microbatches in flight take on a Stage that computes in this order.
    ///
    /// # Arguments
    /// `held` is what is kept of one of each size, and what waits between the two parts of its backward.
    pub(crate) fn activations_bytes(&self, order: &Order, held: BySize<[f64; 2]>) -> f64 {
        let (mut most, mut sum) = (0.0_f64, 0.0);
        for compute in order.computes() {
            let [kept_bytes, waiting_bytes] = held[self.size_of(compute.microbatch().into())];
            match compute {
                Compute::Forward(_) => sum += kept_bytes,
                Compute::BackwardInput(_) => sum += waiting_bytes,
                Compute::Backward(_) | Compute::BackwardWeight(_) => {}
            }
            most = most.max(sum);
            match compute {
                Compute::Backward(_) => sum -= kept_bytes,
                Compute::BackwardWeight(_) => sum -= kept_bytes + waiting_bytes,
                Compute::Forward(_) | Compute::BackwardInput(_) => {}
            }
        }
        most
    }

    /// True when no Plan that goes on from `other` is better than from `own`.
    pub(crate) fn dominates(&self, own: &StepTime, other: &StepTime) -> bool {
        own.in_us <= other.in_us
            && own.in_grad_us <= other.in_grad_us
            && own.step_us <= other.step_us
            && match self.schedule {
                ScheduleKind::OneForwardOneBackward => {
                    own.paths_us.iter().zip(&other.paths_us).all(|(own, other)| own <= other)
                }
                ScheduleKind::FillDrain => Drained::from(own.paths_us).is_within(other.paths_us.into()),
            }
    }

    /// Numbers of microbatches that one of so many Stages may hold, increasing.
    pub(crate) fn held(&self, stages: usize) -> Vec<u64> {
        let mut held: Vec<u64> = (1..=stages).map(|depth| self.in_flight(depth)).collect();
        held.dedup();
        held
    }

    /// Microbatches that a Stage holds with so many Stages on the longest way from it to one that feeds no other, itself
    /// included.
    pub(crate) fn in_flight(&self, depth: usize) -> u64 {
        self.schedule.in_flight(depth as u64, self.microbatches)
    }

    /// The least depth of which no Stage computes otherwise than a deeper one.
    pub(crate) fn deepest(&self) -> usize {
        let most = self.schedule.in_flight(u64::MAX, self.microbatches);
        (1..).find(|&depth| self.in_flight(depth) == most).unwrap_or(usize::MAX)
    }

    /// Computation of a Stage in a step.
    pub(crate) fn busy_us(&self, stage: &StageCost) -> f64 {
        self.sum_us(stage.larger.compute_us(), stage.smaller.compute_us())
    }

    /// Of something that each microbatch takes, for all of them.
    #[inline]
    pub(super) fn sum_us(&self, larger_us: f64, smaller_us: f64) -> f64 {
        let [larger, rest] = [self.counts[LARGER], self.microbatches - self.counts[LARGER]];
        // Not 0 times what may be infinite.
        let of_larger_us = if larger == 0 { 0.0 } else { larger as f64 * larger_us };
        rest as f64 * smaller_us + of_larger_us
    }

    /// The step with one more Stage before its last ones, of which so many are on the longest way from it to one that feeds
    /// no other, itself included.
    // A call would give what is used at once through memory.
    #[inline(always)]
    pub(crate) fn prepend(&self, later: StepTime, stage: &StageCost, depth: usize) -> StepTime {
        match self.schedule {
            ScheduleKind::OneForwardOneBackward => self.prepend_1f1b(later, stage, depth - 1),
            ScheduleKind::FillDrain => self.prepend_fill_drain(later, stage),
        }
    }

    #[inline(always)]
    fn prepend_1f1b(&self, later: StepTime, stage: &StageCost, later_stages: usize) -> StepTime {
        let StageCost { larger, smaller, wait_us, end_us, batch_us } = stage;
        let values = Transfer::new(larger.out_us, smaller.out_us, later.in_us);
        let grads = Transfer::new(larger.out_grad_us, smaller.out_grad_us, later.in_grad_us);
        let paths = if values.smaller_us > 0.0 { later.paths_us.into() } else { Alternating::default() };
        let Alternating { span_us, round_us, first_round_us, all_us } = paths;
        let round_us = round_us + (values.smaller_us + grads.smaller_us);
        let first_round_us = first_round_us + (values.larger_us + grads.larger_us);
        let mut own_us = self.own_us(stage, grads, round_us, later_stages);
        if self.counts[LARGER] > 0 {
            own_us = own_us.longer(self.uneven_us(stage, grads, [first_round_us, round_us], later_stages));
        }
        if *wait_us > 0.0 {
            let backwards_us = self.sum_us(larger.backward_us, smaller.backward_us);
            own_us = own_us.longer(larger.forward_us + backwards_us + (self.microbatches - 1) as f64 * wait_us);
        }
        // The first microbatch goes forward through the Stage, and the last one back.
        let span_us =
            own_us.longer(larger.forward_us + smaller.backward_us + (values.larger_us + grads.smaller_us) + span_us);
        let all_us = (span_us + end_us).longer(larger.forward_us + values.larger_us + all_us);
        let round_us = round_us + smaller.compute_us();
        let first_round_us = first_round_us + larger.compute_us();
        let paths = Alternating { span_us, round_us, first_round_us, all_us };
        StepTime {
            in_us: smaller.in_us,
            in_grad_us: smaller.in_grad_us,
            step_us: later.step_us.longer(all_us).longer(*batch_us),
            paths_us: paths.into(),
        }
    }

    /// The longest path that begins with the Stage's first forward and ends with its last backward.
    #[inline]
    fn own_us(&self, stage: &StageCost, grads: Transfer, round_us: f64, later_stages: usize) -> f64 {
        let PassCost { forward_us, backward_us, in_us, .. } = stage.smaller;
        let (last, later) = ((self.microbatches - 1) as f64, later_stages as f64);
        let (compute_us, apart, most_rounds) = (forward_us + backward_us, later + 1.0, self.rounds(later_stages + 1));
        let pass_us = compute_us + round_us;
        // What the receives of Values and of gradients take more than what is computed beside them.
        let values_us = (2.0 * in_us - backward_us).longer(0.0);
        let grads_us = (grads.smaller_us - forward_us).longer(0.0);
        let period_us = compute_us + values_us.longer(grads_us);
        // Microbatches that are left beside so many rounds.
        let rest = |rounds: f64| last - (rounds - 1.0) * apart;
        let paired = |rest: f64| (rest - later).longer(0.0);
        let around_us = |rounds: f64| {
            let (rest, paired) = (rest(rounds), paired(rest(rounds)));
            let unpaired = (paired - 1.0).longer(0.0);
            let begins_us = rest * backward_us + paired * forward_us + (paired * grads_us).longer(unpaired * values_us);
            let ends_us = rest * forward_us + paired * backward_us + (paired * values_us).longer(unpaired * grads_us);
            rounds * pass_us + begins_us.longer(ends_us)
        };
        let busy_us = self.microbatches as f64 * compute_us + paired(last) * (period_us - compute_us);
        let own_us = busy_us.longer(around_us(1.0));
        if most_rounds < 2 {
            return own_us;
        }
        let most_rounds = most_rounds as f64;
        let rounds = if pass_us > apart * period_us { most_rounds } else { 2.0 };
        own_us.longer(around_us(most_rounds)).longer(rounds * pass_us + rest(rounds) * period_us)
    }

    /// The longest of the same paths where the first microbatches are larger: those that go through computations of the
    /// Stage alone, through its transfers, or once to the last Stage and back.
    #[cold]
    fn uneven_us(&self, stage: &StageCost, grads: Transfer, rounds_us: [f64; 2], later_stages: usize) -> f64 {
        let (larger, smaller) = (&stage.larger, &stage.smaller);
        let (last, count) = ((self.microbatches - 1) as f64, self.counts[LARGER] as f64);
        let later = later_stages as f64;
        let paired = (last - later).longer(0.0);
        let forwards_us = larger.forward_us - smaller.forward_us;
        let backwards_us = larger.backward_us - smaller.backward_us;
        let busy_us = self.busy_us(stage);
        // Beside a backward the Values for the forward behind it arrive, and beside that the next gradients.
        let (values, forwards) = ((count - later - 1.0).clamp(0.0, paired), (count - later - 1.0).clamp(0.0, paired));
        let (gradients, backwards) = ((count - 1.0).shorter(paired), count.shorter(paired));
        let values_us = paired * (2.0 * smaller.in_us - smaller.backward_us)
            + values * 2.0 * (larger.in_us - smaller.in_us)
            - backwards * backwards_us;
        let grads_us = paired * (grads.smaller_us - smaller.forward_us)
            + gradients * (grads.larger_us - grads.smaller_us)
            - forwards * forwards_us;
        let own_us = busy_us + values_us.longer(grads_us).longer(0.0);
        // The first microbatch around, and behind it all backwards and the forwards that are paired with them.
        let begins_us = rounds_us[0]
            + self.microbatches as f64 * smaller.backward_us
            + count * backwards_us
            + (1.0 + paired) * smaller.forward_us
            + (1.0 + forwards) * forwards_us;
        // All forwards and the backwards that are paired with them, and then the last microbatch around.
        let ends_us = rounds_us[1]
            + self.microbatches as f64 * smaller.forward_us
            + count * forwards_us
            + (1.0 + paired) * smaller.backward_us
            + backwards * backwards_us;
        own_us.longer(begins_us).longer(ends_us)
    }

    fn prepend_fill_drain(&self, later: StepTime, stage: &StageCost) -> StepTime {
        let StageCost { larger, smaller, wait_us, end_us: own_end_us, batch_us } = stage;
        let values = Transfer::new(larger.out_us, smaller.out_us, later.in_us);
        let grads = Transfer::new(larger.out_grad_us, smaller.out_grad_us, later.in_grad_us);
        let paths = if values.smaller_us > 0.0 { later.paths_us.into() } else { Drained::default() };
        let Drained { last_forward_us, forwards_us, first_backward_us, backwards_us, end_us } = paths;
        // Through the transfers, then through the Stage: the first microbatch on its way in, the last one on its way out.
        let all_us = self.sum_us(values.larger_us, values.smaller_us);
        let forwards_us = (values.larger_us + forwards_us).longer(all_us + last_forward_us);
        let last_forward_us = values.smaller_us + last_forward_us;
        let all_us = self.sum_us(larger.forward_us, smaller.forward_us);
        let forwards_us = (larger.forward_us + forwards_us).longer(all_us + last_forward_us);
        let last_forward_us = smaller.forward_us + last_forward_us;
        let all_us = self.sum_us(grads.larger_us, grads.smaller_us);
        let backwards_us = (backwards_us + grads.smaller_us).longer(first_backward_us + all_us);
        let first_backward_us = first_backward_us + grads.larger_us;
        let all_us = self.sum_us(larger.backward_us, smaller.backward_us) + (self.microbatches - 1) as f64 * wait_us;
        let backwards_us = (backwards_us + smaller.backward_us).longer(first_backward_us + all_us);
        let first_backward_us = first_backward_us + larger.backward_us;
        let end_us = end_us.longer(backwards_us + own_end_us);
        StepTime {
            in_us: smaller.in_us,
            in_grad_us: smaller.in_grad_us,
            step_us: later.step_us.longer(forwards_us + end_us).longer(*batch_us),
            paths_us: Drained { last_forward_us, forwards_us, first_backward_us, backwards_us, end_us }.into(),
        }
    }

    /// The time of a whole step.
    pub(crate) fn step_us(&self, time: StepTime) -> f64 {
        time.step_us
    }

    /// As many microbatches surely go around one after another in a step of at most so many Stages: those that are not in
    /// flight together.
    pub(crate) fn rounds(&self, stages: usize) -> u64 {
        1 + (self.microbatches - 1) / (stages.max(1) as u64)
    }

    /// No step with so many [rounds](Self::rounds) takes less that has these last Stages, and before them others through
    /// which the first microbatch passes forward and the last one back in at least `pass_us`.
    #[inline]
    pub(crate) fn bound_us(&self, later: StepTime, pass_us: f64, rounds: u64) -> f64 {
        let StepTime { in_us, in_grad_us, step_us, paths_us } = later;
        let pass_us = if in_us > 0.0 { pass_us } else { 0.0 };
        match self.schedule {
            ScheduleKind::OneForwardOneBackward => {
                let Alternating { span_us, all_us, round_us, .. } = paths_us.into();
                let earlier_us = if self.counts[LARGER] > 0 { 0.0 } else { pass_us };
                let around_us = rounds as f64 * (in_us + in_grad_us + round_us + earlier_us);
                (in_us + in_grad_us + span_us + pass_us).longer(in_us + all_us).longer(step_us).longer(around_us)
            }
            ScheduleKind::FillDrain => {
                let Drained { last_forward_us, forwards_us, first_backward_us, backwards_us, end_us } = paths_us.into();
                // Of all microbatches but one, the transfer takes twice what this end tells.
                let others = 2.0 * (self.microbatches - 1) as f64;
                let forwards_us = forwards_us.longer(others * in_us + last_forward_us);
                let backwards_us = backwards_us.longer(others * in_grad_us + first_backward_us);
                (in_us + forwards_us + (in_grad_us + backwards_us + pass_us).longer(end_us)).longer(step_us)
            }
        }
    }
}
