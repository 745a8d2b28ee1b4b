//! What it costs to run backwards in two parts.

use std::ops::Range;

use super::at::{At, DeviceTimes, Pricing};
use crate::chain::PartTimes;

/// A backward in two parts, beside the whole one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct BackwardParts {
    /// Time of the first part, by that of the whole.
    pub(crate) input: f64,
    /// Time of the second part, by that of the whole. Both together are more than 1 where Ops run twice.
    pub(crate) weight: f64,
    /// Memory between them for each microbatch, beside what is kept anyway.
    pub(crate) waiting_bytes: f64,
}

impl Default for BackwardParts {
    fn default() -> Self {
        Self { input: 1.0, weight: 0.0, waiting_bytes: 0.0 }
    }
}

impl Pricing<'_> {
    /// The two parts of the backward of a run, on the device where they take longest.
    pub(crate) fn backward_parts(&self, run: &Range<usize>, at: &At<'_>) -> BackwardParts {
        let rows = at.most_rows();
        let parts = BackwardParts { waiting_bytes: self.chain.waiting_bytes(run, rows), ..BackwardParts::default() };
        let on = |(DeviceTimes { device, .. }, kind): (&DeviceTimes<'_>, usize)| {
            let PartTimes { whole_us, input_us, weight_us } =
                self.chain.part_times(run, device, self.problem.measured[kind].as_ref(), rows);
            // A host that computes itself begins each part anew.
            let begun_us = if device.host { device.action_us } else { 0.0 };
            let share = |us: f64| (us + begun_us) / (whole_us + begun_us).max(f64::MIN_POSITIVE);
            (whole_us > 0.0).then(|| (share(input_us), share(weight_us)))
        };
        let shares: Vec<(f64, f64)> = at.devices.iter().zip(at.place.kinds()).filter_map(on).collect();
        let most = shares.into_iter().reduce(|most, next| (most.0.max(next.0), most.1.max(next.1)));
        most.map_or(parts, |(input, weight)| BackwardParts { input, weight, ..parts })
    }
}
