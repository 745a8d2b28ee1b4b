//! What moves between the Replicas of a division.

use std::collections::BTreeMap;

use rannc_plan::{Overlap, Schedule, depths, overlaps, split_even};

use super::tied::{TiedSum, tied_sums};
use crate::chain::{CrossingSpec, StateSpec};
use crate::price::{Pricing, RankOrder};
use crate::solve::FoundStage;

/// What one Replica sends to one of a later Stage for a microbatch, and gets back. Replicas are counted through
/// the Stages.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ReplicaLink {
    pub(crate) from: usize,
    pub(crate) to: usize,
    pub(crate) values_us: f64,
    /// `None` when no gradient comes back.
    pub(crate) grads_us: Option<f64>,
}

/// Finds the links of a division.
pub(crate) struct Linker<'a> {
    pub(crate) crossings: &'a [CrossingSpec],
    pub(crate) states: &'a [StateSpec],
    pub(crate) order: &'a RankOrder,
    pub(crate) pricing: &'a Pricing<'a>,
    pub(crate) stages: &'a [FoundStage],
}

impl Linker<'_> {
    /// The sums of gradients that several Stages hold.
    pub(crate) fn tied_sums(&self) -> Vec<TiedSum> {
        tied_sums(self.states, self.stages, self.order, self.pricing.problem.cluster)
    }

    /// By Stage, the number of Stages on the longest way from it to one that feeds no other, both included.
    fn depths(&self) -> Vec<u32> {
        depths(self.stages.len(), self.crossings().into_keys())
    }

    /// By Stage, the microbatches that it holds under a Schedule.
    pub(crate) fn held(&self, schedule: &Schedule) -> Vec<u64> {
        let microbatches = u32::try_from(self.pricing.step.microbatches).unwrap_or(u32::MAX);
        let depths = self.depths().into_iter().enumerate();
        depths.map(|(stage, depth)| schedule.order(stage, depth, microbatches).in_flight()).collect()
    }

    /// The links, by the Stage of the sender, then that of the receiver.
    pub(crate) fn links(&self) -> Vec<ReplicaLink> {
        let stages = |(&(from, to), values): (&(usize, usize), &Vec<_>)| self.stage_links(from, to, values);
        self.crossings().iter().flat_map(stages).collect()
    }

    /// What goes from which Stage to which.
    fn crossings(&self) -> BTreeMap<(usize, usize), Vec<&CrossingSpec>> {
        let stage_of = |block: usize| self.stages.partition_point(|stage| stage.run.end <= block);
        let mut crossings: BTreeMap<(usize, usize), Vec<&CrossingSpec>> = BTreeMap::new();
        for crossing in self.crossings {
            let from = stage_of(crossing.made_by);
            let mut to: Vec<usize> = crossing.used_by.iter().map(|&block| stage_of(block)).collect();
            to.dedup();
            for to in to.into_iter().filter(|&to| to != from) {
                crossings.entry((from, to)).or_default().push(crossing);
            }
        }
        crossings
    }

    /// A message takes as long as one with all that the Replica with more rows exchanges with the other Stage.
    fn stage_links(&self, from: usize, to: usize, values: &[&CrossingSpec]) -> Vec<ReplicaLink> {
        let [(first_sender, senders), (first_receiver, receivers)] = [from, to].map(|stage| self.replicas(stage));
        let rows = self.pricing.replica_rows(1);
        let [sender_rows, receiver_rows] = [senders, receivers].map(|ranks| split_even(rows, ranks.len()));
        let cluster = self.pricing.problem.cluster;
        let has_grads = values.iter().any(|value| value.requires_grad);
        let link = |overlap: Overlap| {
            let Overlap { from, to, .. } = overlap;
            let rows = sender_rows[from].rows().max(receiver_rows[to].rows());
            let level = cluster.level_between(senders[from], receivers[to]);
            let send_us = |all: bool| {
                let sent = values.iter().filter(|value| all || value.requires_grad);
                cluster.send_us(level, sent.map(|value| value.bytes.at(rows)).sum())
            };
            let (from, to) = (first_sender + from, first_receiver + to);
            ReplicaLink { from, to, values_us: send_us(true), grads_us: has_grads.then(|| send_us(false)) }
        };
        overlaps(&sender_rows, &receiver_rows).into_iter().map(link).collect()
    }

    /// The number of a Stage's first Replica, and the ranks of all of them.
    fn replicas(&self, stage: usize) -> (usize, &[u32]) {
        let positions = &self.stages[stage].positions;
        ((positions.start - self.stages[0].positions.start) as usize, self.order.ranks(positions.clone()))
    }
}
