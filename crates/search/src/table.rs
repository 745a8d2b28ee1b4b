//! All Stages that one Schedule and number of microbatches allows, priced.

use std::ops::Range;

use crate::place::{Place, RankOrder};
use crate::price::{At, Priced, Pricing};
use crate::step::StageCost;
use crate::variant::{Again, Variant};

/// A priced Stage.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Entry {
    pub(crate) cost: StageCost,
    /// Microbatches in flight that its memory allows; 0 when it does not fit at all.
    pub(crate) max_in_flight: u64,
}

impl Entry {
    /// Prices a Stage whose Blocks need `workspace_bytes`.
    pub(crate) fn new(
        pricing: &Pricing<'_>,
        run: Range<usize>,
        at: &At<'_>,
        variant: Variant,
        workspace_bytes: f64,
    ) -> Self {
        let priced = pricing.stage(run, at, variant, workspace_bytes);
        Self::of(&priced, variant, at.usable_bytes)
    }

    fn of(priced: &Priced, variant: Variant, usable_bytes: f64) -> Self {
        let memory = &priced.memory;
        let max_in_flight = match variant.again {
            _ if !priced.cost.compute_us().is_finite() => 0,
            Again::ToHold(in_flight) if memory.microbatch_bytes.is_finite() => in_flight,
            Again::ToHold(_) => 0,
            Again::Nothing | Again::Everything => memory.room(usable_bytes),
        };
        Self { cost: priced.cost, max_in_flight }
    }
}

/// Prices of every run of Blocks at every place.
pub(crate) struct StageTable<'a> {
    order: &'a RankOrder,
    pub(crate) blocks: usize,
    pub(crate) units: u32,
    pub(crate) variants: Vec<Variant>,
    /// By place, variant, end.
    ends: Vec<Runs>,
    entries: Vec<Entry>,
}

/// The runs with some end that are worth looking at.
#[derive(Clone, Copy, Debug)]
struct Runs {
    /// Place of the longest one in the entries.
    start: usize,
    /// First Block of the longest one.
    first: usize,
}

impl<'a> StageTable<'a> {
    /// Prices all Stages that a Plan with less than `best_us` may have.
    pub(crate) fn new(pricing: &Pricing<'_>, order: &'a RankOrder, best_us: f64) -> Self {
        let (blocks, units) = (pricing.chain.len(), order.units());
        let most = pricing.step.in_flight(blocks.min(units as usize));
        let variants = Variant::all(&pricing.problem.settings.capabilities, most);
        let mut table = Self { order, blocks, units, variants, ends: Vec::new(), entries: Vec::new() };
        for place in order.places() {
            table.fill(pricing, place, best_us);
        }
        table
    }

    fn fill(&mut self, pricing: &Pricing<'_>, place: &Place, best_us: f64) {
        let at = pricing.at(place);
        let workspaces: Vec<f64> =
            (0..self.blocks).map(|block| pricing.workspace_bytes(block, place.replicas)).collect();
        let mut runs: Vec<Entry> = Vec::new();
        for variant in self.variants.clone() {
            for end in 1..=self.blocks {
                let mut workspace_bytes: f64 = 0.0;
                for first in (0..end).rev() {
                    workspace_bytes = workspace_bytes.max(workspaces[first]);
                    let priced = pricing.stage(first..end, &at, variant, workspace_bytes);
                    // Both only grow with the run, unless it finds Blocks that are cheaper to compute again.
                    let too_long = variant.is_monotone() && pricing.step.busy_us(&priced.cost) >= best_us;
                    if too_long || priced.memory.model_bytes() > at.usable_bytes {
                        break;
                    }
                    runs.push(Entry::of(&priced, variant, at.usable_bytes));
                }
                self.ends.push(Runs { start: self.entries.len(), first: end - runs.len() });
                self.entries.extend(runs.drain(..).rev());
            }
        }
    }

    /// The Stages with this last Block, first unit, number of units and variant that are worth looking at, with
    /// their first Blocks, increasing.
    pub(crate) fn ending(
        &self,
        end: usize,
        unit: u32,
        units: u32,
        variant: usize,
    ) -> impl DoubleEndedIterator<Item = (usize, &Entry)> {
        let layer = self.order.place_index(unit, units) * self.variants.len() + variant;
        let Runs { start, first } = self.ends[layer * self.blocks + end - 1];
        (first..end).zip(&self.entries[start..start + end - first])
    }
}
