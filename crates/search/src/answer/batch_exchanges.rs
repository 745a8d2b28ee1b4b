//! What the ranks' own batches and the Replicas of a division exchange, where ranks bring as equally many rows as they can.

use std::collections::BTreeMap;

use rannc_plan::{BatchKind, overlaps, split_even};

use crate::chain::{Affine, BatchSpec};
use crate::price::{BySize, Pricing, RankOrder};
use crate::solve::FoundStage;

/// Exchanges of a kind. Ranks are counted like Replicas, through the Stages. Gradients of inputs, which few models have, are
/// left out.
#[derive(Clone, Debug)]
pub(crate) struct BatchExchange {
    pub(crate) kind: BatchKind,
    /// By size of the microbatch.
    pub(crate) meetings: BySize<Meeting>,
    /// Of the first microbatch, with which inputs without rows come.
    pub(crate) first: Meeting,
}

/// Who takes part in an exchange, and how long it takes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Meeting {
    pub(crate) members: Vec<u32>,
    pub(crate) us: f64,
}

/// The bytes from one rank to one other.
type Moved = BTreeMap<(usize, usize), f64>;

/// All that these Stages exchange, but nothing that no rank takes part in.
pub(super) fn batch_exchanges(
    batch: &BatchSpec,
    order: &RankOrder,
    pricing: &Pricing<'_>,
    stages: &[FoundStage],
    nodes: &[u32],
) -> Vec<BatchExchange> {
    let ranks = stages.iter().map(|stage| order.ranks(stage.positions.clone())).collect();
    let exchanger = Exchanger { batch, pricing, stages, nodes, ranks };
    let found = [BatchKind::Input, BatchKind::Output, BatchKind::OutputGrad].map(|kind| exchanger.exchange(kind));
    found.into_iter().filter(|own| !own.first.members.is_empty()).collect()
}

struct Exchanger<'a> {
    batch: &'a BatchSpec,
    pricing: &'a Pricing<'a>,
    stages: &'a [FoundStage],
    /// Of each rank.
    nodes: &'a [u32],
    /// Of each Stage.
    ranks: Vec<&'a [u32]>,
}

impl Exchanger<'_> {
    fn exchange(&self, kind: BatchKind) -> BatchExchange {
        let first_size = self.pricing.step.size_of(0);
        let rows = self.pricing.sizes.rows;
        let mut first = self.moved(kind, rows[first_size]);
        if kind == BatchKind::Input {
            self.add_whole_inputs(rows[first_size], &mut first);
        }
        let meetings = rows.map(|rows| self.meeting(&self.moved(kind, rows)));
        BatchExchange { kind, meetings, first: self.meeting(&first) }
    }

    fn gather_inputs(&self) -> bool {
        self.pricing.problem.settings.gather_inputs
    }

    /// What has rows of a Stage.
    fn values(&self, kind: BatchKind, stage: &FoundStage) -> Vec<Affine> {
        let BatchSpec { inputs, outputs } = self.batch;
        let is_used = |used_by: &[usize]| used_by.iter().any(|block| stage.run.contains(block));
        match kind {
            BatchKind::Input => {
                let used = inputs.iter().filter(|input| input.has_rows && is_used(&input.used_by));
                used.map(|input| input.bytes).collect()
            }
            _ => {
                let all = kind == BatchKind::Output;
                let made = outputs.iter().filter(|output| stage.run.contains(&output.made_by));
                made.filter(|output| all || output.requires_grad).map(|output| output.bytes).collect()
            }
        }
    }

    /// What moves for so many rows. Without gathered inputs the first rank has all of them, outputs go to every rank, and every
    /// rank has their gradients.
    fn moved(&self, kind: BatchKind, rows: u64) -> Moved {
        let owners = self.owners();
        let mut moved = Moved::new();
        if kind == BatchKind::OutputGrad && !self.gather_inputs() {
            return moved;
        }
        let mut first = 0;
        for (stage, ranks) in self.stages.iter().zip(&self.ranks) {
            let values = self.values(kind, stage);
            let replica_rows = split_even(rows, ranks.len());
            let of_stage = first;
            let mut add = |owner: usize, replica: usize, rows: u64| {
                let (owner, replica) = (owners[owner], of_stage + replica);
                if owner != replica {
                    let ends = if kind == BatchKind::Output { (replica, owner) } else { (owner, replica) };
                    *moved.entry(ends).or_default() += values.iter().map(|bytes| bytes.at(rows)).sum::<f64>();
                }
            };
            first += ranks.len();
            if values.is_empty() {
                continue;
            }
            if kind == BatchKind::Output && !self.gather_inputs() {
                for (replica, rows) in replica_rows.iter().enumerate().filter(|(_, rows)| !rows.is_empty()) {
                    (0..owners.len()).for_each(|owner| add(owner, replica, rows.rows()));
                }
                continue;
            }
            let owner_rows = split_even(rows, if self.gather_inputs() { owners.len() } else { 1 });
            overlaps(&owner_rows, &replica_rows).iter().for_each(|own| add(own.from, own.to, own.rows.rows()));
        }
        moved
    }

    /// Inputs without rows, which the first rank gives to all that compute.
    fn add_whole_inputs(&self, rows: u64, moved: &mut Moved) {
        let giver = self.owners()[0];
        let mut first = 0;
        for (stage, ranks) in self.stages.iter().zip(&self.ranks) {
            let whole = self.batch.inputs.iter().filter(|input| !input.has_rows);
            let used = whole.filter(|input| input.used_by.iter().any(|block| stage.run.contains(block)));
            let values: Vec<f64> = used.map(|input| input.bytes.at(0)).collect();
            let computing = split_even(rows, ranks.len()).into_iter().filter(|rows| !rows.is_empty()).count();
            for replica in (first..first + computing).filter(|&replica| replica != giver && !values.is_empty()) {
                *moved.entry((giver, replica)).or_default() += values.iter().sum::<f64>();
            }
            first += ranks.len();
        }
    }

    /// All Replicas, by the numbers of their ranks.
    fn owners(&self) -> Vec<usize> {
        let ranks = self.ranks.concat();
        let mut owners: Vec<usize> = (0..ranks.len()).collect();
        owners.sort_unstable_by_key(|&replica| ranks[replica]);
        owners
    }

    /// A message takes as long as one with all that its sender gives, or all that its receiver takes.
    fn meeting(&self, moved: &Moved) -> Meeting {
        let (ranks, cluster) = (self.ranks.concat(), self.pricing.problem.cluster);
        let (mut given, mut taken) = (vec![0.0; ranks.len()], vec![0.0; ranks.len()]);
        let mut members = Vec::new();
        for (&(from, to), bytes) in moved {
            given[from] += bytes;
            taken[to] += bytes;
            members.extend([from as u32, to as u32]);
        }
        members.sort_unstable();
        members.dedup();
        let us = |&(from, to): &(usize, usize)| {
            let [src, dst] = [from, to].map(|place| self.nodes[ranks[place] as usize]);
            cluster.send_us(cluster.level_of_nodes(src, dst), f64::max(given[from], taken[to]))
        };
        Meeting { members, us: moved.keys().map(us).fold(0.0, f64::max) }
    }
}
