//! Of Plans that differ by less than predictions may be off, the simplest.

use std::fmt;

use rannc_cost::counted;
use rannc_plan::{Plan, Schedule, ScheduleKind};
use serde::Serialize;

use crate::solve::Solution;

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
        (faster > 0.0).then(|| Self {
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

/// Of Schedules that may be used, the one that holds fewer microbatches than a given one, if there is one.
pub(super) fn leaner(usable: Vec<ScheduleKind>, than: ScheduleKind) -> Option<ScheduleKind> {
    (than == ScheduleKind::FillDrain)
        .then_some(ScheduleKind::OneForwardOneBackward)
        .filter(|schedule| usable.contains(schedule))
}
