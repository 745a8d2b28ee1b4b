//! The end of a step: the gradient reduction that shows, the optimizer, and working copies.

use std::ops::Range;

use rannc_cost::{RankGroup, update_us};
use rannc_plan::Sharding;

use super::at::{At, Pricing, Problem};
use super::saver::Saver;
use super::sharding::Collectives;
use super::step::PassCost;
use crate::chain::IntervalSums;

/// What a Stage does at the end of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct End {
    /// What its Replicas divide of its own parameters.
    pub(crate) divides: Sharding,
    /// Reduction of the gradients of its own parameters that the backward does not hide, and what it costs the backward.
    /// Where gradients are divided, behind the backward of every microbatch.
    pub(crate) reduce_us: f64,
    /// At least this for those that other Stages hold too, after all backwards.
    pub(crate) tied_us: f64,
    /// The optimizer, the collectives that make its parameters whole until the next one, as far as they show, and working
    /// copies.
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
    /// Gradient reduction and optimizer, with the first microbatch's pass and the last one's.
    pub(super) fn end(&self, run: &Range<usize>, at: &At<'_>, saver: Saver, [first, last]: [&PassCost; 2]) -> End {
        let cluster = self.problem.cluster;
        let sharding = at.place.divides(saver.sharding);
        let Collectives { reduction_us, last_us, each_microbatch } = self.collectives(run, at, sharding);
        // Buckets are reduced while the last backward runs; only the last one must wait for its end. Where each
        // microbatch's are, the passes know of the others.
        let exposed_us = (reduction_us - last.backward_us).max(last_us);
        let reduce_us =
            if each_microbatch { last_us } else { exposed_us + at.collective_slowdown * (reduction_us - exposed_us) };
        let bytes = |sums: &IntervalSums| sums.at(run.start, run.end);
        // Less than a byte is what rounding leaves of nothing.
        let rest = |all_bytes: f64, bytes: f64| if all_bytes - bytes < 1.0 { 0.0 } else { all_bytes - bytes };
        let own = &self.chain.own;
        let tied_bytes = rest(bytes(&self.chain.message_bytes), bytes(&own.message_bytes));
        // Parameters that Replicas have whole, and update in parts.
        let gathered_bytes = match sharding {
            Sharding::None => 0.0,
            Sharding::Optimizer | Sharding::Gradients => bytes(&own.bytes),
            Sharding::KeptParams | Sharding::Params => rest(bytes(&own.bytes), bytes(&own.spanned_bytes)),
        };
        let divides = match sharding {
            _ if bytes(&own.message_bytes) <= 0.0 => Sharding::None,
            _ if sharding.divides_params() && bytes(&own.spanned_bytes) <= 0.0 => Sharding::Gradients,
            sharding => sharding,
        };
        let kept_us = if divides == Sharding::KeptParams { self.kept_gathers_us(run, at, first) } else { 0.0 };
        End {
            divides,
            reduce_us,
            tied_us: cluster.all_reduce_us(TWO, tied_bytes),
            update_us: at.collective.all_gather_us(gathered_bytes)
                + kept_us
                + self.update_us(run, at, Saver { sharding, ..saver }),
        }
    }

    /// The optimizer of a Replica's part, and the working copies of what is not gathered.
    fn update_us(&self, run: &Range<usize>, at: &At<'_>, saver: Saver) -> f64 {
        let part = if saver.sharding == Sharding::None { 1.0 } else { 1.0 / f64::from(at.place.replicas) };
        let own_bytes = self.chain.own.bytes.at(run.start, run.end);
        let tied_bytes = (self.chain.trainable_bytes.at(run.start, run.end) - own_bytes).max(0.0);
        let bytes = tied_bytes + own_bytes * part;
        let state_bytes = bytes * self.problem.settings.optimizer_bytes_per_param_byte;
        let Problem { cluster, measured, .. } = self.problem;
        let on = |kind: usize| {
            let device = &cluster.kinds[kind];
            let measured = measured[kind].as_ref().and_then(|measured| measured.update_us_per_byte);
            let update_us = measured.map_or_else(|| update_us(device, bytes, state_bytes), |each_us| each_us * bytes);
            // The state comes from the host and goes back.
            let travel_us = 2.0 * state_bytes / device.host_bytes_per_s * 1e6;
            let update_us = if saver.offload { update_us.max(travel_us) } else { update_us };
            let gathered_us =
                if saver.sharding.divides_params() { self.gathered_conversion_us(kind, run) } else { 0.0 };
            update_us + self.chain.conversion_us(kind, run) - gathered_us
        };
        at.place.kinds().map(on).fold(0.0, f64::max)
    }
}
