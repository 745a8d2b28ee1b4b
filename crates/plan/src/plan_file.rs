//! The plan file.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use rannc_ir::sealed::{self, SealError, Sealed};
use rannc_ir::{Graph, OpPlace, OpRun};
use thiserror::Error;

use crate::consistent::PlanFault;
use crate::partition::{Partition, PartitionError};
use crate::plan::{OLD_SCHEMA, PLAN_SCHEMA, Plan, StagePlan};
use crate::saver::Recompute;
use crate::schedule::Crew;

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
    #[error("the plan file has schema {found}, this RaNNC reads schema {PLAN_SCHEMA}; {}", renewal(found))]
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
    /// Asks for several Stages on a rank.
    #[error(
        "rank {} of the plan has {crew}; this RaNNC can show and simulate several stages on a rank, but runs only one: give \
         every rank one stage, as all plans of its own search do",
        crew.ranks[0]
    )]
    SharedRanks {
        /// The first ranks that have several.
        crew: Crew,
    },
    /// Made for another Graph.
    #[error(
        "the plan was made for graph {plan_name} ({plan_hash}), this model's graph is {graph_name} ({graph_hash}); \
         make a plan for this model as it is called now: the types of its parameters and torch.autocast are part of it"
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
    /// A Block is not what it was when the Plan was made.
    #[error(
        "block {block} of the plan's stage {stage}, which begins at {place}, has hash {found} in the file and {computed} \
         in this model's graph: the file was edited, or made by a version that divides a graph otherwise; make the plan \
         again with this version"
    )]
    OtherBlock {
        /// The Stage.
        stage: usize,
        /// Place of the Block among those of the Stage.
        block: usize,
        /// Its first main Op.
        place: Box<OpPlace>,
        /// Hash in the plan.
        found: String,
        /// Hash in the Graph.
        computed: String,
    },
    /// Made for another number of ranks.
    #[error("the plan is for {0}, this job has {actual}; start {0} or make a plan for {actual}", ranks(*plan))]
    OtherWorld {
        /// Ranks in the plan.
        plan: u32,
        /// Ranks of the job.
        actual: u32,
    },
}

fn renewal(found: &str) -> &'static str {
    if found == OLD_SCHEMA.to_string() {
        "make a file of this schema of it with `rannc upgrade PLAN GRAPH` (`python -m pyrannc capture` writes the \
         model's graph), or make the plan again with this version"
    } else {
        "make the plan again with this version"
    }
}

fn ranks(count: u32) -> String {
    format!("{count} {}", if count == 1 { "rank" } else { "ranks" })
}

impl From<SealError> for PlanFileError {
    fn from(error: SealError) -> Self {
        match error {
            SealError::NotJson(error) => Self::NotJson(error),
            SealError::Form(error) => Self::Form(error),
            SealError::Schema { found } => Self::Schema { found },
            SealError::Checksum { found, computed } => Self::Checksum { found, computed },
        }
    }
}

impl Sealed for Plan {
    const SCHEMA: u32 = PLAN_SCHEMA;

    fn checksum(&mut self) -> &mut String {
        &mut self.checksum
    }
}

impl Plan {
    /// Checks that the fields agree with each other and computes the checksum.
    pub fn seal(self) -> Result<Self, PlanFileError> {
        self.check_consistent().map_err(PlanFileError::Inconsistent)?;
        Ok(sealed::seal(self))
    }

    /// The file's text. The same Plan gives the same bytes.
    pub fn to_json(&self) -> String {
        sealed::to_json(self)
    }

    /// Reads a file's text and checks form, schema, checksum and consistency.
    pub fn from_json(text: &str) -> Result<Self, PlanFileError> {
        let plan: Self = sealed::from_json(text)?;
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
        sealed::write(path, &self.to_json()).map_err(|source| PlanFileError::Write { path: path.to_owned(), source })
    }

    /// Checks that the Plan was made for this Graph.
    pub fn check_graph(&self, graph: &Graph) -> Result<(), PlanFileError> {
        check_graph(&self.graph_name, &self.graph_hash, graph)
    }

    /// Checks that the Plan's Blocks have these hashes, given in order, which those of its Graph have.
    pub fn check_blocks<'h>(
        &self,
        graph: &Graph,
        hashes: impl IntoIterator<Item = &'h String>,
    ) -> Result<(), PlanFileError> {
        let numbered = |(stage, planned): (usize, &'_ StagePlan)| {
            (0..planned.blocks.len()).map(move |block| (stage, block)).collect::<Vec<_>>()
        };
        let numbers = self.stages.iter().enumerate().flat_map(numbered);
        for ((stage, block), computed) in numbers.zip(hashes) {
            let planned = &self.stages[stage].blocks[block];
            if planned.hash != *computed {
                let main_ops = rannc_ir::main_ops(graph);
                let place = Box::new(graph.place(main_ops[planned.ops.first as usize]));
                let (found, computed) = (planned.hash.clone(), computed.clone());
                return Err(PlanFileError::OtherBlock { stage, block, place, found, computed });
            }
        }
        Ok(())
    }

    /// Divides the Graph that the Plan was made for, with Spans, and proves that it means the same.
    ///
    /// # Errors
    /// When the Stages or Blocks are not of this Graph.
    pub fn partition(&self, graph: &Graph) -> Result<Partition, PartitionError> {
        let stages: Vec<OpRun> = self.stages.iter().map(|stage| stage.ops).collect();
        let blocks = self.stages.iter().flat_map(|stage| &stage.blocks);
        let blocks: Vec<(OpRun, Recompute)> = blocks.map(|block| (block.ops, block.recompute)).collect();
        let partition = Partition::new(graph, &stages)?.with_spans(graph, &blocks)?;
        partition.verify(graph)?;
        self.check_feeds(&partition)?;
        Ok(partition)
    }

    /// Checks that the Stages feed those that the Plan says, where it does.
    fn check_feeds(&self, partition: &Partition) -> Result<(), PartitionError> {
        for (stage, (planned, found)) in self.stages.iter().zip(partition.feeds()).enumerate() {
            if let Some(planned) = planned.feeds.clone().filter(|planned| *planned != found) {
                return Err(PartitionError::Feeds { stage, found, planned });
            }
        }
        Ok(())
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
        for (stage, planned) in self.stages.iter().enumerate() {
            let asked = [(planned.recomputes(), "recomputation"), (planned.offload, "offload")];
            if let Some(&(_, what)) = asked.iter().find(|(asked, _)| *asked) {
                return Err(PlanFileError::NotRunnable { stage, what });
            }
        }
        match self.crews().into_iter().find(Crew::is_shared) {
            Some(crew) => Err(PlanFileError::SharedRanks { crew }),
            None => Ok(()),
        }
    }
}

/// Checks that a Plan of the Graph with this name and hash was made for `graph`.
pub(crate) fn check_graph(plan_name: &str, plan_hash: &str, graph: &Graph) -> Result<(), PlanFileError> {
    let graph_hash = graph.hash();
    if graph_hash == plan_hash {
        return Ok(());
    }
    Err(PlanFileError::OtherGraph {
        plan_name: plan_name.to_owned(),
        plan_hash: plan_hash.to_owned(),
        graph_name: graph.name.clone(),
        graph_hash,
    })
}
