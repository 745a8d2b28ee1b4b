//! What it costs to run backwards in two parts.

use std::ops::Range;

use super::at::{At, DeviceTimes, Pricing};
use crate::chain::PartTimes;

impl Pricing<'_> {
    /// The times of the two parts of the backward of a run, by that of the whole, on the device where they take longest.
    /// Both together are more than 1 where Ops run twice.
    pub(super) fn backward_shares(&self, run: &Range<usize>, at: &At<'_>) -> [f64; 2] {
        let rows = at.most_rows();
        let on = |(DeviceTimes { device, .. }, kind): (&DeviceTimes<'_>, usize)| {
            let PartTimes { whole_us, input_us, weight_us } =
                self.chain.part_times(run, device, self.problem.measured[kind].as_ref(), rows);
            // A host that computes itself begins each part anew.
            let begun_us = if device.host { device.action_us } else { 0.0 };
            let share = |us: f64| (us + begun_us) / (whole_us + begun_us).max(f64::MIN_POSITIVE);
            (whole_us > 0.0).then(|| [share(input_us), share(weight_us)])
        };
        let shares = at.devices.iter().zip(at.place.kinds()).filter_map(on);
        let most = shares.reduce(|most, next| [most[0].max(next[0]), most[1].max(next[1])]);
        most.unwrap_or([1.0, 0.0])
    }
}
