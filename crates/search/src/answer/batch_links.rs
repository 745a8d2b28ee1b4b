//! What moves between the ranks' own batches and the Replicas of a division, where all ranks bring equally many rows.

use std::collections::{BTreeMap, HashMap};

use rannc_plan::{Overlap, Payload, overlaps, split_even};

use crate::chain::{Affine, BatchSpec};
use crate::price::{BySize, Pricing, RankOrder};
use crate::solve::FoundStage;

/// What one rank sends to one other for a microbatch. Ranks are counted like Replicas, through the Stages. Gradients of
/// inputs, which few models have, are left out.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct BatchLink {
    /// An input, an output, or its gradient.
    pub(crate) kind: Payload,
    pub(crate) from: usize,
    pub(crate) to: usize,
    /// `None` where only the first message carries anything: inputs without rows.
    pub(crate) us: Option<BySize<f64>>,
    /// Of the first microbatch.
    pub(crate) first_us: f64,
}

/// By the rank with the rows and the Replica, the rows of each size of microbatch.
type Moved = BTreeMap<(usize, usize), BySize<u64>>;

/// A message, or all that shares its links: of each size of microbatch, and of the first one.
#[derive(Clone, Copy, Default)]
struct Amount {
    bytes: BySize<f64>,
    first_bytes: f64,
}

/// The links of these Stages, one Stage after another.
pub(super) fn batch_links(
    batch: &BatchSpec,
    order: &RankOrder,
    pricing: &Pricing<'_>,
    stages: &[FoundStage],
    nodes: &[u32],
) -> Vec<BatchLink> {
    let own = stages.iter().map(|stage| order.ranks(stage.positions.clone())).collect();
    BatchLinker { batch, pricing, stages, nodes, ranks: own }.links()
}

struct BatchLinker<'a> {
    batch: &'a BatchSpec,
    pricing: &'a Pricing<'a>,
    stages: &'a [FoundStage],
    /// Of each rank.
    nodes: &'a [u32],
    /// Of each Stage.
    ranks: Vec<&'a [u32]>,
}

impl BatchLinker<'_> {
    fn links(&self) -> Vec<BatchLink> {
        let owners = self.owners();
        let stages = self.ranks.iter().enumerate();
        let stage_of: Vec<usize> = stages.flat_map(|(stage, ranks)| std::iter::repeat_n(stage, ranks.len())).collect();
        let mut links = Vec::new();
        for (stage, found) in self.stages.iter().enumerate() {
            let used = |used_by: &[usize]| used_by.iter().any(|block| found.run.contains(block));
            let inputs = || self.batch.inputs.iter().filter(|input| used(&input.used_by));
            let values: Vec<Affine> = inputs().filter(|input| input.has_rows).map(|input| input.bytes).collect();
            let once_bytes: f64 = inputs().filter(|input| !input.has_rows).map(|input| input.bytes.at(0)).sum();
            let mut moved = if values.is_empty() { Moved::new() } else { self.moved(stage, &owners, false) };
            if once_bytes > 0.0 {
                let first = self.first(stage);
                (first..first + self.ranks[stage].len()).for_each(|replica| {
                    moved.entry((owners[0], replica)).or_default();
                });
            }
            let amounts = self.amounts(&moved, &values, (owners[0], once_bytes));
            links.extend(self.links_of(Payload::Input, &amounts, &stage_of));

            let outputs = || self.batch.outputs.iter().filter(|output| found.run.contains(&output.made_by));
            let values: Vec<Affine> = outputs().map(|output| output.bytes).collect();
            if values.is_empty() {
                continue;
            }
            let moved = self.moved(stage, &owners, true);
            let amounts = self.amounts(&moved, &values, (owners[0], 0.0));
            links.extend(self.links_of(Payload::Output, &amounts, &stage_of));
            let grads: Vec<Affine> = outputs().filter(|own| own.requires_grad).map(|output| output.bytes).collect();
            if !grads.is_empty() && self.gather_inputs() {
                let amounts = self.amounts(&moved, &grads, (owners[0], 0.0));
                links.extend(self.links_of(Payload::OutputGrad, &amounts, &stage_of));
            }
        }
        links
    }

    fn gather_inputs(&self) -> bool {
        self.pricing.problem.settings.gather_inputs
    }

    /// A Stage's first Replica.
    fn first(&self, stage: usize) -> usize {
        self.ranks[..stage].iter().map(|ranks| ranks.len()).sum()
    }

    /// All Replicas, by the numbers of their ranks.
    fn owners(&self) -> Vec<usize> {
        let ranks = self.ranks.concat();
        let mut owners: Vec<usize> = (0..ranks.len()).collect();
        owners.sort_unstable_by_key(|&replica| ranks[replica]);
        owners
    }

    /// Which rows move between the ranks' batches and a Stage. Without gathered inputs the first rank has all of them, and
    /// outputs go to every rank.
    fn moved(&self, stage: usize, owners: &[usize], outputs: bool) -> Moved {
        let (first, ranks) = (self.first(stage), self.ranks[stage]);
        let mut moved = Moved::new();
        for (size, &rows) in self.pricing.sizes.rows.iter().enumerate() {
            let replica_rows = split_even(rows, ranks.len());
            let mut add = |owner: usize, replica: usize, rows: u64| {
                if owners[owner] != first + replica {
                    moved.entry((owners[owner], first + replica)).or_default()[size] += rows;
                }
            };
            if outputs && !self.gather_inputs() {
                for (replica, rows) in replica_rows.iter().enumerate().filter(|(_, rows)| !rows.is_empty()) {
                    (0..owners.len()).for_each(|owner| add(owner, replica, rows.rows()));
                }
                continue;
            }
            let owner_rows = split_even(rows, if self.gather_inputs() { owners.len() } else { 1 });
            for Overlap { from, to, rows } in overlaps(&owner_rows, &replica_rows) {
                add(from, to, rows.rows());
            }
        }
        moved
    }

    /// What each message carries of Values with rows; in the first that a rank sends, also what goes once.
    fn amounts(
        &self,
        moved: &Moved,
        values: &[Affine],
        (giver, once_bytes): (usize, f64),
    ) -> BTreeMap<(usize, usize), Amount> {
        let first_size = self.pricing.step.size_of(0);
        let amount = |(&(owner, replica), rows): (&(usize, usize), &BySize<u64>)| {
            let at = |rows: u64| if rows == 0 { 0.0 } else { values.iter().map(|bytes| bytes.at(rows)).sum() };
            let bytes = rows.map(at);
            let once_bytes = if owner == giver { once_bytes } else { 0.0 };
            ((owner, replica), Amount { bytes, first_bytes: bytes[first_size] + once_bytes })
        };
        moved.iter().filter(|((owner, replica), _)| owner != replica).map(amount).collect()
    }

    /// A message takes as long as one with all that its rank exchanges with the other's Stage, or the reverse.
    fn links_of(
        &self,
        kind: Payload,
        amounts: &BTreeMap<(usize, usize), Amount>,
        stage_of: &[usize],
    ) -> Vec<BatchLink> {
        let ends = |&(owner, replica): &(usize, usize)| [(owner, stage_of[replica]), (replica, stage_of[owner])];
        let mut shared: HashMap<(usize, usize), Amount> = HashMap::new();
        for (pair, amount) in amounts {
            for end in ends(pair) {
                let sum = shared.entry(end).or_default();
                (0..3).for_each(|size| sum.bytes[size] += amount.bytes[size]);
                sum.first_bytes += amount.first_bytes;
            }
        }
        let ranks = self.ranks.concat();
        let cluster = self.pricing.problem.cluster;
        let link = |(&(owner, replica), amount): (&(usize, usize), &Amount)| {
            let [one, other] = ends(&(owner, replica)).map(|end| shared[&end]);
            let [src, dst] = [owner, replica].map(|place| self.nodes[ranks[place] as usize]);
            let level = cluster.level_of_nodes(src, dst);
            let us = |own: f64, bytes: f64| if own > 0.0 { cluster.send_us(level, bytes) } else { 0.0 };
            let by_size = std::array::from_fn(|size| us(amount.bytes[size], one.bytes[size].max(other.bytes[size])));
            let (from, to) = if kind == Payload::Output { (replica, owner) } else { (owner, replica) };
            BatchLink {
                kind,
                from,
                to,
                us: amount.bytes.iter().any(|&bytes| bytes > 0.0).then_some(by_size),
                first_us: us(amount.first_bytes, one.first_bytes.max(other.first_bytes)),
            }
        };
        amounts.iter().map(link).collect()
    }
}
