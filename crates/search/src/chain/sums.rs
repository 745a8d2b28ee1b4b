//! Sums of amounts that grow with the rows, over all runs of Blocks.

use std::ops::Range;

use super::interval::{IntervalSums, IntervalSumsBuilder};
use super::spec::Affine;

/// Sums of [`Affine`] amounts over all runs.
#[derive(Clone, Debug)]
pub(crate) struct AffineSums(IntervalSums<Affine>);

impl AffineSums {
    pub(super) fn new(len: usize, add: impl FnOnce(&mut IntervalSumsBuilder<Affine>)) -> Self {
        let mut builder = IntervalSumsBuilder::new(len);
        add(&mut builder);
        Self(builder.finish())
    }

    pub(crate) fn at(&self, first: usize, end: usize, rows: u64) -> f64 {
        self.0.at(first, end).at(rows)
    }
}

/// Sums of [`Affine`] amounts that each belong to one Block.
#[derive(Clone, Debug)]
pub(crate) struct BlockSums {
    /// By place between Blocks, of those before it.
    before: Vec<Affine>,
}

impl BlockSums {
    pub(super) fn new(len: usize, amounts: impl Iterator<Item = (usize, Affine)>) -> Self {
        let mut before = vec![Affine::default(); len + 1];
        for (block, amount) in amounts {
            before[block + 1..].iter_mut().for_each(|sum| *sum += amount);
        }
        Self { before }
    }

    /// False for a run to whose Blocks nothing belongs.
    pub(crate) fn has_any(&self, run: &Range<usize>) -> bool {
        self.before[run.end] != self.before[run.start]
    }

    pub(crate) fn at(&self, run: &Range<usize>, rows: u64) -> f64 {
        self.before[run.end].at(rows) - self.before[run.start].at(rows)
    }
}
