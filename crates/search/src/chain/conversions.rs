//! Working copies: parameters that are only converted to a type of half the digits, once a step.

use std::collections::BTreeMap;

use rannc_ir::{Analysis, Arg, DType, Graph, Op, OpId, ValueDef, ValueId};

/// The ops that make working copies.
#[derive(Clone, Debug, Default)]
pub(super) struct Conversions {
    /// What each of them converts.
    pub(super) param_of: BTreeMap<OpId, ValueId>,
    /// By parameter, its copy.
    pub(super) copy_of: BTreeMap<ValueId, ValueId>,
}

/// The conversions of a graph that are all that is done with a parameter. One that is also read by other ops may have a
/// copy on a Stage without these; it counts as converted for every microbatch there.
pub(super) fn conversions(graph: &Graph, analysis: &Analysis) -> Conversions {
    // By parameter; none where several ops read it.
    let mut readers: BTreeMap<ValueId, Option<OpId>> = BTreeMap::new();
    for (id, op) in graph.ops.iter() {
        for value in op.operands() {
            if matches!(graph.values[value].def, ValueDef::Param(_)) {
                let only = readers.entry(value).or_insert(Some(id));
                *only = only.filter(|&known| known == id);
            }
        }
    }
    let given = |value: ValueId| {
        graph.outputs.contains(&value) || graph.buffers.values().any(|buffer| buffer.update == Some(value))
    };
    let mut found = Conversions::default();
    for (param, op) in readers.into_iter().filter_map(|(param, op)| Some((param, op?))) {
        if let Some(copy) = copy_of(graph, &graph.ops[op], param)
            && analysis.batch_free[op]
            && !analysis.storages.is_changed(copy)
            && !given(copy)
            && !given(param)
        {
            found.param_of.insert(op, param);
            found.copy_of.insert(param, copy);
        }
    }
    found
}

/// The result, if all that the op does is to convert the parameter, and gradients come back through it where it gets any.
fn copy_of(graph: &Graph, op: &Op, param: ValueId) -> Option<ValueId> {
    let ([Arg::Value(_), Arg::Torch(_)], [copy]) = (&op.args[..], &op.results[..]) else { return None };
    let (before, after) = (&graph.values[param], &graph.values[*copy]);
    let halves = before.dtype == DType::Float32 && matches!(after.dtype, DType::Float16 | DType::Bfloat16);
    let converts = op.target == "aten.to.dtype" && op.kwargs.is_empty() && op.region.is_none() && halves;
    (converts && (op.grad_enabled || !before.requires_grad)).then_some(*copy)
}
