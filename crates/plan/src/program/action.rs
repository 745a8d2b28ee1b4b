//! What a rank does, one thing at a time.

use std::fmt;

use rannc_ir::ValueId;
use serde::{Deserialize, Serialize};

use super::routes::Interval;
use crate::schedule::{Call, Compute, WINDOW};

/// Rows of one Value that move together with others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Piece {
    /// The Value.
    pub value: ValueId,
    /// Rows within the microbatch.
    pub rows: Interval,
}

/// What a message between Stages carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Payload {
    /// Values, to a later Stage.
    Value,
    /// Their gradients, back.
    Grad,
}

impl Payload {
    /// The messages that a computation waits for, and makes, if any.
    pub const fn of(compute: Compute) -> Option<Self> {
        match compute {
            Compute::Forward(_) => Some(Self::Value),
            Compute::Backward(_) | Compute::BackwardInput(_) => Some(Self::Grad),
            Compute::BackwardWeight(_) => None,
        }
    }

    /// How many messages may be under way on a channel before the sender waits for the oldest; `None` when it never
    /// does. Values wait only without training: else the backward's order bounds them.
    pub const fn window(self, call: Call) -> Option<usize> {
        match self {
            Self::Value if call.trains() => None,
            Self::Value | Self::Grad => Some(WINDOW),
        }
    }
}

/// A message between two ranks, as either of them sees it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Message {
    /// The microbatch.
    pub mb: u32,
    /// The other rank.
    pub peer: u32,
    /// What it carries.
    pub kind: Payload,
    /// From which Stage to which, where either rank has several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stages: Option<(u32, u32)>,
    /// The rows, in the order in which they are packed.
    pub pieces: Vec<Piece>,
}

/// What moves between the ranks' own batches and the Stages, in the order in which all ranks come to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BatchKind {
    /// Inputs of the Graph, from the rank that has them to a Replica.
    Input,
    /// Outputs with rows, from the Replica that makes them to the ranks whose rows they are of.
    Output,
    /// Gradients of outputs, back.
    OutputGrad,
    /// Gradients of inputs, back; of inputs without rows with the last microbatch, all others' included.
    InputGrad,
}

impl BatchKind {
    /// What a computation waits for.
    pub const fn awaited_by(compute: Compute) -> Option<Self> {
        match compute {
            Compute::Forward(_) => Some(Self::Input),
            Compute::Backward(_) | Compute::BackwardInput(_) => Some(Self::OutputGrad),
            Compute::BackwardWeight(_) => None,
        }
    }

    /// What a computation makes.
    pub const fn made_by(compute: Compute) -> Option<Self> {
        match compute {
            Compute::Forward(_) => Some(Self::Output),
            Compute::Backward(_) | Compute::BackwardInput(_) => Some(Self::InputGrad),
            Compute::BackwardWeight(_) => None,
        }
    }

    /// True for what belongs to backwards.
    pub const fn is_of_backward(self) -> bool {
        matches!(self, Self::OutputGrad | Self::InputGrad)
    }
}

impl fmt::Display for BatchKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Input => "inputs",
            Self::Output => "outputs",
            Self::OutputGrad => "gradients of outputs",
            Self::InputGrad => "gradients of inputs",
        })
    }
}

/// Rows that move between two ranks in an [`Exchange`].
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Parcel {
    /// The other rank.
    pub peer: u32,
    /// The rows, in the order in which they are packed.
    pub pieces: Vec<Piece>,
}

/// All that a rank gives to and takes from others of one kind for a microbatch.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Exchange {
    /// What.
    pub kind: BatchKind,
    /// The microbatch.
    pub mb: u32,
    /// By increasing peer.
    pub sends: Vec<Parcel>,
    /// Likewise.
    pub recvs: Vec<Parcel>,
}

/// One thing that a rank does.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "action", rename_all = "snake_case")]
pub enum Action {
    /// Forward of the rank's rows of a microbatch.
    Forward {
        /// The microbatch.
        mb: u32,
        /// Its Stage, where the rank has several.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        stage: Option<u32>,
    },
    /// Backward of the rank's rows of a microbatch.
    Backward {
        /// The microbatch.
        mb: u32,
        /// Its Stage, where the rank has several.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        stage: Option<u32>,
    },
    /// The first part of a backward: the gradients of what came in.
    BackwardInput {
        /// The microbatch.
        mb: u32,
        /// Its Stage, where the rank has several.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        stage: Option<u32>,
    },
    /// The second part of a backward: the gradients of Params.
    BackwardWeight {
        /// The microbatch.
        mb: u32,
        /// Its Stage, where the rank has several.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        stage: Option<u32>,
    },
    /// Starts to send.
    Send(Message),
    /// Starts to receive; the computation of the message's microbatch waits for it.
    Recv(Message),
    /// Starts to give and take rows, once its own Exchange before has ended. It ends when all ranks that take part in this
    /// kind and microbatch have come to it. The computation that needs the rows waits for it, else the end of the list.
    Exchange(Exchange),
    /// Sums a bucket of gradients over a group of ranks. It starts at once, or under the backward that follows, as soon
    /// as that has filled the bucket; the rank waits for it at the end of its list.
    AllReduce {
        /// Place of the ranks among the Program's groups.
        group: u32,
        /// Place of the gradients among the Program's buckets.
        bucket: u32,
        /// Their size.
        bytes: u64,
    },
    /// Sums a bucket's gradients of one microbatch over a group of ranks, of which each gets its part of the bucket. It
    /// starts under the microbatch's backward that follows, as soon as that has filled the bucket; a rank without rows of
    /// the microbatch adds nothing and starts at once. Before a rank starts the first of a microbatch, which is before
    /// its backward, it waits for those of the microbatch before; at the end of its list it waits for all.
    ReduceScatter {
        /// Place of the ranks among the Program's groups.
        group: u32,
        /// Place of the gradients among the Program's buckets.
        bucket: u32,
        /// The microbatch.
        mb: u32,
        /// The size of the whole bucket.
        bytes: u64,
    },
    /// Each rank of a group gets the Params of a bucket, of which each holds its part, for one computation. Within that a
    /// Span's Params are whole from their gather, which starts one Span ahead, to the Span's end. Where they are kept,
    /// those of the first Spans are gathered from the begin of the list of Actions on, and all are whole to its end. A
    /// rank without rows of the microbatch gives its part too. What stands next waits for all the gathers of a computation.
    AllGather {
        /// Place of the ranks among the Program's groups.
        group: u32,
        /// Place of the Params among the Program's buckets.
        bucket: u32,
        /// The microbatch.
        mb: u32,
        /// Which computation of it.
        pass: Pass,
        /// The size of all parts of the bucket, in the type of the Params.
        bytes: u64,
    },
}

/// Which computation of a microbatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pass {
    /// Its forward.
    Forward,
    /// Its backward.
    Backward,
}

impl fmt::Display for Pass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Forward => "forward",
            Self::Backward => "backward",
        })
    }
}

impl Action {
    /// The group of ranks that do it together.
    pub const fn group(&self) -> Option<u32> {
        match self {
            Self::AllReduce { group, .. } | Self::ReduceScatter { group, .. } | Self::AllGather { group, .. } => {
                Some(*group)
            }
            _ => None,
        }
    }
}

crate::with_computations!(Action);

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, message, direction) = match self {
            Self::Forward { mb, stage } => return computation(f, "Forward", *mb, *stage),
            Self::Backward { mb, stage } => return computation(f, "Backward", *mb, *stage),
            Self::BackwardInput { mb, stage } => return computation(f, "BackwardInput", *mb, *stage),
            Self::BackwardWeight { mb, stage } => return computation(f, "BackwardWeight", *mb, *stage),
            Self::AllReduce { group, bucket, bytes } => {
                return write!(f, "AllReduce(bucket {bucket}, {bytes} bytes over group {group})");
            }
            Self::ReduceScatter { group, bucket, mb, bytes } => {
                return write!(f, "ReduceScatter(mb {mb}, bucket {bucket}, {bytes} bytes over group {group})");
            }
            Self::AllGather { group, bucket, mb, pass, bytes } => {
                return write!(f, "AllGather({pass} of mb {mb}, bucket {bucket}, {bytes} bytes over group {group})");
            }
            Self::Exchange(Exchange { kind, mb, sends, recvs }) => {
                write!(f, "Exchange(mb {mb}, {kind}")?;
                for (parcels, direction) in [(sends, "to"), (recvs, "from")] {
                    for Parcel { peer, pieces } in parcels {
                        write!(f, " {direction} rank {peer}:")?;
                        list(f, pieces)?;
                    }
                }
                return f.write_str(")");
            }
            Self::Send(message) => ("Send", message, "to"),
            Self::Recv(message) => ("Recv", message, "from"),
        };
        let kind = match message.kind {
            Payload::Value => "values",
            Payload::Grad => "gradients",
        };
        write!(f, "{name}(mb {}, {kind} {direction} rank {}", message.mb, message.peer)?;
        if let Some((from, to)) = message.stages {
            write!(f, ", stage {from} to {to}")?;
        }
        f.write_str(":")?;
        list(f, &message.pieces)?;
        f.write_str(")")
    }
}

fn computation(f: &mut fmt::Formatter<'_>, name: &str, mb: u32, stage: Option<u32>) -> fmt::Result {
    match stage {
        Some(stage) => write!(f, "{name}(mb {mb}, stage {stage})"),
        None => write!(f, "{name}(mb {mb})"),
    }
}

fn list(f: &mut fmt::Formatter<'_>, pieces: &[Piece]) -> fmt::Result {
    pieces.iter().try_for_each(|Piece { value, rows }| write!(f, " {value}[{rows}]"))
}
