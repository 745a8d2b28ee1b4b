//! Which Blocks of a Stage to compute again so that its memory suffices.
//!
//! Each Block computed again frees what it keeps inside, for each microbatch, and costs its forward. The
//! cheapest choice that frees enough is a knapsack problem.

/// A choice must cost less than this share of another one to replace it: where the times of kinds are nearly
/// proportional to their memory, too many choices are nearly as good.
pub(crate) const CHEAPER: f64 = 1.0 - 1e-4;

/// Choices that are looked at: where every Block is a kind of its own, there may be no end of them.
const MOST_CHOICES: usize = 20_000;

/// Blocks of one kind.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Saving {
    /// The kind.
    pub(crate) kind: u32,
    /// Memory that each of them frees.
    pub(crate) bytes: f64,
    /// Time that it costs.
    pub(crate) us: f64,
    /// How many there are.
    pub(crate) count: usize,
}

impl Saving {
    fn ratio(&self) -> f64 {
        self.us / self.bytes
    }
}

/// Memory to free, and what may free it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Choice {
    /// The cheapest memory first.
    pub(crate) savings: Vec<Saving>,
    /// For each microbatch.
    pub(crate) needed_bytes: f64,
}

impl Choice {
    /// The cost of the cheapest choice that is found; `None` when all together free less.
    pub(crate) fn cheapest_us(&self) -> Option<f64> {
        let cost_us =
            |counts: Vec<usize>| self.savings.iter().zip(counts).map(|(saving, count)| saving.us * count as f64).sum();
        self.cheapest().map(cost_us)
    }

    /// The same, or less if it is not known that no choice is much cheaper.
    pub(crate) fn sure_us(&self) -> Option<f64> {
        let search = self.search();
        if search.choices_left > 0 { search.best.map(|_| search.best_us) } else { self.least_us() }
    }

    /// The cost if parts of Blocks could be taken, which no choice is below; `None` when all together free less.
    pub(crate) fn least_us(&self) -> Option<f64> {
        Some(least_us(&self.savings, self.needed_bytes)).filter(|us| us.is_finite())
    }

    /// The cheapest numbers of each kind that free enough and are found, if any do.
    pub(crate) fn cheapest(&self) -> Option<Vec<usize>> {
        self.search().best
    }

    fn search(&self) -> Knapsack<'_> {
        let savings = &self.savings[..];
        let counts = vec![0; savings.len()];
        let mut search = Knapsack { savings, best_us: f64::INFINITY, best: None, counts, choices_left: MOST_CHOICES };
        search.take(0, self.needed_bytes, 0.0);
        search
    }
}

/// Kinds by the ratio of time to memory; those that free nothing are left out.
pub(crate) fn cheapest_first(mut savings: Vec<Saving>) -> Vec<Saving> {
    savings.retain(|saving| saving.bytes > 0.0);
    savings.sort_by(|left, right| left.ratio().total_cmp(&right.ratio()).then(right.bytes.total_cmp(&left.bytes)));
    savings
}

/// The most memory that one Block of these kinds frees, and holds again while it is computed again.
pub(crate) fn largest_bytes(savings: &[Saving]) -> f64 {
    savings.iter().map(|saving| saving.bytes).fold(0.0, f64::max)
}

/// Branch and bound over the kinds (Horowitz and Sahni, 1974).
struct Knapsack<'a> {
    savings: &'a [Saving],
    best_us: f64,
    best: Option<Vec<usize>>,
    counts: Vec<usize>,
    choices_left: usize,
}

impl Knapsack<'_> {
    fn take(&mut self, kind: usize, needed_bytes: f64, us: f64) {
        if needed_bytes <= 0.0 {
            if us < self.best_us * CHEAPER {
                (self.best_us, self.best) = (us, Some(self.counts.clone()));
            }
            return;
        }
        if kind == self.savings.len() || us + least_us(&self.savings[kind..], needed_bytes) >= self.best_us * CHEAPER {
            return;
        }
        // The first choice that frees enough is found without a wrong turn.
        self.choices_left = self.choices_left.saturating_sub(1);
        if self.choices_left == 0 && self.best.is_some() {
            return;
        }
        let Saving { bytes, us: each_us, count, .. } = self.savings[kind];
        let most = (needed_bytes / bytes).ceil().min(count as f64) as usize;
        for taken in (0..=most).rev() {
            self.counts[kind] = taken;
            self.take(kind + 1, needed_bytes - taken as f64 * bytes, us + taken as f64 * each_us);
        }
        self.counts[kind] = 0;
    }
}

/// The cost of freeing so much if parts of Blocks could be taken; infinite when all together free less.
fn least_us(savings: &[Saving], mut needed_bytes: f64) -> f64 {
    let mut us = 0.0;
    for saving in savings {
        let wanted = (needed_bytes / saving.bytes).max(0.0);
        if wanted <= saving.count as f64 {
            return us + wanted * saving.us;
        }
        us += saving.count as f64 * saving.us;
        needed_bytes -= saving.count as f64 * saving.bytes;
    }
    if needed_bytes <= 0.0 { us } else { f64::INFINITY }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn brute_force_us(savings: &[Saving], needed_bytes: f64) -> f64 {
        match savings {
            _ if needed_bytes <= 0.0 => 0.0,
            [] => f64::INFINITY,
            [first, rest @ ..] => (0..=first.count)
                .map(|taken| taken as f64 * first.us + brute_force_us(rest, needed_bytes - taken as f64 * first.bytes))
                .fold(f64::INFINITY, f64::min),
        }
    }

    #[test]
    fn proportional_kinds_do_not_take_for_ever() {
        let saving = |bytes: u32| Saving { kind: bytes, bytes: f64::from(bytes), us: f64::from(bytes), count: 6 };
        let savings: Vec<Saving> = (0..30).map(|kind| saving(1000 + 997 * kind * kind % 9001)).collect();
        let needed_bytes = savings.iter().map(|saving| saving.bytes).sum::<f64>() * 2.7;
        let choice = Choice { savings: cheapest_first(savings), needed_bytes };
        assert!(choice.cheapest_us().expect("enough") * CHEAPER <= needed_bytes * (1.0 + 1e-4));
    }

    #[test]
    fn kinds_without_number_do_not_take_for_ever() {
        // Prime numbers of bytes, and times that are nearly proportional: every bound is nearly as good as the best.
        let saving = |kind: u32| {
            let bytes = f64::from(100_003 + 7919 * kind * kind % 90_001);
            Saving { kind, bytes, us: bytes * (1.0 + 0.01 * f64::from(kind * 37 % 101)), count: 1 }
        };
        let savings = cheapest_first((0..192).map(saving).collect());
        let choice = Choice { needed_bytes: savings.iter().map(|saving| saving.bytes).sum::<f64>() / 2.1, savings };
        let begun = std::time::Instant::now();
        let (least_us, sure_us) = (choice.least_us().expect("enough"), choice.sure_us().expect("enough"));
        let cheapest_us = choice.cheapest_us().expect("enough");
        assert!(begun.elapsed().as_secs_f64() < 2.0);
        assert!(least_us <= sure_us * (1.0 + 1e-12) && sure_us <= cheapest_us && cheapest_us < least_us * 1.01);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(5000))]

        #[test]
        fn no_choice_is_much_cheaper(
            drawn in prop::collection::vec((0..20_u32, 1..20_u32, 0..4_usize), 0..5), needed in 0..200_u32,
        ) {
            let saving = |(bytes, us, count)| Saving { kind: 0, bytes: f64::from(bytes), us: f64::from(us), count };
            let needed_bytes = f64::from(needed);
            let choice = Choice { savings: cheapest_first(drawn.into_iter().map(saving).collect()), needed_bytes };
            let savings = &choice.savings;
            let expected_us = brute_force_us(savings, needed_bytes);
            match choice.cheapest() {
                Some(counts) => {
                    let us: f64 = savings.iter().zip(&counts).map(|(saving, &count)| saving.us * count as f64).sum();
                    let bytes: f64 = savings.iter().zip(&counts).map(|(saving, &count)| saving.bytes * count as f64).sum();
                    prop_assert!(bytes >= needed_bytes && us >= expected_us, "{} {}", us, expected_us);
                    prop_assert!(us * CHEAPER <= expected_us, "{} {}", us, expected_us);
                    prop_assert!(choice.cheapest_us() == Some(us));
                    prop_assert!(choice.least_us().expect("enough") <= us * (1.0 + 1e-12));
                }
                None => {
                    prop_assert!(expected_us.is_infinite() && choice.cheapest_us().is_none() && choice.least_us().is_none());
                }
            }
        }
    }
}
