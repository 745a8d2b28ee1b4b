//! The best division over all Schedules, numbers of microbatches and orders of ranks.
//!
//! The time of the best Plan is guessed, low at first: the less time Plans may take, the fewer there are to look
//! at. Below the guess every Schedule and number of microbatches gets its lower bound; a quick search of the most
//! promising gives a Plan to beat; then the cases that may hold a better one are searched exactly. The orders of ranks
//! of one Schedule and number of microbatches are searched side by side with the same Plan to beat, so the
//! number of threads does not show in the answer.

use std::collections::BTreeSet;

use rannc_cost::Cluster;
use rannc_plan::ScheduleKind;
use rayon::prelude::*;

use super::relax::{Grain, Relaxation, with_best_sends};
use super::stages::{Found, StageSearch};
use super::table::StageTable;
use crate::price::{CHEAPER, Place, Pricing, Problem, RankOrder, Saver};
use crate::settings::Limits;
use crate::stop::{Budget, Clock, Deadline, Stop};

/// A Plan must take less than this share of the time of another one to replace it.
const BETTER: f64 = 1.0 - 1e-9;
/// A bound that is at least this share of the best time is not worth raising.
const TIGHT: f64 = 0.99;
/// Guesses of the time of the best Plan, by the time of all Blocks on all ranks.
const GUESSES: [f64; 4] = [1.05, 1.65, 2.8, 5.0];
/// How far a first Plan may be from its bound.
const FIRST: f64 = 1.1;
/// Partial steps that a search for runners-up follows.
const RUNNER_UP_WIDTH: usize = 2;
/// The most that a runner-up may take, by the time of the best Plan.
const RUNNER_UP_LOSS: f64 = 3.0;
/// How far the number of Stages of a runner-up may be from the best Plan's.
const RUNNER_UP_REACH: usize = 2;

/// What is decided before the Stages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SearchCase {
    pub(crate) schedule: ScheduleKind,
    pub(crate) microbatches: u64,
    /// Place in the list of orders; `None` for the rough one.
    pub(crate) order: Option<usize>,
}

/// A division, and the case that it belongs to.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Solution {
    pub(crate) case: SearchCase,
    pub(crate) found: Found,
}

/// What a search found.
#[derive(Clone, Debug)]
pub(crate) struct Solved {
    pub(crate) best: Solution,
    /// Good divisions of other cases: where the formula tells a step too short, one of them may be better.
    pub(crate) finalists: Vec<Solution>,
    /// No Plan takes less.
    pub(crate) lower_bound_us: f64,
    /// By Schedule and microbatches: no Plan with them takes less, or is better than the best one.
    pub(crate) bounds: Vec<(ScheduleKind, u64, f64)>,
    pub(crate) stop: Stop,
}

/// What became of a group of cases.
struct Looked {
    found: Vec<Solution>,
    stop: Stop,
}

/// Cases that only differ in the order of ranks.
struct CaseGroup<'a> {
    cases: &'a [SearchCase],
    /// No Plan of these cases takes less, or is better than the best one.
    bound_us: f64,
}

impl CaseGroup<'_> {
    fn pricing<'p>(&self, problem: Problem<'p>) -> Pricing<'p> {
        let SearchCase { schedule, microbatches, .. } = self.cases[0];
        Pricing::new(problem, schedule, microbatches)
    }
}

fn groups(cases: &[SearchCase]) -> Vec<CaseGroup<'_>> {
    let alike = |left: &SearchCase, right: &SearchCase| {
        (left.schedule, left.microbatches) == (right.schedule, right.microbatches)
    };
    cases.chunk_by(alike).map(|cases| CaseGroup { cases, bound_us: 0.0 }).collect()
}

/// The computation of a step with all Blocks on all ranks, whether they fit or not.
fn all_ranks_us(pricing: &Pricing<'_>) -> f64 {
    let Problem { chain, cluster, settings, .. } = pricing.problem;
    let place = Place::ideal(cluster, &(settings.world_size..=settings.world_size), 0);
    let plain = pricing.plain(&(0..chain.len()), &pricing.at(&place), Saver::PLAIN, 0.0);
    pricing.step.busy_us(&plain.cost)
}

/// A search over the divisions of one case.
struct CaseSearch<'a> {
    case: SearchCase,
    pricing: Pricing<'a>,
    order: &'a RankOrder,
    table: StageTable,
    relaxed: &'a Relaxation<'a>,
}

impl<'a> CaseSearch<'a> {
    fn new(
        problem: Problem<'a>,
        case: SearchCase,
        order: &'a RankOrder,
        relaxed: &'a Relaxation<'a>,
        best_us: f64,
        deadline: Deadline<'_>,
    ) -> Self {
        let pricing = Pricing::new(problem, case.schedule, case.microbatches);
        let wanted = |place: &Place| relaxed.stages_at(place);
        let table = StageTable::new(&pricing, order.places(), wanted, best_us, deadline);
        Self { case, pricing, order, table, relaxed }
    }

    /// False when it was time to end before all of its Stages were known.
    fn is_complete(&self) -> bool {
        self.relaxed.is_complete() && self.table.is_complete
    }

    /// See [`StageSearch::run`].
    fn run(
        &self,
        exactly: Option<usize>,
        width: Option<usize>,
        best_us: f64,
        budget: &mut Budget<'_>,
    ) -> Option<Solution> {
        let Self { pricing, order, table, relaxed, .. } = self;
        let search = StageSearch { pricing, order, table, relaxed };
        search.run(exactly, width, best_us, budget).map(|found| Solution { case: self.case, found })
    }
}

/// A search over cases.
pub(crate) struct Solver<'a> {
    pub(crate) problem: Problem<'a>,
    pub(crate) orders: &'a [RankOrder],
    /// An order with few units, for a first Plan.
    pub(crate) rough: &'a RankOrder,
    pub(crate) grain: Grain,
    pub(crate) clock: Clock<'a>,
}

impl<'a> Solver<'a> {
    /// All cases for these numbers of microbatches.
    pub(crate) fn cases(&self, microbatches: &[u64]) -> Vec<SearchCase> {
        let mut cases = Vec::new();
        let schedules = self.problem.settings.schedules();
        for &schedule in &schedules {
            // With one microbatch, all Schedules are one.
            let worth_trying = |&&count: &&u64| count > 1 || schedule == schedules[0];
            for &microbatches in microbatches.iter().filter(worth_trying) {
                cases.extend((0..self.orders.len()).map(|order| SearchCase {
                    schedule,
                    microbatches,
                    order: Some(order),
                }));
            }
        }
        cases
    }

    /// The order of ranks of a case.
    pub(crate) fn order(&self, case: SearchCase) -> &'a RankOrder {
        case.order.map_or(self.rough, |order| &self.orders[order])
    }

    /// The best division of all cases, or why the search for one ended without.
    pub(crate) fn solve(&self, cases: &[SearchCase]) -> Result<Solved, Stop> {
        let cluster = with_best_sends(self.problem.cluster);
        let ideal = self.ideal(&cluster);
        let all_ranks = groups(cases).into_iter().map(|group| all_ranks_us(&group.pricing(ideal)));
        let guess_us = all_ranks.fold(f64::INFINITY, f64::min);
        for limit_us in GUESSES.map(|factor| guess_us * factor).into_iter().filter(|us| us.is_finite()) {
            match self.solve_below(ideal, cases, limit_us) {
                Err(Stop::Complete | Stop::Candidates) => {}
                ended => return ended,
            }
        }
        self.solve_below(ideal, cases, f64::INFINITY)
    }

    /// What no Plan of the problem is better than: one with this cluster, where parts of Blocks may be computed again and
    /// only direct transfers take time.
    fn ideal<'c>(&self, cluster: &'c Cluster) -> Problem<'c>
    where
        'a: 'c,
    {
        Problem { cluster, in_parts: true, direct: true, ..self.problem }
    }

    fn deadline(&self) -> Deadline<'a> {
        Deadline::new(&self.problem.settings.limits, self.clock)
    }

    /// Relaxed Plans of a group's cases that take less than `best_us`.
    fn relaxed<'p>(
        &self,
        group: &CaseGroup<'_>,
        ideal: Problem<'p>,
        best_us: f64,
        deadline: Deadline<'_>,
    ) -> Relaxation<'p> {
        let mut relaxed = Relaxation::new(&group.pricing(ideal), best_us, self.grain, deadline);
        relaxed.limit(best_us, deadline);
        relaxed
    }

    /// The cases with their lower bounds, the most promising first; as far as it came before it was time to end.
    fn bounded<'c>(&self, ideal: Problem<'_>, cases: &'c [SearchCase], best_us: f64) -> Vec<CaseGroup<'c>> {
        let mut groups = groups(cases);
        let bound = |group: &mut CaseGroup<'_>| {
            let relaxed = Relaxation::new(&group.pricing(ideal), best_us, self.grain, self.deadline());
            group.bound_us = relaxed.bound_us().min(best_us);
        };
        groups.par_iter_mut().for_each(bound);
        // A stable sort: of equal bounds the first stays first.
        groups.sort_by(|left, right| left.bound_us.total_cmp(&right.bound_us));
        groups
    }

    /// The best division if it takes less than `limit_us`; beyond it when it was time to end.
    fn solve_below(&self, ideal: Problem<'_>, cases: &[SearchCase], limit_us: f64) -> Result<Solved, Stop> {
        let mut groups = self.bounded(ideal, cases, limit_us);
        let mut best: Option<Solution> = None;
        let mut finalists: Vec<Solution> = Vec::new();
        let mut stop = Stop::Complete;
        for group in &mut groups {
            if self.clock.is_told() {
                return Err(Stop::Told);
            }
            if best.is_none() && !self.deadline().is_over() {
                best = self.first(ideal, group, limit_us.min(group.bound_us * FIRST));
                finalists.extend(best.clone());
            }
            let best_us = limit_us.min(time_to_beat_us(best.as_ref()));
            let Looked { found, stop: ended } = self.look(ideal, group, best_us);
            stop = stop.max(ended);
            best = found.iter().cloned().fold(best, better);
            finalists.extend(found);
        }
        if stop == Stop::Time || (stop == Stop::Candidates && limit_us.is_infinite()) {
            let quick = Self { grain: Grain::COARSE, ..*self };
            let any = |group: &CaseGroup<'_>| quick.first(ideal, group, f64::INFINITY);
            best = best.or_else(|| groups.iter().find_map(any));
        }
        let best = best.ok_or(stop)?;
        let lower_bound_us = self.raised_us(ideal, &groups, best.found.step_us);
        let bound = |group: &CaseGroup<'_>| (group.cases[0].schedule, group.cases[0].microbatches, group.bound_us);
        let bounds = groups.iter().map(bound).collect();
        Ok(Solved { best, finalists, lower_bound_us, bounds, stop })
    }

    /// The least of the bounds. Those far below `best_us` are raised by an exact search with ideal places and whole Blocks,
    /// where there are no other kinds of devices and no units that leave divisions out.
    fn raised_us(&self, ideal: Problem<'_>, groups: &[CaseGroup<'_>], best_us: f64) -> f64 {
        let order = &self.orders[0];
        let exact = ideal.cluster.kinds.len() == 1 && order.units() == order.positions();
        let order = &order.with_ideal_places(ideal.cluster);
        let raised = |group: &CaseGroup<'_>| {
            if group.bound_us >= best_us * TIGHT || !exact || self.deadline().is_over() {
                return group.bound_us;
            }
            let relaxed = self.relaxed(group, ideal, best_us, self.deadline());
            let whole = Problem { in_parts: false, ..ideal };
            let search = CaseSearch::new(whole, group.cases[0], order, &relaxed, best_us, self.deadline());
            match self.run(&search, None, best_us) {
                (found, Stop::Complete) => {
                    group.bound_us.max(found.map_or(best_us, |found| found.found.step_us) * CHEAPER)
                }
                _ => group.bound_us,
            }
        };
        let mut groups: Vec<&CaseGroup<'_>> = groups.iter().collect();
        groups.sort_by(|left, right| left.bound_us.total_cmp(&right.bound_us));
        let Some((lowest, others)) = groups.split_first() else { return best_us };
        // Where the lowest cannot be raised, nothing else needs to be.
        let least_us = raised(lowest).min(best_us);
        let lower = others.par_iter().filter(|group| group.bound_us < least_us);
        lower.map(|group| raised(group)).reduce(|| least_us, f64::min)
    }

    /// A Plan to beat, from few units of ranks and the most promising partial step of each state: quick, so that
    /// no limit is too low for it.
    fn first(&self, ideal: Problem<'_>, group: &CaseGroup<'_>, best_us: f64) -> Option<Solution> {
        if group.bound_us >= best_us {
            return None;
        }
        let case = SearchCase { order: None, ..group.cases[0] };
        let deadline = Deadline::only_told(self.clock);
        let relaxed = self.relaxed(group, ideal, best_us, deadline);
        let search = CaseSearch::new(self.problem, case, self.rough, &relaxed, best_us, deadline);
        let mut budget = Budget::new(&Limits::default(), self.clock);
        search.run(self.problem.settings.forced_stages(), Some(1), best_us, &mut budget)
    }

    /// Divisions of a group's cases that take less than `best_us`; raises the group's bound.
    fn look(&self, ideal: Problem<'_>, group: &mut CaseGroup<'_>, best_us: f64) -> Looked {
        let budget = Budget::new(&self.problem.settings.limits, self.clock);
        if group.bound_us >= best_us || budget.is_spent() {
            let stop = if group.bound_us >= best_us { Stop::Complete } else { budget.stop() };
            return Looked { found: Vec::new(), stop };
        }
        let relaxed = self.relaxed(group, ideal, best_us, self.deadline());
        group.bound_us = group.bound_us.max(relaxed.bound_us()).min(best_us);
        let look = |&case: &SearchCase| self.look_at(case, &relaxed, best_us);
        let looked: Vec<(Option<Solution>, Stop)> = group.cases.par_iter().map(look).collect();
        let stop = looked.iter().map(|(_, stop)| *stop).max().unwrap_or(Stop::Complete);
        Looked { found: looked.into_iter().filter_map(|(found, _)| found).collect(), stop }
    }

    /// The best division of a case that takes less than `best_us`.
    fn look_at(&self, case: SearchCase, relaxed: &Relaxation<'_>, best_us: f64) -> (Option<Solution>, Stop) {
        let search = CaseSearch::new(self.problem, case, self.order(case), relaxed, best_us, self.deadline());
        let (quick, _) = self.run(&search, Some(1), best_us);
        let (exact, stop) = self.run(&search, None, quick.as_ref().map_or(best_us, |found| found.found.step_us));
        (exact.or(quick), stop)
    }

    fn run(&self, search: &CaseSearch<'_>, width: Option<usize>, best_us: f64) -> (Option<Solution>, Stop) {
        let mut budget = Budget::new(&self.problem.settings.limits, self.clock);
        let found = search.run(self.problem.settings.forced_stages(), width, best_us, &mut budget);
        let missing = if search.is_complete() { Stop::Complete } else { Stop::Time };
        (found, budget.stop().max(missing))
    }

    /// Divisions that are simpler than the best one, with fewer Stages or as many and fewer microbatches, and take less
    /// than `limit_us`. A quick search, which may miss some.
    pub(crate) fn simpler(&self, cases: &[SearchCase], solved: &Solved, limit_us: f64) -> Vec<Solution> {
        let (stages, best) = (solved.best.found.stages.len(), solved.best.case);
        let promising = |group: &CaseGroup<'_>| {
            let SearchCase { schedule, microbatches, .. } = group.cases[0];
            let bound = |&&(known, count, _): &&(ScheduleKind, u64, f64)| (known, count) == (schedule, microbatches);
            let bound_us = solved.bounds.iter().find(bound).map_or(0.0, |&(_, _, bound_us)| bound_us);
            bound_us < limit_us && (stages > 1 || microbatches < best.microbatches)
        };
        let cluster = with_best_sends(self.problem.cluster);
        let (ideal, quick) = (self.ideal(&cluster), Self { grain: Grain::COARSE, ..*self });
        let of_group = |group: &CaseGroup<'_>| {
            let fewer = group.cases[0].microbatches < best.microbatches;
            let counts: BTreeSet<usize> = match self.problem.settings.forced_stages() {
                Some(forced) => [forced].into_iter().filter(|_| fewer).collect(),
                None => {
                    [1, stages / 2, stages - 1, stages].into_iter().filter(|&count| count < stages || fewer).collect()
                }
            };
            let most = self.problem.settings.max_stages.map_or(stages, |most| most as usize);
            let counts = counts.into_iter().filter(|count| (1..=most).contains(count));
            let relaxed = quick.relaxed(group, ideal, limit_us, self.deadline());
            if relaxed.bound_us() >= limit_us || self.deadline().is_over() {
                return Vec::new();
            }
            let counts: Vec<usize> = counts.collect();
            let of_case = |&case: &SearchCase| {
                let order = self.order(case);
                let search = CaseSearch::new(self.problem, case, order, &relaxed, limit_us, self.deadline());
                let of_count = |&stages: &usize| {
                    let mut budget = Budget::new(&self.problem.settings.limits, self.clock);
                    search.run(Some(stages), Some(1), limit_us, &mut budget)
                };
                counts.iter().filter_map(of_count).collect::<Vec<_>>()
            };
            group.cases.iter().flat_map(of_case).collect()
        };
        let groups: Vec<CaseGroup<'_>> = groups(cases).into_iter().filter(promising).collect();
        let found: Vec<Vec<Solution>> = groups.par_iter().map(of_group).collect();
        found.into_iter().flatten().collect()
    }

    /// Other good divisions, at most `count`, best first: with other numbers of Stages or microbatches.
    pub(crate) fn runners_up(&self, cases: &[SearchCase], best: &Solution, count: usize) -> Vec<Solution> {
        let stages = best.found.stages.len();
        let reach = stages.saturating_sub(RUNNER_UP_REACH).max(1)..=stages + RUNNER_UP_REACH;
        let counts: Vec<usize> = match self.problem.settings.forced_stages() {
            Some(forced) => vec![forced],
            None => [1].into_iter().filter(|one| !reach.contains(one)).chain(reach.clone()).collect(),
        };
        let worst_us = best.found.step_us * RUNNER_UP_LOSS;
        let cluster = with_best_sends(self.problem.cluster);
        let ideal = self.ideal(&cluster);
        let of_group = |group: &CaseGroup<'_>| {
            if self.deadline().is_over() {
                return Vec::new();
            }
            let relaxed = self.relaxed(group, ideal, worst_us, self.deadline());
            let of_case = |&case: &SearchCase| {
                let search = CaseSearch::new(self.problem, case, self.order(case), &relaxed, worst_us, self.deadline());
                let of_count = |&stages: &usize| {
                    let mut budget = Budget::new(&self.problem.settings.limits, self.clock);
                    search.run(Some(stages), Some(RUNNER_UP_WIDTH), worst_us, &mut budget)
                };
                counts.iter().filter_map(of_count).collect()
            };
            group.cases.par_iter().map(of_case).collect()
        };
        let found: Vec<Vec<Vec<Solution>>> = groups(cases).par_iter().map(of_group).collect();
        let mut others: Vec<Solution> = found.into_iter().flatten().flatten().collect();
        others.sort_by(|left, right| left.found.step_us.total_cmp(&right.found.step_us));
        let mut seen = vec![shape(best)];
        others.retain(|other| {
            let fresh = !seen.contains(&shape(other));
            seen.push(shape(other));
            fresh
        });
        others.truncate(count);
        others
    }
}

/// What makes a Plan another one for a person: Replicas, microbatches, and the Schedule where it tells several
/// Stages what to do with several microbatches.
fn shape(solution: &Solution) -> (Vec<usize>, u64, Option<ScheduleKind>) {
    let SearchCase { schedule, microbatches, .. } = solution.case;
    let replicas: Vec<usize> = solution.found.stages.iter().map(|stage| stage.positions.len()).collect();
    let schedule = (replicas.len() > 1 && microbatches > 1).then_some(schedule);
    (replicas, microbatches, schedule)
}

fn time_to_beat_us(known: Option<&Solution>) -> f64 {
    known.map_or(f64::INFINITY, |known| known.found.step_us * BETTER)
}

fn better(known: Option<Solution>, found: Solution) -> Option<Solution> {
    if found.found.step_us < time_to_beat_us(known.as_ref()) { Some(found) } else { known }
}
