//! All Stages that one Schedule and number of microbatches allows, priced.

use std::ops::Range;

use crate::price::{Again, At, Place, PlainStage, Priced, Pricing, Saver, StageCost};
use crate::stop::Deadline;

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
        saver: Saver,
        workspace_bytes: f64,
    ) -> Self {
        let priced = pricing.stage(run, at, saver, workspace_bytes);
        Self::of(&priced, saver, at.usable_bytes)
    }

    /// Prices a Stage beside the plain one. Nothing is computed again to hold what the plain one holds: that does
    /// not fit, so that nobody looks at it.
    pub(crate) fn beside(
        pricing: &Pricing<'_>,
        run: &Range<usize>,
        at: &At<'_>,
        saver: Saver,
        plain: &PlainStage,
    ) -> Self {
        match saver.again {
            Again::ToHold(in_flight) if plain.memory.room(at.usable_bytes) >= in_flight => Self::default(),
            _ => Self::of(&pricing.with_saver(run, at, saver, plain), saver, at.usable_bytes),
        }
    }

    /// True when it fits at all.
    fn fits(&self) -> bool {
        self.max_in_flight > 0
    }

    fn of(priced: &Priced, saver: Saver, usable_bytes: f64) -> Self {
        let memory = &priced.memory;
        let max_in_flight = match saver.again {
            _ if !priced.cost.is_finite() => 0,
            Again::ToHold(in_flight) if memory.microbatch_bytes.is_finite() => in_flight,
            Again::ToHold(_) => 0,
            Again::Nothing | Again::Everything => memory.room(usable_bytes),
        };
        Self { cost: priced.cost, max_in_flight }
    }
}

/// Prices of every run of Blocks at every place of a list.
pub(crate) struct StageTable {
    pub(crate) blocks: usize,
    pub(crate) savers: Vec<Saver>,
    /// False when it was time to end before all Stages were priced.
    pub(crate) is_complete: bool,
    /// By place, saver, end.
    ends: Vec<Runs>,
    entries: Vec<Entry>,
}

/// Which of the Stages with some end an entry is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StageKey {
    pub(crate) place: usize,
    pub(crate) saver: usize,
    pub(crate) first: usize,
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

impl Runs {
    fn firsts(&self) -> Range<usize> {
        self.first..self.first + self.count
    }

    fn entries(&self) -> Range<usize> {
        self.start..self.start + self.count
    }
}

/// The savers that only differ in what is computed again, at one place.
struct Layers<'a> {
    savers: Range<usize>,
    at: &'a At<'a>,
    /// Of each Block.
    workspaces: &'a [f64],
    /// A place of another table, where the Stages are that are wanted.
    wanted: Option<(&'a StageTable, usize)>,
}

impl Layers<'_> {
    fn wants(&self, saver: usize, run: &Range<usize>) -> bool {
        self.wanted.is_none_or(|(table, place)| table.has(place, saver, run))
    }

    /// The first Block of the longest run with this end that may be wanted.
    fn longest(&self, end: usize) -> usize {
        let Some((table, place)) = self.wanted else { return 0 };
        let runs = self.savers.clone().map(|saver| table.runs(place, saver, end));
        runs.filter(|runs| runs.count > 0).map(|runs| runs.first).min().unwrap_or(end)
    }
}

impl StageTable {
    /// Prices all Stages that a Plan with less than `best_us` may have at these places; where a place of another table
    /// tells which are `wanted`, only those.
    pub(crate) fn new<'t>(
        pricing: &Pricing<'_>,
        places: &[Place],
        wanted: impl Fn(&Place) -> Option<(&'t Self, usize)>,
        best_us: f64,
        deadline: Deadline<'_>,
    ) -> Self {
        let (blocks, world_size) = (pricing.chain.len(), pricing.problem.settings.world_size);
        let held = pricing.step.held(blocks.min(world_size as usize));
        let savers = Saver::all(&pricing.problem.settings.savers, &held);
        let mut table = Self { blocks, savers, is_complete: true, ends: Vec::new(), entries: Vec::new() };
        for place in places {
            let at = &pricing.at(place);
            let workspaces: Vec<f64> = (0..blocks).map(|block| pricing.workspace_bytes(block, at)).collect();
            let mut first = 0;
            for alike in table.savers.clone().chunk_by(Saver::is_again_of) {
                let savers = first..first + alike.len();
                let layers = Layers { savers, at, workspaces: &workspaces, wanted: wanted(place) };
                table.fill(pricing, &layers, best_us, deadline);
                first += alike.len();
            }
        }
        table
    }

    fn fill(&mut self, pricing: &Pricing<'_>, layers: &Layers<'_>, best_us: f64, deadline: Deadline<'_>) {
        let first_layer = self.ends.len();
        self.ends.resize(first_layer + layers.savers.len() * self.blocks, Runs::default());
        let mut runs: Vec<Vec<Entry>> = vec![Vec::new(); layers.savers.len()];
        for end in 1..=self.blocks {
            if !self.is_complete || deadline.is_over() {
                self.is_complete = false;
                return;
            }
            self.price(pricing, layers, end, best_us, &mut runs);
            for (layer, runs) in runs.iter_mut().enumerate() {
                self.ends[first_layer + layer * self.blocks + end - 1] = self.keep(end, runs);
                runs.clear();
            }
        }
    }

    /// Prices the runs with this end for each of the savers, the shortest first.
    fn price(&self, pricing: &Pricing<'_>, layers: &Layers<'_>, end: usize, best_us: f64, runs: &mut [Vec<Entry>]) {
        let mut workspace_bytes: f64 = 0.0;
        let savers = layers.savers.clone();
        for first in (layers.longest(end)..end).rev() {
            let run = first..end;
            workspace_bytes = workspace_bytes.max(layers.workspaces[first]);
            if !savers.clone().any(|saver| layers.wants(saver, &run)) {
                runs.iter_mut().for_each(|runs| runs.push(Entry::default()));
                continue;
            }
            let plain = pricing.plain(&run, layers.at, self.savers[savers.start], workspace_bytes);
            // Both only grow with the run, and computing again adds time.
            if pricing.step.busy_us(&plain.cost) >= best_us || plain.memory.model_bytes() > layers.at.usable_bytes {
                break;
            }
            for (saver, runs) in savers.clone().zip(&mut *runs) {
                let wanted = layers.wants(saver, &run);
                let price = || Entry::beside(pricing, &run, layers.at, self.savers[saver], &plain);
                runs.push(if wanted { price() } else { Entry::default() });
            }
        }
    }

    /// Keeps the runs with this end, the shortest first, from the first to the last that fits.
    fn keep(&mut self, end: usize, runs: &[Entry]) -> Runs {
        let fit = runs.iter().position(Entry::fits).zip(runs.iter().rposition(Entry::fits));
        let Some((shortest, longest)) = fit else { return Runs::default() };
        let start = self.entries.len();
        self.entries.extend(runs[shortest..=longest].iter().rev());
        Runs { start, first: end - 1 - longest, count: longest - shortest + 1 }
    }

    fn index(&self, place: usize, saver: usize, end: usize) -> usize {
        (place * self.savers.len() + saver) * self.blocks + end - 1
    }

    fn runs(&self, place: usize, saver: usize, end: usize) -> Runs {
        self.ends[self.index(place, saver, end)]
    }

    fn has(&self, place: usize, saver: usize, run: &Range<usize>) -> bool {
        let runs = self.runs(place, saver, run.end);
        runs.firsts().contains(&run.start) && self.entries[runs.start + run.start - runs.first].fits()
    }

    /// The Stages with this place, saver and last Block that are worth looking at, with their first Blocks,
    /// increasing.
    pub(crate) fn ending(
        &self,
        place: usize,
        saver: usize,
        end: usize,
    ) -> impl DoubleEndedIterator<Item = (usize, &Entry)> {
        let runs = self.runs(place, saver, end);
        runs.firsts().zip(&self.entries[runs.entries()]).filter(|(_, entry)| entry.fits())
    }

    /// All Stages with this last Block that are worth looking at.
    pub(crate) fn all_ending(&self, end: usize) -> impl Iterator<Item = (StageKey, &Entry)> {
        self.layers().flat_map(move |(place, saver)| {
            let stage = move |first| StageKey { place, saver, first };
            self.ending(place, saver, end).map(move |(first, entry)| (stage(first), entry))
        })
    }

    fn layers(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let savers = self.savers.len();
        (0..self.ends.len() / self.blocks).map(move |layer| (layer / savers, layer % savers))
    }

    /// Drops those of the Stages with this last Block that are not useful.
    pub(crate) fn retain(&mut self, end: usize, mut useful: impl FnMut(StageKey, &Entry) -> bool) {
        for (place, saver) in self.layers() {
            let runs = self.runs(place, saver, end);
            let entries = &mut self.entries[runs.entries()];
            for (first, entry) in runs.firsts().zip(entries.iter_mut()) {
                if entry.fits() && !useful(StageKey { place, saver, first }, entry) {
                    *entry = Entry::default();
                }
            }
            let kept = entries.iter().position(Entry::fits).zip(entries.iter().rposition(Entry::fits));
            let index = self.index(place, saver, end);
            self.ends[index] = kept.map_or(Runs::default(), |(longest, shortest)| {
                let count = shortest - longest + 1;
                Runs { start: runs.start + longest, first: runs.first + longest, count }
            });
        }
    }
}
