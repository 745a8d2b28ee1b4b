//! Ops that depend on no batch: they are cloned into Stages, all others are divided over them.

use crate::entity::Arena;
use crate::graph::{Graph, OpId, ValueDef, ValueId};
use crate::storages::Storages;

/// For each op whether it may be cloned into every Stage that needs its results, instead of sending
/// them: it depends on no input, draws nothing, is not opaque and stands in no region, and whatever
/// changes the storages that it reads or makes are batch-free ops as well, so that each clone changes
/// its own. Such an op may read parameters, unchanged buffers, constants and the batch size.
pub fn batch_free_ops(graph: &Graph) -> Arena<OpId, bool> {
    batch_free(graph, &Storages::new(graph))
}

/// The ops that are not batch-free, in execution order. Stages are runs of this list.
pub fn main_ops(graph: &Graph) -> Vec<OpId> {
    batch_free_ops(graph).iter().filter(|&(_, &free)| !free).map(|(op, _)| op).collect()
}

pub(crate) fn batch_free(graph: &Graph, storages: &Storages) -> Arena<OpId, bool> {
    let mut updates: Arena<ValueId, bool> = graph.values.ids().map(|_| false).collect();
    for update in graph.buffers.values().filter_map(|buffer| buffer.update) {
        updates[update] = true;
    }
    // By earliest Value: storages that are never changed, or only by batch-free ops as far as is known.
    let is_op = |root: ValueId| matches!(graph.values[root].def, ValueDef::Op { .. });
    let mut private: Arena<ValueId, bool> =
        graph.values.ids().map(|value| !storages.is_changed(value) || is_op(storages.root[value])).collect();
    let mut free: Arena<OpId, bool> = graph.ops.ids().map(|_| false).collect();
    loop {
        for (id, op) in graph.ops.iter() {
            let reads_free = op.operands().iter().all(|&value| {
                private[storages.root[value]]
                    && match graph.values[value].def {
                        ValueDef::Input(_) => false,
                        ValueDef::Param(_) | ValueDef::Buffer(_) | ValueDef::Constant(_) => true,
                        ValueDef::Op { op, .. } => free[op],
                    }
            });
            let makes_free = op.results.iter().all(|&value| private[storages.root[value]] && !updates[value]);
            // An op without effect on a Value is there for another effect; no Stage would clone it.
            let is_value_only = !(op.results.is_empty() && op.mutates.is_empty());
            free[id] = is_value_only && !op.random && !op.opaque && op.region.is_none() && reads_free && makes_free;
        }
        let mut settled = true;
        for (_, op) in graph.ops.iter().filter(|&(id, _)| !free[id]) {
            for &value in op.results.iter().chain(&op.mutates).filter(|&&value| storages.is_changed(value)) {
                settled &= !std::mem::take(&mut private[storages.root[value]]);
            }
        }
        if settled {
            return free;
        }
    }
}
