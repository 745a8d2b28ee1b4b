//! The dynamic program over Stages, from the last one to the first.
//!
//! A state says where the first Stage so far begins, how many ranks the Stages take, and how many
//! Stages there are (only as far as their number matters to memory or is limited). Each state keeps
//! the partial steps that no other of its partial steps dominates in all three parts of the
//! objective, so the result is exact. A partial step is dropped when even the [`Relaxation`] of what
//! is missing cannot make it better than a Plan that is known already.

use crate::price::{Pricing, Span, StepTime};
use crate::relax::Relaxation;
use crate::table::{Entry, StageTable};

/// A division into Stages.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Found {
    pub(crate) microbatches: u64,
    pub(crate) spans: Vec<Span>,
    pub(crate) step_us: f64,
}

/// A partial step.
#[derive(Clone, Copy, Debug)]
struct Label {
    time: StepTime,
    /// No Plan that goes on from here takes less.
    bound_us: f64,
    /// State and place of the label that this one put a Stage before.
    later: (u32, u32),
}

/// What limits the number of Stages.
#[derive(Clone, Copy, Debug)]
struct StageCount {
    /// Stages that states tell apart.
    counted: usize,
    /// True when more Stages are counted as `counted`.
    saturates: bool,
    exactly: Option<usize>,
}

impl StageCount {
    fn new(pricing: &Pricing<'_>) -> Self {
        let most = pricing.chain.len().min(pricing.settings.world_size as usize);
        let exactly = pricing.settings.forced_stages();
        let limit = exactly.or(pricing.settings.max_stages.map(|stages| stages as usize)).unwrap_or(most);
        let saturates = limit >= most && exactly.is_none();
        // Beyond this number the memory in flight stays the same.
        let matters = (1..most).find(|&stages| pricing.in_flight(stages) == pricing.microbatches).unwrap_or(most);
        Self { counted: if saturates { matters } else { limit.min(most) }, saturates, exactly }
    }

    /// The count with one more Stage, if that is allowed.
    fn next(&self, stages: usize) -> Option<usize> {
        if stages < self.counted { Some(stages + 1) } else { self.saturates.then_some(stages) }
    }
}

/// A search for one number of microbatches.
pub(crate) struct StageSearch<'a> {
    pricing: &'a Pricing<'a>,
    table: &'a StageTable,
    bounds: &'a Relaxation,
    count: StageCount,
    /// Labels kept for each state; all of them when not given.
    width: Option<usize>,
    /// Time of the best Plan known.
    best_us: f64,
    best: Option<Label>,
    states: Vec<Vec<Label>>,
}

impl<'a> StageSearch<'a> {
    /// The best division that takes less than `best_us`, if there is one. With a `width`, only so many
    /// partial steps of each state are followed: quick, but not exact.
    pub(crate) fn run(
        pricing: &'a Pricing<'a>,
        table: &'a StageTable,
        bounds: &'a Relaxation,
        width: Option<usize>,
        best_us: f64,
    ) -> Option<Found> {
        let count = StageCount::new(pricing);
        let states = (table.blocks + 1) * (table.devices as usize + 1) * (count.counted + 1);
        let mut search =
            Self { pricing, table, bounds, count, width, best_us, best: None, states: vec![Vec::new(); states] };
        let root = Label { time: StepTime::default(), bound_us: 0.0, later: (0, 0) };
        let start = search.state(table.blocks, 0, 0);
        search.states[start].push(root);
        for end in (1..=table.blocks).rev() {
            for devices in 0..table.devices {
                for stages in 0..=count.counted {
                    search.expand(end, devices, stages);
                }
            }
        }
        search.best.map(|label| search.trace(label))
    }

    fn state(&self, block: usize, devices: u32, stages: usize) -> usize {
        (block * (self.table.devices as usize + 1) + devices as usize) * (self.count.counted + 1) + stages
    }

    /// Puts every possible Stage that ends at `end` before the labels of a state.
    fn expand(&mut self, end: usize, devices: u32, stages: usize) {
        let state = self.state(end, devices, stages);
        let Some(next) = self.count.next(stages).filter(|_| !self.states[state].is_empty()) else { return };
        let mut labels = std::mem::take(&mut self.states[state]);
        labels.retain(|label| label.bound_us < self.best_us);
        labels.sort_by(|left, right| left.bound_us.total_cmp(&right.bound_us));
        labels.truncate(self.width.unwrap_or(usize::MAX));
        let in_flight = self.pricing.in_flight(next);
        for replicas in self.replicas(devices, next) {
            let rank = self.table.devices - devices - replicas;
            let entries = self.table.ending(end, rank, replicas);
            for first in (0..end).rev() {
                if self.too_long(Span { first, end, replicas }) {
                    break;
                }
                if entries[first].max_in_flight >= in_flight {
                    self.prepend(&labels, state, &entries[first], first, rank, next);
                }
            }
        }
        self.states[state] = labels;
    }

    /// Numbers of Replicas for the Stage that is `stages` from the end.
    fn replicas(&self, devices: u32, stages: usize) -> std::ops::RangeInclusive<u32> {
        let free = self.table.devices - devices;
        match &self.pricing.settings.replicas {
            // A state with too few free ranks has no labels: the forced numbers add up to all ranks.
            Some(forced) => forced[forced.len() - stages]..=forced[forced.len() - stages],
            None => 1..=free,
        }
    }

    /// True when a run takes so long that no Plan with it, or with a longer one, is better.
    fn too_long(&self, span: Span) -> bool {
        let least_us = self.bounds.sum_us(self.table.blocks, self.table.devices);
        let waits = (self.pricing.microbatches - 1) as f64;
        least_us + waits * self.pricing.compute_us(span) >= self.best_us
    }

    fn prepend(&mut self, labels: &[Label], state: usize, entry: &Entry, first: usize, rank: u32, stages: usize) {
        let missing_us = (self.bounds.sum_us(first, rank), self.bounds.max_us(first, rank));
        if !missing_us.0.is_finite() {
            return;
        }
        let waits = (self.pricing.microbatches - 1) as f64;
        let target = self.state(first, self.table.devices - rank, stages);
        for (place, label) in labels.iter().enumerate() {
            let time = label.time.prepend(entry.microbatch_us, entry.backward_us, entry.end_us);
            let later = (index(state), index(place));
            if first == 0 {
                self.complete(Label { time, bound_us: time.step_us(self.pricing.microbatches), later }, stages);
                continue;
            }
            let bound_us = time.sum_us + missing_us.0 + waits * time.max_us.max(missing_us.1);
            if bound_us < self.best_us {
                insert(&mut self.states[target], Label { time, bound_us, later });
            }
        }
    }

    fn complete(&mut self, label: Label, stages: usize) {
        if label.bound_us < self.best_us && self.count.exactly.is_none_or(|wanted| wanted == stages) {
            self.best_us = label.bound_us;
            self.best = Some(label);
        }
    }

    /// The Stages behind a complete label, which begins at Block 0 and takes all ranks.
    fn trace(&self, label: Label) -> Found {
        let mut found = Found { microbatches: self.pricing.microbatches, spans: Vec::new(), step_us: label.bound_us };
        let (mut first, mut devices, mut later) = (0, self.table.devices, label.later);
        while first < self.table.blocks {
            let state = later.0 as usize / (self.count.counted + 1);
            let (end, rest) = (state / (self.table.devices as usize + 1), state % (self.table.devices as usize + 1));
            let rest = index(rest);
            found.spans.push(Span { first, end, replicas: devices - rest });
            (first, devices) = (end, rest);
            if first < self.table.blocks {
                later = self.states[later.0 as usize][later.1 as usize].later;
            }
        }
        found
    }
}

fn index(place: usize) -> u32 {
    u32::try_from(place).expect("there are fewer than 2^32 states and labels")
}

/// Adds a label to a state unless another one dominates it, and drops those that it dominates.
fn insert(labels: &mut Vec<Label>, label: Label) {
    if labels.iter().any(|known| known.time.dominates(&label.time)) {
        return;
    }
    labels.retain(|known| !label.time.dominates(&known.time));
    labels.push(label);
}
