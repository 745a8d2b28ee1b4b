//! What may be cut from what: main ops, groups that stay together, allowed cuts.
//!
//! All functions take a verified graph.

use std::collections::{BTreeMap, BTreeSet};

use thiserror::Error;

use crate::batch_free::batch_free;
use crate::entity::Arena;
use crate::graph::{Graph, OpId, ValueDef, ValueId};
use crate::once::once_ops;
use crate::row_state::{Mixing, RowDim};
use crate::rows::Rows;
use crate::storages::Storages;

/// Why a cut is not allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum CutRefusal {
    /// A Value would have to be sent whose rows cannot be told apart.
    #[error("{value}, made by {producer} and used by {consumer}, has no dimension proven to run over the batch")]
    NoRowDim {
        /// The Value.
        value: ValueId,
        /// The main op before the cut that makes it.
        producer: OpId,
        /// The last main op that uses it.
        consumer: OpId,
    },
    /// The ops of a [`Group`] would be parted.
    #[error("{first} to {last} must stay together: {reason}")]
    Group {
        /// First op of the group.
        first: OpId,
        /// Last op of the group.
        last: OpId,
        /// What holds the group together.
        reason: GroupReason,
    },
}

impl CutRefusal {
    /// The reason with the places of its ops in the model's source.
    pub fn describe(&self, graph: &Graph) -> String {
        let (first, last) = match *self {
            Self::NoRowDim { producer, consumer, .. } => (producer, consumer),
            Self::Group { first, last, .. } => (first, last),
        };
        format!("{self} ({}; {})", graph.place(first), graph.place(last))
    }
}

/// What holds a [`Group`] together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum GroupReason {
    /// They share a storage that is changed in the forward: in place, or by a new value for a buffer.
    /// Ops that read an Op's result after its last change are free: what they receive is final.
    #[error("they use the storage of {0}, which is changed in place")]
    Storage(ValueId),
    /// They stand in one region (an autocast block, a vmap level).
    #[error("they stand in region {0}")]
    Region(u32),
    /// They treat each row by itself together only.
    #[error("they treat each row by itself together only (row group {0})")]
    RowGroup(u32),
}

/// Main ops that must be in one Stage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpGroup {
    /// What holds them together.
    pub reason: GroupReason,
    /// The ops in execution order, at least two.
    pub ops: Vec<OpId>,
    /// Place of the first one in the list of main ops.
    pub first: u32,
    /// Place of the last one in the list of main ops.
    pub last: u32,
}

/// Everything that cutting a graph asks about it.
#[derive(Clone, Debug)]
pub struct Analysis {
    /// What the Values know of rows.
    pub rows: Rows,
    /// See [`crate::row_dims`].
    pub row_dims: Arena<ValueId, Option<RowDim>>,
    /// See [`crate::batch_free_ops`].
    pub batch_free: Arena<OpId, bool>,
    /// Ops that are the same for every part of a batch and may run before all others: main ops among them draw, or change
    /// buffers.
    pub once: Arena<OpId, bool>,
    /// See [`crate::main_ops`].
    pub main_ops: Vec<OpId>,
    /// Place of each main op in `main_ops`; `None` for batch-free ops.
    pub main_index: Arena<OpId, Option<u32>>,
    /// Storages and which of them the forward changes.
    pub storages: Storages,
    /// Main ops that stay together.
    pub groups: Vec<OpGroup>,
    /// See [`cuts`].
    pub cuts: Vec<Option<CutRefusal>>,
}

impl Analysis {
    /// Analyses `graph`.
    pub fn new(graph: &Graph) -> Self {
        Self::with_mixing(graph, graph.mixing, &BTreeSet::new())
    }

    /// Like [`Analysis::new`], with another way for Ops that mix rows, as those in `mixed` do that put batches one after
    /// another.
    pub fn with_mixing(graph: &Graph, mixing: Mixing, mixed: &BTreeSet<OpId>) -> Self {
        let storages = Storages::new(graph);
        let batch_free = batch_free(graph, &storages);
        let once = once_ops(graph, &storages);
        let rows = Rows::new(graph, &storages, mixing, mixed);
        let row_dims = rows.row_dims();
        let main_ops: Vec<OpId> = graph.ops.ids().filter(|&op| !batch_free[op]).collect();
        let mut main_index: Arena<OpId, Option<u32>> = graph.ops.ids().map(|_| None).collect();
        for (index, &op) in (0..).zip(&main_ops) {
            main_index[op] = Some(index);
        }
        let groups = groups(graph, &storages, &main_index);
        let mut analysis =
            Self { rows, row_dims, batch_free, once, main_ops, main_index, storages, groups, cuts: Vec::new() };
        analysis.cuts = analysis.refusals(graph);
        analysis
    }

    /// For each main op result without row dimension: the main ops that make it and use it.
    pub fn unsendable(&self, graph: &Graph) -> BTreeMap<ValueId, (OpId, Vec<OpId>)> {
        let mut uses: BTreeMap<ValueId, (OpId, Vec<OpId>)> = BTreeMap::new();
        for &consumer in &self.main_ops {
            for value in graph.ops[consumer].operands() {
                if let ValueDef::Op { op: producer, .. } = graph.values[value].def
                    && !self.batch_free[producer]
                    && self.row_dims[value].is_none()
                {
                    uses.entry(value).or_insert_with(|| (producer, Vec::new())).1.push(consumer);
                }
            }
        }
        uses
    }

    /// The batch-free ops that a Stage clones to have the results of `op`, a batch-free op: itself, what
    /// it is made of, and what changes the storages of any of these in place.
    pub fn clones(&self, graph: &Graph, op: OpId) -> BTreeSet<OpId> {
        let mut clones = BTreeSet::new();
        let mut open = vec![op];
        while let Some(id) = open.pop() {
            if !clones.insert(id) {
                continue;
            }
            let op = &graph.ops[id];
            for value in op.operands().into_iter().chain(op.results.iter().copied()) {
                if let ValueDef::Op { op, .. } = graph.values[value].def {
                    open.push(op);
                }
                open.extend(self.storages.changers(value));
            }
        }
        clones
    }

    fn refusals(&self, graph: &Graph) -> Vec<Option<CutRefusal>> {
        let mut spans: Vec<(u32, u32, CutRefusal)> = Vec::new();
        for group in &self.groups {
            let (first, last) = (self.main_ops[group.first as usize], self.main_ops[group.last as usize]);
            spans.push((group.first, group.last, CutRefusal::Group { first, last, reason: group.reason }));
        }
        for (value, (producer, consumers)) in self.unsendable(graph) {
            let ends = consumers.last().and_then(|&consumer| Some((consumer, self.main_index[consumer]?)));
            if let (Some(first), Some((consumer, last))) = (self.main_index[producer], ends) {
                spans.push((first, last, CutRefusal::NoRowDim { value, producer, consumer }));
            }
        }
        spans.sort_by_key(|&(first, _, _)| first);
        let mut spans = spans.into_iter().peekable();
        let mut longest: Option<(u32, CutRefusal)> = None;
        (0..=self.main_ops.len())
            .map(|cut| {
                while let Some((_, last, refusal)) = spans.next_if(|&(first, _, _)| (first as usize) < cut) {
                    if longest.is_none_or(|(end, _)| last > end) {
                        longest = Some((last, refusal));
                    }
                }
                longest.filter(|&(last, _)| cut <= last as usize).map(|(_, refusal)| refusal)
            })
            .collect()
    }
}

/// For each place in the list of main ops, the end included: why the list may not be cut before it,
/// or `None` when it may. Nothing is cut at the two ends, so they are always allowed.
pub fn cuts(graph: &Graph) -> Vec<Option<CutRefusal>> {
    Analysis::new(graph).cuts
}

/// For each place in the list of main ops, the end included, whether the list may be cut before it.
pub fn allowed_cuts(graph: &Graph) -> Vec<bool> {
    cuts(graph).iter().map(Option::is_none).collect()
}

fn groups(graph: &Graph, storages: &Storages, main_index: &Arena<OpId, Option<u32>>) -> Vec<OpGroup> {
    let mut by_storage: BTreeMap<ValueId, Vec<OpId>> = BTreeMap::new();
    let mut by_region: BTreeMap<u32, Vec<OpId>> = BTreeMap::new();
    let mut by_row_group: BTreeMap<u32, Vec<OpId>> = BTreeMap::new();
    for (id, op) in graph.ops.iter() {
        for value in op.operands().into_iter().chain(op.results.iter().copied()) {
            let is_final = match graph.values[storages.root[value]].def {
                ValueDef::Op { op, .. } => main_index[op].is_none() || storages.changers(value).all(|last| last < id),
                _ => false,
            };
            if storages.is_changed(value) && !is_final {
                by_storage.entry(storages.root[value]).or_default().push(id);
            }
        }
        if let Some(region) = op.region {
            by_region.entry(region).or_default().push(id);
        }
        if let Some(group) = op.row_group.filter(|_| main_index[id].is_some()) {
            by_row_group.entry(group).or_default().push(id);
        }
    }
    for buffer in graph.buffers.values() {
        if let Some(ValueDef::Op { op, .. }) = buffer.update.map(|update| graph.values[update].def) {
            by_storage.entry(storages.root[buffer.value]).or_default().push(op);
        }
    }
    let by_storage = by_storage.into_iter().map(|(root, ops)| (GroupReason::Storage(root), ops));
    let by_region = by_region.into_iter().map(|(region, ops)| (GroupReason::Region(region), ops));
    let by_row_group = by_row_group.into_iter().map(|(group, ops)| (GroupReason::RowGroup(group), ops));
    by_storage.chain(by_region).chain(by_row_group).filter_map(|(reason, ops)| group(reason, ops, main_index)).collect()
}

fn group(reason: GroupReason, mut ops: Vec<OpId>, main_index: &Arena<OpId, Option<u32>>) -> Option<OpGroup> {
    ops.sort_unstable();
    ops.dedup();
    let (first, last) = (main_index[*ops.first()?]?, main_index[*ops.last()?]?);
    (first < last).then_some(OpGroup { reason, ops, first, last })
}
