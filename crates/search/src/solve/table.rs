//! All Stages that one Schedule and number of microbatches allows, priced.

use std::ops::Range;

use super::ranks::FewestRanks;
use crate::price::{Again, At, Place, PlainStage, Priced, Pricing, Saver, StageCost};
use crate::stop::Deadline;

/// A priced Stage.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Entry {
    pub(crate) cost: StageCost,
    /// Microbatches in flight that its memory allows; 0 when it does not fit at all.
    pub(crate) max_in_flight: u64,
    /// See [`Mark::BeatenBy`].
    beaten_by: Option<u16>,
}

impl Entry {
    /// Prices a Stage whose Blocks need `workspace_bytes`.
    pub(crate) fn new(
        pricing: &Pricing<'_>,
        run: Range<usize>,
        at: &At<'_>,
        saver: Saver,
        workspace_bytes: f64,
    ) -> Self {
        let plain = pricing.plain(&run, at, saver, workspace_bytes);
        Self::of(pricing, &run, at, saver, &plain, at.usable_bytes)
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
        let beside_bytes = pricing.problem.beside.get(&(run.start, run.end)).copied();
        match saver.again {
            Again::ToHold(in_flight) if plain.memory.room(at.usable_bytes) >= in_flight => Self::default(),
            // What is computed again was chosen to fill the memory.
            Again::ToHold(_) if beside_bytes.is_some() => Self::default(),
            _ => {
                let usable_bytes = at.usable_bytes - beside_bytes.unwrap_or(0.0);
                Self::of(pricing, run, at, saver, plain, usable_bytes)
            }
        }
    }

    /// True when it fits at all.
    fn fits(&self) -> bool {
        self.max_in_flight > 0
    }

    fn of(
        pricing: &Pricing<'_>,
        run: &Range<usize>,
        at: &At<'_>,
        saver: Saver,
        &PlainStage { cost, mut memory }: &PlainStage,
        usable_bytes: f64,
    ) -> Self {
        let again = pricing.compute_again(run, at, saver.again, &mut memory);
        let max_in_flight = match saver.again {
            _ if !cost.is_finite() => 0,
            Again::ToHold(in_flight) if memory.microbatch_bytes.is_finite() => in_flight,
            Again::ToHold(_) => 0,
            Again::Nothing | Again::Everything => memory.room(usable_bytes),
        };
        if max_in_flight == 0 {
            return Self::default();
        }
        let Priced { cost, .. } = pricing.with_repeated(run, at, saver, &PlainStage { cost, memory }, again);
        Self { cost, max_in_flight, beaten_by: None }
    }

    /// True when no Plan of so many microbatches is better with `other` in its place.
    fn is_as_good_as(&self, other: &Self, microbatches: u64) -> bool {
        self.max_in_flight >= other.max_in_flight.min(microbatches) && self.cost.is_within(&other.cost)
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
    marks: Vec<Mark>,
    entries: Vec<Entry>,
}

/// What became of a Stage.
#[derive(Clone, Copy, Debug)]
enum Mark {
    /// It does not fit, or is not worth looking at.
    Out,
    /// With this saver, which stands for it, it is as good in every respect.
    BeatenBy(u16),
    /// Place among the entries.
    At(u32),
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
    /// Place of the longest one in the marks.
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

    fn marks(&self) -> Range<usize> {
        self.start..self.start + self.count
    }
}

/// Which Stages at a place may be part of a Plan that is good enough.
#[derive(Clone, Copy)]
pub(crate) enum Wanted<'t> {
    /// Those that leave the Blocks on both sides enough ranks.
    Leaving(&'t FewestRanks),
    /// Those at a place of another table.
    At(&'t StageTable, usize),
}

/// All savers at one place.
struct Layers<'a> {
    /// Those that only differ in what is computed again, for each way to differ otherwise that the place allows.
    alike: Vec<Range<usize>>,
    savers: usize,
    at: &'a At<'a>,
    /// Of each Block.
    workspaces: &'a [f64],
    wanted: Wanted<'a>,
}

impl Layers<'_> {
    fn wants(&self, saver: usize, run: &Range<usize>) -> bool {
        match self.wanted {
            Wanted::Leaving(_) => true,
            Wanted::At(table, place) => table.has(place, saver, run),
        }
    }

    /// First Blocks, from the first to the last, of the runs with this end that may be wanted.
    fn firsts(&self, end: usize) -> Range<usize> {
        match self.wanted {
            Wanted::Leaving(fewest) => fewest.firsts(end, self.at.place.fewest()),
            Wanted::At(table, place) => {
                let runs = self.alike.iter().cloned().flatten().map(|saver| table.runs(place, saver, end).firsts());
                let together =
                    |left: Range<usize>, right: Range<usize>| left.start.min(right.start)..left.end.max(right.end);
                runs.filter(|firsts| !firsts.is_empty()).reduce(together).unwrap_or(0..0)
            }
        }
    }
}

impl StageTable {
    /// Prices all Stages that a Plan with less than `best_us` may have at these places, as far as they are `wanted`.
    pub(crate) fn new<'t>(
        pricing: &Pricing<'_>,
        places: &[Place],
        wanted: impl Fn(&Place) -> Wanted<'t>,
        best_us: f64,
        deadline: Deadline<'_>,
    ) -> Self {
        let (blocks, world_size) = (pricing.chain.len(), pricing.problem.settings.world_size);
        let held = pricing.step.held(blocks.min(world_size as usize));
        let savers = Saver::all(&pricing.problem.settings.savers, &held);
        let mut table =
            Self { blocks, savers, is_complete: true, ends: Vec::new(), marks: Vec::new(), entries: Vec::new() };
        for place in places {
            let at = &pricing.at(place);
            let workspaces: Vec<f64> = (0..blocks).map(|block| pricing.workspace_bytes(block, at)).collect();
            let (alike, savers) = (table.alike(pricing, place), table.savers.len());
            let layers = Layers { alike, savers, at, workspaces: &workspaces, wanted: wanted(place) };
            table.fill(pricing, &layers, best_us, deadline);
        }
        table
    }

    fn alike(&self, pricing: &Pricing<'_>, place: &Place) -> Vec<Range<usize>> {
        let mut start = 0;
        let alike = self.savers.chunk_by(Saver::is_again_of).map(|alike| {
            let end = start + alike.len();
            std::mem::replace(&mut start, end)..end
        });
        alike.filter(|alike| self.savers[alike.start].may_be_at(place, &pricing.problem.settings.savers)).collect()
    }

    fn fill(&mut self, pricing: &Pricing<'_>, layers: &Layers<'_>, best_us: f64, deadline: Deadline<'_>) {
        let first_layer = self.ends.len();
        self.ends.resize(first_layer + layers.savers * self.blocks, Runs::default());
        let mut runs: Vec<Vec<Entry>> = vec![Vec::new(); layers.savers];
        for end in 1..=self.blocks {
            if !self.is_complete || deadline.is_over() {
                self.is_complete = false;
                return;
            }
            let firsts = layers.firsts(end);
            self.price(pricing, layers, (firsts.clone(), end), best_us, &mut runs);
            for (layer, runs) in runs.iter_mut().enumerate() {
                self.ends[first_layer + layer * self.blocks + end - 1] = self.keep(firsts.end, runs);
                runs.clear();
            }
        }
    }

    /// Prices the runs with this end for each of the savers, the shortest first.
    fn price(
        &self,
        pricing: &Pricing<'_>,
        layers: &Layers<'_>,
        (firsts, end): (Range<usize>, usize),
        best_us: f64,
        runs: &mut [Vec<Entry>],
    ) {
        let mut workspace_bytes = layers.workspaces[firsts.end..end].iter().copied().fold(0.0, f64::max);
        let mut open = layers.alike.clone();
        for first in firsts.rev() {
            let run = first..end;
            workspace_bytes = workspace_bytes.max(layers.workspaces[first]);
            // This only grows with the run, as does the time of what is plain but for messages beside it, and every
            // saver adds time.
            open.retain(|alike| {
                pricing.least_model_bytes(&run, layers.at, self.savers[alike.start]) <= layers.at.usable_bytes
            });
            let wanted = |saver: usize| layers.wants(saver, &run);
            if !open.iter().cloned().flatten().any(wanted) {
                open.iter().cloned().flatten().for_each(|saver| runs[saver].push(Entry::default()));
                continue;
            }
            let cost = pricing.plain_cost(&run, layers.at);
            if open.is_empty() || pricing.least_of_longer_us(&cost) >= best_us {
                break;
            }
            for alike in &open {
                let memory = pricing.memory(&run, layers.at, self.savers[alike.start], workspace_bytes);
                let plain = PlainStage { cost, memory };
                for saver in alike.clone() {
                    let price = || Entry::beside(pricing, &run, layers.at, self.savers[saver], &plain);
                    runs[saver].push(if wanted(saver) { price() } else { Entry::default() });
                }
            }
            note_beaten(&open, runs, pricing.step.microbatches);
        }
    }

    /// Keeps runs with one end, of which the shortest is the first and begins right before `until`, from the first to the
    /// last that fits.
    fn keep(&mut self, until: usize, runs: &[Entry]) -> Runs {
        let fit = runs.iter().position(Entry::fits).zip(runs.iter().rposition(Entry::fits));
        let Some((shortest, longest)) = fit else { return Runs::default() };
        let start = self.marks.len();
        for entry in runs[shortest..=longest].iter().rev() {
            let mark = match entry.beaten_by {
                _ if !entry.fits() => Mark::Out,
                Some(saver) => Mark::BeatenBy(saver),
                None => {
                    self.entries.push(*entry);
                    Mark::At(u32::try_from(self.entries.len() - 1).expect("fewer Stages than 2^32"))
                }
            };
            self.marks.push(mark);
        }
        Runs { start, first: until - 1 - longest, count: longest - shortest + 1 }
    }

    fn index(&self, place: usize, saver: usize, end: usize) -> usize {
        (place * self.savers.len() + saver) * self.blocks + end - 1
    }

    fn runs(&self, place: usize, saver: usize, end: usize) -> Runs {
        self.ends[self.index(place, saver, end)]
    }

    fn mark(&self, place: usize, saver: usize, run: &Range<usize>) -> Mark {
        let runs = self.runs(place, saver, run.end);
        if runs.firsts().contains(&run.start) { self.marks[runs.start + run.start - runs.first] } else { Mark::Out }
    }

    fn has(&self, place: usize, saver: usize, run: &Range<usize>) -> bool {
        !matches!(self.mark(place, saver, run), Mark::Out)
    }

    /// The Stages with this place, saver and last Block that are worth looking at, with their first Blocks,
    /// increasing; without those for which others stand.
    pub(crate) fn ending(
        &self,
        place: usize,
        saver: usize,
        end: usize,
    ) -> impl DoubleEndedIterator<Item = (usize, &Entry)> {
        let runs = self.runs(place, saver, end);
        runs.firsts().zip(&self.marks[runs.marks()]).filter_map(|(first, mark)| match *mark {
            Mark::At(entry) => Some((first, &self.entries[entry as usize])),
            Mark::Out | Mark::BeatenBy(_) => None,
        })
    }

    /// All Stages with this last Block that are worth looking at, without those for which others stand.
    pub(crate) fn all_ending(&self, end: usize) -> impl Iterator<Item = (StageKey, &Entry)> {
        self.layers().flat_map(move |(place, saver)| {
            let stage = move |first| StageKey { place, saver, first };
            self.ending(place, saver, end).map(move |(first, entry)| (stage(first), entry))
        })
    }

    fn layers(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let savers = self.savers.len();
        let places = self.ends.len() / (savers * self.blocks);
        (0..places).flat_map(move |place| (0..savers).map(move |saver| (place, saver)))
    }

    /// Drops those of the Stages with this last Block that are not useful, and those for which they stand. These are there
    /// for tables of other places, where what stands for them may be worse.
    pub(crate) fn retain(&mut self, end: usize, mut useful: impl FnMut(StageKey, &Entry) -> bool) {
        for (place, saver) in self.layers() {
            let runs = self.runs(place, saver, end);
            for (first, mark) in runs.firsts().zip(&mut self.marks[runs.marks()]) {
                if let Mark::At(entry) = *mark
                    && !useful(StageKey { place, saver, first }, &self.entries[entry as usize])
                {
                    *mark = Mark::Out;
                }
            }
        }
        for (place, saver) in self.layers() {
            let runs = self.runs(place, saver, end);
            for first in runs.firsts() {
                if !self.is_stood_for(place, saver, &(first..end)) {
                    self.marks[runs.start + first - runs.first] = Mark::Out;
                }
            }
            let kept = |mark: &Mark| !matches!(mark, Mark::Out);
            let marks = &self.marks[runs.marks()];
            let index = self.index(place, saver, end);
            let ends = marks.iter().position(kept).zip(marks.iter().rposition(kept));
            self.ends[index] = ends.map_or(Runs::default(), |(longest, shortest)| {
                let count = shortest - longest + 1;
                Runs { start: runs.start + longest, first: runs.first + longest, count }
            });
        }
    }

    /// True for a Stage that is there, and for one for which such a one stands.
    fn is_stood_for(&self, place: usize, mut saver: usize, run: &Range<usize>) -> bool {
        loop {
            match self.mark(place, saver, run) {
                Mark::BeatenBy(by) => saver = usize::from(by),
                Mark::At(_) => return true,
                Mark::Out => return false,
            }
        }
    }
}

/// Marks those of the entries that were priced last that are not better than another one with as much computed again.
fn note_beaten(open: &[Range<usize>], runs: &mut [Vec<Entry>], microbatches: u64) {
    if open.len() < 2 {
        return;
    }
    for (place, alike) in open.iter().enumerate() {
        for (again, saver) in alike.clone().enumerate() {
            let by = beaten_by(open, runs, (place, again), microbatches);
            let own = runs[saver].last_mut().expect("it was priced");
            own.beaten_by = by.map(|saver| u16::try_from(saver).expect("few savers"));
        }
    }
}

/// The saver with which an entry is as good.
fn beaten_by(
    open: &[Range<usize>],
    runs: &[Vec<Entry>],
    (place, again): (usize, usize),
    microbatches: u64,
) -> Option<usize> {
    let last = |place: usize| runs[open[place].start + again].last().expect("it was priced");
    let own = last(place);
    let beats = |&other: &usize| {
        let entry = last(other);
        let as_good = entry.fits() && entry.beaten_by.is_none() && entry.is_as_good_as(own, microbatches);
        as_good && (other < place || !own.is_as_good_as(entry, microbatches))
    };
    let mut others = (0..open.len()).filter(|&other| other != place && own.fits());
    others.find(beats).map(|other| open[other].start + again)
}
