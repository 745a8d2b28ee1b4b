//! What a Value knows of the rows of the batch, and how parts of the batch come together.

use serde::{Deserialize, Serialize};

/// The dimension of a Value that runs over the batch: rows `[lo, hi)` of the batch are
/// `[per_row * lo, per_row * hi)` of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RowDim {
    /// The dimension.
    pub dim: u32,
    /// Its extent for one row.
    pub per_row: u64,
}

/// How results of parts of the batch make that of the whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Join {
    /// Added.
    Sum,
    /// Averaged by the parts' rows.
    Mean,
    /// One after another along the row dimension.
    Rows(RowDim),
}

/// What a Value knows of the rows of the batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowState {
    /// Nothing: it is the same for any rows.
    Free,
    /// Row `i` of it depends on row `i` of the inputs alone.
    Rows(RowDim),
    /// Several batches, as many as the row dimension has places for one row, one after another. Each place depends on one
    /// row of the inputs alone, but those of one row do not lie side by side: such a Value neither crosses nor joins.
    Batches(RowDim),
    /// Row `i` of it holds the number `i`.
    Numbers(RowDim),
    /// A reduction over rows: parts join by adding, or by averaging.
    Partial(Join),
    /// Several rows together, in a way that parts do not tell.
    Mixed,
}

impl RowState {
    /// Its row dimension, if each row depends on the same row of the inputs alone.
    pub const fn row_dim(self) -> Option<RowDim> {
        if let Self::Rows(rows) = self { Some(rows) } else { None }
    }
}

/// What several batches are that are put one after another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Batches {
    /// Rows of their own until they are taken apart again: [`RowState::Batches`].
    InLine,
    /// Rows that are mixed.
    Mixed,
}

/// What is done where rows are mixed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mixing {
    /// All rows of the batch come together first.
    #[default]
    Batch,
    /// Each part mixes the rows that it has, as is asked for by whoever knows that this is meant.
    Parts,
}

impl Mixing {
    /// True for the way that is not written down.
    pub(crate) fn is_default(&self) -> bool {
        *self == Self::default()
    }
}
