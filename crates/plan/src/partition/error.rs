//! Why a Graph cannot be divided so.

use rannc_ir::{OpPlace, ValueId};
use thiserror::Error;

use super::verify::PartitionFault;

/// Why a Graph cannot be divided so.
#[derive(Debug, Error)]
pub enum PartitionError {
    /// No Stages are given.
    #[error("a partition needs at least one stage")]
    NoStages,
    /// A Stage does not begin where the one before it ends, or has no Ops.
    #[error("stage {stage} holds main ops {first}..{end}, but must begin at {expected} and hold at least one")]
    Range {
        /// The Stage.
        stage: usize,
        /// Its first main Op.
        first: u32,
        /// One past its last main Op.
        end: u32,
        /// Where it must begin.
        expected: u32,
    },
    /// The Stages hold more or fewer Ops than there are.
    #[error("the stages end at main op {end}, the graph has {main_ops}")]
    End {
        /// One past the last main Op of the last Stage.
        end: u32,
        /// Main Ops of the Graph.
        main_ops: usize,
    },
    /// The Graph may not be cut there.
    #[error("stage {stage} may not begin at {place}: {reason}")]
    Cut {
        /// The Stage after the cut.
        stage: usize,
        /// Its first main Op.
        place: Box<OpPlace>,
        /// What forbids it, with places.
        reason: String,
    },
    /// Blocks that are not what the Graph is made of.
    #[error("the blocks of the plan do not make up the graph's {main_ops} main ops in their order")]
    Blocks {
        /// Main Ops of the Graph.
        main_ops: usize,
    },
    /// A Stage that feeds others than the Plan says.
    #[error(
        "stage {stage} feeds stages {found:?}, the plan says {planned:?}; the file was edited: make the plan again"
    )]
    Feeds {
        /// The Stage.
        stage: usize,
        /// Those that use what it makes.
        found: Vec<u32>,
        /// Those of the Plan.
        planned: Vec<u32>,
    },
    /// A Block may not begin there.
    #[error("a block of the plan may not begin at {place}: {reason}")]
    BlockCut {
        /// Its first main Op.
        place: Box<OpPlace>,
        /// What forbids it, with places.
        reason: String,
    },
    /// What was divided does not mean what the Graph means.
    #[error("{0}; this is an error of RaNNC")]
    Fault(#[from] PartitionFault),
    /// An input depends on the batch other than by rows.
    #[error(
        "input {index} ({name}), used by {place}, depends on the batch size but not by rows of its first dimension"
    )]
    InputRows {
        /// Place in the Graph's inputs.
        index: u32,
        /// Name of its Value.
        name: String,
        /// An Op that uses it.
        place: Box<OpPlace>,
    },
    /// The Graph to follow is not the one that the partition divides.
    #[error("the partition to follow was made for another graph: it has no {0}")]
    OtherGraph(String),
    /// A parameter that no Stage of the partition to follow holds.
    #[error("{name}, read by {place}, is held by no stage of the plan")]
    NotHeld {
        /// Name of the parameter.
        name: String,
        /// An Op that reads it.
        place: Box<OpPlace>,
    },
    /// No Stage can run an Op.
    #[error(
        "no stage can run {place}: what it and the ops that must stay with it read is held together by stages \
         {held:?}, and its operands are made in stage {operands}"
    )]
    NoStageFor {
        /// The Op.
        place: Box<OpPlace>,
        /// Stages that hold all that it reads.
        held: Vec<u32>,
        /// Stage that makes the last of its operands.
        operands: u32,
    },
    /// No Stage holds all that an output without main Ops is made of.
    #[error("no stage holds all parameters and buffers that output value {value} is made of")]
    NoStageForOutput {
        /// The output.
        value: ValueId,
    },
}
