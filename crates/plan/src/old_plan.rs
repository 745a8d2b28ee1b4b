//! Plan files of schema 2, which told of a Stage's Blocks only how many there are.

use rannc_ir::sealed::{self, Sealed};
use rannc_ir::{Graph, OpRun};
use serde::{Deserialize, Serialize};

use crate::partition::Partition;
use crate::plan::{BlockPlan, OLD_SCHEMA, PLAN_SCHEMA, Plan, StagePlan};
use crate::plan_file::{PlanFileError, check_graph};
use crate::predicted::{StagePrediction, StepPrediction};
use crate::saver::{Recompute, Sharding};
use crate::schedule::Schedule;

/// A Plan of schema 2.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OldPlan {
    schema: u32,
    pyrannc: String,
    graph_hash: String,
    graph_name: String,
    world_size: u32,
    batch_rows: u64,
    microbatches: u32,
    schedule: Schedule,
    stages: Vec<OldStage>,
    predicted: StepPrediction,
    checksum: String,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct OldStage {
    ops: OpRun,
    modules: Vec<String>,
    ranks: Vec<u32>,
    blocks: u32,
    recompute: OldRecompute,
    sharding: Sharding,
    offload: bool,
    predicted: StagePrediction,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum OldRecompute {
    None,
    Stage,
    Blocks(Vec<OpRun>),
}

impl Sealed for OldPlan {
    const SCHEMA: u32 = OLD_SCHEMA;

    fn checksum(&mut self) -> &mut String {
        &mut self.checksum
    }
}

impl OldPlan {
    /// Reads a file's text and checks form, schema and checksum.
    ///
    /// # Errors
    /// When the text is not such a file, or is damaged.
    pub fn from_json(text: &str) -> Result<Self, PlanFileError> {
        Ok(sealed::from_json(text)?)
    }

    /// Checks that it was made for this Graph.
    ///
    /// # Errors
    /// When it was made for another.
    pub fn check_graph(&self, graph: &Graph) -> Result<(), PlanFileError> {
        check_graph(&self.graph_name, &self.graph_hash, graph)
    }

    /// The runs of main Ops that it names: its Stages, and what they compute again.
    pub fn runs(&self) -> impl Iterator<Item = OpRun> {
        self.stages.iter().flat_map(|stage| std::iter::once(stage.ops).chain(stage.recompute.runs().iter().copied()))
    }

    /// The same Plan of this Graph with these Blocks, given by their runs and hashes; they end wherever one of
    /// [`OldPlan::runs`] does.
    ///
    /// # Errors
    /// When the fields contradict each other, or the Blocks do not make up the Stages.
    pub fn upgrade(self, graph: &Graph, blocks: &[(OpRun, String)]) -> Result<Plan, PlanFileError> {
        let cuts: Vec<OpRun> = self.stages.iter().map(|stage| stage.ops).collect();
        let feeds = Partition::new(graph, &cuts).map(|partition| partition.feeds()).unwrap_or_default();
        let stages = self.stages.into_iter().enumerate().map(|(number, stage)| {
            let own = blocks.iter().filter(|(ops, _)| within(*ops, stage.ops));
            let own =
                own.map(|(ops, hash)| BlockPlan { ops: *ops, hash: hash.clone(), recompute: stage.recompute.of(*ops) });
            StagePlan {
                blocks: own.collect(),
                feeds: feeds.get(number).cloned(),
                ops: stage.ops,
                modules: stage.modules,
                ranks: stage.ranks,
                sharding: stage.sharding,
                offload: stage.offload,
                bucket_bytes: None,
                predicted: stage.predicted,
            }
        });
        let plan = Plan {
            schema: PLAN_SCHEMA,
            stages: stages.collect(),
            eager_spans: Vec::new(),
            memory_budget_percent: None,
            pyrannc: self.pyrannc,
            graph_hash: self.graph_hash,
            graph_name: self.graph_name,
            precision: String::new(),
            world_size: self.world_size,
            batch_rows: self.batch_rows,
            microbatches: self.microbatches,
            schedule: self.schedule,
            predicted: self.predicted,
            checksum: String::new(),
        };
        plan.seal()
    }
}

impl OldRecompute {
    fn runs(&self) -> &[OpRun] {
        match self {
            Self::Blocks(runs) => runs,
            Self::None | Self::Stage => &[],
        }
    }

    fn of(&self, ops: OpRun) -> Recompute {
        match self {
            Self::None => Recompute::None,
            Self::Stage => Recompute::Stage,
            Self::Blocks(runs) if runs.iter().any(|&run| within(ops, run)) => Recompute::Block,
            Self::Blocks(_) => Recompute::None,
        }
    }
}

const fn within(ops: OpRun, run: OpRun) -> bool {
    run.first <= ops.first && ops.end <= run.end
}
