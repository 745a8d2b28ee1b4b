//! Sums over all runs of a chain, from differences.

use std::ops::{Add, Range, Sub};

/// What can be summed.
pub(crate) trait Amount: Copy + Default + Add<Output = Self> + Sub<Output = Self> {}

impl<T: Copy + Default + Add<Output = T> + Sub<Output = T>> Amount for T {}

/// For every run `first..end` of a chain of `len` places, a sum.
#[derive(Clone, Debug)]
pub(crate) struct IntervalSums<T = f64> {
    stride: usize,
    /// At `end * stride + first`: searches look at all runs with one end.
    sums: Vec<T>,
}

impl<T: Amount> IntervalSums<T> {
    /// The sum of a run.
    pub(crate) fn at(&self, first: usize, end: usize) -> T {
        self.sums[end * self.stride + first]
    }
}

/// Collects terms of [`IntervalSums`]. A term belongs to runs that begin in a range and hold a place.
#[derive(Clone, Debug)]
pub(crate) struct IntervalSumsBuilder<T = f64> {
    len: usize,
    stride: usize,
    /// At (place + 1, start): how the terms that begin to count at `place` change from start - 1 to start.
    differences: Vec<T>,
}

impl<T: Amount> IntervalSumsBuilder<T> {
    pub(crate) fn new(len: usize) -> Self {
        let stride = len + 1;
        Self { len, stride, differences: vec![T::default(); stride * stride] }
    }

    /// Counts `amount` once in every run that begins in `starts` and holds at least one of `places`
    /// (increasing).
    pub(crate) fn add_once(&mut self, starts: Range<usize>, places: &[usize], amount: T) {
        let mut unseen = starts.start;
        for &place in places {
            self.add(unseen..starts.end.min(place + 1), place, amount);
            unseen = unseen.max(place + 1);
        }
    }

    /// Counts `amount` in every run that begins in `starts` and ends with one of these places.
    pub(crate) fn add_last(&mut self, starts: Range<usize>, last: Range<usize>, amount: T) {
        self.add(starts.clone(), last.start, amount);
        if last.end < self.len {
            self.add(starts, last.end, T::default() - amount);
        }
    }

    /// Counts `amount` in every run that holds `from` but not `until`, which comes later.
    pub(crate) fn add_open(&mut self, from: usize, until: usize, amount: T) {
        self.add(0..from + 1, from, amount);
        self.add(0..from + 1, until, T::default() - amount);
    }

    /// Counts `amount` in every run that holds `from` and ends before `next`, which comes later.
    pub(crate) fn add_ending(&mut self, from: usize, next: usize, amount: T) {
        self.add(0..from + 1, next - 1, amount);
        self.add(0..from + 1, next, T::default() - amount);
    }

    fn add(&mut self, starts: Range<usize>, place: usize, amount: T) {
        if starts.start < starts.end {
            let row = &mut self.differences[(place + 1) * self.stride..];
            row[starts.start] = row[starts.start] + amount;
            row[starts.end] = row[starts.end] - amount;
        }
    }

    pub(crate) fn finish(self) -> IntervalSums<T> {
        let Self { len, stride, differences: mut sums } = self;
        for row in sums.chunks_mut(stride) {
            let mut sum = T::default();
            for entry in row {
                sum = sum + *entry;
                *entry = sum;
            }
        }
        for end in 1..=len {
            for start in 0..=len {
                sums[end * stride + start] = sums[end * stride + start] + sums[(end - 1) * stride + start];
            }
        }
        IntervalSums { stride, sums }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEN: usize = 6;

    fn runs() -> impl Iterator<Item = (usize, usize)> {
        (0..LEN).flat_map(|first| (first + 1..=LEN).map(move |end| (first, end)))
    }

    #[test]
    fn a_term_counts_once_in_each_run() {
        let places = [1, 3, 4];
        let mut builder = IntervalSumsBuilder::new(LEN);
        builder.add_once(2..LEN, &places, 5.0);
        let sums = builder.finish();
        for (first, end) in runs() {
            let counts = first >= 2 && places.iter().any(|&place| (first..end).contains(&place));
            assert_eq!(sums.at(first, end), if counts { 5.0 } else { 0.0 }, "{first}..{end}");
        }
    }

    #[test]
    fn an_open_term_counts_until_its_end() {
        let mut builder = IntervalSumsBuilder::new(LEN);
        builder.add_open(1, 4, 3.0);
        let sums = builder.finish();
        for (first, end) in runs() {
            let counts = first <= 1 && (2..=4).contains(&end);
            assert_eq!(sums.at(first, end), if counts { 3.0 } else { 0.0 }, "{first}..{end}");
        }
    }

    #[test]
    fn a_last_term_counts_at_some_ends() {
        for last in [1..4, 2..LEN] {
            let mut builder = IntervalSumsBuilder::new(LEN);
            builder.add_last(0..3, last.clone(), 3.0);
            let sums = builder.finish();
            for (first, end) in runs() {
                let counts = first < 3 && last.contains(&(end - 1));
                // No run ends before it begins.
                assert_eq!(sums.at(first, end), if counts { 3.0 } else { 0.0 }, "{first}..{end} {last:?}");
            }
        }
    }

    #[test]
    fn an_ending_term_counts_at_one_end() {
        let mut builder = IntervalSumsBuilder::new(LEN);
        builder.add_ending(1, 4, 3.0);
        let sums = builder.finish();
        for (first, end) in runs() {
            let counts = first <= 1 && end == 4;
            assert_eq!(sums.at(first, end), if counts { 3.0 } else { 0.0 }, "{first}..{end}");
        }
    }
}
