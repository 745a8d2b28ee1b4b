//! A chain of Blocks, and what each computes for itself.

use std::collections::BTreeMap;

use indexmap::IndexSet;
use rannc_ir::{Analysis, Graph, OpId, OpRun, ValueDef, ValueId, block_hash};

/// A run of Atoms.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// Its main ops.
    pub ops: OpRun,
    /// What it computes for itself of each microbatch: its main ops and the batch-free ops that no other Block uses, but
    /// for those that run once a step; increasing.
    pub own_ops: Vec<OpId>,
    /// Blocks with the same kind compute the same up to names.
    pub kind: u32,
}

/// A chain of Blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blocks {
    /// The Blocks in order; together they hold every main op once.
    pub blocks: Vec<Block>,
    /// Structural hash of each kind.
    pub hashes: Vec<String>,
}

impl Blocks {
    /// The Blocks that are these runs of main ops.
    pub fn of(graph: &Graph, analysis: &Analysis, runs: impl Iterator<Item = OpRun>) -> Self {
        let mut hashes: IndexSet<String> = IndexSet::new();
        let runs: Vec<OpRun> = runs.collect();
        let blocks = runs.iter().zip(own_ops(graph, analysis, &runs)).map(|(&ops, own_ops)| {
            let (kind, _) = hashes.insert_full(block_hash(graph, &own_ops));
            Block { ops, own_ops, kind: index(kind) }
        });
        Self { blocks: blocks.collect(), hashes: hashes.into_iter().collect() }
    }
}

/// Main ops of each run, and the batch-free ops that only this run uses, as far as they run for each microbatch.
fn own_ops(graph: &Graph, analysis: &Analysis, runs: &[OpRun]) -> Vec<Vec<OpId>> {
    let main_ops = |ops: &OpRun| analysis.main_ops[ops.first as usize..ops.end as usize].to_vec();
    let mut own_ops: Vec<Vec<OpId>> = runs.iter().map(main_ops).collect();
    let last = runs.len().saturating_sub(1);
    // Outputs that depend on no input are made in the last Stage.
    let outputs = graph.outputs.iter().map(|&value| (last, value));
    let operands = |(place, ops): (usize, &Vec<OpId>)| {
        ops.iter().flat_map(|&op| graph.ops[op].operands()).map(|value| (place, value)).collect::<Vec<_>>()
    };
    let mut open: Vec<(usize, ValueId)> = own_ops.iter().enumerate().flat_map(operands).chain(outputs).collect();
    let mut only_user: BTreeMap<OpId, Option<usize>> = BTreeMap::new();
    while let Some((place, value)) = open.pop() {
        let ValueDef::Op { op, .. } = graph.values[value].def else { continue };
        if !analysis.batch_free[op] {
            continue;
        }
        let known = only_user.get(&op).copied();
        if matches!(known, Some(None)) || known == Some(Some(place)) {
            continue;
        }
        only_user.insert(op, if known.is_none() { Some(place) } else { None });
        // What is cloned with it: its operands, and what changes them or its results in place.
        let cloned = analysis.clones(graph, op).into_iter().flat_map(|op| graph.ops[op].results.iter().copied());
        open.extend(cloned.map(|value| (place, value)));
    }
    for (op, user) in only_user {
        if let Some(place) = user {
            own_ops[place].push(op);
        }
    }
    for ops in &mut own_ops {
        ops.retain(|&op| !analysis.once[op]);
        ops.sort_unstable();
    }
    own_ops
}

pub(super) fn index(place: usize) -> u32 {
    u32::try_from(place).expect("an arena holds fewer than 2^32 ops")
}
