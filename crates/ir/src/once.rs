//! Ops that are the same for every part of a batch: they run once a step, before all others.

use std::collections::BTreeMap;

use crate::entity::Arena;
use crate::graph::{Arg, Dim, Graph, Op, OpId, ValueDef, ValueId};
use crate::storages::Storages;

/// For each op whether it runs once a step: it depends on no input and no batch size, is not opaque and stands in no
/// region, whatever it reads is made by such ops or is state that no other op changes, and what it changes is read by
/// other ops only when it has changed for the last time. Unlike batch-free ops these may draw, and change buffers.
pub(crate) fn once_ops(graph: &Graph, storages: &Storages) -> Arena<OpId, bool> {
    let mut once: Arena<OpId, bool> = graph.ops.ids().map(|_| false).collect();
    for (id, op) in graph.ops.iter() {
        once[id] = may_run_once(graph, op);
    }
    while drop_dependent(graph, storages, &mut once) || drop_shared(graph, storages, &mut once) {}
    once
}

/// What one op by itself says.
fn may_run_once(graph: &Graph, op: &Op) -> bool {
    let has_rows = |value: &ValueId| graph.values[*value].shape.iter().any(|dim| dim.per_row != 0);
    // An op without results draws by its place in the batch.
    !op.results.is_empty()
        && !op.opaque
        && op.region.is_none()
        && !op.args.iter().chain(op.kwargs.values()).any(is_of_batch_size)
        && !op.results.iter().any(has_rows)
}

fn is_of_batch_size(arg: &Arg) -> bool {
    match arg {
        Arg::Dim(Dim { per_row, .. }) => *per_row != 0,
        Arg::List(items) => items.iter().any(is_of_batch_size),
        _ => false,
    }
}

/// Drops ops that read an input, or what another op makes; true if there were any.
fn drop_dependent(graph: &Graph, storages: &Storages, once: &mut Arena<OpId, bool>) -> bool {
    let mut dropped = false;
    for (id, op) in graph.ops.iter() {
        let is_once = |value: &ValueId| match graph.values[*value].def {
            ValueDef::Input(_) => false,
            ValueDef::Param(_) | ValueDef::Buffer(_) | ValueDef::Constant(_) => true,
            ValueDef::Op { op, .. } => once[op],
        };
        let all =
            op.operands().iter().chain(&op.results).all(|value| is_once(value) && is_once(&storages.root[*value]));
        dropped |= once[id] && !all;
        once[id] &= all;
    }
    dropped
}

/// Drops ops that touch what other ops change too, or read before its last change; true if there were any.
fn drop_shared(graph: &Graph, storages: &Storages, once: &mut Arena<OpId, bool>) -> bool {
    // By storage: the ops that touch it and are not dropped yet, and the last change of it by one of them.
    let mut touching: BTreeMap<ValueId, Vec<OpId>> = BTreeMap::new();
    let mut shared: BTreeMap<ValueId, bool> = BTreeMap::new();
    for buffer in graph.buffers.values() {
        if let Some(ValueDef::Op { op, .. }) = buffer.update.map(|update| graph.values[update].def) {
            *shared.entry(storages.root[buffer.value]).or_default() |= !once[op];
        }
    }
    for (id, op) in graph.ops.iter() {
        for value in op.operands().iter().chain(&op.results).filter(|&&value| storages.is_changed(value)) {
            let root = storages.root[*value];
            touching.entry(root).or_default().push(id);
            let last = storages.changers(root).last();
            *shared.entry(root).or_default() |= !once[id] && last.is_some_and(|last| id <= last);
        }
    }
    let mut dropped = false;
    for (_, id) in shared
        .into_iter()
        .filter(|&(_, shared)| shared)
        .flat_map(|(root, _)| touching.get(&root).into_iter().flatten().map(move |&id| (root, id)).collect::<Vec<_>>())
    {
        dropped |= std::mem::take(&mut once[id]);
    }
    dropped
}
