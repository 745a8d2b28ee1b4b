//! What moves between the Replicas of a division.

use std::collections::BTreeMap;

use rannc_plan::{Overlap, overlaps, split_even};

use crate::chain::CrossingSpec;
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
    pub(crate) order: &'a RankOrder,
    pub(crate) pricing: &'a Pricing<'a>,
    pub(crate) stages: &'a [FoundStage],
}

impl Linker<'_> {
    /// The links, by the Stage of the sender, then that of the receiver.
    pub(crate) fn links(&self) -> Vec<ReplicaLink> {
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
        let stages = |(&(from, to), values): (&(usize, usize), &Vec<_>)| self.stage_links(from, to, values);
        crossings.iter().flat_map(stages).collect()
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
