//! Parameters that several Stages hold: their gradients are summed over all holders, after the Stages' own.

use std::collections::BTreeMap;

use rannc_cost::Cluster;

use crate::chain::StateSpec;
use crate::price::RankOrder;
use crate::solve::FoundStage;

/// The gradients that the same Stages hold.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TiedSum {
    /// The Stages, increasing.
    pub(crate) stages: Vec<usize>,
    /// Their ranks, increasing.
    pub(crate) ranks: Vec<u32>,
    pub(crate) bytes: f64,
    pub(crate) us: f64,
}

/// The tied sums of a division, in the order of a Program's.
pub(crate) fn tied_sums(
    states: &[StateSpec],
    stages: &[FoundStage],
    order: &RankOrder,
    cluster: &Cluster,
) -> Vec<TiedSum> {
    let stage_of = |block: &usize| stages.partition_point(|stage| stage.run.end <= *block);
    let mut bytes: BTreeMap<Vec<usize>, f64> = BTreeMap::new();
    for state in states.iter().filter(|state| state.trainable) {
        let mut holders: Vec<usize> = state.blocks.iter().map(stage_of).collect();
        holders.dedup();
        if holders.len() > 1 {
            *bytes.entry(holders).or_default() += state.message_bytes;
        }
    }
    let sum = |(holders, bytes): (Vec<usize>, f64)| {
        let ranks = holders.iter().flat_map(|&stage| order.ranks(stages[stage].positions.clone()));
        let mut ranks: Vec<u32> = ranks.copied().collect();
        ranks.sort_unstable();
        ranks.dedup();
        let us = cluster.all_reduce_us(cluster.group(&ranks), bytes);
        TiedSum { stages: holders, ranks, bytes, us }
    };
    let mut sums: Vec<TiedSum> = bytes.into_iter().map(sum).collect();
    sums.sort_by(|left, right| left.ranks.cmp(&right.ranks));
    sums
}
