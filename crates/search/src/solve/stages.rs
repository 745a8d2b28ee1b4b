//! The dynamic program over Stages, from the last one to the first.
//!
//! A state says where the first Stage so far begins, how many units of ranks the Stages take, and how
//! many Stages there are (as far as their number matters or is limited). Each state keeps the partial steps that no other
//! of its partial steps dominates in all parts of the objective among those before which Stages are as deep, so the result
//! is exact. A partial step is dropped when even the [`Relaxation`] of what is missing
//! cannot make it better than a Plan that is known already.

use std::ops::Range;

use super::depths::{Ahead, Depths};
use super::relax::Relaxation;
use super::table::{Entry, StageTable};
use crate::price::{Pricing, RankOrder, Saver, StepModel, StepTime};
use crate::stop::Budget;

/// A division into Stages.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Found {
    pub(crate) stages: Vec<FoundStage>,
    pub(crate) step_us: f64,
}

/// A Stage of a division.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct FoundStage {
    /// Its Blocks.
    pub(crate) run: Range<usize>,
    /// Its positions in the order of ranks.
    pub(crate) positions: Range<u32>,
    pub(crate) saver: Saver,
}

/// A partial step.
#[derive(Clone, Copy, Debug)]
struct Label {
    time: StepTime,
    /// No Plan that goes on from here takes less.
    bound_us: f64,
    ahead: Ahead,
    /// State and place of the label that this one put a Stage before.
    later: (u32, u32),
    /// Of that Stage.
    saver: u32,
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
    fn new(pricing: &Pricing<'_>, order: &RankOrder, exactly: Option<usize>) -> Self {
        let settings = pricing.problem.settings;
        let most = pricing.chain.len().min(order.units() as usize);
        let limit = exactly.or(settings.max_stages.map(|stages| stages as usize)).unwrap_or(most);
        let saturates = limit >= most && exactly.is_none();
        // Bounds do not depend on more Stages than there are microbatches.
        let matters = usize::try_from(pricing.step.microbatches).unwrap_or(usize::MAX).min(most);
        Self { counted: if saturates { matters } else { limit.min(most) }, saturates, exactly }
    }

    /// The count with one more Stage, if that is allowed.
    fn next(&self, stages: usize) -> Option<usize> {
        if stages < self.counted { Some(stages + 1) } else { self.saturates.then_some(stages) }
    }
}

/// A search for one Schedule, number of microbatches and order of ranks.
pub(crate) struct StageSearch<'a> {
    pub(crate) pricing: &'a Pricing<'a>,
    pub(crate) order: &'a RankOrder,
    pub(crate) table: &'a StageTable,
    pub(crate) relaxed: &'a Relaxation<'a>,
}

impl StageSearch<'_> {
    /// The best division (with `exactly` so many Stages) that takes less than `best_us`, if there is one.
    /// With a `width`, only so many partial steps of each state are followed: quick, but not exact.
    pub(crate) fn run(
        &self,
        exactly: Option<usize>,
        width: Option<usize>,
        best_us: f64,
        budget: &mut Budget<'_>,
    ) -> Option<Found> {
        let count = StageCount::new(self.pricing, self.order, exactly);
        let states = (self.table.blocks + 1) * (self.order.units() as usize + 1) * (count.counted + 1);
        let depths = Depths::new(&self.pricing.chain.feeds, self.pricing.step.deepest());
        let states = vec![Vec::new(); states];
        let mut run = SearchRun { search: self, count, width, best_us, best: None, depths, states, budget };
        let root = Label { time: StepTime::default(), bound_us: 0.0, ahead: Ahead::END, later: (0, 0), saver: 0 };
        let start = run.state(self.table.blocks, 0, 0);
        run.states[start].push(root);
        for end in (1..=self.table.blocks).rev() {
            for units in 0..self.order.units() {
                for stages in 0..=count.counted {
                    run.expand(end, units, stages);
                }
            }
        }
        run.best.map(|(label, units)| run.trace(label, units))
    }
}

struct SearchRun<'a, 'c> {
    search: &'a StageSearch<'a>,
    count: StageCount,
    /// Labels kept for each state; all of them when not given.
    width: Option<usize>,
    /// Time of the best Plan known.
    best_us: f64,
    /// That Plan, and the units it takes.
    best: Option<(Label, u32)>,
    depths: Depths<'a>,
    states: Vec<Vec<Label>>,
    budget: &'a mut Budget<'c>,
}

impl SearchRun<'_, '_> {
    fn state(&self, block: usize, units: u32, stages: usize) -> usize {
        (block * (self.search.order.units() as usize + 1) + units as usize) * (self.count.counted + 1) + stages
    }

    /// Puts every possible Stage that ends at `end` before the labels of a state.
    fn expand(&mut self, end: usize, units: u32, stages: usize) {
        let state = self.state(end, units, stages);
        let Some(next) = self.count.next(stages).filter(|_| !self.states[state].is_empty()) else { return };
        let mut labels = std::mem::take(&mut self.states[state]);
        labels.retain(|label| label.bound_us < self.best_us);
        labels.sort_by(|left, right| left.bound_us.total_cmp(&right.bound_us));
        labels.truncate(self.width.unwrap_or(usize::MAX));
        labels.sort_by_key(|label| label.ahead);
        let mut number = 0;
        for alike in labels.chunk_by(|left, right| left.ahead == right.ahead) {
            let step = self.search.pricing.step;
            let held = self.depths.possible(alike[0].ahead);
            let held = held.map(|depths| step.in_flight(*depths.start())..=step.in_flight(*depths.end()));
            for count in self.unit_counts(units) {
                let unit = self.search.order.units() - units - count;
                let place = self.search.order.place_index(unit, count);
                for (saver, way) in self.search.table.savers.iter().enumerate() {
                    if held.iter().any(|held| way.serves(held)) {
                        self.extend(alike, Extension { state, number, end, unit, place, next, saver });
                    }
                }
            }
            number += alike.len();
        }
        self.states[state] = labels;
    }

    /// Numbers of units for the Stage before a state. Each forced number of Replicas is a unit.
    fn unit_counts(&self, units: u32) -> Range<u32> {
        let forced = self.search.pricing.problem.settings.replicas.is_some();
        let most = if forced { 1 } else { self.search.order.units() - units };
        1..most + 1
    }

    /// Puts Stages before labels that have the same ahead.
    fn extend(&mut self, labels: &[Label], step: Extension) {
        if self.budget.is_spent() {
            return;
        }
        let StageSearch { pricing, table, .. } = *self.search;
        let saver = table.savers[step.saver];
        for (first, entry) in table.ending(step.place, step.saver, step.end).rev() {
            // A longer run may find Blocks that are cheaper to compute again.
            if saver.is_monotone() && self.too_long(entry) {
                break;
            }
            let (depth, ahead) = self.depths.put_before(&(first..step.end), labels[0].ahead);
            let in_flight = pricing.step.in_flight(depth);
            if entry.max_in_flight >= in_flight && saver.serves(&(in_flight..=in_flight)) {
                self.prepend(labels, entry, Begin { first, depth, ahead }, &step);
            }
        }
    }

    /// True when a Stage takes so long that no Plan with it, or with a longer run at its place, is better.
    fn too_long(&self, entry: &Entry) -> bool {
        self.search.pricing.least_of_longer_us(&entry.cost) >= self.best_us
    }

    fn prepend(&mut self, labels: &[Label], entry: &Entry, Begin { first, depth, ahead }: Begin, step: &Extension) {
        let StageSearch { pricing, order, relaxed, .. } = *self.search;
        let before_us = relaxed.before_us(step.next, first, order.range(0, step.unit).end);
        let idle = first == 0 && step.unit > 0;
        if !before_us.is_finite() || (idle && !pricing.problem.settings.may_idle) {
            return;
        }
        self.budget.spend(labels.len());
        let taken = order.units() - step.unit;
        let target = self.state(first, taken, step.next);
        let most = self.count.exactly.unwrap_or(step.next + first.min(step.unit as usize));
        let rounds = pricing.step.rounds(most);
        for (place, label) in labels.iter().enumerate() {
            let time = pricing.step.prepend(label.time, &entry.cost, depth);
            let (later, saver) = ((index(step.state), index(step.number + place)), index(step.saver));
            if first == 0 {
                let label = Label { time, bound_us: pricing.step.step_us(time), ahead, later, saver };
                self.complete(label, taken, step.next);
                continue;
            }
            let bound_us = pricing.step.bound_us(time, before_us, rounds);
            if bound_us < self.best_us {
                insert(&pricing.step, &mut self.states[target], Label { time, bound_us, ahead, later, saver });
            }
        }
    }

    fn complete(&mut self, label: Label, units: u32, stages: usize) {
        if label.bound_us < self.best_us && self.count.exactly.is_none_or(|wanted| wanted == stages) {
            self.best_us = label.bound_us;
            self.best = Some((label, units));
        }
    }

    /// The Stages behind a complete label, which begins at Block 0.
    fn trace(&self, label: Label, units: u32) -> Found {
        let StageSearch { order, table, .. } = *self.search;
        let mut found = Found { stages: Vec::new(), step_us: label.bound_us };
        let (mut first, mut units, mut label) = (0, units, label);
        while first < table.blocks {
            let state = label.later.0 as usize / (self.count.counted + 1);
            let (end, rest) = (state / (order.units() as usize + 1), state % (order.units() as usize + 1));
            let rest = index(rest);
            let positions = order.range(order.units() - units, order.units() - rest);
            let saver = table.savers[label.saver as usize];
            found.stages.push(FoundStage { run: first..end, positions, saver });
            (first, units) = (end, rest);
            if first < table.blocks {
                label = self.states[label.later.0 as usize][label.later.1 as usize];
            }
        }
        found
    }
}

/// How a Stage is put before a state.
#[derive(Clone, Copy)]
struct Extension {
    state: usize,
    /// Place of the first label that it is put before.
    number: usize,
    end: usize,
    /// First unit of the Stage.
    unit: u32,
    /// Which place its units are.
    place: usize,
    /// Stages with it.
    next: usize,
    saver: usize,
}

/// Where a Stage begins, how deep it is, and what is ahead of Stages before it.
#[derive(Clone, Copy)]
struct Begin {
    first: usize,
    depth: usize,
    ahead: Ahead,
}

fn index(place: usize) -> u32 {
    u32::try_from(place).expect("there are fewer than 2^32 states and labels")
}

/// Adds a label to a state unless another one dominates it, and drops those that it dominates.
fn insert(step: &StepModel, labels: &mut Vec<Label>, label: Label) {
    let dominates = |one: &Label, other: &Label| one.ahead == other.ahead && step.dominates(&one.time, &other.time);
    if labels.iter().any(|known| dominates(known, &label)) {
        return;
    }
    labels.retain(|known| !dominates(&label, known));
    labels.push(label);
}
