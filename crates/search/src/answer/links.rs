//! What moves between the Replicas of a division.

use std::collections::BTreeMap;

use rannc_plan::{Order, Overlap, Schedule, overlaps, split_even};

use super::batch_exchanges::{BatchExchange, batch_exchanges};
use super::tied::{TiedSum, tied_sums};
use crate::chain::{BatchSpec, CrossingSpec, StateSpec};
use crate::price::{BySize, GRADS_ON_THE_WAY, Pricing, RankOrder};
use crate::solve::FoundStage;

/// What one Replica sends to one of a later Stage for a microbatch, and gets back. Replicas are counted through
/// the Stages.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ReplicaLink {
    pub(crate) from: usize,
    pub(crate) to: usize,
    /// `None` where they have no rows of a microbatch in common.
    pub(crate) values_us: BySize<Option<f64>>,
    /// `None` where no gradient comes back.
    pub(crate) grads_us: BySize<Option<f64>>,
}

/// Finds the links of a division.
pub(crate) struct Linker<'a> {
    pub(crate) crossings: &'a [CrossingSpec],
    pub(crate) states: &'a [StateSpec],
    pub(crate) batch: &'a BatchSpec,
    pub(crate) order: &'a RankOrder,
    pub(crate) pricing: &'a Pricing<'a>,
    pub(crate) stages: &'a [FoundStage],
    /// Of each rank.
    nodes: Vec<u32>,
}

/// All that moves between Replicas beside what one Stage's own do together.
#[derive(Clone, Debug, Default)]
pub(crate) struct Moves {
    pub(crate) links: Vec<ReplicaLink>,
    pub(crate) exchanges: Vec<BatchExchange>,
    pub(crate) tied: Vec<TiedSum>,
}

impl<'a> Linker<'a> {
    /// The links of these Stages.
    pub(crate) fn new(
        crossings: &'a [CrossingSpec],
        states: &'a [StateSpec],
        batch: &'a BatchSpec,
        order: &'a RankOrder,
        pricing: &'a Pricing<'a>,
        stages: &'a [FoundStage],
    ) -> Self {
        Self { crossings, states, batch, order, pricing, stages, nodes: pricing.problem.cluster.node_table() }
    }

    /// All that moves.
    pub(crate) fn moves(&self) -> Moves {
        let exchanges = batch_exchanges(self.batch, self.order, self.pricing, self.stages, &self.nodes);
        Moves { links: self.links(), exchanges, tied: self.tied_sums() }
    }

    /// The sums of gradients that several Stages hold.
    pub(crate) fn tied_sums(&self) -> Vec<TiedSum> {
        tied_sums(self.states, self.stages, self.order, self.pricing.problem.cluster)
    }

    /// The Stage of each Replica, counted through the Stages.
    pub(super) fn stage_of_replicas(&self) -> Vec<usize> {
        let stages = self.stages.iter().enumerate();
        stages.flat_map(|(number, stage)| std::iter::repeat_n(number, stage.positions.len())).collect()
    }

    /// By Stage, the number of Stages on the longest way from it to one that feeds no other, both included.
    pub(super) fn depths(&self) -> Vec<u32> {
        self.pricing.chain.feeds.depths(&self.stage_ends())
    }

    /// By Stage, those that use what it makes, increasing.
    pub(super) fn feeds(&self) -> Vec<Vec<u32>> {
        let mut feeds = vec![Vec::new(); self.stages.len()];
        let edges = self.pricing.chain.feeds.edges(&self.stage_ends());
        edges.into_iter().for_each(|(from, to)| feeds[from].push(to as u32));
        feeds
    }

    /// The ranks of each Stage.
    fn stage_ranks(&self) -> Vec<Vec<u32>> {
        self.stages.iter().map(|stage| self.order.ranks(stage.positions.clone()).to_vec()).collect()
    }

    fn stage_ends(&self) -> Vec<usize> {
        self.stages.iter().map(|stage| stage.run.end).collect()
    }

    /// By Stage, its order under a Schedule.
    pub(crate) fn orders(&self, schedule: &Schedule) -> Vec<Order> {
        let microbatches = u32::try_from(self.pricing.step.microbatches).unwrap_or(u32::MAX);
        let edges: Vec<(usize, usize)> = self.pricing.chain.feeds.edges(&self.stage_ends()).into_iter().collect();
        schedule.stage_orders(&self.stage_ranks(), &edges, microbatches)
    }

    /// By Stage, memory for the gradients that come back from several Stages for one Value, but those from one of them.
    pub(crate) fn repeated_grads_bytes(&self) -> Vec<f64> {
        let mut bytes = vec![0.0; self.stages.len()];
        for crossing in self.crossings.iter().filter(|crossing| crossing.requires_grad) {
            let (from, to) = self.ends(crossing);
            let rows = self.pricing.replica_rows(self.stages[from].positions.len() as u32);
            let repeated = to.len().saturating_sub(1) as f64;
            bytes[from] += repeated * GRADS_ON_THE_WAY * crossing.bytes.at(rows);
        }
        bytes
    }

    /// The links, by the Stage of the sender, then that of the receiver.
    pub(crate) fn links(&self) -> Vec<ReplicaLink> {
        let stages = |(&(from, to), values): (&(usize, usize), &Vec<_>)| self.stage_links(from, to, values);
        self.crossings().iter().flat_map(stages).collect()
    }

    /// What goes from which Stage to which.
    fn crossings(&self) -> BTreeMap<(usize, usize), Vec<&CrossingSpec>> {
        let mut crossings: BTreeMap<(usize, usize), Vec<&CrossingSpec>> = BTreeMap::new();
        for crossing in self.crossings {
            let (from, to) = self.ends(crossing);
            for to in to {
                crossings.entry((from, to)).or_default().push(crossing);
            }
        }
        crossings
    }

    /// The Stage that makes a Value, and the others that use it.
    fn ends(&self, crossing: &CrossingSpec) -> (usize, Vec<usize>) {
        let stage_of = |block: usize| self.stages.partition_point(|stage| stage.run.end <= block);
        let from = stage_of(crossing.made_by);
        let mut to: Vec<usize> = crossing.used_by.iter().map(|&block| stage_of(block)).collect();
        to.dedup();
        to.retain(|&to| to != from);
        (from, to)
    }

    /// A message takes as long as one with all that the Replica with more rows exchanges with the other Stage.
    fn stage_links(&self, from: usize, to: usize, values: &[&CrossingSpec]) -> Vec<ReplicaLink> {
        let [(first_sender, senders), (first_receiver, receivers)] = [from, to].map(|stage| self.replicas(stage));
        let cluster = self.pricing.problem.cluster;
        let [sender_nodes, receiver_nodes] =
            [senders, receivers].map(|ranks| ranks.iter().map(|&rank| self.nodes[rank as usize]).collect::<Vec<_>>());
        let has_grads = values.iter().any(|value| value.requires_grad);
        let mut links: BTreeMap<(usize, usize), ReplicaLink> = BTreeMap::new();
        for (size, &rows) in self.pricing.sizes.rows.iter().enumerate() {
            let [sender_rows, receiver_rows] = [senders, receivers].map(|ranks| split_even(rows, ranks.len()));
            for Overlap { from, to, .. } in overlaps(&sender_rows, &receiver_rows) {
                let rows = sender_rows[from].rows().max(receiver_rows[to].rows());
                let level = cluster.level_of_nodes(sender_nodes[from], receiver_nodes[to]);
                let send_us = |all: bool| {
                    let sent = values.iter().filter(|value| all || value.requires_grad);
                    cluster.send_us(level, sent.map(|value| value.bytes.at(rows)).sum())
                };
                let link = links.entry((from, to)).or_insert_with(|| ReplicaLink {
                    from: first_sender + from,
                    to: first_receiver + to,
                    values_us: [None; 3],
                    grads_us: [None; 3],
                });
                link.values_us[size] = Some(send_us(true));
                link.grads_us[size] = has_grads.then(|| send_us(false));
            }
        }
        links.into_values().collect()
    }

    /// The number of a Stage's first Replica, and the ranks of all of them.
    fn replicas(&self, stage: usize) -> (usize, &[u32]) {
        let positions = &self.stages[stage].positions;
        ((positions.start - self.stages[0].positions.start) as usize, self.order.ranks(positions.clone()))
    }
}
