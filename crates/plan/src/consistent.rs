//! What a Plan may not contradict.

use std::collections::{BTreeMap, BTreeSet};

use thiserror::Error;

use crate::bucket_sizes::{FIRST_BUCKET_BYTES, LARGEST_BUCKET_BYTES};
use crate::plan::{BlockPlan, Placement, Plan, StagePlan};
use crate::predicted::StepPrediction;
use crate::saver::{Recompute, Sharding};
use crate::schedule::{Crew, Schedule};

/// As many as a cluster may have: readers make lists of them.
const MOST_RANKS: u32 = 1_000_000;
/// Likewise.
const MOST_MICROBATCHES: u32 = 1_000_000;

/// How a Plan contradicts itself.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum PlanFault {
    /// There is no Stage.
    #[error("it has no stages")]
    NoStages,
    /// There is no microbatch.
    #[error("it has no microbatches")]
    NoMicrobatches,
    /// There is no row.
    #[error("its batch has no rows")]
    NoRows,
    /// Microbatches without rows.
    #[error("it has {microbatches} microbatches for a batch of {rows} rows; each needs at least one")]
    FewRows {
        /// Its microbatches.
        microbatches: u32,
        /// Rows of its batch.
        rows: u64,
    },
    /// More microbatches than anybody can mean.
    #[error("it has {0} microbatches; there can be at most {MOST_MICROBATCHES}")]
    TooManyMicrobatches(u32),
    /// More ranks than there can be.
    #[error("it is for {0} ranks; there can be at most {MOST_RANKS}")]
    TooManyRanks(u32),
    /// Ops are missing, repeated, or a Stage has none.
    #[error("stage {stage} has main ops {first}..{end}, but must begin at {expected} and have at least one")]
    Ops {
        /// The Stage.
        stage: usize,
        /// Its first main Op.
        first: u32,
        /// One past its last.
        end: u32,
        /// Where the Stage before it ends.
        expected: u32,
    },
    /// More than all.
    #[error("its compiled spans keep at most {0}% of what they would keep; this must be from 0 to 100")]
    MemoryBudget(u8),
    /// A Stage has no Replica.
    #[error("stage {0} has no ranks")]
    NoRanks(usize),
    /// A rank does not exist.
    #[error("stage {stage} has rank {rank}, but the ranks are 0..{world_size}")]
    RankOutside {
        /// The Stage.
        stage: usize,
        /// The rank.
        rank: u32,
        /// Number of ranks.
        world_size: u32,
    },
    /// A rank stands twice in a Stage.
    #[error("rank {rank} stands twice in stage {stage}")]
    RankTwice {
        /// The Stage.
        stage: usize,
        /// The rank.
        rank: u32,
    },
    /// A rank has no work.
    #[error("rank {0} is in no stage")]
    RankUnused(u32),
    /// Blocks that are not what the Stage is made of.
    #[error("the blocks of stage {0} do not make up its main ops in their order")]
    Blocks(usize),
    /// A Stage that is computed again as a whole, but not all of it.
    #[error("stage {0} computes all of it again, but not all of its blocks say so")]
    Recompute(usize),
    /// Stages that a Stage cannot feed.
    #[error("stage {0} feeds stages that do not come after it, or lists them out of order")]
    Feeds(usize),
    /// Orders of computations for other crews than there are.
    #[error("its schedule lists {listed} orders, but there must be {}: {}", crews.len(), list(crews))]
    Orders {
        /// In the Schedule.
        listed: usize,
        /// In the Plan.
        crews: Vec<Crew>,
    },
    /// The order of a crew does not compute everything once.
    #[error("the order of {crew} {problem}")]
    Order {
        /// The crew.
        crew: Crew,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// A backward in two parts where its gradients are divided.
    #[error(
        "the order of stage {0} has backwards in two parts, but its replicas divide gradients; list B, not I and W"
    )]
    DividedParts(u32),
    /// A Stage divides what several Stages of a rank would have to divide in turn.
    #[error(
        "the replicas of stage {0} divide gradients or parameters, but some of its ranks have other stages too; let them \
         divide no more than the optimizer's state, or give the stage ranks of its own"
    )]
    DividedSeats(usize),
    /// Buckets of a size that no links ask for.
    #[error(
        "stage {stage} has buckets of {bytes} bytes; there can be {FIRST_BUCKET_BYTES} at least and {LARGEST_BUCKET_BYTES} \
         at most"
    )]
    BucketBytes {
        /// The Stage.
        stage: usize,
        /// Of its last buckets.
        bytes: u64,
    },
    /// A prediction is not a number.
    #[error("a predicted time is infinite or not a number")]
    NotFinite,
    /// Sizes of microbatches do not fall.
    #[error("a stage's sizes of microbatches are not listed from the largest to the smallest")]
    Sizes,
}

impl Plan {
    /// Checks that the fields agree with each other.
    pub(crate) fn check_consistent(&self) -> Result<(), PlanFault> {
        if self.stages.is_empty() {
            return Err(PlanFault::NoStages);
        }
        if self.microbatches == 0 {
            return Err(PlanFault::NoMicrobatches);
        }
        if self.batch_rows == 0 {
            return Err(PlanFault::NoRows);
        }
        if u64::from(self.microbatches) > self.batch_rows {
            return Err(PlanFault::FewRows { microbatches: self.microbatches, rows: self.batch_rows });
        }
        if self.microbatches > MOST_MICROBATCHES {
            return Err(PlanFault::TooManyMicrobatches(self.microbatches));
        }
        if self.world_size > MOST_RANKS {
            return Err(PlanFault::TooManyRanks(self.world_size));
        }
        if let Some(percent) = self.memory_budget_percent.filter(|percent| *percent > 100) {
            return Err(PlanFault::MemoryBudget(percent));
        }
        let mut expected = 0;
        for (stage, StagePlan { ops, .. }) in self.stages.iter().enumerate() {
            // A model that only returns its inputs or Params has no main Op, and one Stage.
            let least = u32::from(self.stages.len() > 1);
            if ops.first != expected || ops.end < ops.first.saturating_add(least) {
                return Err(PlanFault::Ops { stage, first: ops.first, end: ops.end, expected });
            }
            expected = ops.end;
        }
        check_blocks(&self.stages)?;
        check_buckets(&self.stages)?;
        check_feeds(&self.stages)?;
        let Placement { ranks, sharding, .. } = self.placement();
        check_ranks(&ranks, &sharding, self.world_size)?;
        self.check_schedule()?;
        let StepPrediction { step_us, bubble, lower_bound_us } = self.predicted;
        let stage_times = self.stages.iter().flat_map(|StagePlan { predicted: p, .. }| {
            [p.forward_us, p.backward_us, p.transfer_us, p.reduce_us, p.update_us]
        });
        let sizes = || self.stages.iter().map(|stage| &stage.predicted.sizes);
        let pass_times = sizes().flatten().flat_map(|pass| [pass.forward_us, pass.backward_us]);
        if !stage_times.chain(pass_times).chain([step_us, bubble, lower_bound_us]).all(f64::is_finite) {
            return Err(PlanFault::NotFinite);
        }
        let falling = sizes().all(|sizes| sizes.is_sorted_by(|one, next| one.rows > next.rows));
        if falling { Ok(()) } else { Err(PlanFault::Sizes) }
    }

    /// Checks that listed orders have every computation of every Stage.
    fn check_schedule(&self) -> Result<(), PlanFault> {
        let Schedule::Explicit(orders) = &self.schedule else { return Ok(()) };
        let crews = self.crews();
        if orders.len() != crews.len() {
            return Err(PlanFault::Orders { listed: orders.len(), crews });
        }
        let divides = |&&stage: &&u32| {
            let StagePlan { sharding, ranks, .. } = &self.stages[stage as usize];
            *sharding >= Sharding::Gradients && ranks.len() > 1
        };
        for (crew, order) in crews.into_iter().zip(orders) {
            if let Some(&stage) = crew.stages.iter().find(divides).filter(|_| order.splits_backward()) {
                return Err(PlanFault::DividedParts(stage));
            }
            if let Some(problem) = order.fault(&crew, self.microbatches) {
                return Err(PlanFault::Order { crew, problem });
            }
        }
        Ok(())
    }
}

/// Checks that buckets have sizes that the search may give them.
fn check_buckets(stages: &[StagePlan]) -> Result<(), PlanFault> {
    let sizes = stages.iter().enumerate().filter_map(|(stage, planned)| Some((stage, planned.bucket_bytes?)));
    for (stage, bytes) in sizes {
        if !(FIRST_BUCKET_BYTES..=LARGEST_BUCKET_BYTES).contains(&bytes) {
            return Err(PlanFault::BucketBytes { stage, bytes });
        }
    }
    Ok(())
}

/// Checks that Blocks make up their Stages, and agree on what is computed again as a whole.
fn check_blocks(stages: &[StagePlan]) -> Result<(), PlanFault> {
    for (stage, planned) in stages.iter().enumerate() {
        let mut expected = planned.ops.first;
        for BlockPlan { ops, .. } in &planned.blocks {
            if ops.first != expected || ops.end <= ops.first {
                return Err(PlanFault::Blocks(stage));
            }
            expected = ops.end;
        }
        if expected != planned.ops.end {
            return Err(PlanFault::Blocks(stage));
        }
        let together = planned.blocks.iter().filter(|block| block.recompute == Recompute::Stage).count();
        if together != 0 && together != planned.blocks.len() {
            return Err(PlanFault::Recompute(stage));
        }
    }
    Ok(())
}

/// Checks that Stages feed later ones, as far as they tell.
fn check_feeds(stages: &[StagePlan]) -> Result<(), PlanFault> {
    let are_later = |(stage, planned): (usize, &StagePlan)| {
        let feeds = planned.feeds.iter().flatten().map(|&fed| fed as usize);
        std::iter::once(stage).chain(feeds).chain([stages.len()]).is_sorted_by(|one, next| one < next)
    };
    match stages.iter().enumerate().position(|stage| !are_later(stage)) {
        Some(stage) => Err(PlanFault::Feeds(stage)),
        None => Ok(()),
    }
}

/// Checks that every rank of `0..world_size` stands in some Stage and in none twice, that no Stage is without, and that
/// Stages with ranks in common divide no gradients; what Stages do not tell to divide is whole.
pub(crate) fn check_ranks(stages: &[Vec<u32>], sharding: &[Sharding], world_size: u32) -> Result<(), PlanFault> {
    let mut stages_of: BTreeMap<u32, usize> = BTreeMap::new();
    for (stage, ranks) in stages.iter().enumerate() {
        if ranks.is_empty() {
            return Err(PlanFault::NoRanks(stage));
        }
        let mut own = BTreeSet::new();
        for &rank in ranks {
            if rank >= world_size {
                return Err(PlanFault::RankOutside { stage, rank, world_size });
            }
            if !own.insert(rank) {
                return Err(PlanFault::RankTwice { stage, rank });
            }
            *stages_of.entry(rank).or_default() += 1;
        }
    }
    if let Some(rank) = (0..world_size).find(|rank| !stages_of.contains_key(rank)) {
        return Err(PlanFault::RankUnused(rank));
    }
    let divides = |stage: &usize| sharding.get(*stage).is_some_and(|level| *level >= Sharding::Gradients);
    let is_shared = |stage: &usize| stages[*stage].len() > 1 && stages[*stage].iter().any(|rank| stages_of[rank] > 1);
    match (0..stages.len()).find(|stage| divides(stage) && is_shared(stage)) {
        Some(stage) => Err(PlanFault::DividedSeats(stage)),
        None => Ok(()),
    }
}

fn list(crews: &[Crew]) -> String {
    crews.iter().map(|crew| format!("one of {crew}")).collect::<Vec<_>>().join(", ")
}
