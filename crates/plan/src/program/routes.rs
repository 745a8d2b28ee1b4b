//! Which rows are where: splits of rows, and the overlap of two splits.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Rows `lo..hi`; written `[lo, hi]` in JSON.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(from = "(u64, u64)", into = "(u64, u64)")]
pub struct Interval {
    /// First row.
    pub lo: u64,
    /// One past the last row.
    pub hi: u64,
}

impl Interval {
    /// Rows `lo..hi`.
    pub const fn new(lo: u64, hi: u64) -> Self {
        Self { lo, hi }
    }
    /// Number of rows.
    pub const fn rows(self) -> u64 {
        self.hi.saturating_sub(self.lo)
    }
    /// True when there is no row.
    pub const fn is_empty(self) -> bool {
        self.hi <= self.lo
    }
    /// Its rows that are in none of the others, as runs.
    pub(crate) fn without(self, others: impl IntoIterator<Item = Self>) -> Vec<Self> {
        let mut left = vec![self];
        for other in others {
            let apart =
                |own: Self| [Self { hi: own.hi.min(other.lo), ..own }, Self { lo: own.lo.max(other.hi), ..own }];
            left = match other.is_empty() {
                true => left,
                false => left.into_iter().flat_map(apart).filter(|rows| !rows.is_empty()).collect(),
            };
        }
        left
    }
    /// The rows in both.
    pub fn overlap(self, other: Self) -> Self {
        Self { lo: self.lo.max(other.lo), hi: self.hi.min(other.hi) }
    }
}

impl From<(u64, u64)> for Interval {
    fn from((lo, hi): (u64, u64)) -> Self {
        Self { lo, hi }
    }
}

impl From<Interval> for (u64, u64) {
    fn from(interval: Interval) -> Self {
        (interval.lo, interval.hi)
    }
}

impl fmt::Display for Interval {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}..{}", self.lo, self.hi)
    }
}

/// Rows of one rank's local batch that belong to one microbatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Slice {
    /// The microbatch.
    pub mb: u32,
    /// Rows of the local batch.
    pub local: Interval,
    /// Where the first of them stands within the microbatch.
    pub at: u64,
}

impl Slice {
    /// The same rows, counted within the microbatch.
    pub const fn within(&self) -> Interval {
        Interval { lo: self.at, hi: self.at + self.local.rows() }
    }
}

/// Splits `rows` rows into `parts` runs as evenly as possible: the first `rows % parts` have one row more.
pub fn split_even(rows: u64, parts: usize) -> Vec<Interval> {
    let count = parts.max(1) as u64;
    let (each, longer) = (rows / count, rows % count);
    let start = |part: u64| part * each + part.min(longer);
    (0..parts as u64).map(|part| Interval::new(start(part), start(part + 1))).collect()
}

/// The batch cut into microbatches: how long each one is, and which local rows of each rank are in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BatchSplit {
    /// Rows of each microbatch.
    pub microbatches: Vec<u64>,
    /// By rank, its non-empty slices by increasing microbatch.
    pub slices: Vec<Vec<Slice>>,
    /// By microbatch, every rank's rows within it in rank order (possibly none).
    pub owners: Vec<Vec<Interval>>,
}

impl BatchSplit {
    /// Cuts each rank's rows into `microbatches` slices; a microbatch is its slices in rank order.
    pub fn new(rows_per_rank: &[u64], microbatches: usize) -> Self {
        let local: Vec<Vec<Interval>> = rows_per_rank.iter().map(|&rows| split_even(rows, microbatches)).collect();
        let mut split = Self {
            microbatches: Vec::with_capacity(microbatches),
            slices: vec![Vec::new(); rows_per_rank.len()],
            owners: Vec::with_capacity(microbatches),
        };
        for (index, mb) in (0..microbatches).zip(0..) {
            let mut at = 0;
            let mut owners = Vec::with_capacity(local.len());
            for (rank, parts) in local.iter().enumerate() {
                let slice = Slice { mb, local: parts[index], at };
                owners.push(slice.within());
                at += slice.local.rows();
                if !slice.local.is_empty() {
                    split.slices[rank].push(slice);
                }
            }
            split.microbatches.push(at);
            split.owners.push(owners);
        }
        split
    }
}

/// Rows that go from one part of a split to one part of another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overlap {
    /// Place of the sender in its split.
    pub from: usize,
    /// Place of the receiver in its split.
    pub to: usize,
    /// The rows; never empty.
    pub rows: Interval,
}

/// All non-empty overlaps of two splits of the same rows, in row order. Each split is in row order
/// without overlap inside; parts may be empty.
pub fn overlaps(senders: &[Interval], receivers: &[Interval]) -> Vec<Overlap> {
    let mut found = Vec::with_capacity(senders.len() + receivers.len());
    let (mut from, mut to) = (0, 0);
    while from < senders.len() && to < receivers.len() {
        let rows = senders[from].overlap(receivers[to]);
        if !rows.is_empty() {
            found.push(Overlap { from, to, rows });
        }
        if senders[from].hi <= receivers[to].hi {
            from += 1;
        } else {
            to += 1;
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(found: &[Overlap]) -> String {
        found.iter().map(|o| format!("{}->{} {}", o.from, o.to, o.rows)).collect::<Vec<_>>().join(", ")
    }

    #[test]
    fn even_splits_give_the_first_parts_one_more() {
        let lengths = |rows, parts| split_even(rows, parts).iter().map(|part| part.rows()).collect::<Vec<_>>();
        assert_eq!(lengths(10, 4), [3, 3, 2, 2]);
        assert_eq!(lengths(2, 4), [1, 1, 0, 0]);
        assert_eq!(lengths(0, 2), [0, 0]);
        assert_eq!(split_even(5, 2), [Interval::new(0, 3), Interval::new(3, 5)]);
    }

    #[test]
    fn rows_without_others() {
        let without = |others: &[(u64, u64)]| {
            let left = Interval::new(2, 8).without(others.iter().map(|&rows| rows.into()));
            left.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
        };
        assert_eq!([without(&[]), without(&[(4, 4)]), without(&[(0, 2), (8, 9)])], ["2..8"; 3]);
        assert_eq!([without(&[(0, 3), (7, 9)]), without(&[(4, 5)])], ["3..7", "2..4 5..8"]);
        assert_eq!([without(&[(0, 9)]), without(&[(2, 4), (3, 8)])], [""; 2]);
    }

    #[test]
    fn overlaps_of_uneven_splits() {
        assert_eq!(text(&overlaps(&split_even(6, 2), &split_even(6, 3))), "0->0 0..2, 0->1 2..3, 1->1 3..4, 1->2 4..6");
        assert_eq!(text(&overlaps(&split_even(1, 3), &split_even(1, 2))), "0->0 0..1");
        assert_eq!(text(&overlaps(&split_even(4, 1), &split_even(4, 4))), "0->0 0..1, 0->1 1..2, 0->2 2..3, 0->3 3..4");
        assert_eq!(text(&overlaps(&[], &split_even(4, 1))), "");
    }

    #[test]
    fn overlaps_skip_empty_parts() {
        let senders = [Interval::new(0, 0), Interval::new(0, 2), Interval::new(2, 2), Interval::new(2, 3)];
        let receivers = [Interval::new(0, 3), Interval::new(3, 3)];
        assert_eq!(text(&overlaps(&senders, &receivers)), "1->0 0..2, 3->0 2..3");
    }

    #[test]
    fn microbatches_take_a_slice_of_every_rank() {
        let split = BatchSplit::new(&[3, 0, 4], 2);
        assert_eq!(split.microbatches, [4, 3]);
        let slice = |mb, lo, hi, at| Slice { mb, local: Interval::new(lo, hi), at };
        assert_eq!(
            split.slices,
            [vec![slice(0, 0, 2, 0), slice(1, 2, 3, 0)], vec![], vec![slice(0, 0, 2, 2), slice(1, 2, 4, 1)]]
        );
    }

    #[test]
    fn fewer_rows_than_microbatches_leave_the_last_ones_empty() {
        assert_eq!(BatchSplit::new(&[2, 1], 4).microbatches, [2, 1, 0, 0]);
    }
}
