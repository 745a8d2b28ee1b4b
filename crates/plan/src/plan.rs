//! The Plan and its file.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use rannc_ir::{Graph, OpRun, text_hash};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::build::Placement;
use crate::schedule::ScheduleKind;

/// Version of the plan file that this crate writes and reads.
pub const PLAN_SCHEMA: u32 = 2;

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
    /// Number of ranks.
    pub world_size: u32,
    /// Rows of the global batch that it was made for.
    pub batch_rows: u64,
    /// Microbatches of a step.
    pub microbatches: u32,
    /// Order of forward and backward.
    pub schedule: ScheduleKind,
    /// The Stages in order.
    pub stages: Vec<StagePlan>,
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
    /// The rank of each Replica.
    pub ranks: Vec<u32>,
    /// Number of Blocks.
    pub blocks: u32,
    /// What is computed again for the backward.
    pub recompute: Recompute,
    /// What its Replicas divide among them.
    pub sharding: Sharding,
    /// True when the optimizer's state stays in host memory.
    pub offload: bool,
    /// Expected cost.
    pub predicted: StagePrediction,
}

/// What of a forward is computed again for the backward instead of being kept (Chen et al., Training Deep
/// Nets with Sublinear Memory Cost, 2016).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Recompute {
    /// Nothing.
    #[default]
    None,
    /// The whole Stage: only what it receives is kept.
    Stage,
    /// These runs of its main Ops, increasing: of each only what it takes in is kept.
    Blocks(Vec<OpRun>),
}

/// What the Replicas of a Stage divide among them instead of holding it whole (Rajbhandari et al., ZeRO,
/// 2020); each level includes those before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Sharding {
    /// Nothing.
    #[default]
    None,
    /// The optimizer's state (ZeRO 1).
    Optimizer,
    /// Gradients (ZeRO 2).
    Gradients,
    /// Parameters (ZeRO 3).
    Params,
}

/// Expected cost of a Stage, per microbatch on its largest Replica.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StagePrediction {
    /// Forward of one microbatch.
    pub forward_us: f64,
    /// Backward of one microbatch, recomputation included.
    pub backward_us: f64,
    /// Transfers from and to the neighbouring Stages for one microbatch, gradients included.
    pub transfer_us: f64,
    /// Gradient reduction that the backward does not hide, once a step.
    pub reduce_us: f64,
    /// The optimizer, once a step.
    pub update_us: f64,
    /// Received from earlier Stages for one microbatch.
    pub in_bytes: u64,
    /// Sent to later Stages for one microbatch.
    pub out_bytes: u64,
    /// Peak memory of a step.
    pub memory: MemoryPrediction,
}

/// Expected peak memory of one device, by use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemoryPrediction {
    /// Parameters and buffers.
    pub params_bytes: u64,
    /// Gradients.
    pub grads_bytes: u64,
    /// Optimizer state.
    pub optimizer_bytes: u64,
    /// Saved for backward, over all microbatches in flight.
    pub activations_bytes: u64,
    /// Temporary.
    pub workspace_bytes: u64,
    /// Communication buffers.
    pub comm_bytes: u64,
    /// The framework's own.
    pub framework_bytes: u64,
}

impl MemoryPrediction {
    /// Each use with its name, in the order of the fields.
    pub const fn uses(&self) -> [(&'static str, u64); 7] {
        [
            ("parameters", self.params_bytes),
            ("gradients", self.grads_bytes),
            ("optimizer state", self.optimizer_bytes),
            ("activations", self.activations_bytes),
            ("temporary tensors", self.workspace_bytes),
            ("transfers", self.comm_bytes),
            ("the framework", self.framework_bytes),
        ]
    }

    /// The sum; of impossible amounts the largest number.
    pub fn total_bytes(&self) -> u64 {
        self.uses().into_iter().fold(0, |sum, (_, bytes)| sum.saturating_add(bytes))
    }
}

/// Expected time of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepPrediction {
    /// The whole step.
    pub step_us: f64,
    /// Share of device time spent waiting, 0 to 1.
    pub bubble: f64,
    /// No Plan takes less under the same model.
    pub lower_bound_us: f64,
}

/// Why a plan file cannot be used.
#[derive(Debug, Error)]
pub enum PlanFileError {
    /// The file cannot be read.
    #[error("cannot read the plan file {}: {source}; check that it exists on this machine and may be read", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file cannot be written.
    #[error("cannot write the plan file {}: {source}; check that its folder exists and has space", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The text is not JSON.
    #[error("the plan is not JSON ({0}); the file is cut short or is not a plan file: make the plan again")]
    NotJson(#[source] serde_json::Error),
    /// The JSON is not a plan.
    #[error("the plan's JSON does not have the form of a plan ({0}); make the plan again")]
    Form(#[source] serde_json::Error),
    /// Another version of the file format.
    #[error(
        "the plan file has schema {found}, this RaNNC reads schema {PLAN_SCHEMA}; make the plan again with this version"
    )]
    Schema {
        /// What the file says.
        found: String,
    },
    /// The content is not what was written.
    #[error(
        "the plan's checksum is {found}, its content gives {computed}; the file was damaged or edited: make the plan again"
    )]
    Checksum {
        /// What the file says.
        found: String,
        /// What the content gives.
        computed: String,
    },
    /// The fields contradict each other.
    #[error("the plan contradicts itself: {0}; make the plan again")]
    Inconsistent(PlanFault),
    /// Asks for what the runtime cannot do yet.
    #[error("stage {stage} of the plan asks for {what}, which this RaNNC can price but not run yet; plan without it")]
    NotRunnable {
        /// The Stage.
        stage: usize,
        /// What it asks for.
        what: &'static str,
    },
    /// Made for another Graph.
    #[error(
        "the plan was made for graph {plan_name} ({plan_hash}), this model's graph is {graph_name} ({graph_hash}); \
         make a plan for this model"
    )]
    OtherGraph {
        /// Name in the plan.
        plan_name: String,
        /// Hash in the plan.
        plan_hash: String,
        /// Name of the Graph.
        graph_name: String,
        /// Hash of the Graph.
        graph_hash: String,
    },
    /// Made for another number of ranks.
    #[error("the plan is for {plan} ranks, this job has {actual}; start {plan} ranks or make a plan for {actual}")]
    OtherWorld {
        /// Ranks in the plan.
        plan: u32,
        /// Ranks of the job.
        actual: u32,
    },
}

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
    /// A rank stands twice.
    #[error("rank {0} stands twice in the stages")]
    RankTwice(u32),
    /// A rank has no work.
    #[error("rank {0} is in no stage")]
    RankUnused(u32),
    /// Runs of Ops to compute again that are not runs of the Stage.
    #[error("stage {0} computes main ops again that are not its own, or in no order")]
    Recompute(usize),
    /// A prediction is not a number.
    #[error("a predicted time is infinite or not a number")]
    NotFinite,
}

impl Plan {
    /// Checks that the fields agree with each other and computes the checksum.
    pub fn seal(mut self) -> Result<Self, PlanFileError> {
        self.check_consistent().map_err(PlanFileError::Inconsistent)?;
        self.checksum = self.compute_checksum();
        Ok(self)
    }

    /// The file's text. The same Plan gives the same bytes.
    pub fn to_json(&self) -> String {
        let mut text = serde_json::to_string_pretty(self).expect("a Plan holds only strings, numbers and lists");
        text.push('\n');
        text
    }

    /// Reads a file's text and checks form, schema, checksum and consistency.
    pub fn from_json(text: &str) -> Result<Self, PlanFileError> {
        let json: serde_json::Value = serde_json::from_str(text).map_err(PlanFileError::NotJson)?;
        let schema = json.get("schema").unwrap_or(&serde_json::Value::Null);
        if *schema != PLAN_SCHEMA {
            let found = if schema.is_null() { "none".to_owned() } else { schema.to_string() };
            return Err(PlanFileError::Schema { found });
        }
        let plan: Self = serde_json::from_str(text).map_err(PlanFileError::Form)?;
        let computed = plan.compute_checksum();
        if computed != plan.checksum {
            return Err(PlanFileError::Checksum { found: plan.checksum, computed });
        }
        plan.check_consistent().map_err(PlanFileError::Inconsistent)?;
        Ok(plan)
    }

    /// Reads a plan file.
    pub fn read(path: &Path) -> Result<Self, PlanFileError> {
        let text = fs::read_to_string(path).map_err(|source| PlanFileError::Read { path: path.to_owned(), source })?;
        Self::from_json(&text)
    }

    /// Writes a plan file.
    pub fn write(&self, path: &Path) -> Result<(), PlanFileError> {
        fs::write(path, self.to_json()).map_err(|source| PlanFileError::Write { path: path.to_owned(), source })
    }

    /// Checks that the Plan was made for this Graph.
    pub fn check_graph(&self, graph: &Graph) -> Result<(), PlanFileError> {
        let graph_hash = graph.hash();
        if graph_hash == self.graph_hash {
            return Ok(());
        }
        Err(PlanFileError::OtherGraph {
            plan_name: self.graph_name.clone(),
            plan_hash: self.graph_hash.clone(),
            graph_name: graph.name.clone(),
            graph_hash,
        })
    }

    /// Checks that the Plan is for this number of ranks.
    pub fn check_world(&self, world_size: u32) -> Result<(), PlanFileError> {
        if world_size == self.world_size {
            return Ok(());
        }
        Err(PlanFileError::OtherWorld { plan: self.world_size, actual: world_size })
    }

    /// Checks that the Plan asks for nothing that the runtime cannot do yet.
    pub fn check_runnable(&self) -> Result<(), PlanFileError> {
        for (stage, StagePlan { recompute, sharding, offload, .. }) in self.stages.iter().enumerate() {
            let asked = [
                (*recompute != Recompute::None, "recomputation"),
                (*sharding != Sharding::None, "sharding"),
                (*offload, "offload"),
            ];
            if let Some(&(_, what)) = asked.iter().find(|(asked, _)| *asked) {
                return Err(PlanFileError::NotRunnable { stage, what });
            }
        }
        Ok(())
    }

    /// The ranks of the Stages, the number of microbatches and the Schedule: all that a Program needs of the Plan.
    pub fn placement(&self) -> Placement {
        Placement {
            ranks: self.stages.iter().map(|stage| stage.ranks.clone()).collect(),
            microbatches: self.microbatches,
            schedule: self.schedule,
        }
    }

    fn compute_checksum(&self) -> String {
        let unsigned = Self { checksum: String::new(), ..self.clone() };
        let text = serde_json::to_string(&unsigned).expect("a Plan holds only strings, numbers and lists");
        text_hash(&text)
    }

    fn check_consistent(&self) -> Result<(), PlanFault> {
        if self.stages.is_empty() {
            return Err(PlanFault::NoStages);
        }
        if self.microbatches == 0 {
            return Err(PlanFault::NoMicrobatches);
        }
        if self.batch_rows == 0 {
            return Err(PlanFault::NoRows);
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
        check_recompute(&self.stages)?;
        check_ranks(self.stages.iter().map(|stage| stage.ranks.as_slice()), self.world_size)?;
        let StepPrediction { step_us, bubble, lower_bound_us } = self.predicted;
        let stage_times = self.stages.iter().flat_map(|StagePlan { predicted: p, .. }| {
            [p.forward_us, p.backward_us, p.transfer_us, p.reduce_us, p.update_us]
        });
        if stage_times.chain([step_us, bubble, lower_bound_us]).all(f64::is_finite) {
            Ok(())
        } else {
            Err(PlanFault::NotFinite)
        }
    }
}

/// Checks that runs to compute again increase and lie in their Stage.
fn check_recompute(stages: &[StagePlan]) -> Result<(), PlanFault> {
    for (stage, StagePlan { ops, recompute, .. }) in stages.iter().enumerate() {
        let Recompute::Blocks(runs) = recompute else { continue };
        let mut free = ops.first;
        for run in runs {
            if run.first < free || run.end <= run.first || run.end > ops.end {
                return Err(PlanFault::Recompute(stage));
            }
            free = run.end;
        }
    }
    Ok(())
}

/// Checks that every rank of `0..world_size` stands in exactly one Stage, and no Stage is without.
pub(crate) fn check_ranks<'a>(stages: impl Iterator<Item = &'a [u32]>, world_size: u32) -> Result<(), PlanFault> {
    let mut all = Vec::new();
    for (stage, ranks) in stages.enumerate() {
        if ranks.is_empty() {
            return Err(PlanFault::NoRanks(stage));
        }
        if let Some(&rank) = ranks.iter().find(|&&rank| rank >= world_size) {
            return Err(PlanFault::RankOutside { stage, rank, world_size });
        }
        all.extend_from_slice(ranks);
    }
    all.sort_unstable();
    if let Some(pair) = all.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(PlanFault::RankTwice(pair[0]));
    }
    match (0..world_size).find(|&rank| all.get(rank as usize) != Some(&rank)) {
        Some(rank) => Err(PlanFault::RankUnused(rank)),
        None => Ok(()),
    }
}
