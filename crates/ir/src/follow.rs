//! One Op followed by its operator's rule: what its operands know of rows, and so its results.

use crate::dtype::DType;
use crate::entity::Arena;
use crate::graph::{Arg, Dim, Graph, Op, Value, ValueId};
use crate::ops::{Over, RowRule, Slot, row_rule};
use crate::row_state::{Join, RowDim, RowState};

/// How rows come together, for messages.
pub(crate) type How = &'static str;

const NO_RULE: How = "what it does to rows is not known";
const ROW_AXIS: How = "it works along the batch";
const UNALIGNED: How = "its operands have their rows in different dimensions";
const UNCONFIRMED: How = "the extents of its result do not follow the batch";
const ROW_NUMBERS: How = "it computes with the numbers of the rows";
const BATCH_SIZE: How = "it computes with the number of rows";
const CHANGES: How = "it changes a tensor without rows by what has rows";

/// What each result of `op` knows of rows, if none of its operands joins or mixes them.
///
/// # Errors
/// How it mixes rows.
pub(crate) fn follow(graph: &Graph, op: &Op, states: &Arena<ValueId, RowState>) -> Result<Vec<RowState>, How> {
    let call = Call { graph, op, states };
    let operands = op.operands();
    let free = operands.iter().all(|&value| states[value] == RowState::Free);
    let extents = op.results.iter().any(|&value| graph.values[value].shape.iter().any(|dim| dim.per_row != 0));
    if free && !extents && !call.has_batch_size() {
        return Ok(vec![RowState::Free; op.results.len()]);
    }
    // Inside of vmap shapes are those of one sample, so that the rules hold for what has rows there.
    let enters_or_leaves = op.target.contains("batch_dim");
    if op.region.is_some()
        && call.in_vmap()
        && (enters_or_leaves || operands.iter().all(|&v| states[v] == RowState::Free))
    {
        if operands.iter().any(|&value| matches!(states[value], RowState::Partial(_) | RowState::Mixed)) {
            return Err(NO_RULE);
        }
        return Ok(op.results.iter().map(|&value| by_extents(&graph.values[value])).collect());
    }
    if op.row_wise {
        return call.confirmed(RowState::Rows(call.leading()?));
    }
    if op.opaque {
        return Err(NO_RULE);
    }
    let rule = packet(&op.target).and_then(row_rule).ok_or(NO_RULE)?;
    let state = call.by_rule(rule)?;
    if rule != RowRule::BatchNorm && state != RowState::Free && call.changes_what_has_no_rows() {
        return Err(CHANGES);
    }
    call.confirmed(state)
}

/// `view` of `aten.view.default`.
fn packet(target: &str) -> Option<&str> {
    let mut parts = target.splitn(3, '.');
    if parts.next() == Some("aten") { parts.next() } else { None }
}

fn by_extents(value: &Value) -> RowState {
    match sole_batch_dim(&value.shape) {
        Some(rows) => RowState::Rows(rows),
        None if value.shape.iter().any(|dim| dim.per_row != 0) => RowState::Mixed,
        None => RowState::Free,
    }
}

struct Call<'a> {
    graph: &'a Graph,
    op: &'a Op,
    states: &'a Arena<ValueId, RowState>,
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
            RowRule::Cat | RowRule::Stack => self.together(rule),
            RowRule::Reduce { dims, keep, over } => self.reduced(dims, keep, over),
            RowRule::Along { dims, default } => self.along(dims, default),
            RowRule::Trailing(slot) => self.trailing(slot),
            RowRule::Leading => self.leading().map(RowState::Rows),
            RowRule::Attention => self.attention(),
            RowRule::Convolution => self.convolution(),
            RowRule::BatchNorm => self.leading().map(RowState::Rows),
            RowRule::Recurrent => self.recurrent(),
            RowRule::Pad => self.padded(),
            RowRule::Embedding => self.looked_up(),
            RowRule::OneHot => self.rows_of(self.first()?).map(RowState::Rows),
            RowRule::Index => self.indexed(),
            RowRule::IndexPut => self.index_put(),
            RowRule::Linear => self.linear(),
            RowRule::Matmul => self.product(0),
            RowRule::AddMatmul => self.sum_and_product(),
            RowRule::Einsum => self.einsum(),
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
                RowState::Rows(rows) | RowState::Numbers(rows) if found == Some(rows) => Ok(state),
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

    // Operands

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
        match self.states[value] {
            RowState::Rows(rows) => Ok(rows),
            RowState::Numbers(_) => Err(ROW_NUMBERS),
            _ => Err(UNALIGNED),
        }
    }

    fn rows_or_free(&self, value: ValueId) -> Result<Option<RowDim>, How> {
        if self.states[value] == RowState::Free { Ok(None) } else { self.rows_of(value).map(Some) }
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

    // Rules

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
        Ok(self.states[self.first()?])
    }

    fn regrouped(&self) -> Result<RowState, How> {
        let source = self.first()?;
        let after = self.op.results.first().and_then(|&value| sole_batch_dim(&self.graph.values[value].shape));
        let after = after.ok_or(UNCONFIRMED)?;
        let (before, numbers) = match self.states[source] {
            RowState::Rows(rows) => (rows, false),
            RowState::Numbers(rows) => (rows, true),
            _ => return Err(UNALIGNED),
        };
        let shape = |value: ValueId| &self.graph.values[value].shape;
        if elements_before(shape(source), before.dim) != elements_before(shape(self.op.results[0]), after.dim) {
            return Err("it divides the batch in another way");
        }
        Ok(if numbers { RowState::Numbers(after) } else { RowState::Rows(after) })
    }

    fn expanded(&self, rule: RowRule) -> Result<RowState, How> {
        let (source, rank) = (self.first()?, self.result_rank());
        let place = |rows: RowDim| (rows.dim as usize + rank).checked_sub(self.rank(source)).ok_or(UNCONFIRMED);
        match self.states[source] {
            RowState::Free => self.created(),
            RowState::Rows(rows) => {
                let place = place(rows)?;
                if rule == RowRule::Repeat && self.times(place, rank)? != 1 {
                    return Err("it repeats the batch");
                }
                row_state(place, rows.per_row)
            }
            RowState::Numbers(rows) if rule == RowRule::Expand => match row_state(place(rows)?, rows.per_row)? {
                RowState::Rows(rows) => Ok(RowState::Numbers(rows)),
                other => Ok(other),
            },
            _ => Err(ROW_NUMBERS),
        }
    }

    fn times(&self, place: usize, rank: usize) -> Result<i64, How> {
        let Some(Arg::List(times)) = self.argument((1, "repeats")).or_else(|| self.argument((1, "dims"))) else {
            return Err(NO_RULE);
        };
        match (place + times.len()).checked_sub(rank).and_then(|index| times.get(index)) {
            None => Ok(1),
            Some(Arg::Int(times)) => Ok(*times),
            Some(_) => Err(BATCH_SIZE),
        }
    }

    fn interleaved(&self) -> Result<RowState, How> {
        let source = self.first()?;
        let rows = self.rows_of(source)?;
        let Some(Arg::Int(times)) = self.argument((1, "repeats")) else { return Err(NO_RULE) };
        let dim = self.dims((2, "dim"), self.rank(source))?.ok_or(ROW_AXIS)?[0];
        if dim != rows.dim as usize {
            return Ok(RowState::Rows(rows));
        }
        let times = u64::try_from(*times).map_err(|_| NO_RULE)?;
        row_state(dim, rows.per_row.checked_mul(times).ok_or(NO_RULE)?)
    }

    fn moved(&self, rule: RowRule) -> Result<RowState, How> {
        let source = self.first()?;
        let rank = self.rank(source);
        let order = match rule {
            RowRule::Permute => self.dims((1, "dims"), rank)?.ok_or(NO_RULE)?,
            RowRule::MoveDim => {
                let from = self.dims((1, "source"), rank)?.ok_or(NO_RULE)?;
                let to = self.dims((2, "destination"), rank)?.ok_or(NO_RULE)?;
                moved_order(&from, &to, rank)?
            }
            _ => {
                let dims = (self.dims((1, "dim0"), rank)?, self.dims((2, "dim1"), rank)?);
                let (a, b) = match dims {
                    (Some(a), Some(b)) => (a[0], b[0]),
                    _ if rank >= 2 => (rank - 2, rank - 1),
                    _ => return self.identity(),
                };
                let mut order: Vec<usize> = (0..rank).collect();
                order.swap(a, b);
                order
            }
        };
        let rows = match self.states[source] {
            RowState::Rows(rows) | RowState::Numbers(rows) => rows,
            _ => return Err(UNALIGNED),
        };
        let place = order.iter().position(|&dim| dim == rows.dim as usize).ok_or(NO_RULE)?;
        let moved = row_state(place, rows.per_row)?;
        match (self.states[source], moved) {
            (RowState::Numbers(_), RowState::Rows(rows)) => Ok(RowState::Numbers(rows)),
            _ => Ok(moved),
        }
    }

    fn without(&self, slot: Slot) -> Result<RowState, How> {
        let source = self.first()?;
        let rows = self.rows_of(source)?;
        let dim = self.dims(slot, self.rank(source))?.map_or(0, |dims| dims[0]);
        if dim == rows.dim as usize {
            return Err("it takes single rows out of the batch");
        }
        row_state(rows.dim as usize - usize::from(dim < rows.dim as usize), rows.per_row)
    }

    fn section(&self, slot: Slot) -> Result<RowState, How> {
        let source = self.first()?;
        let (RowState::Rows(rows) | RowState::Numbers(rows)) = self.states[source] else { return Err(UNALIGNED) };
        let dim = self.dims(slot, self.rank(source))?.map_or(0, |dims| dims[0]);
        let whole = self.op.results.len() == 1
            && self.graph.values[source].shape == self.graph.values[self.op.results[0]].shape;
        if dim == rows.dim as usize && !whole {
            return Err("it takes a section of the batch");
        }
        Ok(self.states[source])
    }

    fn together(&self, rule: RowRule) -> Result<RowState, How> {
        let Some(Arg::List(items)) = self.op.args.first() else { return Err(NO_RULE) };
        let mut found: Option<(RowDim, usize)> = None;
        for item in items {
            let Arg::Value(value) = *item else { return Err(NO_RULE) };
            let rows = self.rows_of(value)?;
            if found.is_some_and(|known| known != (rows, self.rank(value))) {
                return Err(UNALIGNED);
            }
            found = Some((rows, self.rank(value)));
        }
        let (rows, rank) = found.ok_or(NO_RULE)?;
        let stacks = usize::from(rule == RowRule::Stack);
        let dim = self.dims((1, "dim"), rank + stacks)?.map_or(0, |dims| dims[0]);
        if stacks == 1 {
            return row_state(rows.dim as usize + usize::from(dim <= rows.dim as usize), rows.per_row);
        }
        if dim == rows.dim as usize { Err("it puts batches one after another") } else { Ok(RowState::Rows(rows)) }
    }

    fn reduced(&self, dims: Slot, keep: Option<Slot>, over: Over) -> Result<RowState, How> {
        let source = self.first()?;
        if matches!(self.argument(dims), Some(Arg::Value(_))) {
            // `max` and `min` of two tensors.
            return self.aligned(0);
        }
        let rows = self.rows_of(source)?;
        if self.op.operands().into_iter().any(|value| self.states[value] != RowState::Rows(rows)) {
            return Err(UNALIGNED);
        }
        let rank = self.rank(source);
        let dims = self.dims(dims, rank)?.unwrap_or_else(|| (0..rank).collect());
        if dims.contains(&(rows.dim as usize)) {
            return match over {
                Over::Sum => Ok(RowState::Partial(Join::Sum)),
                Over::Mean => Ok(RowState::Partial(Join::Mean)),
                Over::Other => Err("it reduces the batch other than by a sum or a mean"),
            };
        }
        let kept = keep.is_some_and(|slot| self.argument(slot) == Some(&Arg::Bool(true)));
        let gone = if kept { 0 } else { dims.iter().filter(|&&dim| dim < rows.dim as usize).count() };
        row_state(rows.dim as usize - gone, rows.per_row)
    }

    fn along(&self, dims: Slot, default: Option<i64>) -> Result<RowState, How> {
        let source = self.first()?;
        let rank = self.rank(source);
        let dims = match self.dims(dims, rank)? {
            Some(dims) => dims,
            None => match default {
                Some(default) => vec![wrapped(default, rank)?],
                None => (0..rank).collect(),
            },
        };
        // Each of their operands says where by its own places, those of the rows included.
        let name = packet(&self.op.target).unwrap_or_default();
        let by_places = name.starts_with("gather") || name.starts_with("scatter");
        let mut found: Option<RowDim> = None;
        for value in self.op.operands() {
            match self.rows_or_free(value)? {
                Some(rows) if dims.contains(&(rows.dim as usize)) => return Err(ROW_AXIS),
                Some(rows) if found.is_some_and(|known| known != rows) => return Err(UNALIGNED),
                Some(rows) => found = Some(rows),
                None if by_places && self.rank(value) > 0 => return Err(UNALIGNED),
                None => {}
            }
        }
        found.map(RowState::Rows).ok_or(UNALIGNED)
    }

    fn trailing(&self, slot: Slot) -> Result<RowState, How> {
        let source = self.first()?;
        let rows = self.rows_of(source)?;
        let Some(Arg::List(shape)) = self.argument(slot) else { return Err(NO_RULE) };
        self.others_free(&[0])?;
        if (rows.dim as usize) + shape.len() < self.rank(source) { Ok(RowState::Rows(rows)) } else { Err(ROW_AXIS) }
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
        if others.into_iter().all(|value| self.states[value] == RowState::Free) { Ok(()) } else { Err(UNALIGNED) }
    }

    fn attention(&self) -> Result<RowState, How> {
        if self.rank(self.first()?) < 3 { Err(ROW_AXIS) } else { self.leading().map(RowState::Rows) }
    }

    fn convolution(&self) -> Result<RowState, How> {
        let (input, weight) = (self.first()?, self.value(1).ok_or(NO_RULE)?);
        self.others_free(&[0])?;
        if self.rank(input) != self.rank(weight) {
            return Err("its input has no dimension for the batch");
        }
        self.leading().map(RowState::Rows)
    }

    fn recurrent(&self) -> Result<RowState, How> {
        let input = self.first()?;
        let rows = self.rows_of(input)?;
        let batch_first = matches!(self.op.args.last(), Some(Arg::Bool(true)));
        if self.rank(input) != 3 || rows.per_row != 1 || rows.dim != u32::from(!batch_first) {
            return Err(ROW_AXIS);
        }
        for value in self.op.operands().into_iter().filter(|&value| value != input) {
            if self.rows_or_free(value)?.is_some_and(|rows| rows.dim != 1 || rows.per_row != 1) {
                return Err(UNALIGNED);
            }
        }
        Ok(RowState::Rows(rows))
    }

    fn padded(&self) -> Result<RowState, How> {
        let source = self.first()?;
        let rows = self.rows_of(source)?;
        let Some(Arg::List(pads)) = self.argument((1, "pad")) else { return Err(NO_RULE) };
        let from_right = self.rank(source) - rows.dim as usize;
        let own = pads.iter().skip(2 * (from_right - 1)).take(2);
        if own.into_iter().all(|pad| *pad == Arg::Int(0)) { Ok(RowState::Rows(rows)) } else { Err(ROW_AXIS) }
    }

    fn looked_up(&self) -> Result<RowState, How> {
        let (table, indices) = (self.first()?, self.value(1).ok_or(NO_RULE)?);
        if self.states[table] != RowState::Free {
            return Err("it looks rows up in a table made of rows");
        }
        if self.argument((3, "scale_grad_by_freq")) == Some(&Arg::Bool(true)) {
            return Err("its gradient depends on how often the batch has an index");
        }
        self.rows_of(indices).map(RowState::Rows)
    }

    fn linear(&self) -> Result<RowState, How> {
        let source = self.first()?;
        self.others_free(&[0])?;
        let rows = self.rows_of(source)?;
        if rows.dim as usize + 1 == self.rank(source) { Err(ROW_AXIS) } else { Ok(RowState::Rows(rows)) }
    }

    /// `matmul` of the operands at `place` and after it.
    fn product(&self, place: usize) -> Result<RowState, How> {
        let (a, b) = (self.value(place).ok_or(NO_RULE)?, self.value(place + 1).ok_or(NO_RULE)?);
        let (rank_a, rank_b) = (self.rank(a), self.rank(b));
        if rank_a == 0 || rank_b == 0 {
            return Err(NO_RULE);
        }
        let summed_b = rank_b.saturating_sub(2);
        let (rows_a, rows_b) = (self.rows_or_free(a)?, self.rows_or_free(b)?);
        // Places from the right in the result.
        let place_a = |rows: RowDim| {
            let right = rank_a - 1 - rows.dim as usize;
            if rank_b == 1 { right.checked_sub(1) } else { Some(right).filter(|&right| right > 0) }
        };
        let place_b = |rows: RowDim| {
            let dim = rows.dim as usize;
            let right = rank_b - 1 - dim;
            (dim != summed_b).then_some(if rank_a == 1 && right > 1 { right - 1 } else { right })
        };
        let rank = self.result_rank();
        let at = |right: usize, rows: RowDim| row_state(rank.checked_sub(right + 1).ok_or(UNCONFIRMED)?, rows.per_row);
        match (rows_a, rows_b) {
            (Some(a), None) => at(place_a(a).ok_or(ROW_AXIS)?, a),
            (None, Some(b)) => at(place_b(b).ok_or(ROW_AXIS)?, b),
            (Some(a), Some(b)) if a.per_row != b.per_row => Err(UNALIGNED),
            (Some(a), Some(b)) => match (place_a(a), place_b(b)) {
                (None, None) => Ok(RowState::Partial(Join::Sum)),
                (Some(left), Some(right)) if left == right && left > 1 => at(left, a),
                _ => Err("it multiplies rows with rows"),
            },
            (None, None) => Err(UNCONFIRMED),
        }
    }

    fn sum_and_product(&self) -> Result<RowState, How> {
        let added = self.first()?;
        let product = self.product(1)?;
        let RowState::Rows(rows) = product else { return Err("it adds to a sum over rows") };
        let from_right = |value: ValueId, rows: RowDim| self.rank(value) - rows.dim as usize;
        match self.rows_or_free(added)? {
            Some(own)
                if own.per_row != rows.per_row || from_right(added, own) != self.result_rank() - rows.dim as usize =>
            {
                Err(UNALIGNED)
            }
            _ => Ok(product),
        }
    }

    fn einsum(&self) -> Result<RowState, How> {
        let (Some(Arg::Str(equation)), Some(Arg::List(items))) = (self.op.args.first(), self.op.args.get(1)) else {
            return Err(NO_RULE);
        };
        let equation: String = equation.chars().filter(|c| !c.is_whitespace()).collect();
        let (inputs, output) = equation.split_once("->").filter(|_| !equation.contains('.')).ok_or(NO_RULE)?;
        let mut letter: Option<(char, u64)> = None;
        let mut free = Vec::new();
        for (axes, item) in inputs.split(',').zip(items) {
            let Arg::Value(value) = *item else { return Err(NO_RULE) };
            match self.rows_or_free(value)? {
                Some(rows) => {
                    let own = (axes.chars().nth(rows.dim as usize).ok_or(NO_RULE)?, rows.per_row);
                    if letter.is_some_and(|known| known != own) || axes.matches(own.0).count() != 1 {
                        return Err("it multiplies rows with rows");
                    }
                    letter = Some(own);
                }
                None => free.push(axes),
            }
        }
        let (letter, per_row) = letter.ok_or(UNCONFIRMED)?;
        if free.iter().any(|axes| axes.contains(letter)) {
            return Err(ROW_AXIS);
        }
        match output.chars().position(|c| c == letter) {
            Some(place) => row_state(place, per_row),
            None => Ok(RowState::Partial(Join::Sum)),
        }
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

    fn arange(&self) -> Result<RowState, How> {
        let rows = RowDim { dim: 0, per_row: 1 };
        let counts = |arg: &Arg| matches!(arg, Arg::Dim(dim) if dim.per_row == 1 && dim.fixed == 0);
        match self.op.args.as_slice() {
            [end] if counts(end) => Ok(RowState::Numbers(rows)),
            [Arg::Int(0), end] if counts(end) => Ok(RowState::Numbers(rows)),
            [Arg::Int(0), end, Arg::Int(1)] if counts(end) => Ok(RowState::Numbers(rows)),
            _ if !self.has_batch_size() => Ok(RowState::Free),
            _ => Err(ROW_NUMBERS),
        }
    }

    fn loss(&self, slot: Slot) -> Result<RowState, How> {
        let mut alone: Option<(usize, u64)> = None;
        for value in self.op.operands() {
            if let Some(rows) = self.rows_or_free(value)? {
                let own = (self.rank(value) - rows.dim as usize, rows.per_row);
                if alone.is_some_and(|known| known != own) {
                    return Err(UNALIGNED);
                }
                alone = Some(own);
            }
        }
        match self.integer(slot, 1)? {
            0 => self.aligned(0),
            1 => Ok(RowState::Partial(Join::Mean)),
            2 => Ok(RowState::Partial(Join::Sum)),
            _ => Err(NO_RULE),
        }
    }

    fn class_loss(&self, slot: Slot) -> Result<RowState, How> {
        let (scores, targets) = (self.first()?, self.value(1).ok_or(NO_RULE)?);
        self.others_free(&[0, 1])?;
        let (own, other) = (self.rows_of(scores)?, self.rows_of(targets)?);
        if own.dim != 0 || own != other || self.rank(scores) < 2 {
            return Err(ROW_AXIS);
        }
        let probabilities = self.graph.values[targets].dtype.is_differentiable();
        match self.integer(slot, 1)? {
            0 => Ok(RowState::Rows(own)),
            1 if probabilities => Ok(RowState::Partial(Join::Mean)),
            1 => Err("it averages over the targets that are not ignored"),
            2 => Ok(RowState::Partial(Join::Sum)),
            _ => Err(NO_RULE),
        }
    }

    fn indices(&self) -> Result<Vec<Option<ValueId>>, How> {
        let Some(Arg::List(items)) = self.argument((1, "indices")) else { return Err(NO_RULE) };
        let one = |item: &Arg| match item {
            Arg::None => Ok(None),
            Arg::Value(value) if matches!(self.graph.values[*value].dtype, DType::Bool | DType::Uint8) => {
                Err("it chooses elements by a mask")
            }
            Arg::Value(value) => Ok(Some(*value)),
            _ => Err(NO_RULE),
        };
        items.iter().map(one).collect()
    }

    fn indexed(&self) -> Result<RowState, How> {
        let source = self.first()?;
        let places = Places::of(self, &self.indices()?)?;
        let index_rows = self.index_rows(source, &places)?;
        match (self.rows_or_free(source)?, index_rows) {
            (None, Some((from_right, per_row))) => row_state(places.start() + places.rank - from_right, per_row),
            (Some(rows), Some((from_right, _))) if places.has(rows.dim as usize) => {
                row_state(places.start() + places.rank - from_right, rows.per_row)
            }
            (Some(rows), None) if !places.has(rows.dim as usize) => {
                row_state(places.after(rows.dim as usize), rows.per_row)
            }
            (Some(_), Some(_)) => Err("it takes rows of the batch by other rows"),
            (Some(_), None) => Err("it takes rows out of the batch"),
            (None, None) => Err(UNCONFIRMED),
        }
    }

    fn index_put(&self) -> Result<RowState, How> {
        let source = self.first()?;
        let rows = self.rows_of(source)?;
        let places = Places::of(self, &self.indices()?)?;
        let index_rows = self.index_rows(source, &places)?;
        let values = self.value(2).ok_or(NO_RULE)?;
        let own = self.rows_or_free(values)?.map(|own| (self.rank(values) - own.dim as usize, own.per_row));
        // Rows as they stand in what `index` with the same indices would give.
        let indexed_rank = self.rank(source) - places.count() + places.rank;
        let expected = match index_rows {
            Some((from_right, per_row)) if places.has(rows.dim as usize) => {
                (indexed_rank - places.start() - places.rank + from_right, per_row)
            }
            None if !places.has(rows.dim as usize) => (indexed_rank - places.after(rows.dim as usize), rows.per_row),
            _ => return Err("it writes to rows of the batch by other rows"),
        };
        if own.is_some_and(|own| own != expected) { Err(UNALIGNED) } else { Ok(RowState::Rows(rows)) }
    }

    /// The rows of the indices, from the right of their common shape: those that number rows stand for the rows of
    /// `source`, and only there.
    fn index_rows(&self, source: ValueId, places: &Places) -> Result<Option<(usize, u64)>, How> {
        let mut found: Option<(usize, u64)> = None;
        for &(place, index) in &places.indices {
            let rows = match self.states[index] {
                RowState::Free => continue,
                RowState::Rows(rows) => rows,
                RowState::Numbers(rows) => {
                    let whole = RowDim { dim: u32::try_from(place).map_err(|_| NO_RULE)?, per_row: 1 };
                    if self.states[source] != RowState::Rows(whole) {
                        return Err(ROW_NUMBERS);
                    }
                    rows
                }
                _ => return Err(UNALIGNED),
            };
            let numbers = matches!(self.states[index], RowState::Numbers(_));
            if self.states[source].row_dim().is_some_and(|own| own.dim as usize == place) && !numbers {
                return Err("it takes rows of the batch by other rows");
            }
            let own = (self.rank(index) - rows.dim as usize, rows.per_row);
            if found.is_some_and(|known| known != own) {
                return Err(UNALIGNED);
            }
            found = Some(own);
        }
        let taken = self.states[source].row_dim().is_some_and(|own| places.has(own.dim as usize));
        let numbered = places.indices.iter().any(|&(_, index)| matches!(self.states[index], RowState::Numbers(_)));
        if taken && !numbered { Err("it takes rows out of the batch") } else { Ok(found) }
    }
}

/// Where advanced indices stand, and their common rank.
struct Places {
    indices: Vec<(usize, ValueId)>,
    rank: usize,
}

impl Places {
    fn of(call: &Call, indices: &[Option<ValueId>]) -> Result<Self, How> {
        let indices: Vec<(usize, ValueId)> =
            indices.iter().enumerate().filter_map(|(place, index)| Some((place, (*index)?))).collect();
        let rank = indices.iter().map(|&(_, index)| call.rank(index)).max().ok_or(NO_RULE)?;
        Ok(Self { indices, rank })
    }

    fn count(&self) -> usize {
        self.indices.len()
    }

    fn has(&self, dim: usize) -> bool {
        self.indices.iter().any(|&(place, _)| place == dim)
    }

    fn adjacent(&self) -> bool {
        self.indices.windows(2).all(|pair| pair[0].0 + 1 == pair[1].0)
    }

    /// Where the indices' common dimensions begin in the result.
    fn start(&self) -> usize {
        if self.adjacent() { self.indices[0].0 } else { 0 }
    }

    /// Where a dimension that is not indexed stands in the result.
    fn after(&self, dim: usize) -> usize {
        let before = self.indices.iter().filter(|&&(place, _)| place < dim).count();
        if self.adjacent() && before == 0 { dim } else { dim - before + self.rank }
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

fn moved_order(from: &[usize], to: &[usize], rank: usize) -> Result<Vec<usize>, How> {
    let mut order: Vec<Option<usize>> = vec![None; rank];
    for (&from, &to) in from.iter().zip(to) {
        *order.get_mut(to).ok_or(NO_RULE)? = Some(from);
    }
    let mut rest = (0..rank).filter(|dim| !from.contains(dim));
    order.into_iter().map(|dim| dim.or_else(|| rest.next()).ok_or(NO_RULE)).collect()
}

fn elements_before(shape: &[Dim], dim: u32) -> i64 {
    shape.iter().take(dim as usize).fold(1, |product, dim| product.saturating_mul(dim.fixed))
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
