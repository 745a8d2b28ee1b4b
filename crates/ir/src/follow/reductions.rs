//! What becomes of rows in sums, products, layers and losses.

use super::*;

impl Call<'_> {
    pub(super) fn reduced(&self, dims: Slot, keep: Option<Slot>, over: Over) -> Result<RowState, How> {
        let source = self.first()?;
        if matches!(self.argument(dims), Some(Arg::Value(_))) {
            // `max` and `min` of two tensors.
            return self.aligned(0);
        }
        let rows = self.rows_of(source)?;
        if self.op.operands().into_iter().any(|value| self.state(value) != RowState::Rows(rows)) {
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

    pub(super) fn along(&self, dims: Slot, default: Option<i64>) -> Result<RowState, How> {
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

    pub(super) fn trailing(&self, slot: Slot) -> Result<RowState, How> {
        let source = self.first()?;
        let rows = self.rows_of(source)?;
        let Some(Arg::List(shape)) = self.argument(slot) else { return Err(NO_RULE) };
        self.others_free(&[0])?;
        if (rows.dim as usize) + shape.len() < self.rank(source) { Ok(RowState::Rows(rows)) } else { Err(ROW_AXIS) }
    }

    pub(super) fn attention(&self) -> Result<RowState, How> {
        if self.rank(self.first()?) < 3 { Err(ROW_AXIS) } else { self.leading().map(RowState::Rows) }
    }

    pub(super) fn convolution(&self) -> Result<RowState, How> {
        let (input, weight) = (self.first()?, self.value(1).ok_or(NO_RULE)?);
        self.others_free(&[0])?;
        if self.rank(input) != self.rank(weight) {
            return Err("its input has no dimension for the batch");
        }
        self.leading().map(RowState::Rows)
    }

    pub(super) fn recurrent(&self) -> Result<RowState, How> {
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

    pub(super) fn linear(&self) -> Result<RowState, How> {
        let source = self.first()?;
        self.others_free(&[0])?;
        let rows = self.rows_of(source)?;
        if rows.dim as usize + 1 == self.rank(source) { Err(ROW_AXIS) } else { Ok(RowState::Rows(rows)) }
    }

    /// `matmul` of the operands at `place` and after it.
    pub(super) fn product(&self, place: usize) -> Result<RowState, How> {
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

    pub(super) fn sum_and_product(&self) -> Result<RowState, How> {
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

    pub(super) fn einsum(&self) -> Result<RowState, How> {
        let (Some(Arg::Str(equation)), Some(Arg::List(items))) = (self.op.args.first(), self.op.args.get(1)) else {
            return Err(NO_RULE);
        };
        let equation: String = equation.chars().filter(|c| !c.is_whitespace()).collect();
        let (inputs, output) = equation.split_once("->").ok_or(NO_RULE)?;
        let mut axis: Option<(Axis, u64)> = None;
        let mut free = Vec::new();
        let mut broadcast = 0;
        for (text, item) in inputs.split(',').zip(items) {
            let Arg::Value(value) = *item else { return Err(NO_RULE) };
            let (axes, more) = axes_of(text, |letters| self.rank(value).checked_sub(letters))?;
            broadcast = broadcast.max(more);
            match self.rows_or_free(value)? {
                Some(rows) => {
                    let own = (*axes.get(rows.dim as usize).ok_or(NO_RULE)?, rows.per_row);
                    if axis.is_some_and(|known| known != own) || axes.iter().filter(|&&a| a == own.0).count() != 1 {
                        return Err("it multiplies rows with rows");
                    }
                    axis = Some(own);
                }
                None => free.extend(axes),
            }
        }
        let (axis, per_row) = axis.ok_or(UNCONFIRMED)?;
        // Under an ellipsis, what has no rows has an extent of 1 there.
        if matches!(axis, Axis::Letter(_)) && free.contains(&axis) {
            return Err(ROW_AXIS);
        }
        match axes_of(output, |_| Some(broadcast))?.0.iter().position(|&own| own == axis) {
            Some(place) => row_state(place, per_row),
            None => Ok(RowState::Partial(Join::Sum)),
        }
    }

    /// Two tensors broadcast, then one number in the place of a dimension.
    pub(super) fn cosine(&self) -> Result<RowState, How> {
        let (a, b) = (self.first()?, self.value(1).ok_or(NO_RULE)?);
        let rank = self.rank(a).max(self.rank(b));
        let dim = wrapped(self.integer((2, "dim"), 1)?, rank)?;
        let mut found: Option<(usize, u64)> = None;
        for value in [a, b] {
            if let Some(rows) = self.rows_or_free(value)? {
                let own = (rank - self.rank(value) + rows.dim as usize, rows.per_row);
                if found.is_some_and(|known| known != own) {
                    return Err(UNALIGNED);
                }
                found = Some(own);
            }
        }
        match found.ok_or(UNCONFIRMED)? {
            (place, _) if place == dim => Err(ROW_AXIS),
            (place, per_row) => row_state(place - usize::from(dim < place), per_row),
        }
    }

    pub(super) fn tensordot(&self) -> Result<RowState, How> {
        let (a, b) = (self.first()?, self.value(1).ok_or(NO_RULE)?);
        let (rank_a, rank_b) = (self.rank(a), self.rank(b));
        let summed_a = self.dims((2, "dims_self"), rank_a)?.unwrap_or_default();
        let summed_b = self.dims((3, "dims_other"), rank_b)?.unwrap_or_default();
        let left = |summed: &[usize], dim: usize| (0..dim).filter(|place| !summed.contains(place)).count();
        match (self.rows_or_free(a)?, self.rows_or_free(b)?) {
            (Some(rows), None) if !summed_a.contains(&(rows.dim as usize)) => {
                row_state(left(&summed_a, rows.dim as usize), rows.per_row)
            }
            (None, Some(rows)) if !summed_b.contains(&(rows.dim as usize)) => {
                row_state(left(&summed_a, rank_a) + left(&summed_b, rows.dim as usize), rows.per_row)
            }
            (Some(_), None) | (None, Some(_)) => Err(ROW_AXIS),
            _ => Err("it multiplies rows with rows"),
        }
    }

    pub(super) fn outer(&self) -> Result<RowState, How> {
        let (a, b) = (self.first()?, self.value(1).ok_or(NO_RULE)?);
        match (self.rows_or_free(a)?, self.rows_or_free(b)?) {
            (Some(rows), None) => row_state(0, rows.per_row),
            (None, Some(rows)) => row_state(1, rows.per_row),
            _ => Err("it multiplies rows with rows"),
        }
    }

    pub(super) fn loss(&self, slot: Slot) -> Result<RowState, How> {
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

    pub(super) fn class_loss(&self, slot: Slot) -> Result<RowState, How> {
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
}

/// A dimension in an equation of products: by its letter, or under the ellipsis by its place from the right.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Axis {
    Letter(char),
    Under(usize),
}

/// The dimensions of one tensor, and how many are under the ellipsis; `under` says so for a number of letters.
fn axes_of(text: &str, under: impl Fn(usize) -> Option<usize>) -> Result<(Vec<Axis>, usize), How> {
    let letters = |text: &str| text.chars().map(Axis::Letter).collect::<Vec<_>>();
    let Some((before, after)) = text.split_once("...") else { return Ok((letters(text), 0)) };
    let more = under(before.chars().count() + after.chars().count()).ok_or(NO_RULE)?;
    let axes = [letters(before), (0..more).rev().map(Axis::Under).collect(), letters(after)].concat();
    Ok((axes, more))
}
