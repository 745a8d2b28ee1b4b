//! How large the microbatches of a step are.
//!
//! Rows that do not divide go to the first parts: the first microbatches of every rank are a row longer, and at most one
//! between them and the others has the longer parts of some ranks alone.

use crate::settings::Settings;

/// One amount for each size of microbatch: the first ones, the one between, the others.
pub(crate) type BySize<T> = [T; 3];
/// The size of the first microbatches, which are the largest.
pub(crate) const LARGER: usize = 0;
/// The size between the first and the last ones.
pub(crate) const BETWEEN: usize = 1;
/// The size of the last microbatches.
pub(crate) const SMALLER: usize = 2;

/// The microbatches that have rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MicrobatchSizes {
    /// Rows of one of each size.
    pub(crate) rows: BySize<u64>,
    /// How many there are of each size. If all are equal, they count as smaller ones.
    pub(crate) counts: BySize<u64>,
    /// The place in a [`ByCount`](crate::chain::ByCount): also those without rows count.
    pub(crate) by_count: usize,
}

impl MicrobatchSizes {
    /// Those of a batch in so many microbatches, of which some may have no rows.
    pub(crate) fn new(settings: &Settings, microbatches: u64) -> Self {
        let ranks = if settings.gather_inputs { u64::from(settings.world_size) } else { 1 };
        let (each, longer_ranks) = (settings.batch_rows / ranks, settings.batch_rows % ranks);
        let (rows, longer) = (each / microbatches, each % microbatches);
        let mut sizes = vec![(ranks * (rows + 1), longer), (ranks * rows + longer_ranks, 1)];
        sizes.push((ranks * rows, microbatches - longer - 1));
        sizes.retain(|&(rows, count)| rows > 0 && count > 0);
        sizes.dedup_by(|next, size| {
            let equal = next.0 == size.0;
            size.1 += if equal { next.1 } else { 0 };
            equal
        });
        let (rows, counts) = match sizes[..] {
            [(larger, first), (between, one), (smaller, last)] => ([larger, between, smaller], [first, one, last]),
            [(larger, first), (smaller, last)] => ([larger, smaller, smaller], [first, 0, last]),
            [(rows, count)] => ([rows; 3], [0, 0, count]),
            _ => unreachable!("a batch has rows, and three sizes at most"),
        };
        Self { rows, counts, by_count: usize::from(microbatches > 1) }
    }

    /// Rows of the largest one.
    pub(crate) fn most_rows(&self) -> u64 {
        self.rows[LARGER]
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rannc_plan::split_even;

    use super::*;

    proptest! {
        #[test]
        fn sizes_are_those_of_the_runtime(
            world_size in 1..9_u32, batch_rows in 1..200_u64, microbatches in 1..40_u64, gather_inputs in any::<bool>(),
        ) {
            let settings = Settings { world_size, batch_rows, gather_inputs, ..Settings::default() };
            let ranks = if gather_inputs { world_size as usize } else { 1 };
            let mut expected = vec![0; microbatches as usize];
            for rank in split_even(batch_rows, ranks) {
                for (sum, part) in expected.iter_mut().zip(split_even(rank.rows(), microbatches as usize)) {
                    *sum += part.rows();
                }
            }
            expected.retain(|&rows| rows > 0);
            let MicrobatchSizes { rows, counts, by_count } = MicrobatchSizes::new(&settings, microbatches);
            let told: Vec<u64> =
                rows.iter().zip(counts).flat_map(|(&rows, count)| std::iter::repeat_n(rows, count as usize)).collect();
            prop_assert_eq!(told, expected);
            prop_assert_eq!(by_count, usize::from(microbatches > 1));
        }
    }
}
