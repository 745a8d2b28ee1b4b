//! What each Replica of a Stage takes for its own rows.

use std::collections::BTreeMap;
use std::ops::Range;

use rannc_plan::{Compute, Interval, Sharding, split_even};

use super::again::Repeated;
use super::at::Pricing;
use super::end::End;
use super::place::Place;
use super::sizes::{BySize, LARGER};

/// The Replicas of a Stage: all that says how long each computes.
#[derive(Clone, Debug)]
pub(crate) struct Replicas<'a> {
    pub(crate) run: Range<usize>,
    pub(crate) place: &'a Place,
    pub(crate) sharding: Sharding,
    pub(crate) again: Repeated,
    /// True when backwards may come in two parts.
    pub(crate) splits_backward: bool,
}

/// What a Replica takes for its rows of a microbatch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct ReplicaPass {
    pub(crate) forward_us: f64,
    pub(crate) backward_us: f64,
    /// The two parts of the backward, where it may come in two. Both together take longer where Ops run twice.
    pub(crate) parts_us: [f64; 2],
}

impl ReplicaPass {
    /// Forward and whole backward.
    pub(super) fn whole_us(&self) -> f64 {
        self.forward_us + self.backward_us
    }

    /// One of its computations.
    pub(crate) fn us(&self, compute: Compute) -> f64 {
        let [input_us, weight_us] = self.parts_us;
        match compute {
            Compute::Forward(_) => self.forward_us,
            Compute::Backward(_) => self.backward_us,
            Compute::BackwardInput(_) => input_us,
            Compute::BackwardWeight(_) => weight_us,
        }
    }
}

/// A Stage, Replica by Replica.
#[derive(Clone, Debug)]
pub(crate) struct TimedStage {
    pub(crate) end: End,
    /// By Replica; the first one has the most rows of every microbatch.
    pub(crate) passes: Vec<BySize<ReplicaPass>>,
}

impl TimedStage {
    pub(super) fn replicas(&self) -> u32 {
        u32::try_from(self.passes.len()).expect("as many as a cluster may have")
    }

    /// The Replica with the most rows.
    pub(crate) fn largest(&self) -> BySize<ReplicaPass> {
        self.passes[0]
    }
}

impl Pricing<'_> {
    /// What a Replica takes for so many rows.
    pub(crate) fn replica_pass(&self, replicas: &Replicas<'_>, rows: u64) -> ReplicaPass {
        let &Replicas { ref run, place, sharding, again, splits_backward } = replicas;
        let at = self.at_own_rows(place, rows);
        let mut passes = [self.pass(run, &at, LARGER)];
        passes.iter_mut().for_each(|pass| again.add_to(pass));
        self.share_out(run, &at, sharding, &mut passes);
        let [pass] = passes;
        let shares = if splits_backward { self.backward_shares(run, &at) } else { [1.0, 0.0] };
        ReplicaPass {
            forward_us: pass.forward_us,
            backward_us: pass.backward_us,
            parts_us: shares.map(|share| pass.backward_us * share),
        }
    }

    /// All Replicas of a Stage with this end.
    pub(crate) fn timed(&self, replicas: &Replicas<'_>, end: End) -> TimedStage {
        let count = replicas.place.replicas as usize;
        let rows: BySize<Vec<Interval>> = self.sizes.rows.map(|rows| split_even(rows, count));
        // A Replica without rows computes nothing.
        let mut known = BTreeMap::from([(0, ReplicaPass::default())]);
        let mut pass = |rows: u64| *known.entry(rows).or_insert_with(|| self.replica_pass(replicas, rows));
        let passes = (0..count).map(|replica| rows.each_ref().map(|of_size| pass(of_size[replica].rows())));
        TimedStage { end, passes: passes.collect() }
    }
}
