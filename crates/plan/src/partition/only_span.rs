//! Which Span alone uses a Param, so that no other needs it whole.

use rannc_ir::{Graph, OpId, ValueId};

use super::parts::StagePart;

/// The place of the one Span that uses a Param of a Stage with this Value. Where all that the Stage does with it is to
/// convert it to another type, the Span that uses the result, for the conversion needs no more than each rank's part.
pub(crate) fn only_span(graph: &Graph, part: &StagePart, value: ValueId) -> Option<u32> {
    let readers = |value: ValueId| -> Vec<OpId> {
        part.ops.iter().copied().filter(|&op| graph.ops[op].operands().contains(&value)).collect()
    };
    let mut found = readers(value);
    let mut values = vec![value];
    if let [op] = found[..]
        && let Some(converted) = conversion(graph, op)
    {
        values.push(converted);
        found = readers(converted);
    }
    if values.iter().any(|value| part.sends.contains(value) || part.outputs.contains(value)) {
        return None;
    }
    let uses = |ops: &[OpId]| found.iter().any(|op| ops.contains(op));
    if part.prologue.as_ref().is_some_and(|prologue| uses(&prologue.ops)) {
        return None;
    }
    let mut users = (0..).zip(&part.spans).filter(|(_, span)| uses(&span.ops)).map(|(place, _)| place);
    users.next().filter(|_| users.next().is_none())
}

/// The result of an Op that does nothing but convert to another type.
pub(crate) fn conversion(graph: &Graph, op: OpId) -> Option<ValueId> {
    let op = &graph.ops[op];
    let converts = op.target == "aten.to.dtype" && op.args.len() == 2 && op.kwargs.is_empty();
    match op.results[..] {
        [result] if converts => Some(result),
        _ => None,
    }
}
