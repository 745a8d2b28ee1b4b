//! Where the rows of the batch lie in a Value.
//!
//! A Value may be cut into rows, and so be sent between Stages with different Replica counts, only
//! when one of its dimensions is proven to run over the batch with the rows in order. The proof is
//! local: it follows the shapes from op to op and gives up (`None`) whenever an op might reorder.

use serde::{Deserialize, Serialize};

use crate::batch_free::batch_free_ops;
use crate::entity::Arena;
use crate::graph::{Dim, Graph, Op, OpId, Value, ValueDef, ValueId};

/// The dimension of a Value that runs over the batch: rows `[lo, hi)` of the batch are
/// `[per_row * lo, per_row * hi)` of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RowDim {
    /// The dimension.
    pub dim: u32,
    /// Its extent for one row.
    pub per_row: u64,
}

/// Ops that keep the order of the elements and only regroup them.
const REGROUPING: &[&str] = &[
    "_reshape_alias",
    "_unsafe_view",
    "flatten",
    "reshape",
    "reshape_as",
    "squeeze",
    "squeeze_",
    "unflatten",
    "unsqueeze",
    "unsqueeze_",
    "view",
    "view_as",
    "view_copy",
];

/// Ops that may change the order along a dimension and keep its extent.
const REORDERING: &[&str] = &[
    "argsort",
    "as_strided",
    "flip",
    "fliplr",
    "flipud",
    "gather",
    "index",
    "index_add",
    "index_copy",
    "index_put",
    "index_put_",
    "index_select",
    "msort",
    "repeat",
    "repeat_interleave",
    "roll",
    "scatter",
    "scatter_",
    "scatter_add",
    "scatter_add_",
    "sort",
    "take",
    "take_along_dim",
    "tile",
    "topk",
    "unfold",
];

/// The row dimension of each Value, where there is a proven one. The graph must be a verified one.
///
/// * An input has it when its first dimension is the batch size and no other depends on it.
/// * A regrouping op (`view`, ...) keeps it when as many elements stand before it as in the operand.
/// * Any other op's result has it when exactly one dimension depends on the batch, without a fixed
///   part, and either that is the batch size itself, or some operand has the same extent per row as
///   proven row dimension, no other operand contradicts, and the op is not known to reorder.
pub fn row_dims(graph: &Graph) -> Arena<ValueId, Option<RowDim>> {
    prove(graph, &batch_free_ops(graph))
}

pub(crate) fn prove(graph: &Graph, batch_free: &Arena<OpId, bool>) -> Arena<ValueId, Option<RowDim>> {
    let mut rows: Arena<ValueId, Option<RowDim>> = graph.values.values().map(input_rows).collect();
    for op in graph.ops.values() {
        for &result in &op.results {
            rows[result] = result_rows(graph, op, &graph.values[result], batch_free, &rows);
        }
    }
    rows
}

fn input_rows(value: &Value) -> Option<RowDim> {
    let rows = sole_batch_dim(&value.shape)?;
    (matches!(value.def, ValueDef::Input(_)) && rows == RowDim { dim: 0, per_row: 1 }).then_some(rows)
}

fn result_rows(
    graph: &Graph,
    op: &Op,
    result: &Value,
    batch_free: &Arena<OpId, bool>,
    rows: &Arena<ValueId, Option<RowDim>>,
) -> Option<RowDim> {
    let candidate = sole_batch_dim(&result.shape)?;
    let operands = op.operands();
    let name = overload_packet(&op.target);
    if REGROUPING.contains(&name) {
        return match operands.first().and_then(|&source| rows[source].map(|rows| (source, rows))) {
            Some((source, before)) => {
                let kept = elements_before(&graph.values[source].shape, before.dim);
                (kept == elements_before(&result.shape, candidate.dim)).then_some(candidate)
            }
            None => (candidate.per_row == 1).then_some(candidate),
        };
    }
    let has = |per_row: u64| operands.iter().any(|&v| rows[v].is_some_and(|rows| rows.per_row == per_row));
    if candidate.per_row == 1 {
        // A chunk of several rows' elements, [4 * b] -> [b], has the right extent and other rows.
        let regrouped = operands.iter().any(|&v| rows[v].is_some_and(|rows| rows.per_row > 1));
        return (has(1) || !regrouped).then_some(candidate);
    }
    let contradicted = operands.iter().any(|&v| {
        rows[v].is_none_or(|rows| rows.per_row != candidate.per_row)
            && is_main(graph, batch_free, v)
            && graph.values[v].shape.iter().any(|dim| u64::try_from(dim.per_row) == Ok(candidate.per_row))
    });
    (has(candidate.per_row) && !contradicted && !REORDERING.contains(&name)).then_some(candidate)
}

/// The one dimension that depends on the batch, when it is a multiple of it.
fn sole_batch_dim(shape: &[Dim]) -> Option<RowDim> {
    let mut dependent = shape.iter().enumerate().filter(|(_, dim)| dim.per_row != 0);
    let (index, dim) = dependent.next()?;
    if dependent.next().is_some() || dim.fixed != 0 {
        return None;
    }
    Some(RowDim { dim: u32::try_from(index).ok()?, per_row: u64::try_from(dim.per_row).ok()? })
}

fn elements_before(shape: &[Dim], dim: u32) -> i64 {
    shape.iter().take(dim as usize).fold(1, |product, dim| product.saturating_mul(dim.fixed))
}

fn is_main(graph: &Graph, batch_free: &Arena<OpId, bool>, value: ValueId) -> bool {
    matches!(graph.values[value].def, ValueDef::Op { op, .. } if !batch_free[op])
}

/// `view` of `aten.view.default`; the whole target when it is not one of torch's own operators.
fn overload_packet(target: &str) -> &str {
    let mut parts = target.splitn(3, '.');
    match (parts.next(), parts.next()) {
        (Some("aten"), Some(packet)) => packet,
        _ => target,
    }
}
