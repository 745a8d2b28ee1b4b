//! Where rows go when dimensions are divided, moved, repeated, cut or put together.

use super::*;

impl Call<'_> {
    pub(super) fn regrouped(&self) -> Result<RowState, How> {
        let source = self.first()?;
        let after = self.op.results.first().and_then(|&value| sole_batch_dim(&self.graph.values[value].shape));
        let after = after.ok_or(UNCONFIRMED)?;
        let (before, numbers) = match self.state(source) {
            RowState::Rows(rows) => (rows, false),
            RowState::Numbers(rows) => (rows, true),
            _ => return Err(UNALIGNED),
        };
        let (places, places_after) =
            (self.places_before(source, before), self.places_before(self.op.results[0], after));
        if places == places_after {
            return Ok(if numbers { RowState::Numbers(after) } else { RowState::Rows(after) });
        }
        let in_line = !numbers && before.per_row == 1 && places_after.checked_mul(after.per_row) == Some(places);
        if in_line { self.put_in_line(after) } else { Err("it divides the batch in another way") }
    }

    /// How many times a Value has all of the batch, by the dimensions before that of the rows.
    pub(super) fn places_before(&self, value: ValueId, rows: RowDim) -> u64 {
        let before = self.graph.values[value].shape.iter().take(rows.dim as usize);
        before.fold(1, |product, dim| product.saturating_mul(dim.fixed.unsigned_abs()))
    }

    pub(super) fn expanded(&self, rule: RowRule) -> Result<RowState, How> {
        let (source, rank) = (self.first()?, self.result_rank());
        let place = |rows: RowDim| (rows.dim as usize + rank).checked_sub(self.rank(source)).ok_or(UNCONFIRMED);
        match self.state(source) {
            RowState::Free => self.created(),
            RowState::Rows(rows) => {
                let place = place(rows)?;
                let times = if rule == RowRule::Repeat { self.times(place, rank)? } else { 1 };
                match (row_state(place, rows.per_row)?, u64::try_from(times).unwrap_or(0)) {
                    (RowState::Rows(rows), times) if times > 1 && rows.per_row == 1 => {
                        self.put_in_line(RowDim { per_row: times, ..rows })
                    }
                    (state, 1) => Ok(state),
                    _ => Err("it repeats the batch"),
                }
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

    pub(super) fn interleaved(&self) -> Result<RowState, How> {
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

    pub(super) fn moved(&self, rule: RowRule) -> Result<RowState, How> {
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
        let rows = match self.state(source) {
            RowState::Rows(rows) | RowState::Numbers(rows) => rows,
            _ => return Err(UNALIGNED),
        };
        let place = order.iter().position(|&dim| dim == rows.dim as usize).ok_or(NO_RULE)?;
        let moved = row_state(place, rows.per_row)?;
        match (self.state(source), moved) {
            (RowState::Numbers(_), RowState::Rows(rows)) => Ok(RowState::Numbers(rows)),
            _ => Ok(moved),
        }
    }

    pub(super) fn without(&self, slot: Slot) -> Result<RowState, How> {
        let source = self.first()?;
        let rows = self.rows_of(source)?;
        let dim = self.dims(slot, self.rank(source))?.map_or(0, |dims| dims[0]);
        if dim == rows.dim as usize {
            return Err("it takes single rows out of the batch");
        }
        row_state(rows.dim as usize - usize::from(dim < rows.dim as usize), rows.per_row)
    }

    pub(super) fn section(&self, slot: Slot) -> Result<RowState, How> {
        let source = self.first()?;
        let (RowState::Rows(rows) | RowState::Numbers(rows)) = self.state(source) else { return Err(UNALIGNED) };
        let dim = self.dims(slot, self.rank(source))?.map_or(0, |dims| dims[0]);
        let whole = self.op.results.len() == 1
            && self.graph.values[source].shape == self.graph.values[self.op.results[0]].shape;
        if dim == rows.dim as usize && !whole {
            return Err("it takes a section of the batch");
        }
        Ok(self.state(source))
    }

    pub(super) fn together(&self, rule: RowRule) -> Result<RowState, How> {
        let Some(Arg::List(items)) = self.op.args.first() else { return Err(NO_RULE) };
        let mut found: Option<(RowDim, usize)> = None;
        let mut count = 0;
        for item in items {
            let Arg::Value(value) = *item else { return Err(NO_RULE) };
            if rule == RowRule::Cat && self.graph.values[value].shape == [Dim::fixed(0)] {
                // Torch passes over it, whatever the rank of the others.
                continue;
            }
            let rows = self.rows_of(value)?;
            if found.is_some_and(|known| known != (rows, self.rank(value))) {
                return Err(UNALIGNED);
            }
            found = Some((rows, self.rank(value)));
            count += 1;
        }
        let (rows, rank) = found.ok_or(NO_RULE)?;
        let stacks = usize::from(rule == RowRule::Stack);
        let dim = if rule == RowRule::Beside {
            usize::from(rank > 1)
        } else {
            self.dims((1, "dim"), rank + stacks)?.map_or(0, |dims| dims[0])
        };
        if stacks == 1 {
            return row_state(rows.dim as usize + usize::from(dim <= rows.dim as usize), rows.per_row);
        }
        match (dim == rows.dim as usize, count) {
            (false, _) | (true, 1) => Ok(RowState::Rows(rows)),
            (true, count) if rows.per_row == 1 => self.put_in_line(RowDim { per_row: count as u64, ..rows }),
            _ => Err(ONE_AFTER_ANOTHER),
        }
    }

    pub(super) fn padded(&self) -> Result<RowState, How> {
        let source = self.first()?;
        let rows = self.rows_of(source)?;
        let Some(Arg::List(pads)) = self.argument((1, "pad")) else { return Err(NO_RULE) };
        let from_right = self.rank(source) - rows.dim as usize;
        let own = pads.iter().skip(2 * (from_right - 1)).take(2);
        if own.into_iter().all(|pad| *pad == Arg::Int(0)) { Ok(RowState::Rows(rows)) } else { Err(ROW_AXIS) }
    }

    pub(super) fn arange(&self) -> Result<RowState, How> {
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
}

fn moved_order(from: &[usize], to: &[usize], rank: usize) -> Result<Vec<usize>, How> {
    let mut order: Vec<Option<usize>> = vec![None; rank];
    for (&from, &to) in from.iter().zip(to) {
        *order.get_mut(to).ok_or(NO_RULE)? = Some(from);
    }
    let mut rest = (0..rank).filter(|dim| !from.contains(dim));
    order.into_iter().map(|dim| dim.or_else(|| rest.next()).ok_or(NO_RULE)).collect()
}
