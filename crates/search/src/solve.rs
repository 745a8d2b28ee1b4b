//! The best division over all Schedules, numbers of microbatches and orders of ranks.
//!
//! Quick searches give a Plan to beat; then the cases that may hold a better one are searched exactly,
//! the most promising first, some at a time. Every case is a function of what was known before its
//! batch, so the number of threads does not show in the answer.

use std::time::Instant;

use rannc_plan::ScheduleKind;
use rayon::prelude::*;

use crate::bound::{lower_bound_us, with_best_sends};
use crate::place::RankOrder;
use crate::price::{Pricing, Problem};
use crate::relax::Relaxation;
use crate::settings::Limits;
use crate::stages::{Found, StageSearch};
use crate::step::StepTime;
use crate::stop::{Budget, Stop};
use crate::table::StageTable;

/// A Plan must take less than this share of the time of another one to replace it.
const BETTER: f64 = 1.0 - 1e-9;
/// A bound that is at least this share of the best time is not worth raising.
const TIGHT: f64 = 0.99;
/// Cases that are searched at a time, with the same Plan to beat.
const BATCH: usize = 4;
/// Partial steps that a search for runners-up follows.
const RUNNER_UP_WIDTH: usize = 2;
/// The most that a runner-up may take, by the time of the best Plan.
const RUNNER_UP_LOSS: f64 = 3.0;
/// How far the number of Stages of a runner-up may be from the best Plan's.
const RUNNER_UP_REACH: usize = 2;

/// What is decided before the Stages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Case {
    pub(crate) schedule: ScheduleKind,
    pub(crate) microbatches: u64,
    /// Place in the list of orders; `None` for the rough one.
    pub(crate) order: Option<usize>,
}

/// A division, and the case that it belongs to.
#[derive(Clone, Debug)]
pub(crate) struct Solution {
    pub(crate) case: Case,
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
    pub(crate) stop: Stop,
}

/// What became of one case.
struct Looked {
    /// No Plan of the case takes less, or is better than what was known before.
    bound_us: f64,
    found: Option<Solution>,
    stop: Stop,
}

/// A search over cases.
pub(crate) struct Solver<'a> {
    pub(crate) problem: Problem<'a>,
    pub(crate) orders: &'a [RankOrder],
    /// An order with few units, for a first Plan.
    pub(crate) rough: &'a RankOrder,
    pub(crate) begun: Instant,
}

impl<'a> Solver<'a> {
    /// All cases for these numbers of microbatches.
    pub(crate) fn cases(&self, microbatches: &[u64]) -> Vec<Case> {
        let mut cases = Vec::new();
        for schedule in self.problem.settings.schedules() {
            for &microbatches in microbatches {
                cases.extend((0..self.orders.len()).map(|order| Case { schedule, microbatches, order: Some(order) }));
            }
        }
        cases
    }

    /// The order of ranks of a case.
    pub(crate) fn order(&self, case: Case) -> &'a RankOrder {
        case.order.map_or(self.rough, |order| &self.orders[order])
    }

    /// The best division of all cases, or why the search for one ended without.
    pub(crate) fn solve(&self, cases: &[Case]) -> Result<Solved, Stop> {
        let mut best = self.first(cases);
        let mut open = self.bounded(cases, time_to_beat_us(best.as_ref()));
        let mut bounds: Vec<(f64, Case)> = Vec::new();
        let mut stop = Stop::Complete;
        let mut finalists: Vec<Solution> = best.iter().cloned().collect();
        while !open.is_empty() {
            let best_us = time_to_beat_us(best.as_ref());
            let batch: Vec<(f64, Case)> = open.drain(..BATCH.min(open.len())).collect();
            let looked: Vec<Looked> =
                batch.par_iter().map(|&(bound_us, case)| self.look(case, bound_us, best_us)).collect();
            for (Looked { bound_us, found, stop: ended }, (_, case)) in looked.into_iter().zip(batch) {
                bounds.push((bound_us, case));
                finalists.extend(found.clone());
                best = better(best, found);
                stop = stop.max(ended);
            }
        }
        let best = best.ok_or(stop)?;
        let lower_bound_us = self.tightened_us(&bounds, best.found.step_us);
        Ok(Solved { best, finalists, lower_bound_us, stop })
    }

    /// The least of the bounds. Those far below `best_us` are raised by an exact search with ideal places, where there are
    /// no other kinds of devices and no units that leave divisions out.
    fn tightened_us(&self, bounds: &[(f64, Case)], best_us: f64) -> f64 {
        let cluster = &with_best_sends(self.problem.cluster);
        let exact = cluster.kinds.len() == 1 && self.orders[0].units() == self.orders[0].positions();
        let order = &self.orders[0].with_ideal_places(cluster);
        let solver = Solver { problem: Problem { cluster, ..self.problem }, orders: self.orders, ..*self };
        let mut open: Vec<(f64, Case)> =
            bounds.iter().map(|&(us, case)| (us, Case { order: Some(0), ..case })).collect();
        open.sort_by(|left, right| left.0.total_cmp(&right.0));
        // With ideal places, all orders of ranks are one.
        let mut seen: Vec<Case> = Vec::new();
        open.retain(|(_, case)| {
            let fresh = !seen.contains(case);
            seen.push(*case);
            fresh
        });
        let tightened = |&(bound_us, case): &(f64, Case)| {
            if bound_us >= best_us * TIGHT || !exact {
                return bound_us.min(best_us);
            }
            let pricing = Pricing::new(solver.problem, case.schedule, case.microbatches);
            let table = StageTable::new(&pricing, order, best_us);
            let search =
                StageSearch { pricing: &pricing, order, table: &table, bounds: &Relaxation::new(&pricing, &table) };
            match solver.run(&search, case, None, best_us) {
                (found, Stop::Complete) => bound_us.max(found.map_or(best_us, |found| found.found.step_us)),
                _ => bound_us,
            }
        };
        open.par_iter().map(tightened).reduce(|| best_us, f64::min)
    }

    /// A Plan to beat, from few units of ranks and the most promising partial step of each state: quick, so that
    /// no limit is too low for it.
    fn first(&self, cases: &[Case]) -> Option<Solution> {
        let rough = cases.iter().filter(|case| case.order == Some(0)).map(|case| Case { order: None, ..*case });
        let rough: Vec<Case> = rough.collect();
        let found: Vec<Option<Solution>> = rough
            .par_iter()
            .map(|&case| {
                let mut budget = Budget::new(&Limits::default(), self.begun);
                let found = self.with_search(case, f64::INFINITY, |search| {
                    search.run(self.problem.settings.forced_stages(), Some(1), f64::INFINITY, &mut budget)
                });
                found.map(|found| Solution { case, found })
            })
            .collect();
        found.into_iter().fold(None, better)
    }

    /// The cases with their lower bounds, the most promising first.
    fn bounded(&self, cases: &[Case], best_us: f64) -> Vec<(f64, Case)> {
        let mut counts: Vec<u64> = cases.iter().map(|case| case.microbatches).collect();
        counts.sort_unstable();
        counts.dedup();
        let bound = |&count: &u64| lower_bound_us(self.problem, count, best_us);
        let bounds: Vec<f64> = counts.par_iter().map(bound).collect();
        let of_case = |case: &Case| counts.binary_search(&case.microbatches).map_or(0.0, |place| bounds[place]);
        let mut open: Vec<(f64, Case)> = cases.iter().map(|&case| (of_case(&case), case)).collect();
        // A stable sort: of equal bounds the first case stays first.
        open.sort_by(|left, right| left.0.total_cmp(&right.0));
        open
    }

    /// The best division of a case that takes less than `best_us`.
    fn look(&self, case: Case, bound_us: f64, best_us: f64) -> Looked {
        if bound_us >= best_us {
            return Looked { bound_us, found: None, stop: Stop::Complete };
        }
        let budget = Budget::new(&self.problem.settings.limits, self.begun);
        if budget.is_spent() {
            return Looked { bound_us, found: None, stop: budget.stop() };
        }
        self.with_search(case, best_us, |search| {
            let bound_us = bound_us.max(self.relaxed_us(search)).min(best_us);
            if bound_us >= best_us {
                return Looked { bound_us, found: None, stop: Stop::Complete };
            }
            let (quick, _) = self.run(search, case, Some(1), best_us);
            let (exact, stop) =
                self.run(search, case, None, quick.as_ref().map_or(best_us, |found| found.found.step_us));
            Looked { bound_us, found: exact.or(quick), stop }
        })
    }

    /// A bound from the Stages of this case alone, if its units leave none out.
    fn relaxed_us(&self, search: &StageSearch<'_>) -> f64 {
        let (blocks, units) = (search.table.blocks, search.table.units);
        let complete = units == search.order.positions() || self.problem.settings.replicas.is_some();
        if !complete {
            return 0.0;
        }
        let (pass_us, longest_us) = (search.bounds.pass_us(blocks, units), search.bounds.longest_us(blocks, units));
        search.pricing.step.bound_us(StepTime::default(), pass_us, longest_us)
    }

    fn run(
        &self,
        search: &StageSearch<'_>,
        case: Case,
        width: Option<usize>,
        best_us: f64,
    ) -> (Option<Solution>, Stop) {
        let mut budget = Budget::new(&self.problem.settings.limits, self.begun);
        let found = search.run(self.problem.settings.forced_stages(), width, best_us, &mut budget);
        (found.map(|found| Solution { case, found }), budget.stop())
    }

    fn with_search<T>(&self, case: Case, best_us: f64, run: impl FnOnce(&StageSearch<'_>) -> T) -> T {
        let order = self.order(case);
        let pricing = Pricing::new(self.problem, case.schedule, case.microbatches);
        let table = StageTable::new(&pricing, order, best_us);
        let bounds = Relaxation::new(&pricing, &table);
        run(&StageSearch { pricing: &pricing, order, table: &table, bounds: &bounds })
    }

    /// Other good divisions, at most `count`, best first: with other numbers of Stages or microbatches.
    pub(crate) fn runners_up(&self, cases: &[Case], best: &Solution, count: usize) -> Vec<Solution> {
        let stages = best.found.stages.len();
        let reach = stages.saturating_sub(RUNNER_UP_REACH).max(1)..=stages + RUNNER_UP_REACH;
        let counts: Vec<usize> = match self.problem.settings.forced_stages() {
            Some(forced) => vec![forced],
            None => [1].into_iter().filter(|one| !reach.contains(one)).chain(reach.clone()).collect(),
        };
        let worst_us = best.found.step_us * RUNNER_UP_LOSS;
        let of_case = |&case: &Case| {
            self.with_search(case, worst_us, |search| {
                let of_count = |&stages: &usize| {
                    let mut budget = Budget::new(&self.problem.settings.limits, self.begun);
                    search.run(Some(stages), Some(RUNNER_UP_WIDTH), worst_us, &mut budget)
                };
                counts.iter().filter_map(of_count).map(|found| Solution { case, found }).collect()
            })
        };
        let found: Vec<Vec<Solution>> = cases.par_iter().map(of_case).collect();
        let mut others: Vec<Solution> = found.into_iter().flatten().collect();
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
    let Case { schedule, microbatches, .. } = solution.case;
    let replicas: Vec<usize> = solution.found.stages.iter().map(|stage| stage.positions.len()).collect();
    let schedule = (replicas.len() > 1 && microbatches > 1).then_some(schedule);
    (replicas, microbatches, schedule)
}

fn time_to_beat_us(known: Option<&Solution>) -> f64 {
    known.map_or(f64::INFINITY, |known| known.found.step_us * BETTER)
}

fn better(known: Option<Solution>, found: Option<Solution>) -> Option<Solution> {
    match found {
        Some(found) if found.found.step_us < time_to_beat_us(known.as_ref()) => Some(found),
        _ => known,
    }
}
