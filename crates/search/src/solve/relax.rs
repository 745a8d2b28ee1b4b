//! Lower bounds for whole and partial Plans, from relaxed ones.
//!
//! In a relaxed Plan every Stage has a place as good as any in the cluster, ranks may be left over, parts of Blocks
//! may be computed again, and only what surely moves between a Stage and the very next one takes time, so that a
//! relaxed Plan never takes longer than the longest path through the Plan itself (see [`crate::answer`]). Two dynamic
//! programs look at all relaxed Plans:
//! * from the last Stage to the first by the objective itself (see [`StepModel`]), but with the later Stages
//!   as good as any in each of its parts alone: no Plan takes less than what comes out, whatever its cuts
//!   between Blocks, Replicas, ranks and savings of memory;
//! * from the first Stage to the last, with only those Stages that do not make every Plan too long: the least
//!   time before a Stage.
//!
//! Both leave out states with too few ranks for what is still to be computed. Where the number of Stages is given, they
//! look at relaxed Plans with so many.

use std::ops::{Range, RangeInclusive};

use rannc_cost::{Cluster, Link};

use super::ranks::FewestRanks;
use super::table::{Entry, StageKey, StageTable, Wanted};
use crate::chain::Feeds;
use crate::price::{Place, Pricing, Saver, StepModel, StepTime};
use crate::stop::Deadline;

/// How much is told apart: with less of it a bound is found sooner, and lower.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grain {
    /// Stages from the end, with many ranks; further ones are counted as so many.
    pub(crate) counted: usize,
    /// From so many ranks on there are many.
    pub(crate) many_ranks: u32,
    /// Most units of ranks.
    pub(crate) units: usize,
}

impl Grain {
    /// What serves a thousand ranks.
    pub(crate) const FINE: Self = Self { counted: 4, many_ranks: 128, units: 512 };
    /// What serves a quick search of a thousand ranks, which takes no more units either.
    pub(crate) const COARSE: Self = Self { units: 64, ..Self::FINE };
}

/// Of a unit: what is below comes from rounding.
const ROUNDING: f64 = 1e-6;

/// Relaxed Plans for one Schedule and number of microbatches.
pub(crate) struct Relaxation<'a> {
    step: StepModel,
    feeds: &'a Feeds,
    states: States,
    /// Numbers of Replicas that have equally many rows each; a relaxed Stage takes the least of them.
    equal: Vec<RangeInclusive<u32>>,
    /// Stages at ideal places: for each kind of device, for each of these numbers.
    table: StageTable,
    /// By place of the table, the units of ranks that a Stage takes there.
    units: Vec<usize>,
    /// The fewest units of ranks that can compute the Blocks before a place in time, and those from it on.
    fewest: [Vec<usize>; 2],
    /// The last Stages: none are better in any part of the objective.
    later: Vec<StepTime>,
    /// No Stage behind is less deep to which a way leads from a Block before it; by Stages behind and Block, whatever the
    /// ranks.
    least_ahead: Vec<usize>,
    /// Least time in which a microbatch passes the first Stages.
    before_us: Vec<f64>,
    /// False when it was time to end before all relaxed Plans were looked at.
    is_complete: bool,
    /// What no Plan takes less than even then.
    least_us: f64,
}

/// Places between the Stages of a Plan: how many Stages are behind, the Block behind, and the most ranks that the
/// Stages on one side have.
#[derive(Clone, Copy)]
struct States {
    blocks: usize,
    /// In units.
    ranks: usize,
    /// Ranks of a unit. Of each StageKey, the ranks beyond whole units are left out.
    unit: usize,
    /// More Stages are counted as so many.
    counted: usize,
    /// True when a Plan has so many Stages and no more.
    exactly: bool,
}

impl States {
    fn new(pricing: &Pricing<'_>, grain: Grain) -> Self {
        let (blocks, world_size) = (pricing.chain.len(), pricing.problem.settings.world_size);
        let unit = (world_size as usize).div_ceil(grain.units);
        let ranks = world_size as usize / unit;
        let few = world_size < grain.many_ranks;
        let forced = pricing.problem.settings.forced_stages().filter(|&stages| few || stages <= grain.counted);
        if let Some(counted) = forced {
            return Self { blocks, ranks, unit, counted, exactly: true };
        }
        let most = if few { blocks.min(ranks) } else { grain.counted };
        let all_held = |&count: &usize| pricing.step.in_flight(count) == pricing.step.microbatches;
        Self { blocks, ranks, unit, counted: (1..most).find(all_held).unwrap_or(most), exactly: false }
    }

    fn len(&self) -> usize {
        (self.counted + 1) * (self.blocks + 1) * (self.ranks + 1)
    }

    fn index(&self, behind: usize, block: usize, ranks: usize) -> usize {
        self.row_index(behind, block) * (self.ranks + 1) + ranks
    }

    /// The states that only differ in the ranks.
    fn row(&self, behind: usize, block: usize) -> Range<usize> {
        let start = self.index(behind, block, 0);
        start..start + self.ranks + 1
    }

    /// The number of such rows before this one.
    fn row_index(&self, behind: usize, block: usize) -> usize {
        behind * (self.blocks + 1) + block
    }

    /// Numbers of Stages that a Plan may have.
    fn whole(&self) -> RangeInclusive<usize> {
        if self.exactly { self.counted..=self.counted } else { 1..=self.counted }
    }

    /// The most Stages that it may have.
    fn most(&self) -> usize {
        if self.exactly { self.counted } else { self.blocks }
    }

    /// Numbers of Stages that may be behind another one.
    fn behind(&self) -> Range<usize> {
        0..self.counted + usize::from(!self.exactly)
    }

    /// Stages behind with one more.
    fn next(&self, behind: usize) -> usize {
        (behind + 1).min(self.counted)
    }

    /// True when so many Stages stand for more.
    fn stands_for_more(&self, count: usize) -> bool {
        count == self.counted && !self.exactly
    }

    /// No Stage with so many behind it is deeper. The deeper it is, the shorter is every path.
    fn most_deep(&self, behind: usize) -> usize {
        1 + if self.stands_for_more(behind) { self.blocks } else { behind }
    }

    /// True when a Stage that is at least so deep may be run so with so many Stages behind it.
    fn allow(&self, step: &StepModel, entry: &Entry, saver: Saver, least_deep: usize, behind: usize) -> bool {
        let most_deep = if self.stands_for_more(self.next(behind)) { self.most() } else { behind + 1 };
        let in_flight = step.in_flight(least_deep)..=step.in_flight(most_deep);
        entry.max_in_flight >= *in_flight.start() && saver.serves(&in_flight)
    }
}

impl<'a> Relaxation<'a> {
    /// Relaxed Plans that take less than `best_us`.
    pub(crate) fn new(pricing: &Pricing<'a>, best_us: f64, grain: Grain, deadline: Deadline<'_>) -> Self {
        let (states, equal, cluster) = (States::new(pricing, grain), pricing.equal_replicas(), pricing.problem.cluster);
        let of_kind = |kind: usize| equal.iter().map(move |replicas| Place::ideal(cluster, replicas, kind));
        let places: Vec<Place> = (0..cluster.kinds.len()).flat_map(of_kind).collect();
        let ranks = FewestRanks::new(pricing, &places, best_us);
        let table = StageTable::new(pricing, &places, |_| Wanted::Leaving(&ranks), best_us, deadline);
        let units = places.iter().map(|place| place.fewest() as usize / states.unit).collect();
        let (later, before_us) = (vec![StepTime::NEVER; states.len()], vec![f64::INFINITY; states.len()]);
        let least_ahead = vec![usize::MAX; states.row_index(states.counted + 1, 0)];
        let fewest = [Vec::new(), Vec::new()];
        let least_us = longest_block_us(pricing, &places);
        let (step, feeds, is_complete) = (pricing.step, &pricing.chain.feeds, table.is_complete);
        let mut relaxed = Self {
            step,
            feeds,
            states,
            equal,
            table,
            units,
            fewest,
            later,
            least_ahead,
            before_us,
            is_complete,
            least_us,
        };
        relaxed.find_fewest(best_us);
        if relaxed.fewest[0][states.blocks] <= states.ranks {
            relaxed.find_later(best_us, deadline);
        }
        relaxed
    }

    /// False when it was time to end before all relaxed Plans were looked at: then nothing is known of those missing.
    pub(crate) fn is_complete(&self) -> bool {
        self.is_complete
    }

    /// No Plan takes less; infinite when none takes less than the time that was given.
    pub(crate) fn bound_us(&self) -> f64 {
        if !self.is_complete {
            return self.least_us;
        }
        let of_count = |count| self.step.step_us(self.later[self.states.index(count, 0, self.states.ranks)]);
        self.states.whole().map(of_count).fold(f64::INFINITY, f64::min)
    }

    /// Least time in which a microbatch passes the first Stages when so many are `behind` them.
    pub(crate) fn before_us(&self, behind: usize, blocks: usize, ranks: u32) -> f64 {
        self.before_us[self.states.index(behind.min(self.states.counted), blocks, ranks as usize / self.states.unit)]
    }

    /// The Stages at an ideal place that is as good as this one.
    pub(crate) fn stages_at(&self, place: &Place) -> Wanted<'_> {
        let kind = place.kinds().next().unwrap_or(0);
        let equal = self.equal.partition_point(|replicas| *replicas.end() < place.replicas);
        Wanted::At(&self.table, kind * self.equal.len() + equal)
    }

    fn find_fewest(&mut self, best_us: f64) {
        let blocks = self.states.blocks;
        // Time on all ranks together.
        let (mut before_us, mut behind_us) = (vec![f64::INFINITY; blocks + 1], vec![f64::INFINITY; blocks + 1]);
        (before_us[0], behind_us[blocks]) = (0.0, 0.0);
        let least_deep = |run: &Range<usize>| if self.feeds.feeds_later(run) { 2 } else { 1 };
        let fits = |run: Range<usize>, entry: &Entry| entry.max_in_flight >= self.step.in_flight(least_deep(&run));
        let stages =
            |end: usize| self.table.all_ending(end).filter(move |(stage, entry)| fits(stage.first..end, entry));
        let work_us = |stage: &StageKey, entry: &Entry| self.step.busy_us(&entry.cost) * self.units[stage.place] as f64;
        for end in 1..=blocks {
            for (stage, entry) in stages(end) {
                before_us[end] = before_us[end].min(before_us[stage.first] + work_us(&stage, entry));
            }
        }
        for end in (1..=blocks).rev() {
            for (stage, entry) in stages(end) {
                behind_us[stage.first] = behind_us[stage.first].min(behind_us[end] + work_us(&stage, entry));
            }
        }
        let most = self.states.ranks as f64 + 1.0;
        let fewest = |work_us: f64| (work_us / best_us - ROUNDING).ceil().clamp(0.0, most) as usize;
        self.fewest = [before_us, behind_us].map(|work_us| work_us.into_iter().map(fewest).collect());
    }

    /// From the last Stage to the first.
    fn find_later(&mut self, best_us: f64, deadline: Deadline<'_>) {
        let States { blocks, counted, .. } = self.states;
        self.later[self.states.index(0, blocks, 0)] = StepTime::default();
        self.least_ahead[self.states.row_index(0, blocks)] = 0;
        for end in (0..=blocks).rev() {
            for behind in 0..=counted {
                if deadline.is_over() {
                    self.is_complete = false;
                    return;
                }
                let row = self.states.row(behind, end);
                let better = better_with_more(&mut self.later[row], StepTime::NEVER, StepTime::least);
                if end > 0 && self.states.behind().contains(&behind) && !better.is_empty() {
                    self.put_before(end, behind, &better, best_us);
                }
            }
        }
    }

    /// Puts every Stage that ends at `end` before the Stages behind it, for each of these numbers of ranks.
    fn put_before(&mut self, end: usize, behind: usize, better: &[(usize, StepTime)], best_us: f64) {
        let Self { step, feeds, states, table, units, fewest: [fewest_before, _], later, least_ahead, .. } = self;
        let next = states.next(behind);
        let ahead = least_ahead[states.row_index(behind, end)];
        let (most_deep, rounds) = (states.most_deep(behind), step.rounds(states.most()));
        for (stage, entry) in table.all_ending(end) {
            let run = stage.first..end;
            let least_deep = least_deep(feeds, &run, ahead);
            let in_flight = step.in_flight(least_deep);
            // To hold more takes no less.
            if entry.max_in_flight < in_flight || !table.savers[stage.saver].serves(&(in_flight..=in_flight)) {
                continue;
            }
            let ahead_of_it = if feeds.all_lead_to(&run) { least_deep } else { least_deep.min(ahead) };
            let least = &mut least_ahead[states.row_index(next, stage.first)];
            let row = &mut later[states.row(next, stage.first)];
            let replicas = units[stage.place];
            let enough =
                |(ranks, _): &&(usize, StepTime)| ranks + replicas + fewest_before[stage.first] <= states.ranks;
            for &(ranks, behind_it) in better.iter().take_while(enough) {
                let time = step.prepend(behind_it, &entry.cost, most_deep);
                if step.bound_us(time, 0.0, rounds) < best_us {
                    *least = ahead_of_it.min(*least);
                    row[ranks + replicas] = row[ranks + replicas].least(time);
                }
            }
        }
    }

    /// From the first Stage to the last: finds the least time before each StageKey, and drops the Stages that make
    /// every relaxed Plan take `best_us` or more.
    pub(crate) fn limit(&mut self, best_us: f64, deadline: Deadline<'_>) {
        let States { blocks, counted, .. } = self.states;
        self.states.whole().for_each(|behind| self.before_us[self.states.index(behind, 0, 0)] = 0.0);
        // By Block, by number of Stages behind.
        let mut better: Vec<Vec<Vec<(usize, f64)>>> = Vec::new();
        for end in 0..=blocks {
            if deadline.is_over() {
                self.is_complete = false;
                return;
            }
            if end > 0 {
                self.put_behind(end, &better, best_us);
            }
            let rows = (0..=counted).map(|behind| self.states.row(behind, end));
            better.push(rows.map(|row| better_with_more(&mut self.before_us[row], f64::INFINITY, f64::min)).collect());
        }
    }

    /// Puts every Stage that ends at `end` behind the Stages before it.
    fn put_behind(&mut self, end: usize, better: &[Vec<Vec<(usize, f64)>>], best_us: f64) {
        let Self {
            step, feeds, states, table, units, fewest: [_, fewest_behind], later, least_ahead, before_us, ..
        } = self;
        let savers = table.savers.clone();
        let most = (states.ranks + 1).saturating_sub(fewest_behind[end]);
        let rounds = step.rounds(states.most());
        table.retain(end, |stage, entry| {
            let (replicas, busy_us) = (units[stage.place], step.busy_us(&entry.cost));
            let mut useful = false;
            let fits = |&behind: &usize| {
                let ahead = least_ahead[states.row_index(behind, end)];
                let least_deep = least_deep(feeds, &(stage.first..end), ahead);
                states.allow(step, entry, savers[stage.saver], least_deep, behind)
            };
            for behind in states.behind().filter(fits) {
                let next = states.next(behind);
                let enough = |(ranks, _): &&(usize, f64)| ranks + replicas < most;
                for &(ranks, earlier_us) in better[stage.first][next].iter().take_while(enough) {
                    let earlier_us = entry.cost.behind_us(earlier_us);
                    let behind_it = later[states.index(behind, end, states.ranks - ranks - replicas)];
                    if earlier_us + busy_us >= best_us || behind_it == StepTime::NEVER {
                        continue;
                    }
                    let time = step.prepend(behind_it, &entry.cost, states.most_deep(behind));
                    if step.bound_us(time, earlier_us, rounds) < best_us {
                        useful = true;
                        let own_us = &mut before_us[states.index(behind, end, ranks + replicas)];
                        *own_us = own_us.min(earlier_us + entry.cost.pass_us());
                    }
                }
            }
            useful
        });
    }
}

/// No Stage of these Blocks is less deep where no Stage that Blocks before its end feed is less deep than `ahead`.
fn least_deep(feeds: &Feeds, run: &Range<usize>, ahead: usize) -> usize {
    if feeds.feeds_later(run) { ahead.saturating_add(1) } else { 1 }
}

/// The Block that takes longest takes so long even alone on as many ranks of some kind as there are.
fn longest_block_us(pricing: &Pricing<'_>, places: &[Place]) -> f64 {
    let most = places.iter().filter(|place| place.replicas == pricing.problem.settings.world_size);
    let ats: Vec<_> = most.map(|place| pricing.at(place)).collect();
    let least_us = |block: usize| {
        let costs = ats.iter().map(|at| pricing.plain_cost(&(block..block + 1), at));
        costs.map(|cost| pricing.least_of_longer_us(&cost)).fold(f64::INFINITY, f64::min)
    };
    (0..pricing.chain.len()).map(least_us).filter(|us| us.is_finite()).fold(0.0, f64::max)
}

/// Makes a state with more ranks as good as those with fewer; the numbers of ranks from which on it is better, and how
/// good it is there.
fn better_with_more<T: Copy + PartialEq>(row: &mut [T], never: T, least: impl Fn(T, T) -> T) -> Vec<(usize, T)> {
    let (mut better, mut best) = (Vec::new(), never);
    for (ranks, own) in row.iter_mut().enumerate() {
        *own = least(*own, best);
        if *own != best {
            best = *own;
            better.push((ranks, best));
        }
    }
    better
}

/// A cluster where devices of one node send to each other as fast as any two devices.
pub(crate) fn with_best_sends(cluster: &Cluster) -> Cluster {
    let mut cluster = cluster.clone();
    let best = cluster.levels.iter().map(|level| level.send).reduce(|best, send| Link {
        latency_us: best.latency_us.min(send.latency_us),
        bytes_per_s: best.bytes_per_s.max(send.bytes_per_s),
    });
    if let (Some(first), Some(best)) = (cluster.levels.first_mut(), best) {
        first.send = best;
    }
    cluster
}
