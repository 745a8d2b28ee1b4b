//! One Op followed by its operator's rule: what its operands know of rows, and so its results.

use crate::dtype::DType;
use crate::entity::Arena;
use crate::graph::{Arg, Dim, Graph, Op, Value, ValueDef, ValueId};
use crate::ops::{Over, RowRule, Slot, row_rule};
use crate::row_state::{Batches, Join, RowDim, RowState};

mod batches;
mod indices;
mod layout;
mod reductions;

/// How rows come together, for messages.
pub(crate) type How = &'static str;

const NO_RULE: How = "what it does to rows is not known";
const ROW_AXIS: How = "it works along the batch";
const UNALIGNED: How = "its operands have their rows in different dimensions";
const UNCONFIRMED: How = "the extents of its result do not follow the batch";
const ROW_NUMBERS: How = "it computes with the numbers of the rows";
const BATCH_SIZE: How = "it computes with the number of rows";
pub(crate) const ONE_AFTER_ANOTHER: How = "it puts batches one after another";
const CHANGES: How = "it changes a tensor without rows by what has rows";

/// What each result of `op` knows of rows, if none of its operands joins or mixes them.
///
/// # Errors
/// How it mixes rows.
pub(crate) fn follow(
    graph: &Graph,
    op: &Op,
    states: &Arena<ValueId, RowState>,
    given: &Arena<ValueId, bool>,
    batches: Batches,
) -> Result<Vec<RowState>, How> {
    let call = Call { graph, op, states, given, batches };
    let operands = op.operands();
    let free = operands.iter().all(|&value| states[value] == RowState::Free);
    let extents = op.results.iter().any(|&value| graph.values[value].shape.iter().any(|dim| dim.per_row != 0));
    if free && !extents && !call.has_batch_size() && op.row_group.is_none() {
        return Ok(vec![RowState::Free; op.results.len()]);
    }
    // Inside of vmap shapes are those of one sample, so that the rules hold for what has rows there.
    let enters_or_leaves = op.target.contains("batch_dim");
    let of_batches = operands.iter().any(|&value| matches!(states[value], RowState::Batches(_)));
    if of_batches && (op.region.is_some() || op.row_group.is_some() || op.row_wise || op.random) {
        return Err(ONE_AFTER_ANOTHER);
    }
    if op.region.is_some()
        && call.in_vmap()
        && (enters_or_leaves || operands.iter().all(|&v| states[v] == RowState::Free))
    {
        if operands.iter().any(|&value| matches!(states[value], RowState::Partial(_) | RowState::Mixed)) {
            return Err(NO_RULE);
        }
        return Ok(op.results.iter().map(|&value| by_extents(&graph.values[value])).collect());
    }
    if let Some(group) = op.row_group {
        return call.in_row_group(group);
    }
    if op.row_wise {
        return call.row_wise();
    }
    if op.opaque {
        return Err(NO_RULE);
    }
    let rule = packet(&op.target).and_then(row_rule).ok_or(NO_RULE)?;
    if let Some(batches) = call.batches_in_line()? {
        return call.of_batches(rule, batches);
    }
    let state = call.by_rule(rule)?;
    if rule != RowRule::BatchNorm && state != RowState::Free && call.changes_what_has_no_rows() {
        return Err(CHANGES);
    }
    call.confirmed(state)
}

/// `view` of `aten.view.default`.
fn packet(target: &str) -> Option<&str> {
    let mut parts = target.splitn(3, '.');
    if matches!(parts.next(), Some("aten" | "pyrannc")) { parts.next() } else { None }
}

fn by_extents(value: &Value) -> RowState {
    match sole_batch_dim(&value.shape) {
        Some(rows) => RowState::Rows(rows),
        None if value.shape.iter().any(|dim| dim.per_row != 0) => RowState::Mixed,
        None => RowState::Free,
    }
}

/// By Value: an Op of a row group makes it, and somebody outside of the group gets it.
pub(crate) fn given_by_groups(graph: &Graph) -> Arena<ValueId, bool> {
    let mut given: Arena<ValueId, bool> = graph.values.ids().map(|_| false).collect();
    let group_of = |value: ValueId| match graph.values[value].def {
        ValueDef::Op { op, .. } => graph.ops[op].row_group,
        _ => None,
    };
    for op in graph.ops.values() {
        for value in op.operands() {
            given[value] |= group_of(value).is_some_and(|group| op.row_group != Some(group));
        }
    }
    let updates = graph.buffers.values().filter_map(|buffer| buffer.update);
    for value in updates.chain(graph.outputs.iter().copied()) {
        given[value] |= group_of(value).is_some();
    }
    given
}

struct Call<'a> {
    graph: &'a Graph,
    op: &'a Op,
    states: &'a Arena<ValueId, RowState>,
    given: &'a Arena<ValueId, bool>,
    batches: Batches,
}

impl Call<'_> {
    fn by_rule(&self, rule: RowRule) -> Result<RowState, How> {
        match rule {
            _ if !rule.takes_extents() && self.computes_with_batch_size() => Err(BATCH_SIZE),
            RowRule::Identity => self.identity(),
            RowRule::Elementwise if self.has_batch_size() => Err(BATCH_SIZE),
            RowRule::Elementwise => self.aligned(0),
            RowRule::Last(dims) => self.aligned(dims),
            RowRule::Regroup => self.regrouped(),
            RowRule::Expand | RowRule::Repeat => self.expanded(rule),
            RowRule::RepeatInterleave => self.interleaved(),
            RowRule::Transpose | RowRule::Permute | RowRule::MoveDim => self.moved(rule),
            RowRule::Drop(slot) => self.without(slot),
            RowRule::Section(slot) => self.section(slot),
            RowRule::Cat | RowRule::Stack | RowRule::Beside => self.together(rule),
            RowRule::Reduce { dims, keep, over } => self.reduced(dims, keep, over),
            RowRule::Along { dims, default } => self.along(dims, default),
            RowRule::Trailing(slot) => self.trailing(slot),
            RowRule::Leading => self.leading().map(RowState::Rows),
            RowRule::Attention => self.attention(),
            RowRule::Convolution => self.convolution(),
            RowRule::BatchNorm => self.leading().map(RowState::Rows),
            RowRule::Recurrent => self.recurrent(),
            RowRule::Pad => self.padded(),
            RowRule::Cosine => self.cosine(),
            RowRule::LookUp(place) => {
                self.others_free(&[place])?;
                self.rows_of(self.value(place).ok_or(NO_RULE)?).map(RowState::Rows)
            }
            RowRule::IndexSelect => self.selected(),
            RowRule::Gather => self.gathered(),
            RowRule::Embedding => self.looked_up(),
            RowRule::OneHot => self.rows_of(self.first()?).map(RowState::Rows),
            RowRule::Index => self.indexed(),
            RowRule::IndexPut => self.index_put(),
            RowRule::Linear => self.linear(),
            RowRule::Matmul => self.product(0),
            RowRule::AddMatmul => self.sum_and_product(),
            RowRule::Einsum => self.einsum(),
            RowRule::Tensordot => self.tensordot(),
            RowRule::Outer => self.outer(),
            RowRule::Create => self.created(),
            RowRule::Arange => self.arange(),
            RowRule::Loss(slot) => self.loss(slot),
            RowRule::ClassLoss(slot) => self.class_loss(slot),
        }
    }

    /// `state` for every result, where their extents show it.
    fn confirmed(&self, state: RowState) -> Result<Vec<RowState>, How> {
        let confirm = |&value: &ValueId| {
            let shape = &self.graph.values[value].shape;
            let found = sole_batch_dim(shape);
            match state {
                RowState::Rows(rows) | RowState::Numbers(rows) | RowState::Batches(rows) if found == Some(rows) => {
                    Ok(state)
                }
                RowState::Rows(_) if self.leads_elsewhere(value) => found.map(RowState::Rows).ok_or(UNCONFIRMED),
                RowState::Partial(_) | RowState::Free if shape.iter().all(|dim| dim.per_row == 0) => Ok(state),
                _ => Err(UNCONFIRMED),
            }
        };
        self.op.results.iter().map(confirm).collect()
    }

    /// True for the states of a recurrent network, whose rows are in dimension 1 whatever the layout of the others.
    fn leads_elsewhere(&self, value: ValueId) -> bool {
        let recurrent = packet(&self.op.target).and_then(row_rule) == Some(RowRule::Recurrent);
        recurrent && self.op.results.first() != Some(&value)
    }

    /// Rows in dimension 0 of all operands that have any and of all results that have any, as many for each row as
    /// extents tell. A result without is the same for all parts of the batch.
    fn row_wise(&self) -> Result<Vec<RowState>, How> {
        let any = self.have_leading_rows(&self.op.operands())?;
        let result = |&value: &ValueId| match sole_batch_dim(&self.graph.values[value].shape) {
            Some(rows) if any && rows.dim == 0 => Ok(RowState::Rows(rows)),
            None if self.is_constant(value) => Ok(RowState::Free),
            _ => Err(UNCONFIRMED),
        };
        self.op.results.iter().map(result).collect()
    }

    /// Rows in dimension 0 of all that a group takes from others and has any, and of all that it gives to them. Inside,
    /// rows may stand in any order, which nobody else learns: what a group changes without such rows, it alone sees.
    fn in_row_group(&self, group: u32) -> Result<Vec<RowState>, How> {
        let inside = |op: &Op| op.row_group == Some(group);
        let is_made_inside = |value: ValueId| match self.graph.values[value].def {
            ValueDef::Op { op, .. } => inside(&self.graph.ops[op]),
            _ => false,
        };
        let is_taken = |value: &ValueId| !is_made_inside(*value);
        self.have_leading_rows(&self.op.operands().into_iter().filter(is_taken).collect::<Vec<_>>())?;
        let changed: Vec<ValueId> = self.op.mutates.iter().map(|&value| self.root(value)).collect();
        if !changed.is_empty() && self.is_seen_outside(&changed, inside, is_taken) {
            return Err(CHANGES);
        }
        let result = |&value: &ValueId| {
            let found = sole_batch_dim(&self.graph.values[value].shape);
            if self.given[value] {
                return found.filter(|rows| rows.dim == 0).map(RowState::Rows).ok_or(UNCONFIRMED);
            }
            Ok(found.map_or(RowState::Free, RowState::Rows))
        };
        self.op.results.iter().map(result).collect()
    }

    /// True when others see storages that a group changes, or they are not of its making.
    fn is_seen_outside(
        &self,
        changed: &[ValueId],
        inside: impl Fn(&Op) -> bool,
        is_taken: impl Fn(&ValueId) -> bool,
    ) -> bool {
        let is_seen = |value: &ValueId| is_taken(value) && changed.contains(&self.root(*value));
        let mut others = self.graph.ops.values().filter(|op| !inside(op));
        let updates = self.graph.buffers.values().filter_map(|buffer| buffer.update);
        others.any(|op| op.operands().iter().any(is_seen))
            || updates.chain(self.graph.outputs.iter().copied()).any(|value| is_seen(&value))
            || changed.iter().any(|&value| !matches!(self.graph.values[value].def, ValueDef::Op { .. }))
    }

    /// True when some of the Values have rows, all in dimension 0.
    fn have_leading_rows(&self, values: &[ValueId]) -> Result<bool, How> {
        let mut any = false;
        for &value in values {
            if let Some(rows) = self.rows_or_free(value)? {
                if rows.dim != 0 {
                    return Err(UNALIGNED);
                }
                any = true;
            }
        }
        Ok(any)
    }

    fn root(&self, value: ValueId) -> ValueId {
        self.graph.values[value].alias_of.map_or(value, |base| self.root(base))
    }

    fn is_constant(&self, value: ValueId) -> bool {
        let facts = &self.graph.values[value];
        !facts.requires_grad && facts.shape.iter().all(|dim| dim.per_row == 0)
    }

    fn changes_what_has_no_rows(&self) -> bool {
        self.op.mutates.iter().any(|&value| self.graph.values[value].shape.iter().all(|dim| dim.per_row == 0))
    }

    fn in_vmap(&self) -> bool {
        self.graph.ops.values().any(|other| other.region == self.op.region && other.target.contains("vmap"))
    }

    /// True when an argument of its own, not an extent in a list of them, is made of the batch size.
    fn computes_with_batch_size(&self) -> bool {
        let sized = |arg: &Arg| matches!(arg, Arg::Dim(dim) if dim.per_row != 0);
        self.op.args.iter().chain(self.op.kwargs.values()).any(sized)
    }

    fn has_batch_size(&self) -> bool {
        fn any(arg: &Arg) -> bool {
            match arg {
                Arg::Dim(dim) => dim.per_row != 0,
                Arg::List(items) => items.iter().any(any),
                _ => false,
            }
        }
        self.op.args.iter().chain(self.op.kwargs.values()).any(any)
    }

    /// What is known of an operand; places of batches one after another count as those of rows.
    fn state(&self, value: ValueId) -> RowState {
        if let RowState::Batches(rows) = self.states[value] { RowState::Rows(rows) } else { self.states[value] }
    }

    fn value(&self, place: usize) -> Option<ValueId> {
        if let Some(Arg::Value(value)) = self.op.args.get(place) { Some(*value) } else { None }
    }

    fn first(&self) -> Result<ValueId, How> {
        self.value(0).ok_or(NO_RULE)
    }

    fn rank(&self, value: ValueId) -> usize {
        self.graph.values[value].shape.len()
    }

    fn result_rank(&self) -> usize {
        self.op.results.first().map_or(0, |&value| self.rank(value))
    }

    /// The row dimension of an operand that must have rows.
    fn rows_of(&self, value: ValueId) -> Result<RowDim, How> {
        match self.state(value) {
            RowState::Rows(rows) => Ok(rows),
            RowState::Numbers(_) => Err(ROW_NUMBERS),
            _ => Err(UNALIGNED),
        }
    }

    fn rows_or_free(&self, value: ValueId) -> Result<Option<RowDim>, How> {
        if self.state(value) == RowState::Free { Ok(None) } else { self.rows_of(value).map(Some) }
    }

    fn argument(&self, (place, name): Slot) -> Option<&Arg> {
        self.op.args.get(place).or_else(|| self.op.kwargs.get(name)).filter(|arg| **arg != Arg::None)
    }

    fn integer(&self, slot: Slot, default: i64) -> Result<i64, How> {
        match self.argument(slot) {
            None => Ok(default),
            Some(Arg::Int(number)) => Ok(*number),
            Some(_) => Err(NO_RULE),
        }
    }

    /// Dimensions given as a number or a list, counted from the left; `None` where none are given.
    fn dims(&self, slot: Slot, rank: usize) -> Result<Option<Vec<usize>>, How> {
        let one = |arg: &Arg| match arg {
            Arg::Int(dim) => wrapped(*dim, rank),
            _ => Err(NO_RULE),
        };
        match self.argument(slot) {
            None => Ok(None),
            Some(Arg::List(items)) if items.is_empty() => Ok(None),
            Some(Arg::List(items)) => items.iter().map(one).collect::<Result<_, _>>().map(Some),
            Some(arg) => Ok(Some(vec![one(arg)?])),
        }
    }

    /// All operands with rows have them as far from the right, and at least `free_dims` from there.
    fn aligned(&self, free_dims: usize) -> Result<RowState, How> {
        let rank = self.result_rank();
        let mut found: Option<(usize, u64)> = None;
        for value in self.op.operands() {
            if let Some(rows) = self.rows_or_free(value)? {
                let from_right = self.rank(value) - rows.dim as usize;
                if from_right <= free_dims || found.is_some_and(|known| known != (from_right, rows.per_row)) {
                    return Err(UNALIGNED);
                }
                found = Some((from_right, rows.per_row));
            }
        }
        match found {
            Some((_, per_row)) if free_dims > 0 => {
                let first = self.rows_of(self.first()?)?;
                Ok(RowState::Rows(RowDim { dim: first.dim, per_row }))
            }
            Some((from_right, per_row)) if from_right <= rank => row_state(rank - from_right, per_row),
            Some(_) => Err(UNALIGNED),
            None => self.created(),
        }
    }

    fn identity(&self) -> Result<RowState, How> {
        Ok(self.state(self.first()?))
    }

    /// The rows of all operands that have any, in dimension 0.
    fn leading(&self) -> Result<RowDim, How> {
        let mut found: Option<RowDim> = None;
        for value in self.op.operands() {
            if let Some(rows) = self.rows_or_free(value)? {
                if rows.dim != 0 || found.is_some_and(|known| known != rows) {
                    return Err(UNALIGNED);
                }
                found = Some(rows);
            }
        }
        found.ok_or(UNALIGNED)
    }

    fn others_free(&self, with_rows: &[usize]) -> Result<(), How> {
        let place = |index: usize| self.value(index);
        let allowed: Vec<Option<ValueId>> = with_rows.iter().map(|&index| place(index)).collect();
        let others = self.op.operands().into_iter().filter(|&value| !allowed.contains(&Some(value)));
        if others.into_iter().all(|value| self.state(value) == RowState::Free) { Ok(()) } else { Err(UNALIGNED) }
    }

    fn created(&self) -> Result<RowState, How> {
        let shape = self.op.results.first().map(|&value| &self.graph.values[value].shape).ok_or(NO_RULE)?;
        if self.computes_with_batch_size() {
            return Err(BATCH_SIZE);
        }
        match sole_batch_dim(shape) {
            Some(rows) => Ok(RowState::Rows(rows)),
            None if shape.iter().all(|dim| dim.per_row == 0) && !self.has_batch_size() => Ok(RowState::Free),
            None => Err(BATCH_SIZE),
        }
    }
}

fn row_state(dim: usize, per_row: u64) -> Result<RowState, How> {
    u32::try_from(dim).map(|dim| RowState::Rows(RowDim { dim, per_row })).map_err(|_| NO_RULE)
}

fn wrapped(dim: i64, rank: usize) -> Result<usize, How> {
    let rank = i64::try_from(rank).map_err(|_| NO_RULE)?;
    let dim = if dim < 0 { dim + rank } else { dim };
    usize::try_from(dim).ok().filter(|_| dim < rank.max(1)).ok_or(NO_RULE)
}

/// The one dimension that depends on the batch, when it is a multiple of it.
pub(crate) fn sole_batch_dim(shape: &[Dim]) -> Option<RowDim> {
    let mut dependent = shape.iter().enumerate().filter(|(_, dim)| dim.per_row != 0);
    let (index, dim) = dependent.next()?;
    if dependent.next().is_some() || dim.fixed != 0 {
        return None;
    }
    Some(RowDim { dim: u32::try_from(index).ok()?, per_row: u64::try_from(dim.per_row).ok()? })
}
