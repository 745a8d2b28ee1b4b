//! Where the elements of a tensor stand in the stream of their Op.

use std::fmt;
use std::ops::Range;

/// A tensor of shape `[outer, lines, inner]`, whose middle dimension holds lines of the global batch.
///
/// Elements count as in the whole batch with the middle dimension first: element `(o, line, i)` has the number
/// `(line * outer + o) * inner + i`, where `line` is counted in the whole batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    outer: u64,
    inner: u64,
    lines: Vec<Range<u64>>,
    count: u64,
}

/// A tensor that is too large to count its elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlaceError;

impl fmt::Display for PlaceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the numbers of the tensor's elements do not fit into 64 bits, or its lines run backwards")
    }
}

impl std::error::Error for PlaceError {}

/// Elements that follow one another both in memory and in the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    /// The first one's number.
    pub number: u64,
    /// How many.
    pub len: u64,
}

impl Place {
    /// The lines in hand are given as runs, in the order in which they lie in memory.
    pub fn new(outer: u64, inner: u64, lines: Vec<Range<u64>>) -> Result<Self, PlaceError> {
        let end = lines.iter().map(|run| run.end).max().unwrap_or(0);
        outer.checked_mul(inner).and_then(|each| each.checked_mul(end)).ok_or(PlaceError)?;
        let mut count: u64 = 0;
        for run in &lines {
            let len = run.end.checked_sub(run.start).ok_or(PlaceError)?;
            count = count.checked_add(len).ok_or(PlaceError)?;
        }
        outer.checked_mul(inner).and_then(|each| each.checked_mul(count)).ok_or(PlaceError)?;
        Ok(Self { outer, inner, lines, count })
    }

    /// Number of elements.
    pub fn len(&self) -> u64 {
        self.outer * self.inner * self.count
    }

    /// True when there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The longest run that begins with an element, by its place in memory.
    pub(crate) fn run_at(&self, element: u64) -> Run {
        let (row, within) = (element / self.inner, element % self.inner);
        let (outer, mut nth) = (row / self.count, row % self.count);
        for lines in &self.lines {
            let here = lines.end - lines.start;
            if nth < here {
                let line = lines.start + nth;
                let number = (line * self.outer + outer) * self.inner + within;
                // With nothing outside, the next line goes on where this one ends.
                let whole = if self.outer == 1 { here - nth } else { 1 };
                return Run { number, len: whole * self.inner - within };
            }
            nth -= here;
        }
        Run { number: 0, len: 0 }
    }
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init)] // a single run of lines is what is meant
mod tests {
    use super::*;

    #[test]
    fn runs_follow_memory_and_count_in_the_batch() {
        let place = Place::new(2, 3, vec![4..6, 9..10]).expect("it is small");
        assert_eq!(place.len(), 18);
        let numbers: Vec<u64> = (0..6).map(|row| place.run_at(3 * row).number / 3).collect();
        assert_eq!(numbers, [8, 10, 18, 9, 11, 19]);
        assert_eq!(place.run_at(4), Run { number: 31, len: 2 });
    }

    #[test]
    fn lines_join_when_nothing_lies_outside_of_them() {
        let place = Place::new(1, 5, vec![2..4, 7..8]).expect("it is small");
        assert_eq!(place.run_at(1), Run { number: 11, len: 9 });
        assert_eq!(place.run_at(10), Run { number: 35, len: 5 });
    }

    #[test]
    fn what_cannot_be_counted_is_refused() {
        assert_eq!(Place::new(1 << 40, 1 << 40, vec![0..1]), Err(PlaceError));
        let backwards = Range { start: 3, end: 2 };
        assert_eq!(Place::new(1, 1, vec![backwards]), Err(PlaceError));
        assert!(Place::new(1, 7, vec![]).expect("it is small").is_empty());
    }
}
