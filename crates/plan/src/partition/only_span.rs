//! Which Span alone uses a Param, so that no other needs it whole.

use std::collections::{BTreeMap, BTreeSet};
use std::iter;

use rannc_ir::{Analysis, DType, Graph, OpId, ParamId, ValueId};

use super::parts::StagePart;

/// The place of the one Span that uses a Param of a Stage with this Value, and views of it. Where all that the Stage does
/// with it is to convert it to another type, the Span that uses the result, for the conversion needs no more than each
/// rank's part.
pub(crate) fn only_span(graph: &Graph, part: &StagePart, value: ValueId) -> Option<u32> {
    let found = Uses::of(graph, value, |value| {
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
        let found = Uses::of(graph, value, |value| of_value(&readers, value));
        found.any_of(&graph.outputs) || found.ops.iter().any(|&op| analysis.batch_free[op])
    };
    graph.params.iter().filter(|(_, param)| beside(param.value)).map(|(id, _)| id).collect()
}

/// What a Param is used for.
struct Uses {
    /// Its Value, and what that is converted to if nothing else is done with it.
    values: Vec<ValueId>,
    /// The last of these, and views of it.
    views: BTreeSet<ValueId>,
    /// The Ops that read one of the views.
    ops: Vec<OpId>,
}

impl Uses {
    fn of(graph: &Graph, value: ValueId, readers: impl Fn(ValueId) -> Vec<OpId>) -> Self {
        let first = readers(value);
        let converted = if let [op] = first[..] { conversion(graph, op) } else { None };
        let last = converted.unwrap_or(value);
        let mut values = vec![value];
        values.extend(converted);
        let (mut views, mut ops, mut open) = (BTreeSet::new(), Vec::new(), vec![last]);
        while let Some(view) = open.pop() {
            if !views.insert(view) {
                continue;
            }
            let own = readers(view);
            let results = own.iter().flat_map(|&op| &graph.ops[op].results).copied();
            open.extend(results.filter(|&result| shares_storage(graph, result, last)));
            ops.extend(own);
        }
        Self { values, views, ops }
    }

    fn any_of(&self, given: &[ValueId]) -> bool {
        given.iter().any(|value| self.values.contains(value) || self.views.contains(value))
    }
}

/// True for a view.
fn shares_storage(graph: &Graph, view: ValueId, of: ValueId) -> bool {
    let root = |value| iter::successors(Some(value), |&value| graph.values[value].alias_of).last();
    root(view) == root(of)
}

/// The type in which a model computes with each Param: that to which it converts it, where it does nothing else with it and
/// that takes less, otherwise its own.
pub(crate) fn computed_types(graph: &Graph) -> BTreeMap<ParamId, DType> {
    let readers = readers(graph);
    let of = |value: ValueId| {
        let Uses { values, .. } = Uses::of(graph, value, |value| of_value(&readers, value));
        let types = values.into_iter().map(|value| graph.values[value].dtype);
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

/// The result of an Op that does nothing but convert to another type.
fn conversion(graph: &Graph, op: OpId) -> Option<ValueId> {
    let op = &graph.ops[op];
    let converts = op.target == "aten.to.dtype" && op.args.len() == 2 && op.kwargs.is_empty();
    match op.results[..] {
        [result] if converts => Some(result),
        _ => None,
    }
}
