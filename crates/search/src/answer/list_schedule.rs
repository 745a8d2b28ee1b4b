//! Orders of computations found by list scheduling: every Stage does what it can do first, the first part of a backward
//! before a forward, and the second part of one where it would wait otherwise (after Qi et al., Zero Bubble Pipeline
//! Parallelism, 2023).

use rannc_plan::{Compute, Order};

use crate::price::{BySize, StepModel};
use crate::stop::Deadline;

/// What the computations of a Stage take.
#[derive(Clone, Copy, Debug)]
pub(super) struct StageTimes {
    pub(super) forward_us: BySize<f64>,
    /// The whole backward.
    pub(super) backward_us: BySize<f64>,
    /// Its two parts, where it may come in two.
    pub(super) parts_us: Option<BySize<[f64; 2]>>,
    /// Memory of a microbatch in flight.
    pub(super) microbatch_bytes: f64,
    /// Memory besides between the two parts of its backward.
    pub(super) waiting_bytes: f64,
    /// Memory for all of that.
    pub(super) room_bytes: f64,
}

/// What one Stage sends to a later one, and gets back.
#[derive(Clone, Copy, Debug)]
pub(super) struct StageLink {
    pub(super) from: usize,
    pub(super) to: usize,
    pub(super) values_us: BySize<f64>,
    /// `None` when no gradient comes back.
    pub(super) grads_us: Option<BySize<f64>>,
}

/// Stages to be put in order.
pub(super) struct ListScheduler<'a> {
    pub(super) step: &'a StepModel,
    pub(super) stages: &'a [StageTimes],
    pub(super) links: &'a [StageLink],
    /// All forwards of all Stages come before any backward.
    pub(super) forwards_first: bool,
    pub(super) deadline: Deadline<'a>,
}

/// How eager Stages are.
#[derive(Clone, Debug)]
pub(super) struct Manner {
    /// By Stage, most microbatches in flight.
    pub(super) in_flight: Vec<u64>,
    /// A second part of a backward is only begun where it ends before the next computation could begin.
    pub(super) fits_gaps: bool,
}

/// What came of it.
#[derive(Clone, Debug)]
pub(super) struct Scheduled {
    pub(super) orders: Vec<Order>,
    /// When the last Stage has done.
    pub(super) end_us: f64,
}

/// Where a Stage is.
#[derive(Clone, Debug, Default)]
struct Progress {
    computed: Vec<Compute>,
    free_us: f64,
    /// Numbers of microbatches that have begun each kind of computation; backwards count as both their parts.
    forwards: usize,
    backwards: usize,
    ended: usize,
    /// When their results were there.
    forward_ends_us: Vec<f64>,
    backward_ends_us: Vec<f64>,
}

impl ListScheduler<'_> {
    /// The orders that come of a manner; `None` where the Stages would wait for ever, or when it is time to end.
    pub(super) fn schedule(&self, manner: &Manner) -> Option<Scheduled> {
        let mut stages = vec![Progress::default(); self.stages.len()];
        let count = self.step.microbatches as usize;
        while stages.iter().any(|stage| stage.ended < count) {
            if self.deadline.is_over() {
                return None;
            }
            let next = (0..stages.len()).filter_map(|stage| Some((stage, self.next(&stages, stage, manner)?)));
            // Nothing that begins later makes anything ready earlier.
            let (stage, (start_us, compute)) = next.min_by(|(_, one), (_, other)| one.0.total_cmp(&other.0))?;
            self.run(&mut stages[stage], stage, start_us, compute);
        }
        let end_us = stages.iter().map(|stage| stage.free_us).fold(0.0, f64::max);
        let orders = stages.into_iter().map(|stage| stage.computed.into_iter().collect()).collect();
        Some(Scheduled { orders, end_us })
    }

    /// Most memory of microbatches on any Stage.
    pub(super) fn peak_bytes(&self, orders: &[Order]) -> f64 {
        let on = |(stage, order): (usize, &Order)| {
            let bytes = order.held().map(|held| self.bytes(stage, held.microbatches as usize, held.weights as usize));
            bytes.fold(0.0, f64::max)
        };
        orders.iter().enumerate().map(on).fold(0.0, f64::max)
    }

    /// What a Stage does next, and when.
    fn next(&self, stages: &[Progress], stage: usize, manner: &Manner) -> Option<(f64, Compute)> {
        let own = &stages[stage];
        let forward = self.forward(stages, stage, manner.in_flight[stage]);
        let backward = self.backward(stages, stage);
        let sooner = match (backward, forward) {
            (Some(backward), Some(forward)) if forward.0 < backward.0 => Some(forward),
            (backward, forward) => backward.or(forward),
        };
        if own.ended == own.backwards {
            return sooner;
        }
        let weight = Compute::BackwardWeight(number(own.ended));
        let gap_us = sooner.map_or(f64::INFINITY, |(start_us, _)| start_us - own.free_us);
        let [_, weight_us] = self.parts_us(stage, own.ended);
        let fits = gap_us > 0.0 && (!manner.fits_gaps || weight_us <= gap_us);
        if fits { Some((own.free_us, weight)) } else { sooner }
    }

    fn forward(&self, stages: &[Progress], stage: usize, most: u64) -> Option<(f64, Compute)> {
        let own = &stages[stage];
        let held = own.forwards - own.ended;
        let fits = self.bytes(stage, held + 1, own.backwards - own.ended) <= self.stages[stage].room_bytes;
        if own.forwards >= self.step.microbatches as usize || held as u64 >= most || (held > 0 && !fits) {
            return None;
        }
        let mut start_us = own.free_us;
        for link in self.links.iter().filter(|link| link.to == stage) {
            let made_us = stages[link.from].forward_ends_us.get(own.forwards)?;
            start_us = start_us.max(made_us + link.values_us[self.size(own.forwards)]);
        }
        Some((start_us, Compute::Forward(number(own.forwards))))
    }

    fn backward(&self, stages: &[Progress], stage: usize) -> Option<(f64, Compute)> {
        let own = &stages[stage];
        let mut start_us = own.free_us.max(*own.forward_ends_us.get(own.backwards)?);
        if self.forwards_first {
            for other in stages {
                start_us = start_us.max(*other.forward_ends_us.get(self.step.microbatches as usize - 1)?);
            }
        }
        for link in self.links.iter().filter(|link| link.from == stage) {
            let Some(grads_us) = link.grads_us else { continue };
            let made_us = stages[link.to].backward_ends_us.get(own.backwards)?;
            start_us = start_us.max(made_us + grads_us[self.size(own.backwards)]);
        }
        let waiting = own.backwards - own.ended;
        if self.stages[stage].parts_us.is_none() {
            return Some((start_us, Compute::Backward(number(own.backwards))));
        }
        let fits = self.bytes(stage, own.forwards - own.ended, waiting + 1) <= self.stages[stage].room_bytes;
        match (fits, waiting) {
            (true, _) => Some((start_us, Compute::BackwardInput(number(own.backwards)))),
            (false, 0) => Some((start_us, Compute::Backward(number(own.backwards)))),
            // Another one has to end first.
            (false, _) => None,
        }
    }

    /// Does a computation.
    fn run(&self, own: &mut Progress, stage: usize, start_us: f64, compute: Compute) {
        let times = &self.stages[stage];
        let microbatch = compute.microbatch() as usize;
        let size = self.size(microbatch);
        own.computed.push(compute);
        own.free_us = start_us
            + match compute {
                Compute::Forward(_) => times.forward_us[size],
                Compute::Backward(_) => times.backward_us[size],
                Compute::BackwardInput(_) => self.parts_us(stage, microbatch)[0],
                Compute::BackwardWeight(_) => self.parts_us(stage, microbatch)[1],
            };
        own.ended += usize::from(compute.ends_microbatch());
        match compute {
            Compute::Forward(_) => {
                own.forwards += 1;
                own.forward_ends_us.push(own.free_us);
            }
            Compute::Backward(_) | Compute::BackwardInput(_) => {
                own.backwards += 1;
                own.backward_ends_us.push(own.free_us);
            }
            Compute::BackwardWeight(_) => {}
        }
    }

    fn parts_us(&self, stage: usize, microbatch: usize) -> [f64; 2] {
        self.stages[stage].parts_us.map_or([0.0; 2], |parts_us| parts_us[self.size(microbatch)])
    }

    fn bytes(&self, stage: usize, held: usize, waiting: usize) -> f64 {
        let StageTimes { microbatch_bytes, waiting_bytes, .. } = self.stages[stage];
        microbatch_bytes * held as f64 + waiting_bytes * waiting as f64
    }

    fn size(&self, microbatch: usize) -> usize {
        self.step.size_of(microbatch as u64)
    }
}

fn number(microbatch: usize) -> u32 {
    u32::try_from(microbatch).expect("as many as fit into a plan")
}
