//! What of a model is not cut any further, and why.

use rannc_cost::{Blocks, ModuleNames};
use rannc_ir::{Analysis, CutRefusal, Graph, GroupReason, OpRun, ValueDef};

/// The largest Block that may not be cut inside, in words, with what keeps it whole and what would let it be cut.
pub(super) fn whole_piece(graph: &Graph, analysis: &Analysis, blocks: &Blocks) -> String {
    let runs = blocks.blocks.iter().map(|block| block.ops);
    let whole = runs.clone().filter_map(|ops| Some((ops, refusal(analysis, ops)?)));
    let Some((ops, refusal)) = whole.max_by_key(|&(ops, _)| (parameters(graph, analysis, ops), ops.end - ops.first))
    else {
        return of_single_ops(graph, analysis, runs);
    };
    let names = ModuleNames::new(graph, &analysis.main_ops).summary(ops.first, ops.end).join(", ");
    format!("{names} stays in one piece: {}. {}", refusal.describe(graph), advice(refusal))
}

/// Likewise, where every Block is one Op, or may be cut.
fn of_single_ops(graph: &Graph, analysis: &Analysis, runs: impl Iterator<Item = OpRun> + Clone) -> String {
    let single = runs.clone().all(|ops| ops.end - ops.first == 1);
    let Some(largest) = runs.max_by_key(|&ops| parameters(graph, analysis, ops)).filter(|_| single) else {
        return "smaller ones are not told apart".to_owned();
    };
    let op = analysis.main_ops[largest.first as usize];
    let what = if graph.ops[op].opaque { "code that is kept whole, as a warning tells" } else { "one operator" };
    format!("each of them is one op, and the largest, {}, is {what}", graph.place(op))
}

/// Why a Block is not cut: what holds in its middle; none where it may be cut somewhere, or is one Op.
fn refusal(analysis: &Analysis, OpRun { first, end }: OpRun) -> Option<CutRefusal> {
    let inside = &analysis.cuts[first as usize + 1..end as usize];
    if inside.iter().any(Option::is_none) { None } else { *inside.get(inside.len() / 2)? }
}

/// Number of elements of the parameters that main Ops of a run read.
fn parameters(graph: &Graph, analysis: &Analysis, OpRun { first, end }: OpRun) -> u64 {
    let ops = &analysis.main_ops[first as usize..end as usize];
    let mut read: Vec<_> = ops.iter().flat_map(|&op| graph.ops[op].operands()).collect();
    read.sort_unstable();
    read.dedup();
    let values = read.into_iter().map(|value| &graph.values[value]);
    let params = values.filter(|value| matches!(value.def, ValueDef::Param(_)));
    params.map(|param| param.shape.iter().map(|dim| dim.fixed.unsigned_abs()).product::<u64>()).sum()
}

fn advice(refusal: CutRefusal) -> &'static str {
    match refusal {
        CutRefusal::NoRowDim { .. } => {
            "Keep the rows of the batch in a dimension of their own in what sub-modules give each other"
        }
        CutRefusal::Group { reason: GroupReason::Storage(_), .. } => {
            "Compute new tensors there instead of changing one in place"
        }
        CutRefusal::Group { reason: GroupReason::Region(_), .. } => {
            "Put a block of autocast or a vmap round each layer rather than one round all"
        }
        CutRefusal::Group { reason: GroupReason::RowGroup(_), .. } => {
            "Ops that sort rows and put them back are not parted"
        }
    }
}
