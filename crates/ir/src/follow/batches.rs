//! Several batches one after another, as `torch.cat([a, b])` and `torch.stack([a, b]).flatten(0, 1)` put them: whatever
//! treats each place along the batch by itself leaves them so, until they are taken apart again.

use super::*;

impl Call<'_> {
    /// Batches that the Op puts one after another, unless such are to count as mixed.
    pub(super) fn put_in_line(&self, rows: RowDim) -> Result<RowState, How> {
        if self.batches == Batches::InLine { Ok(RowState::Batches(rows)) } else { Err(ONE_AFTER_ANOTHER) }
    }

    /// How many batches stand one after another in the operands, if they do.
    pub(super) fn batches_in_line(&self) -> Result<Option<u64>, How> {
        let mut found = None;
        let mut others = false;
        for value in self.op.operands() {
            match self.states[value] {
                RowState::Batches(rows) if found.is_some_and(|count| count != rows.per_row) => return Err(UNALIGNED),
                RowState::Batches(rows) => found = Some(rows.per_row),
                RowState::Free => {}
                _ => others = true,
            }
        }
        if found.is_some() && others { Err(UNALIGNED) } else { Ok(found) }
    }

    /// What such operands become. A rule that holds for rows of one place each does not look where these lie, so it holds
    /// here wherever the places stay as they are.
    pub(super) fn of_batches(&self, rule: RowRule, count: u64) -> Result<Vec<RowState>, How> {
        if let RowRule::Section(slot) = rule
            && let Some(state) = self.single_batches(slot, count)?
        {
            return self.confirmed(state);
        }
        if rule == RowRule::Regroup
            && let Some(state) = self.batches_side_by_side(count)?
        {
            return self.confirmed(state);
        }
        let state = match self.by_rule(rule)? {
            RowState::Rows(rows) if rows.per_row == count => RowState::Batches(rows),
            RowState::Rows(_) | RowState::Numbers(_) | RowState::Batches(_) => return Err(UNALIGNED),
            other => other,
        };
        if rule != RowRule::BatchNorm && state != RowState::Free && self.changes_what_has_no_rows() {
            return Err(CHANGES);
        }
        self.confirmed(state)
    }

    /// Rows, where the batches come into a dimension of their own before that of the rows: `view(2, rows, width)`.
    fn batches_side_by_side(&self, count: u64) -> Result<Option<RowState>, How> {
        let (source, result) = (self.first()?, self.op.results[0]);
        let after = sole_batch_dim(&self.graph.values[result].shape).ok_or(UNCONFIRMED)?;
        let places = self.places_before(source, self.rows_of(source)?);
        let apart = places.checked_mul(count) == Some(self.places_before(result, after));
        Ok(apart.then_some(RowState::Rows(after)))
    }

    /// Rows, where each result is one of the batches.
    fn single_batches(&self, slot: Slot, count: u64) -> Result<Option<RowState>, How> {
        let source = self.first()?;
        let rows = self.rows_of(source)?;
        let dim = self.dims(slot, self.rank(source))?.map_or(0, |dims| dims[0]);
        let whole = self.graph.values[self.op.results[0]].shape == self.graph.values[source].shape;
        if dim != rows.dim as usize || whole {
            return Ok(None);
        }
        // `slice` and `narrow` say where they begin, and have one result.
        let begins = match self.argument((2, "start")) {
            _ if self.op.results.len() as u64 == count => true,
            None | Some(Arg::Int(0)) => true,
            Some(Arg::Dim(start)) => start.fixed == 0,
            Some(_) => false,
        };
        let step = self.integer((4, "step"), 1)?;
        if begins && step == 1 {
            Ok(Some(RowState::Rows(RowDim { per_row: 1, ..rows })))
        } else {
            Err(ONE_AFTER_ANOTHER)
        }
    }
}
