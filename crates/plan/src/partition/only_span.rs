//! Which Span alone uses a Param, so that no other needs it whole.

use std::collections::{BTreeMap, BTreeSet};
use std::iter;

use rannc_ir::{Analysis, DType, Graph, OpId, ParamId, Storages, ValueId};

use super::parts::StagePart;

/// The place of the one Span that uses a Param of a Stage with this Value, and views of it. Where all that the Stage does
/// with it is to convert it to another type, the Span that uses the result, for the conversion needs no more than each
/// rank's part.
pub(crate) fn only_span(graph: &Graph, storages: &Storages, part: &StagePart, value: ValueId) -> Option<u32> {
    let found = Uses::of(graph, storages, value, |value| {
        part.ops.iter().copied().filter(|&op| graph.ops[op].operands().contains(&value)).collect()
    });
    if found.any_of(&part.sends) || found.any_of(&part.outputs) {
        return None;
    }
    let uses = |span: &[OpId]| found.ops.iter().any(|op| span.contains(op));
    if part.prologue.as_ref().is_some_and(|prologue| uses(&prologue.ops)) {
        return None;
    }
    let mut users = (0..).zip(&part.spans).filter(|(_, span)| uses(&span.ops)).map(|(place, _)| place);
    users.next().filter(|_| users.next().is_none())
}

/// The Params that a Span may not have for itself, depending on the Stages: a Prologue uses them, batch-free Ops do, or they
/// are given out.
pub fn params_beside_spans(graph: &Graph, analysis: &Analysis) -> BTreeSet<ParamId> {
    let readers = readers(graph);
    let beside = |value: ValueId| {
        let found = Uses::of(graph, &analysis.storages, value, |value| of_value(&readers, value));
        found.any_of(&graph.outputs) || found.ops.iter().any(|&op| analysis.batch_free[op])
    };
    graph.params.iter().filter(|(_, param)| beside(param.value)).map(|(id, _)| id).collect()
}

/// What a Param is used for.
struct Uses {
    /// Its Value, what that is converted to if nothing else is done with it, and views of the last of these.
    values: BTreeSet<ValueId>,
    /// The Ops that read the last of these, and its views.
    ops: Vec<OpId>,
}

impl Uses {
    fn of(graph: &Graph, storages: &Storages, value: ValueId, readers: impl Fn(ValueId) -> Vec<OpId>) -> Self {
        let (mut values, mut last, mut ops) = (BTreeSet::from([value]), value, readers(value));
        if let Some(converted) = conversion(graph, &ops) {
            values.insert(converted);
            (last, ops) = (converted, readers(converted));
        }
        // Readers of views are added, whose results may be views as well.
        let mut place = 0;
        while let Some(op) = ops.get(place) {
            let results = graph.ops[*op].results.iter().copied();
            let views = results.filter(|&result| storages.root[result] == storages.root[last] && values.insert(result));
            ops.extend(views.collect::<Vec<_>>().into_iter().flat_map(&readers));
            place += 1;
        }
        Self { values, ops }
    }

    fn any_of(&self, given: &[ValueId]) -> bool {
        given.iter().any(|value| self.values.contains(value))
    }
}

/// The type in which a model computes with each Param: that to which it converts it, where it does nothing else with it and
/// that takes less, otherwise its own.
pub(crate) fn computed_types(graph: &Graph) -> BTreeMap<ParamId, DType> {
    let readers = readers(graph);
    let of = |value: ValueId| {
        let values = iter::once(value).chain(conversion(graph, &of_value(&readers, value)));
        let types = values.map(|value| graph.values[value].dtype);
        types.min_by_key(|dtype| dtype.bytes()).expect("its own is there")
    };
    graph.params.iter().map(|(id, param)| (id, of(param.value))).collect()
}

/// The Ops that read each Value.
fn readers(graph: &Graph) -> BTreeMap<ValueId, BTreeSet<OpId>> {
    let mut readers: BTreeMap<ValueId, BTreeSet<OpId>> = BTreeMap::new();
    for (id, op) in graph.ops.iter() {
        op.operands().into_iter().for_each(|value| _ = readers.entry(value).or_default().insert(id));
    }
    readers
}

fn of_value(readers: &BTreeMap<ValueId, BTreeSet<OpId>>, value: ValueId) -> Vec<OpId> {
    readers.get(&value).into_iter().flatten().copied().collect()
}

/// What the only reader of a Value gives, if it does nothing but convert it to another type.
fn conversion(graph: &Graph, readers: &[OpId]) -> Option<ValueId> {
    let [op] = *readers else { return None };
    let op = &graph.ops[op];
    let converts = op.target == "aten.to.dtype" && op.args.len() == 2 && op.kwargs.is_empty();
    match op.results[..] {
        [result] if converts => Some(result),
        _ => None,
    }
}
