//! How many ranks the Blocks on both sides of a Stage take at least, by their computation alone: known before any Stage
//! is priced, and tells which need no price.

use std::ops::Range;

use crate::price::{Place, Pricing};

/// Of a rank: what is below comes from rounding.
const ROUNDING: f64 = 1e-6;

/// The fewest ranks that can compute the Blocks before a place in time, and those from it on.
pub(crate) struct FewestRanks {
    all: u32,
    before: Vec<u32>,
    behind: Vec<u32>,
}

impl FewestRanks {
    /// For a step that takes less than `best_us` with all Stages at places of this list.
    pub(crate) fn new(pricing: &Pricing<'_>, places: &[Place], best_us: f64) -> Self {
        let (blocks, all) = (pricing.chain.len(), pricing.problem.settings.world_size);
        let ats: Vec<_> = places.iter().map(|place| pricing.at(place)).collect();
        // Time of all ranks together.
        let work_us = |block: usize| {
            let at_place = ats.iter().map(|at| pricing.least_busy_us(block, at) * f64::from(at.place.fewest()));
            at_place.fold(f64::INFINITY, f64::min)
        };
        let before_us: Vec<f64> = std::iter::once(0.0)
            .chain((0..blocks).map(work_us).scan(0.0, |sum_us, us| {
                *sum_us += us;
                Some(*sum_us)
            }))
            .collect();
        let fewest = |us: f64| (us / best_us - ROUNDING).ceil().clamp(0.0, f64::from(all) + 1.0) as u32;
        let behind = before_us.iter().map(|us| fewest(before_us[blocks] - us)).collect();
        Self { all, before: before_us.iter().copied().map(fewest).collect(), behind }
    }

    /// First Blocks of Stages that end at `end` and leave the other Blocks enough ranks.
    pub(crate) fn firsts(&self, end: usize, replicas: u32) -> Range<usize> {
        let left = self.all.checked_sub(replicas + self.behind[end]);
        0..left.map_or(0, |left| self.before[..end].partition_point(|&fewest| fewest <= left))
    }
}

#[cfg(test)]
mod tests {
    use rannc_cost::{Cluster, OpWork, Poly, Work};
    use rannc_plan::ScheduleKind;

    use super::*;
    use crate::chain::Chain;
    use crate::chain::spec::{BlockSpec, ChainSpec};
    use crate::price::Problem;
    use crate::settings::Settings;

    #[test]
    fn a_stage_leaves_the_others_their_ranks() {
        let forward = Work { flops: Poly::affine(0.0, 1e9), launches: 1.0, ..Work::default() };
        let work = vec![OpWork { forward, ..OpWork::default() }];
        let blocks = vec![BlockSpec { work, ..BlockSpec::default() }; 8];
        let cluster = Cluster::preset("cpu", 1, 4).expect("4 devices");
        let chain = Chain::new(ChainSpec { blocks, ..ChainSpec::default() }, &cluster.kinds);
        let settings = Settings { world_size: 4, batch_rows: 16, ..Settings::default() };
        let measured = &[None][..];
        let problem = Problem::new(&chain, &cluster, measured, &settings);
        let pricing = Pricing::new(problem, ScheduleKind::FillDrain, 4);
        let places = [Place::ideal(&cluster, &(1..=1), 0)];
        let block_us = pricing.least_busy_us(0, &pricing.at(&places[0]));
        let firsts = |ranks_us: f64, end: usize, replicas: u32| {
            FewestRanks::new(&pricing, &places, ranks_us * block_us).firsts(end, replicas)
        };
        // A rank computes two Blocks in time, and no third one.
        assert_eq!(firsts(2.1, 8, 2), 0..5);
        assert_eq!(firsts(2.1, 6, 1), 0..5);
        assert_eq!(firsts(2.1, 6, 2), 0..3);
        assert_eq!(firsts(2.1, 6, 4), 0..0);
        // It has all the time.
        assert_eq!(firsts(f64::INFINITY, 6, 4), 0..6);
    }
}
