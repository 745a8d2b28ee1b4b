//! What batch-free Ops read.

use std::collections::BTreeSet;

use rannc_ir::{Graph, OpId, ValueDef, ValueId};

/// The Params, Buffers and Constants that batch-free Ops read, with the Op.
pub(super) fn leaf_operands(graph: &Graph, ops: &BTreeSet<OpId>) -> impl Iterator<Item = (OpId, ValueId)> {
    let is_leaf = |&(_, value): &(OpId, ValueId)| !matches!(graph.values[value].def, ValueDef::Op { .. });
    ops.iter().flat_map(|&op| graph.ops[op].operands().into_iter().map(move |value| (op, value))).filter(is_leaf)
}
