//! The largest amount in every run of Blocks.

use super::interval::IntervalSums;

/// Largest amounts for all runs `first..end`.
#[derive(Clone, Debug)]
pub(crate) struct Largest {
    stride: usize,
    /// At `end * stride + first`.
    amounts: Vec<f64>,
}

impl Largest {
    /// Of amounts at places.
    pub(super) fn of_places(places: &[f64]) -> Self {
        Self::new(places.len(), |largest, _, end| largest.max(places[end - 1]))
    }

    /// Of sums over groups of consecutive places, as far as they lie in the run.
    pub(super) fn of_groups(sums: &IntervalSums, group_of: &[usize]) -> Self {
        let begins: Vec<usize> =
            (0..group_of.len()).map(|place| group_of.partition_point(|&group| group < group_of[place])).collect();
        Self::new(group_of.len(), |largest, first, end| largest.max(sums.at(begins[end - 1].max(first), end)))
    }

    /// With one place more, from what is known of the run that ends before it.
    fn new(len: usize, with_next: impl Fn(f64, usize, usize) -> f64) -> Self {
        let stride = len + 1;
        let mut amounts = vec![0.0; stride * stride];
        for first in 0..len {
            for end in first + 1..=len {
                amounts[end * stride + first] = with_next(amounts[(end - 1) * stride + first], first, end);
            }
        }
        Self { stride, amounts }
    }

    /// The largest of a run.
    pub(crate) fn at(&self, first: usize, end: usize) -> f64 {
        self.amounts[end * self.stride + first]
    }
}

#[cfg(test)]
mod tests {
    use super::super::interval::IntervalSumsBuilder;
    use super::*;

    const AMOUNTS: [f64; 6] = [3.0, 1.0, 4.0, 1.0, 5.0, 2.0];

    #[test]
    fn every_run_has_its_largest() {
        let group_of = [0, 0, 1, 1, 1, 2];
        let mut builder = IntervalSumsBuilder::new(6);
        AMOUNTS.iter().enumerate().for_each(|(place, &amount)| builder.add_once(0..6, &[place], amount));
        let (places, groups) = (Largest::of_places(&AMOUNTS), Largest::of_groups(&builder.finish(), &group_of));
        for first in 0..6 {
            for end in first + 1..=6 {
                assert_eq!(places.at(first, end), AMOUNTS[first..end].iter().copied().fold(0.0, f64::max));
                let of_group = |group: usize| {
                    (first..end).filter(|&place| group_of[place] == group).map(|place| AMOUNTS[place]).sum()
                };
                let expected = (0..3).map(of_group).fold(0.0, f64::max);
                assert_eq!(groups.at(first, end), expected, "{first}..{end}");
            }
        }
    }
}
