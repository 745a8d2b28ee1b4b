//! How long a run of Blocks computes.

use rannc_cost::{ComputeCost, Device};
use std::ops::Range;

use super::at::{At, DeviceTimes, Pricing};
use super::sizes::{LARGER, SMALLER};
use super::step::StageCost;

/// Forward and backward of a run, for one microbatch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct RunTime {
    pub(super) forward_us: f64,
    pub(super) backward_us: f64,
}

impl RunTime {
    /// What takes `cost` on a device. A host that starts what its device computes runs ahead of it, so that over many
    /// microbatches the slower of them counts; the device then waits in proportion to the work of the host. What is
    /// replayed waits for no host.
    fn new(cost: ComputeCost, device: &Device, replays: bool) -> Self {
        let ComputeCost { forward_us, backward_us, forward_host_us, backward_host_us } = cost;
        if device.host {
            let action_us = device.action_us;
            return Self { forward_us: forward_us + action_us, backward_us: backward_us + action_us };
        }
        if replays {
            return Self { forward_us, backward_us };
        }
        let forward_host_us = forward_host_us + device.action_us;
        let host_us = forward_host_us + backward_host_us + device.action_us;
        let waiting_us = host_us - (forward_us + backward_us);
        if waiting_us <= 0.0 {
            return Self { forward_us, backward_us };
        }
        let forward_waiting_us = waiting_us * (forward_host_us / host_us);
        Self { forward_us: forward_us + forward_waiting_us, backward_us: backward_us + waiting_us - forward_waiting_us }
    }
}

impl Pricing<'_> {
    /// Forward and backward of a run for a microbatch of some size, on the slowest device of a place.
    pub(super) fn compute(&self, run: &Range<usize>, at: &At<'_>, size: usize) -> RunTime {
        let microbatches = self.sizes.counts.iter().sum();
        let replays = self.problem.settings.replays;
        let on = |device: &DeviceTimes<'_>| {
            let mut cost = self.chain.run_cost(&device.times[size], run.start, run.end, microbatches);
            let longer = self.beside_messages(run, device.message_slowdown);
            cost.forward_us *= longer;
            cost.backward_us *= longer;
            RunTime::new(cost, device.device, replays)
        };
        at.devices.iter().map(on).fold(RunTime::default(), |slowest, time| RunTime {
            forward_us: slowest.forward_us.max(time.forward_us),
            backward_us: slowest.backward_us.max(time.backward_us),
        })
    }

    /// How many times longer a run computes where some message is under way nearly always: receives begin one computation
    /// ahead, and wait. The whole model has none.
    fn beside_messages(&self, run: &Range<usize>, slowdown: f64) -> f64 {
        if run.len() < self.chain.len() { 1.0 + slowdown } else { 1.0 }
    }

    /// The same for what it computes again; on the device that has most of it.
    pub(crate) fn again_beside_messages(&self, run: &Range<usize>, at: &At<'_>) -> f64 {
        self.beside_messages(run, at.devices.iter().map(|device| device.message_slowdown).fold(0.0, f64::max))
    }

    /// What the computation of a Stage takes at least in a step, if its run begins no later than that of one that takes
    /// `cost`: the longest run is all of the model, and has no messages beside it.
    pub(crate) fn least_of_longer_us(&self, cost: &StageCost) -> f64 {
        self.step.busy_us(cost) / (1.0 + self.most_message_slowdown)
    }

    /// A Block adds at least this to the computation of any Stage in a step.
    pub(crate) fn least_busy_us(&self, block: usize, at: &At<'_>) -> f64 {
        let on = |device: &DeviceTimes<'_>| {
            let of_size = |size: usize| {
                let ComputeCost { forward_us, backward_us, .. } = device.times[size].blocks(block, block + 1);
                forward_us + backward_us
            };
            self.step.sum_us(of_size(LARGER), of_size(SMALLER))
        };
        at.devices.iter().map(on).reduce(f64::min).unwrap_or(0.0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rannc_cost::Cluster;

    use super::*;

    fn device(host: bool, action_us: f64) -> Device {
        let mut cluster = Cluster::preset("H200", 1, 1).expect("a preset");
        Device { host, action_us, ..cluster.kinds.remove(0) }
    }

    proptest! {
        #[test]
        fn the_slower_of_device_and_host_counts(us in prop::array::uniform4(0.0..1e4_f64), action_us in 1.0..1e3_f64) {
            let [forward_us, backward_us, forward_host_us, backward_host_us] = us;
            let cost = ComputeCost { forward_us, backward_us, forward_host_us, backward_host_us };
            let time = RunTime::new(cost, &device(false, action_us), false);
            let replayed = RunTime::new(cost, &device(false, action_us), true);
            prop_assert_eq!(replayed, RunTime { forward_us, backward_us });
            let slower_us = (forward_us + backward_us).max(forward_host_us + backward_host_us + 2.0 * action_us);
            prop_assert!((time.forward_us + time.backward_us - slower_us).abs() <= 1e-9 * slower_us);
            prop_assert!(time.forward_us >= forward_us && time.backward_us >= backward_us);
        }
    }

    #[test]
    fn a_host_that_computes_itself_adds_its_actions() {
        let cost = ComputeCost { forward_us: 10.0, backward_us: 20.0, ..ComputeCost::default() };
        assert_eq!(RunTime::new(cost, &device(true, 3.0), true), RunTime { forward_us: 13.0, backward_us: 23.0 });
    }
}
