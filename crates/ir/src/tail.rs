//! The tail of a Graph: what runs once a step on all rows, and the body that parts of the batch go through.
//!
//! Ops that mix rows, and all that follows a reduction over rows, belong to the tail. Parts of the batch join in the
//! Values that it takes from the body: rows one after another, reductions by their sum or mean. Values that count, of
//! the inputs alone, can be joined before the step begins.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use crate::analysis::Analysis;
use crate::entity::{Arena, Entity};
use crate::graph::{BufferId, ConstId, Graph, Op, OpId, ParamId, ValueDef, ValueId};
use crate::row_state::{Join, Mixing, RowState};
use crate::rows::Rows;

/// A Value that parts of the batch make and the tail takes as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Joined {
    /// The Value.
    pub value: ValueId,
    /// How the parts join.
    pub join: Join,
    /// True when a gradient goes back into it.
    pub requires_grad: bool,
    /// True when it depends on inputs, constants and buffers that stay alone: it can be known before the step.
    pub known: bool,
}

/// What runs once a step on all rows. All ids are those of the whole Graph.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Tail {
    /// Its Ops in order, batch-free ones that it needs included.
    pub ops: Vec<OpId>,
    /// What it takes from the body.
    pub joined: Vec<Joined>,
    /// Main Ops and what they clone that make the joined Values that are known before the step.
    pub known_ops: Vec<OpId>,
    /// Outputs of the Graph that it makes.
    pub outputs: Vec<ValueId>,
    /// Params that it reads.
    pub params: Vec<ParamId>,
    /// Buffers that it or `known_ops` read, or that it gives new contents.
    pub buffers: Vec<BufferId>,
    /// Constants that it or `known_ops` read.
    pub constants: Vec<ConstId>,
    /// True when the gradients that go back into joined Values depend on none of these but the known ones, so that
    /// backwards may run before all parts have joined.
    pub linear: bool,
    /// The Ops that mix rows themselves, and how.
    pub mixing: Vec<(OpId, &'static str)>,
}

/// A Graph divided into body and tail.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Divided {
    /// What parts of the batch go through; its outputs are the joined Values and the outputs that the tail does not
    /// make, each once.
    #[serde(skip)]
    pub body: Graph,
    /// By Op of the body, the Op of the whole Graph.
    pub ops: Vec<OpId>,
    /// By Value of the body, the Value of the whole Graph.
    pub values: Vec<ValueId>,
    /// By output of the body, how parts join; `None` for rows and for what is the same for any rows.
    pub joins: Vec<Option<Join>>,
    /// The tail.
    pub tail: Tail,
}

impl Graph {
    /// Divides a verified graph; without anything that mixes or follows a reduction the body is the graph itself.
    pub fn divide_tail(&self, mixing: Mixing) -> Divided {
        let mut mixed = BTreeSet::new();
        let (analysis, in_tail) = loop {
            let analysis = Analysis::with_mixing(self, mixing, &mixed);
            let in_tail = tail_ops(self, &analysis);
            let found = makers_of_leaving_batches(self, &analysis, &in_tail);
            if found.is_empty() {
                break (analysis, in_tail);
            }
            mixed.extend(found);
        };
        let rows = &analysis.rows;
        let joined = joined_values(self, &analysis, &in_tail);
        let tail = tail(self, &analysis, &in_tail, joined);
        let outputs = body_outputs(self, &in_tail, &tail);
        let (mut body, ops, values) = body(self, &analysis, &in_tail, outputs);
        body.mixing = mixing;
        let joins = body.outputs.iter().map(|&value| partial_join(rows.states[values[value.index()]])).collect();
        Divided { body, ops, values, joins, tail }
    }
}

/// The Ops that put batches one after another which the body would give out: nobody could join their parts.
fn makers_of_leaving_batches(graph: &Graph, analysis: &Analysis, in_tail: &Arena<OpId, bool>) -> BTreeSet<OpId> {
    let is_batches = |&value: &ValueId| matches!(analysis.rows.states[value], RowState::Batches(_));
    let taken = graph.ops.iter().filter(|&(id, _)| in_tail[id]).flat_map(|(_, op)| op.operands());
    let updates = graph.buffers.values().filter_map(|buffer| buffer.update);
    let mut open: Vec<ValueId> = graph.outputs.iter().copied().chain(updates).chain(taken).filter(is_batches).collect();
    let mut makers = BTreeSet::new();
    let mut seen = BTreeSet::new();
    while let Some(value) = open.pop() {
        let ValueDef::Op { op, .. } = graph.values[value].def else { continue };
        if seen.insert(op) {
            let before: Vec<ValueId> = graph.ops[op].operands().into_iter().filter(is_batches).collect();
            if before.is_empty() {
                makers.insert(op);
            }
            open.extend(before);
        }
    }
    makers
}

fn partial_join(state: RowState) -> Option<Join> {
    if let RowState::Partial(join) = state { Some(join) } else { None }
}

/// The Ops whose results follow a reduction or mix rows, with all of a region or a row group of which one does, and all that share a
/// storage with one where the order of changes would be lost between body and tail.
fn tail_ops(graph: &Graph, analysis: &Analysis) -> Arena<OpId, bool> {
    let mut together = BTreeSet::new();
    let mut forced: Arena<OpId, bool> = graph.ops.ids().map(|_| false).collect();
    let mut values: Arena<ValueId, bool> = graph.values.ids().map(|_| false).collect();
    loop {
        let mut found: Arena<OpId, bool> = graph.ops.ids().map(|_| false).collect();
        for (id, op) in graph.ops.iter() {
            found[id] = forced[id]
                || groups_of(op).any(|group| together.contains(&group))
                || follows_reduction(graph, analysis, &values, id);
            if found[id] {
                op.results.iter().for_each(|&value| values[value] = true);
            }
        }
        let known = together.len();
        together.extend(graph.ops.iter().filter(|&(id, _)| found[id]).flat_map(|(_, op)| groups_of(op)));
        if together.len() == known && !force_sharers(graph, analysis, &found, &mut forced) {
            return found;
        }
    }
}

/// The region and the row group of an Op, which the tail has whole or not at all.
fn groups_of(op: &Op) -> impl Iterator<Item = (bool, u32)> {
    op.region.map(|region| (false, region)).into_iter().chain(op.row_group.map(|group| (true, group)))
}

/// `values`: those that the tail makes.
fn follows_reduction(graph: &Graph, analysis: &Analysis, values: &Arena<ValueId, bool>, id: OpId) -> bool {
    let (op, rows) = (&graph.ops[id], &analysis.rows);
    // An Op with results that takes a reduction has mixed ones, unless each part is to mix its own rows.
    let takes = |&value: &ValueId| values[value] || (op.results.is_empty() && is_joined(rows, value));
    // Numbers of rows that parts have made begin anew in each of them; a batch-free Op is cloned instead.
    let mixes = op.results.iter().any(|&value| match rows.states[value] {
        RowState::Mixed => true,
        RowState::Numbers(_) => !analysis.batch_free[id],
        _ => false,
    });
    op.operands().iter().any(takes)
        || mixes
        || op.mutates.iter().any(|&value| rows.spoiled_by(value, id, &analysis.storages))
}

/// Adds to `forced` the main Ops that touch a storage which tail Ops touch too and which is changed, unless it is the
/// body's own and final before the tail reads it. True when there are new ones.
fn force_sharers(
    graph: &Graph,
    analysis: &Analysis,
    found: &Arena<OpId, bool>,
    forced: &mut Arena<OpId, bool>,
) -> bool {
    let storages = &analysis.storages;
    let mut touching: BTreeMap<ValueId, Vec<OpId>> = BTreeMap::new();
    for (id, op) in graph.ops.iter().filter(|&(id, _)| !analysis.batch_free[id] || found[id]) {
        for value in op.operands().into_iter().chain(op.results.iter().copied()) {
            if storages.is_changed(value) {
                touching.entry(storages.root[value]).or_default().push(id);
            }
        }
    }
    for buffer in graph.buffers.values() {
        if let Some(ValueDef::Op { op, .. }) = buffer.update.map(|update| graph.values[update].def) {
            touching.entry(storages.root[buffer.value]).or_default().push(op);
        }
    }
    let mut any = false;
    for (root, ops) in touching {
        let Some(first) = ops.iter().copied().filter(|&id| found[id]).min() else { continue };
        let is_final = match graph.values[root].def {
            ValueDef::Op { op, .. } => {
                !found[op]
                    && (analysis.batch_free[op] || storages.changers(root).all(|last| last < first && !found[last]))
            }
            _ => false,
        };
        for id in ops.into_iter().filter(|&id| !is_final && !found[id]) {
            forced[id] = true;
            any = true;
        }
    }
    any
}

fn is_joined(rows: &Rows, value: ValueId) -> bool {
    matches!(rows.states[value], RowState::Partial(_) | RowState::Mixed)
}

/// What the tail takes from inputs and main Ops of the body.
fn joined_values(graph: &Graph, analysis: &Analysis, in_tail: &Arena<OpId, bool>) -> Vec<Joined> {
    let mut found = BTreeSet::new();
    for (_, op) in graph.ops.iter().filter(|&(id, _)| in_tail[id]) {
        for value in op.operands() {
            let outside = match graph.values[value].def {
                ValueDef::Input(_) => true,
                ValueDef::Op { op, .. } => !in_tail[op] && !analysis.batch_free[op],
                _ => false,
            };
            if outside {
                found.insert(value);
            }
        }
    }
    let known = known_before(graph, analysis);
    let join = |value: ValueId| match analysis.rows.states[value] {
        RowState::Rows(rows) | RowState::Numbers(rows) => Some(Join::Rows(rows)),
        RowState::Partial(join) => Some(join),
        // The same for any rows: every part has it.
        RowState::Free => Some(Join::Mean),
        RowState::Batches(_) | RowState::Mixed => None,
    };
    let joined = |value: ValueId| {
        let requires_grad = graph.values[value].requires_grad;
        Some(Joined { value, join: join(value)?, requires_grad, known: known[value] && !requires_grad })
    };
    found.into_iter().filter_map(joined).collect()
}

/// Values that depend on inputs, constants, buffers that stay and the batch size alone, by Ops that neither draw nor
/// are opaque.
fn known_before(graph: &Graph, analysis: &Analysis) -> Arena<ValueId, bool> {
    let mut known: Arena<ValueId, bool> = graph
        .values
        .iter()
        .map(|(id, value)| {
            matches!(value.def, ValueDef::Input(_) | ValueDef::Constant(_) | ValueDef::Buffer(_))
                && !analysis.storages.is_changed(id)
        })
        .collect();
    for (_, op) in graph.ops.iter() {
        let plain = !op.random && !op.opaque && op.region.is_none() && op.mutates.is_empty();
        let taken = op.operands().into_iter().all(|value| known[value]);
        op.results.iter().for_each(|&value| known[value] = plain && taken && !analysis.storages.is_changed(value));
    }
    known
}

fn tail(graph: &Graph, analysis: &Analysis, in_tail: &Arena<OpId, bool>, joined: Vec<Joined>) -> Tail {
    let main: Vec<OpId> = graph.ops.ids().filter(|&id| in_tail[id]).collect();
    let ops = with_clones(graph, analysis, &main, in_tail);
    let known: Vec<ValueId> = joined.iter().filter(|joined| joined.known).map(|joined| joined.value).collect();
    let known_ops = slice(graph, &known);
    let all = ops.iter().chain(&known_ops);
    let reads: BTreeSet<ValueId> = all.flat_map(|&id| graph.ops[id].operands()).collect();
    let params = graph.params.iter().filter(|(_, param)| reads.contains(&param.value)).map(|(id, _)| id).collect();
    let stored = |update: Option<ValueId>| update.is_some_and(|value| made_by(graph, value, in_tail));
    let buffers = graph
        .buffers
        .iter()
        .filter(|(_, buffer)| reads.contains(&buffer.value) || stored(buffer.update))
        .map(|(id, _)| id)
        .collect();
    let constants = graph.constants.iter().filter(|(_, item)| reads.contains(&item.value)).map(|(id, _)| id).collect();
    let distinct: BTreeSet<ValueId> = graph.outputs.iter().copied().collect();
    let outputs = distinct.into_iter().filter(|&value| made_by(graph, value, in_tail)).collect();
    let trains = graph.params.values().any(|param| {
        let value = param.value;
        reads.contains(&value) && graph.values[value].requires_grad
    });
    let linear = !trains && is_linear(graph, in_tail, &joined);
    let mixing = analysis.rows.mixing.clone();
    Tail { ops: ops.into_iter().collect(), joined, known_ops, outputs, params, buffers, constants, linear, mixing }
}

fn made_by(graph: &Graph, value: ValueId, ops: &Arena<OpId, bool>) -> bool {
    matches!(graph.values[value].def, ValueDef::Op { op, .. } if ops[op])
}

/// `main` with the batch-free Ops that they need.
fn with_clones(graph: &Graph, analysis: &Analysis, main: &[OpId], in_tail: &Arena<OpId, bool>) -> BTreeSet<OpId> {
    let mut ops: BTreeSet<OpId> = main.iter().copied().collect();
    for &id in main {
        for value in graph.ops[id].operands() {
            if let ValueDef::Op { op, .. } = graph.values[value].def
                && analysis.batch_free[op]
                && !in_tail[op]
            {
                ops.extend(analysis.clones(graph, op));
            }
        }
    }
    ops
}

/// All Ops that `values` are made of, in order.
fn slice(graph: &Graph, values: &[ValueId]) -> Vec<OpId> {
    let mut found = BTreeSet::new();
    let mut open = values.to_vec();
    while let Some(value) = open.pop() {
        if let ValueDef::Op { op, .. } = graph.values[value].def
            && found.insert(op)
        {
            open.extend(graph.ops[op].operands());
        }
    }
    found.into_iter().collect()
}

/// Whether gradients into joined Values depend on known ones alone: on their way to the outputs the others are only
/// added, scaled by what is known, or regrouped. For a tail that trains no parameter.
fn is_linear(graph: &Graph, in_tail: &Arena<OpId, bool>, joined: &[Joined]) -> bool {
    if joined.iter().any(|item| item.requires_grad && matches!(item.join, Join::Rows(_))) {
        return false;
    }
    let mut flows: Arena<ValueId, bool> = graph.values.ids().map(|_| false).collect();
    let mut unknown: Arena<ValueId, bool> = graph.values.ids().map(|_| false).collect();
    for item in joined {
        flows[item.value] = item.requires_grad;
        unknown[item.value] = !item.known;
    }
    for (_, op) in graph.ops.iter().filter(|&(id, _)| in_tail[id]) {
        let operands = op.operands();
        let differentiable = op.grad_enabled && op.results.iter().any(|&value| graph.values[value].requires_grad);
        if differentiable && !keeps_gradient_known(&op.target, &operands, &flows, &unknown) {
            return false;
        }
        for &value in &op.results {
            flows[value] = differentiable;
            unknown[value] = operands.iter().any(|&operand| unknown[operand]);
        }
    }
    true
}

fn keeps_gradient_known(
    target: &str,
    operands: &[ValueId],
    flows: &Arena<ValueId, bool>,
    unknown: &Arena<ValueId, bool>,
) -> bool {
    let factor_is_known = |index: usize| operands.get(index).is_none_or(|&value| !unknown[value] && !flows[value]);
    match target.split('.').nth(1).unwrap_or_default().trim_end_matches('_') {
        "add" | "sub" | "rsub" | "neg" | "sum" | "mean" | "stack" | "cat" | "clone" | "to" | "alias" | "view"
        | "reshape" | "squeeze" | "unsqueeze" | "expand" | "_to_copy" | "float" | "contiguous" => {
            operands.iter().all(|&value| flows[value] || !unknown[value])
        }
        "mul" => factor_is_known(0) || factor_is_known(1),
        "div" | "true_divide" => factor_is_known(1),
        _ => false,
    }
}

fn body_outputs(graph: &Graph, in_tail: &Arena<OpId, bool>, tail: &Tail) -> Vec<ValueId> {
    let mut outputs: Vec<ValueId> = Vec::new();
    let joined = tail.joined.iter().filter(|joined| !joined.known).map(|joined| joined.value);
    for value in graph.outputs.iter().copied().filter(|&value| !made_by(graph, value, in_tail)).chain(joined) {
        if !outputs.contains(&value) {
            outputs.push(value);
        }
    }
    outputs
}

/// The graph without its tail and without batch-free Ops and known ones that only the tail needs.
fn body(
    graph: &Graph,
    analysis: &Analysis,
    in_tail: &Arena<OpId, bool>,
    outputs: Vec<ValueId>,
) -> (Graph, Vec<OpId>, Vec<ValueId>) {
    if graph.ops.ids().all(|id| !in_tail[id]) {
        return (graph.clone(), graph.ops.ids().collect(), graph.values.ids().collect());
    }
    let ops = needed_ops(graph, analysis, in_tail, &outputs);
    let kept: BTreeSet<OpId> = ops.iter().copied().collect();
    let values: Vec<ValueId> = graph
        .values
        .iter()
        .filter(|(_, value)| !matches!(value.def, ValueDef::Op { op, .. } if !kept.contains(&op)))
        .map(|(id, _)| id)
        .collect();
    (Renumbered::new(graph, &ops, &values).graph(graph, &outputs), ops, values)
}

/// The Ops outside of the tail that outputs, buffers or other effects need.
fn needed_ops(graph: &Graph, analysis: &Analysis, in_tail: &Arena<OpId, bool>, outputs: &[ValueId]) -> Vec<OpId> {
    let mut needed: Arena<OpId, bool> = graph.ops.ids().map(|_| false).collect();
    let mut wanted: Vec<ValueId> = outputs.to_vec();
    wanted.extend(graph.buffers.values().filter_map(|buffer| buffer.update));
    let effect = |id: OpId| {
        let op = &graph.ops[id];
        !op.mutates.is_empty() || op.results.is_empty() || op.random || op.opaque || op.region.is_some()
    };
    let mut open: Vec<OpId> = graph.ops.ids().filter(|&id| !in_tail[id] && effect(id)).collect();
    let maker = |value: ValueId| match graph.values[value].def {
        ValueDef::Op { op, .. } if !in_tail[op] => Some(op),
        _ => None,
    };
    open.extend(wanted.into_iter().filter_map(maker));
    while let Some(id) = open.pop() {
        if !std::mem::replace(&mut needed[id], true) {
            let op = &graph.ops[id];
            let touched: Vec<ValueId> = op.operands().into_iter().chain(op.results.iter().copied()).collect();
            open.extend(touched.iter().flat_map(|&value| [value, analysis.storages.root[value]]).filter_map(maker));
            open.extend(
                touched.into_iter().flat_map(|value| analysis.storages.changers(value)).filter(|&id| !in_tail[id]),
            );
        }
    }
    graph.ops.ids().filter(|&id| needed[id]).collect()
}

/// New ids for what is kept.
struct Renumbered {
    ops: Arena<OpId, Option<OpId>>,
    values: Arena<ValueId, Option<ValueId>>,
    kept_ops: Vec<OpId>,
    kept_values: Vec<ValueId>,
}

impl Renumbered {
    fn new(graph: &Graph, ops: &[OpId], values: &[ValueId]) -> Self {
        let mut new_ops: Arena<OpId, Option<OpId>> = graph.ops.ids().map(|_| None).collect();
        let mut new_values: Arena<ValueId, Option<ValueId>> = graph.values.ids().map(|_| None).collect();
        ops.iter().enumerate().for_each(|(new, &old)| new_ops[old] = Some(OpId::new(new)));
        values.iter().enumerate().for_each(|(new, &old)| new_values[old] = Some(ValueId::new(new)));
        Self { ops: new_ops, values: new_values, kept_ops: ops.to_vec(), kept_values: values.to_vec() }
    }

    fn value(&self, old: ValueId) -> ValueId {
        self.values[old].expect("what a kept Op reads is kept")
    }

    fn graph(&self, graph: &Graph, outputs: &[ValueId]) -> Graph {
        let mut new = graph.clone();
        new.values = self.kept_values.iter().map(|&old| self.renumbered_value(graph, old)).collect();
        new.ops = self
            .kept_ops
            .iter()
            .map(|&old| {
                let mut op = graph.ops[old].clone();
                op.args.iter_mut().for_each(|arg| arg.map_values(&mut |value| self.value(value)));
                op.kwargs.values_mut().for_each(|arg| arg.map_values(&mut |value| self.value(value)));
                op.results.iter_mut().for_each(|value| *value = self.value(*value));
                op.mutates.iter_mut().for_each(|value| *value = self.value(*value));
                op
            })
            .collect();
        for param in new.params.values_mut() {
            param.value = self.value(param.value);
        }
        for buffer in new.buffers.values_mut() {
            buffer.value = self.value(buffer.value);
            buffer.update = buffer.update.and_then(|update| self.values[update]);
        }
        for constant in new.constants.values_mut() {
            constant.value = self.value(constant.value);
        }
        new.inputs = graph.inputs.iter().map(|&value| self.value(value)).collect();
        new.outputs = outputs.iter().map(|&value| self.value(value)).collect();
        new
    }

    fn renumbered_value(&self, graph: &Graph, old: ValueId) -> crate::graph::Value {
        let mut value = graph.values[old].clone();
        if let ValueDef::Op { op, result } = value.def {
            value.def = ValueDef::Op { op: self.ops[op].expect("the maker of a kept Value is kept"), result };
        }
        value.alias_of = value.alias_of.and_then(|base| self.values[base]);
        value
    }
}
