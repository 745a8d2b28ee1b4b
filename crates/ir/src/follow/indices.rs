//! What becomes of rows that are indexed, or index something.

use super::*;

impl Call<'_> {
    pub(super) fn looked_up(&self) -> Result<RowState, How> {
        let (table, indices) = (self.first()?, self.value(1).ok_or(NO_RULE)?);
        if self.state(table) != RowState::Free {
            return Err("it looks rows up in a table made of rows");
        }
        if self.argument((3, "scale_grad_by_freq")) == Some(&Arg::Bool(true)) {
            return Err("its gradient depends on how often the batch has an index");
        }
        self.rows_of(indices).map(RowState::Rows)
    }

    /// Places of one dimension, by a list of numbers.
    pub(super) fn selected(&self) -> Result<RowState, How> {
        let (source, index) = (self.first()?, self.value(2).ok_or(NO_RULE)?);
        let dim = self.dims((1, "dim"), self.rank(source))?.ok_or(NO_RULE)?[0];
        match (self.rows_or_free(source)?, self.rows_or_free(index)?) {
            (Some(rows), None) if rows.dim as usize == dim => Err("it takes rows out of the batch"),
            (Some(rows), None) => Ok(RowState::Rows(rows)),
            (None, Some(rows)) => row_state(dim, rows.per_row),
            (Some(_), Some(_)) => Err("it takes rows of the batch by other rows"),
            (None, None) => Err(UNCONFIRMED),
        }
    }

    /// Elements of one dimension, by numbers of the same rank: those of a table without rows may be of rows themselves.
    pub(super) fn gathered(&self) -> Result<RowState, How> {
        let (source, index) = (self.first()?, self.value(2).ok_or(NO_RULE)?);
        let dim = self.dims((1, "dim"), self.rank(source))?.ok_or(NO_RULE)?[0];
        match (self.rows_or_free(source)?, self.rows_or_free(index)?) {
            (None, Some(rows)) if rows.dim as usize == dim => Ok(RowState::Rows(rows)),
            _ => self.along((1, "dim"), Some(-1)),
        }
    }

    /// The one index, with its place, where that is a mask.
    fn mask(&self) -> Option<(usize, ValueId)> {
        let Some(Arg::List(items)) = self.argument((1, "indices")) else { return None };
        let mut given = items.iter().enumerate().filter(|(_, item)| **item != Arg::None);
        match (given.next(), given.next()) {
            (Some((place, Arg::Value(mask))), None) if self.is_mask(*mask) => Some((place, *mask)),
            _ => None,
        }
    }

    fn is_mask(&self, index: ValueId) -> bool {
        matches!(self.graph.values[index].dtype, DType::Bool | DType::Uint8)
    }

    /// Writes the same to all elements that a mask chooses: of none does it matter how many were chosen before it.
    fn masked_put(&self, source: ValueId, rows: RowDim, place: usize, mask: ValueId) -> Result<RowState, How> {
        let values = self.value(2).ok_or(NO_RULE)?;
        let (rank, dim, covered) = (self.rank(source), rows.dim as usize, self.rank(mask));
        let after = rank.checked_sub(place + covered).ok_or(NO_RULE)?;
        let shape = &self.graph.values[values].shape;
        if shape.len().checked_sub(after + 1).is_some_and(|chosen| shape[chosen] != Dim::fixed(1)) {
            return Err("it writes what it takes one after another to elements that it chooses by a mask");
        }
        let own = self.rows_or_free(values)?.map(|own| (self.rank(values) - own.dim as usize, own.per_row));
        let of_mask = self.rows_or_free(mask)?.map(|own| (own.dim as usize + place, own.per_row));
        let is_covered = (place..place + covered).contains(&dim);
        // In the place of what the mask covers, what is written has one dimension.
        let from_right = if dim < place { rank - covered + 1 - dim } else { rank - dim };
        let aligned = match own {
            Some(own) => !is_covered && own == (from_right, rows.per_row),
            None => true,
        };
        let expected = is_covered.then_some((dim, rows.per_row));
        if aligned && of_mask == expected { Ok(RowState::Rows(rows)) } else { Err(UNALIGNED) }
    }

    fn indices(&self) -> Result<Vec<Option<ValueId>>, How> {
        let Some(Arg::List(items)) = self.argument((1, "indices")) else { return Err(NO_RULE) };
        let one = |item: &Arg| match item {
            Arg::None => Ok(None),
            Arg::Value(value) if self.is_mask(*value) => Err("it chooses elements by a mask"),
            Arg::Value(value) => Ok(Some(*value)),
            _ => Err(NO_RULE),
        };
        items.iter().map(one).collect()
    }

    pub(super) fn indexed(&self) -> Result<RowState, How> {
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

    pub(super) fn index_put(&self) -> Result<RowState, How> {
        let source = self.first()?;
        let rows = self.rows_of(source)?;
        if let Some((place, mask)) = self.mask() {
            return self.masked_put(source, rows, place, mask);
        }
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
            let rows = match self.state(index) {
                RowState::Free => continue,
                RowState::Rows(rows) => rows,
                RowState::Numbers(rows) => {
                    let whole = RowDim { dim: u32::try_from(place).map_err(|_| NO_RULE)?, per_row: 1 };
                    if self.state(source) != RowState::Rows(whole) {
                        return Err(ROW_NUMBERS);
                    }
                    rows
                }
                _ => return Err(UNALIGNED),
            };
            let numbers = matches!(self.state(index), RowState::Numbers(_));
            if self.state(source).row_dim().is_some_and(|own| own.dim as usize == place) && !numbers {
                return Err("it takes rows of the batch by other rows");
            }
            let own = (self.rank(index) - rows.dim as usize, rows.per_row);
            if found.is_some_and(|known| known != own) {
                return Err(UNALIGNED);
            }
            found = Some(own);
        }
        let taken = self.state(source).row_dim().is_some_and(|own| places.has(own.dim as usize));
        let numbered = places.indices.iter().any(|&(_, index)| matches!(self.state(index), RowState::Numbers(_)));
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
