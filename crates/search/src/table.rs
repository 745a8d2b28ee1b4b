//! All Stages that one Schedule and number of microbatches allows, priced.

use std::ops::Range;

use crate::place::{Place, RankOrder};
use crate::price::{At, Priced, Pricing, StageMemory};
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
    #[cfg(test)]
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

    /// Prices a Stage beside the plain one. Nothing is computed again to hold what the plain one holds: that does
    /// not fit, so that nobody looks at it.
    pub(crate) fn beside(
        pricing: &Pricing<'_>,
        run: &Range<usize>,
        at: &At<'_>,
        variant: Variant,
        plain: &(StageCost, StageMemory),
    ) -> Self {
        match variant.again {
            Again::ToHold(in_flight) if plain.1.room(at.usable_bytes) >= in_flight => Self::default(),
            _ => Self::of(&pricing.with_variant(run, at, variant, plain), variant, at.usable_bytes),
        }
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
#[derive(Clone, Copy, Debug, Default)]
struct Runs {
    /// Place of the longest one in the entries.
    start: usize,
    /// First Block of the longest one.
    first: usize,
    /// How many there are, each a Block shorter.
    count: usize,
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
        for variants in self.variants.clone().chunk_by(Variant::is_again_of) {
            let mut layers: Vec<Vec<Runs>> = vec![Vec::new(); variants.len()];
            for end in 1..=self.blocks {
                let mut runs: Vec<Vec<Entry>> = vec![Vec::new(); variants.len()];
                let mut workspace_bytes: f64 = 0.0;
                for first in (0..end).rev() {
                    workspace_bytes = workspace_bytes.max(workspaces[first]);
                    let run = first..end;
                    let plain = pricing.plain(&run, &at, variants[0], workspace_bytes);
                    // Both only grow with the run, and computing again adds time.
                    if pricing.step.busy_us(&plain.0) >= best_us || plain.1.model_bytes() > at.usable_bytes {
                        break;
                    }
                    for (runs, &variant) in runs.iter_mut().zip(variants) {
                        runs.push(Entry::beside(pricing, &run, &at, variant, &plain));
                    }
                }
                for (layer, runs) in layers.iter_mut().zip(runs) {
                    layer.push(self.keep(end, &runs));
                }
            }
            self.ends.extend(layers.into_iter().flatten());
        }
    }

    /// Keeps the runs with this end, the shortest first, from the first to the last that fits.
    fn keep(&mut self, end: usize, runs: &[Entry]) -> Runs {
        let fits = |entry: &Entry| entry.max_in_flight > 0;
        let (Some(shortest), Some(longest)) = (runs.iter().position(fits), runs.iter().rposition(fits)) else {
            return Runs::default();
        };
        let start = self.entries.len();
        self.entries.extend(runs[shortest..=longest].iter().rev());
        Runs { start, first: end - 1 - longest, count: longest - shortest + 1 }
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
        let Runs { start, first, count } = self.ends[layer * self.blocks + end - 1];
        (first..first + count).zip(&self.entries[start..start + count])
    }
}
