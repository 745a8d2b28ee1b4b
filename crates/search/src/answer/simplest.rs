//! Of Plans that differ by less than predictions may be off, the simplest.

use std::fmt;

use rannc_cost::counted;
use rannc_plan::{Plan, Schedule, ScheduleKind};
use serde::Serialize;

use crate::price::{Pricing, RankOrder, Saver, StageCost, StepTime};
use crate::solve::{Entry, FoundStage, Solution};

/// Plans that only differ in what Replicas divide are told apart by this part of what predictions may be off: the rest is
/// common to them.
const OF_THEIRS: f64 = 0.25;
/// A step that devices would end sooner takes as long as its host, replayed or not, which needs more where Replicas divide
/// what they hold: replayed, with 20 parameters, on a host with two H200, 2.9 ms without a division and 4.8 with one.
pub(crate) const HOST_US: f64 = 2_500.0;
/// What a prediction from measured times may be off by: what differs by less is equally good.
pub(super) const MEASURED_ERROR: f64 = 0.02;
/// The same of a prediction from the roofline.
pub(super) const ESTIMATED_ERROR: f64 = 0.05;

/// A Plan that was not taken, because it is less simple than one that is about as fast.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PassedOver {
    /// Its step.
    pub step_us: f64,
    /// How much less that is than the step of the Plan that was taken, as a share of it.
    pub faster: f64,
    /// Replicas of its Stages.
    pub replicas: Vec<usize>,
    /// Its microbatches.
    pub microbatches: u32,
    /// Its Schedule.
    pub schedule: Schedule,
}

impl fmt::Display for PassedOver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let replicas: Vec<String> = self.replicas.iter().map(ToString::to_string).collect();
        write!(
            f,
            "a plan of {} ({} replicas) with {}, {}, should be {:.1}% faster, which is less than predictions may be off: \
             the simpler one is taken",
            counted(self.replicas.len() as u64, "stage", "stages"),
            replicas.join(" + "),
            counted(u64::from(self.microbatches), "microbatch", "microbatches"),
            self.schedule,
            self.faster * 100.0
        )
    }
}

impl PassedOver {
    /// The Plan that was found fastest, if a slower one was taken.
    pub(super) fn new(fastest: &Plan, taken: &Plan) -> Option<Self> {
        let faster = 1.0 - fastest.predicted.step_us / taken.predicted.step_us;
        let shape = |plan: &Plan| {
            let ranks = plan.stages.iter().map(|stage| stage.ranks.len());
            (ranks.collect::<Vec<_>>(), plan.microbatches, plan.schedule.clone())
        };
        (faster > 0.0 && shape(fastest) != shape(taken)).then(|| Self {
            step_us: fastest.predicted.step_us,
            faster,
            replicas: fastest.stages.iter().map(|stage| stage.ranks.len()).collect(),
            microbatches: fastest.microbatches,
            schedule: fastest.schedule.clone(),
        })
    }
}

/// Fewer Stages, then fewer microbatches, then more equal Stages; then what is told faster.
pub(super) fn is_simpler(one: &Solution, other: &Solution) -> bool {
    let key = |solution: &Solution| {
        let replicas = solution.found.stages.iter().map(|stage| stage.positions.len());
        let uneven = replicas.clone().max().unwrap_or(0) - replicas.clone().min().unwrap_or(0);
        (replicas.count(), solution.case.microbatches, uneven)
    };
    key(one) < key(other)
}

/// Up to which step a division is as fast as another one that is about so fast.
pub(super) fn as_fast_us(limit_us: f64) -> f64 {
    limit_us.max(HOST_US)
}

/// The same division where Replicas divide as little as they may, as long as it is about as fast by the formula.
pub(super) fn dividing_less(pricing: &Pricing<'_>, order: &RankOrder, division: &Solution, error: f64) -> Solution {
    let ends: Vec<usize> = division.found.stages.iter().map(|stage| stage.run.end).collect();
    let (count, depths) = (ends.len(), pricing.chain.feeds.depths(&ends));
    let savers = &pricing.problem.settings.savers;
    let priced = |place: usize, saver: Saver| {
        let FoundStage { run, positions, .. } = &division.found.stages[place];
        let at = pricing.at(order.place_at(positions));
        let workspace_bytes = pricing.run_workspace_bytes(run.clone(), &at);
        let entry = Entry::new(pricing, run.clone(), &at, saver, workspace_bytes);
        let fits =
            saver.may_be_at(at.place, savers) && entry.max_in_flight >= pricing.step.in_flight(depths[place] as usize);
        fits.then_some(entry.cost)
    };
    let step_us = |costs: &[StageCost]| {
        let prepend = |time, (cost, &depth): (&StageCost, &u32)| pricing.step.prepend(time, cost, depth as usize);
        pricing.step.step_us(costs.iter().zip(&depths).rev().fold(StepTime::default(), prepend))
    };
    let mut less = division.clone();
    let known: Option<Vec<StageCost>> = (0..count).map(|place| priced(place, less.found.stages[place].saver)).collect();
    let Some(mut costs) = known else { return less };
    let limit_us = as_fast_us(step_us(&costs) * (1.0 + error * OF_THEIRS));
    for place in 0..count {
        let saver = less.found.stages[place].saver;
        for lower in Saver::all(savers, &[]).into_iter().filter(|other| other.sharding < saver.sharding) {
            let lower = Saver { sharding: lower.sharding, ..saver };
            let Some(cost) = priced(place, lower) else { continue };
            let before = std::mem::replace(&mut costs[place], cost);
            if step_us(&costs) <= limit_us {
                less.found.stages[place].saver = lower;
                break;
            }
            costs[place] = before;
        }
    }
    less.found.step_us = step_us(&costs);
    less
}

/// Of Schedules that may be used, the one that holds fewer microbatches than a given one, if there is one.
pub(super) fn leaner(usable: Vec<ScheduleKind>, than: ScheduleKind) -> Option<ScheduleKind> {
    (than == ScheduleKind::FillDrain)
        .then_some(ScheduleKind::OneForwardOneBackward)
        .filter(|schedule| usable.contains(schedule))
}
