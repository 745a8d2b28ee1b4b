//! A chain of Blocks, and what each computes for itself.

use indexmap::IndexSet;
use rannc_ir::{Analysis, Graph, OpId, OpRun, block_hash, only_users};

/// A run of Atoms.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// Its main ops.
    pub ops: OpRun,
    /// What it computes for itself of each microbatch: its main ops and the batch-free ops that it alone uses, as
    /// [`rannc_ir::only_users`] tells; increasing.
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
    let run_of = |op: OpId| {
        let place = analysis.main_index[op].expect("a main op");
        runs.partition_point(|run| run.end <= place)
    };
    for (op, run) in only_users(graph, analysis, run_of) {
        own_ops[run].push(op);
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
