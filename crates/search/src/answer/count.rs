//! How many Plans there are.

use crate::price::{RankOrder, Saver};
use crate::settings::Settings;
use crate::solve::SearchCase;

/// Plans of a chain of so many Blocks that a search over these cases covers: cuts, Replicas of every Stage,
/// orders of ranks, microbatches, Schedules, and ways to save memory.
pub(crate) fn plans(blocks: usize, orders: &[RankOrder], cases: &[SearchCase], settings: &Settings) -> f64 {
    let savers = Saver::all(&settings.savers, &[1]).len() as f64;
    // All orders have as many units.
    let units = orders[0].units() as usize;
    let of_cases = |cases: usize| {
        let most = settings.max_stages.map_or(units, |most| most as usize).min(blocks).min(units);
        let counts = settings.forced_stages().map_or(1..=most, |forced| forced..=forced);
        let shared = |stages| if settings.replicas.is_some() { 1.0 } else { choose(units - 1, stages - 1) };
        counts.map(|stages| choose(blocks - 1, stages - 1) * shared(stages) * savers.powf(stages as f64)).sum::<f64>()
            * cases as f64
    };
    of_cases(cases.len())
}

/// Ways to choose `taken` of `all`.
fn choose(all: usize, taken: usize) -> f64 {
    (0..taken).map(|place| (all - place) as f64 / (place + 1) as f64).product()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_are_counted() {
        assert_eq!(choose(5, 0), 1.0);
        assert_eq!(choose(5, 2), 10.0);
        assert_eq!(choose(3, 4), 0.0);
    }
}
