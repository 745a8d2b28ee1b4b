//! The Plan as data.

use rannc_ir::OpRun;
use serde::{Deserialize, Serialize};

use crate::bucket_sizes::BUCKET_BYTES;
use crate::predicted::{MemoryPrediction, StagePrediction, StepPrediction};
use crate::saver::{Recompute, Sharding};
use crate::schedule::{Crew, Order, Schedule};

/// Version of the plan file that this crate writes and reads.
pub const PLAN_SCHEMA: u32 = 3;

/// The one before, of files that can be upgraded.
pub(crate) const OLD_SCHEMA: u32 = 2;

/// The decision: Stages, their ranks, microbatches, Schedule, and what is expected of them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// [`PLAN_SCHEMA`].
    pub schema: u32,
    /// Version of RaNNC that made it.
    pub pyrannc: String,
    /// Hash of the Graph that it was made for.
    pub graph_hash: String,
    /// Name of that Graph.
    pub graph_name: String,
    /// In which types the model computes and sums, in words; empty where that was not told.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub precision: String,
    /// Number of ranks.
    pub world_size: u32,
    /// Rows of the global batch that it was made for.
    pub batch_rows: u64,
    /// Microbatches of a step.
    pub microbatches: u32,
    /// Order of forward and backward.
    pub schedule: Schedule,
    /// The Stages in order.
    pub stages: Vec<StagePlan>,
    /// Hashes of the Spans that are not compiled, increasing: where Blocks were measured, their code took longer.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub eager_spans: Vec<String>,
    /// How much of what compiled Spans would keep from forward to backward they keep at most, in percent, as torch's
    /// `activation_memory_budget` counts it; `None`: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_budget_percent: Option<u8>,
    /// Expected time of a step.
    pub predicted: StepPrediction,
    /// SHA-256, in hex, of the compact JSON of this Plan with an empty checksum.
    pub checksum: String,
}

/// One Stage.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StagePlan {
    /// Its main Ops.
    pub ops: OpRun,
    /// Short summary of the modules that it runs, e.g. `bert.encoder.layer.0-11`.
    pub modules: Vec<String>,
    /// The rank of each Replica. Other Stages may have the same ranks.
    pub ranks: Vec<u32>,
    /// Its Blocks in order; none where it has no main Ops.
    pub blocks: Vec<BlockPlan>,
    /// The Stages that use what it makes, increasing; missing in files of versions that did not tell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub feeds: Option<Vec<u32>>,
    /// What its Replicas divide among them.
    pub sharding: Sharding,
    /// True when the optimizer's state stays in host memory.
    pub offload: bool,
    /// Size at which the last buckets of its gradients are full, as its links are; missing in files of versions that did
    /// not tell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bucket_bytes: Option<u64>,
    /// Expected cost.
    pub predicted: StagePrediction,
}

/// One Block of a Stage.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BlockPlan {
    /// Its main Ops.
    pub ops: OpRun,
    /// Structural hash: Blocks with the same compute the same up to names.
    pub hash: String,
    /// What of it is computed again for the backward.
    pub recompute: Recompute,
}

impl StagePlan {
    /// True when all of the Stage is computed again from what it receives.
    pub fn recomputes_all(&self) -> bool {
        self.blocks.iter().any(|block| block.recompute == Recompute::Stage)
    }

    /// Number of Blocks that are computed again, each from what it takes in.
    pub fn blocks_again(&self) -> usize {
        self.blocks.iter().filter(|block| block.recompute == Recompute::Block).count()
    }

    /// True when anything is computed again.
    pub fn recomputes(&self) -> bool {
        self.blocks.iter().any(|block| block.recompute != Recompute::None)
    }
}

/// Where the Replicas of each Stage run, how often, and in which order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// By Stage, the rank of each Replica.
    pub ranks: Vec<Vec<u32>>,
    /// Microbatches of a step.
    pub microbatches: u32,
    /// Order of forwards and backwards.
    pub schedule: Schedule,
    /// By Stage, what its Replicas divide among them; nothing where it is missing.
    pub sharding: Vec<Sharding>,
    /// By Stage, the size at which the last buckets of its gradients are full; [`BUCKET_BYTES`] where it is missing.
    pub bucket_bytes: Vec<u64>,
}

impl Placement {
    /// Size at which the last buckets of a group of ranks are full: the least of the Stages that have just these.
    pub(crate) fn bucket_bytes_of(&self, group: &[u32]) -> u64 {
        let is_own = |ranks: &[u32]| ranks.len() == group.len() && ranks.iter().all(|rank| group.contains(rank));
        let stages = self.ranks.iter().zip(&self.bucket_bytes).filter(|(ranks, _)| is_own(ranks));
        stages.map(|(_, &bytes)| bytes).min().unwrap_or(BUCKET_BYTES)
    }
}

impl Plan {
    /// The ranks of the Stages, what they divide, the sizes of their buckets, the number of microbatches and the Schedule:
    /// all that a Program needs of the Plan.
    pub fn placement(&self) -> Placement {
        Placement {
            ranks: self.stages.iter().map(|stage| stage.ranks.clone()).collect(),
            sharding: self.stages.iter().map(|stage| stage.sharding).collect(),
            bucket_bytes: self.stages.iter().map(|stage| stage.bucket_bytes.unwrap_or(BUCKET_BYTES)).collect(),
            microbatches: self.microbatches,
            schedule: self.schedule.clone(),
        }
    }

    /// The ranks by the Stages that they have, in the order of a listed Schedule.
    pub fn crews(&self) -> Vec<Crew> {
        Crew::of_stages(&self.placement().ranks)
    }

    /// What each crew computes in which order. Under a Schedule with a name, that is not known of a Plan that does not tell
    /// which Stages feed which.
    pub fn orders(&self) -> Option<Vec<Order>> {
        if let Schedule::Explicit(orders) = &self.schedule {
            return Some(orders.clone());
        }
        let mut edges = Vec::new();
        for (from, stage) in self.stages.iter().enumerate() {
            edges.extend(stage.feeds.as_ref()?.iter().map(|&to| (from, to as usize)));
        }
        Some(self.schedule.orders(&self.placement().ranks, &edges, self.microbatches))
    }

    /// Expected peak memory of a rank with all Stages of its crew.
    pub fn memory_of(&self, crew: &Crew) -> MemoryPrediction {
        let own = crew.stages.iter().map(|&stage| self.stages[stage as usize].predicted.memory);
        own.reduce(MemoryPrediction::beside).unwrap_or_default()
    }
}
