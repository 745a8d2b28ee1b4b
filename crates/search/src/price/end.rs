//! The end of a step: the gradient reduction that shows, and the optimizer.

use std::ops::Range;

use rannc_cost::{RankGroup, update_us};
use rannc_plan::{BUCKET_BYTES, Sharding};

use super::at::{At, Pricing, Problem};
use super::place::Place;
use super::saver::Saver;
use super::step::PassCost;

/// What a Stage does once a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct End {
    /// Reduction of the gradients of its own parameters that the backward does not hide, and what it costs the backward.
    pub(crate) reduce_us: f64,
    /// At least this for those that other Stages hold too, after all backwards.
    pub(crate) tied_us: f64,
    /// The optimizer.
    pub(crate) update_us: f64,
}

impl End {
    pub(crate) fn us(&self) -> f64 {
        self.reduce_us + self.tied_us + self.update_us
    }
}

/// The smallest group that gradients of several Stages can be summed over.
const TWO: RankGroup = RankGroup { members: 2, nodes: 1, least_per_node: 2, level: 0 };

impl Pricing<'_> {
    /// Gradient reduction and optimizer. Sharded parameters and gradients also travel with every
    /// microbatch, beside its computation. Of the passes, the last one is of the last microbatch.
    pub(super) fn end(&self, run: &Range<usize>, at: &At<'_>, saver: Saver, passes: &mut [PassCost]) -> End {
        let (cluster, place) = (self.problem.cluster, at.place);
        let all_bytes = self.chain.message_bytes.at(run.start, run.end);
        let bytes = self.chain.own_bytes.at(run.start, run.end);
        let mut reduction_us = cluster.all_reduce_us(place.group, bytes);
        let mut gather_us = 0.0;
        if saver.sharding > Sharding::None {
            reduction_us = cluster.reduce_scatter_us(place.group, bytes);
            gather_us = cluster.all_gather_us(place.group, bytes);
        }
        if saver.sharding >= Sharding::Gradients && self.step.microbatches > 1 {
            passes.iter_mut().for_each(|pass| pass.backward_us = pass.backward_us.max(reduction_us));
        }
        if saver.sharding == Sharding::Params {
            for pass in &mut *passes {
                pass.forward_us = pass.forward_us.max(gather_us);
                pass.backward_us = pass.backward_us.max(gather_us + reduction_us);
            }
            gather_us = 0.0;
        }
        // Buckets are reduced while the last backward runs; only the last one must wait for its end.
        let last_backward_us = passes.last().map_or(0.0, |pass| pass.backward_us);
        let last_us = if bytes > 0.0 { reduction_us * (BUCKET_BYTES as f64 / bytes).min(1.0) } else { 0.0 };
        let exposed_us = (reduction_us - last_backward_us).max(last_us);
        let reduce_us = exposed_us + self.collective_slowdown(at.place) * (reduction_us - exposed_us);
        // Less than a byte is what rounding leaves of nothing.
        let tied_bytes = if all_bytes - bytes < 1.0 { 0.0 } else { all_bytes - bytes };
        End {
            reduce_us,
            tied_us: cluster.all_reduce_us(TWO, tied_bytes),
            update_us: gather_us + self.update_us(self.chain.trainable_bytes.at(run.start, run.end), at, saver),
        }
    }

    /// The largest of the place's devices.
    fn collective_slowdown(&self, place: &Place) -> f64 {
        let Problem { cluster, measured, .. } = self.problem;
        let of_kind = |kind: usize| {
            let measured = measured[kind].as_ref().and_then(|measured| measured.collective_slowdown);
            measured.unwrap_or(cluster.kinds[kind].collective_slowdown)
        };
        place.kinds().map(of_kind).fold(0.0, f64::max)
    }

    fn update_us(&self, trainable_bytes: f64, at: &At<'_>, saver: Saver) -> f64 {
        let share = if saver.sharding > Sharding::None { f64::from(at.place.replicas) } else { 1.0 };
        let bytes = trainable_bytes / share;
        let state_bytes = bytes * self.problem.settings.optimizer_bytes_per_param_byte;
        let Problem { cluster, measured, .. } = self.problem;
        let on = |kind: usize| {
            let device = &cluster.kinds[kind];
            let measured = measured[kind].as_ref().and_then(|measured| measured.update_us_per_byte);
            let update_us = measured.map_or_else(|| update_us(device, bytes, state_bytes), |each_us| each_us * bytes);
            // The state comes from the host and goes back.
            let travel_us = 2.0 * state_bytes / device.host_bytes_per_s * 1e6;
            if saver.offload { update_us.max(travel_us) } else { update_us }
        };
        at.place.kinds().map(on).fold(0.0, f64::max)
    }
}
