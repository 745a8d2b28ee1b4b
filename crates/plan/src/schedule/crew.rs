//! Who computes in one order.

use std::collections::BTreeMap;
use std::fmt;

use super::compute::{Compute, Seated};

/// Ranks that have the same Stages. They compute in one order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Crew {
    /// The Stages of which each of them has a Replica, increasing.
    pub stages: Vec<u32>,
    /// The ranks, increasing.
    pub ranks: Vec<u32>,
}

impl Crew {
    /// All crews of Stages that have these ranks, by their Stages: where every rank has one Stage, those are the Stages.
    pub fn of_stages(stage_ranks: &[Vec<u32>]) -> Vec<Self> {
        let mut stages_of: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
        for (stage, ranks) in (0..).zip(stage_ranks) {
            ranks.iter().for_each(|&rank| stages_of.entry(rank).or_default().push(stage));
        }
        let mut crews: BTreeMap<Vec<u32>, Vec<u32>> = BTreeMap::new();
        stages_of.into_iter().for_each(|(rank, stages)| crews.entry(stages).or_default().push(rank));
        crews.into_iter().map(|(stages, ranks)| Self { stages, ranks }).collect()
    }

    /// True when they have several Stages.
    pub fn is_shared(&self) -> bool {
        self.stages.len() > 1
    }

    /// A computation of one of its Stages, which it names if it has several.
    pub fn seated(&self, stage: u32, compute: Compute) -> Seated {
        Seated { compute, stage: self.is_shared().then_some(stage) }
    }
}

/// `stage 1`, or `stages 0, 2`.
impl fmt::Display for Crew {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let numbers: Vec<String> = self.stages.iter().map(ToString::to_string).collect();
        write!(f, "{} {}", if self.is_shared() { "stages" } else { "stage" }, numbers.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_with_the_same_stages_are_a_crew() {
        let crews = |stage_ranks: &[Vec<u32>]| {
            let crews = Crew::of_stages(stage_ranks).into_iter();
            crews.map(|crew| (crew.stages, crew.ranks)).collect::<Vec<_>>()
        };
        assert_eq!(crews(&[vec![2, 0], vec![1]]), [(vec![0], vec![0, 2]), (vec![1], vec![1])]);
        assert_eq!(crews(&[vec![0], vec![1], vec![0], vec![1]]), [(vec![0, 2], vec![0]), (vec![1, 3], vec![1])]);
        assert_eq!(crews(&[vec![0, 1], vec![1, 2]]), [(vec![0], vec![0]), (vec![0, 1], vec![1]), (vec![1], vec![2])]);
    }
}
