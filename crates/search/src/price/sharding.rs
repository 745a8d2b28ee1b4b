//! What Replicas send each other because each holds a part of gradients or parameters (Rajbhandari et al., ZeRO, 2020).

use std::ops::Range;

use rannc_plan::Sharding;

use super::at::{At, Pricing};
use super::place::Place;
use super::step::PassCost;

/// Times of a Stage's collectives over its Replicas.
#[derive(Clone, Copy, Debug)]
pub(super) struct Collectives {
    /// Sums all gradients of its own parameters.
    pub(super) reduction_us: f64,
    /// The last of these sums, which nothing of a backward hides.
    pub(super) last_us: f64,
    /// True when each microbatch's gradients are summed beside its backward.
    pub(super) each_microbatch: bool,
}

impl Place {
    /// What its Replicas divide where they are asked to: one alone has no other.
    pub(super) fn divides(&self, sharding: Sharding) -> Sharding {
        if self.replicas > 1 { sharding } else { Sharding::None }
    }
}

/// A computation with collectives beside it, which slow it down by a share of the time that is hidden.
fn beside(compute_us: f64, collectives_us: f64, slowdown: f64) -> f64 {
    compute_us.max(collectives_us) + slowdown * compute_us.min(collectives_us)
}

impl Pricing<'_> {
    /// How gradients of a run's own parameters are summed.
    pub(super) fn collectives(&self, run: &Range<usize>, at: &At<'_>, sharding: Sharding) -> Collectives {
        let (collective, own) = (&at.collective, &self.chain.own);
        let bytes = own.message_bytes.at(run.start, run.end);
        // A bucket takes parameters whole.
        let last_bucket_bytes = || bytes.min(own.last_message_bytes(run).max(at.bucket_bytes(sharding) as f64));
        match at.place.divides(sharding) {
            Sharding::None | Sharding::Optimizer => {
                let reduction_us = collective.all_reduce_us(bytes);
                Collectives {
                    reduction_us,
                    last_us: collective.all_reduce_us(last_bucket_bytes()),
                    each_microbatch: false,
                }
            }
            Sharding::Gradients => {
                let reduction_us = collective.reduce_scatter_us(bytes);
                let each_microbatch = self.step.microbatches > 1;
                Collectives {
                    reduction_us,
                    last_us: collective.reduce_scatter_us(last_bucket_bytes()),
                    each_microbatch,
                }
            }
            Sharding::KeptParams | Sharding::Params => {
                let spans = own.spans(run) as f64;
                let reduction_us = spans * collective.reduce_scatter_us(bytes / spans);
                let last_bytes = own.largest_summed.at(run.start, run.end).min(bytes);
                let last_us = collective.reduce_scatter_us(last_bytes);
                Collectives { reduction_us, last_us, each_microbatch: true }
            }
        }
    }

    /// Adds to forward and backward what happens beside them for every microbatch: all but its last sum, which starts
    /// when the backward has ended.
    pub(super) fn share_out(&self, run: &Range<usize>, at: &At<'_>, sharding: Sharding, passes: &mut [PassCost]) {
        let sharding = at.place.divides(sharding);
        if sharding < Sharding::Gradients {
            return;
        }
        let Collectives { reduction_us, last_us, each_microbatch } = self.collectives(run, at, sharding);
        let (first_us, others_us) = if sharding == Sharding::Params { self.gathers_us(run, at) } else { (0.0, 0.0) };
        let slowdown = at.collective_slowdown;
        let sums_us = if each_microbatch { (reduction_us - last_us).max(0.0) } else { 0.0 };
        for pass in passes {
            pass.forward_us = first_us + beside(pass.forward_us, others_us, slowdown);
            pass.backward_us = first_us + beside(pass.backward_us, others_us + sums_us, slowdown);
        }
    }

    /// What it adds to a step to make parameters whole that stay so: beside the first forward, and where they go before the
    /// backwards come, beside the first of these.
    pub(super) fn kept_gathers_us(&self, run: &Range<usize>, at: &At<'_>, first: &PassCost) -> f64 {
        let (first_us, others_us) = self.gathers_us(run, at);
        let more_us = |pass_us: f64| first_us + beside(pass_us, others_us, at.collective_slowdown) - pass_us;
        let again_us = if self.problem.settings.loss_inside { 0.0 } else { more_us(first.backward_us) };
        more_us(first.forward_us) + again_us
    }

    /// Time to make the parameters of all Spans whole: of the first one, which nothing hides, with what it takes to convert
    /// the Replicas' parts, and of the others. Where Spans are of different sizes, the first one is taken to be the largest.
    fn gathers_us(&self, run: &Range<usize>, at: &At<'_>) -> (f64, f64) {
        let (collective, own) = (&at.collective, &self.chain.own);
        let bytes = own.gathered_bytes.at(run.start, run.end);
        let spans = own.spans(run) as f64;
        let all_us = spans * collective.all_gather_us(bytes / spans);
        let first_us = collective.all_gather_us(own.largest_gathered.at(run.start, run.end).min(bytes));
        let conversions_us = at.place.kinds().map(|kind| self.gathered_conversion_us(kind, run)).fold(0.0, f64::max);
        let part_us = conversions_us / f64::from(at.place.replicas);
        (first_us + part_us, (all_us - first_us).max(0.0))
    }

    /// Time to make working copies of all that may be gathered.
    pub(super) fn gathered_conversion_us(&self, kind: usize, run: &Range<usize>) -> f64 {
        let all_bytes = self.chain.copy_bytes.at(run.start, run.end);
        let gathered_bytes = self.chain.own.spanned_copy_bytes.at(run.start, run.end);
        let share = if all_bytes > 0.0 { (gathered_bytes / all_bytes).min(1.0) } else { 0.0 };
        self.chain.conversion_us(kind, run) * share
    }
}
