//! The Program of one batch as data: what every rank does, in order, and which rows go where.

use std::fmt;

use rannc_ir::ValueId;
use serde::{Deserialize, Serialize};

use crate::routes::{Interval, Slice};
use crate::schedule::Call;

/// Rows of a Value that go from one rank to another, or stay where they are (`src == dst`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Transfer {
    /// Rank that has them.
    pub src: u32,
    /// Rank that gets them.
    pub dst: u32,
    /// The microbatch.
    pub mb: u32,
    /// The Value.
    pub value: ValueId,
    /// Rows within the microbatch.
    pub rows: Interval,
}

/// Rows of one Value within a message.
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

/// A message between two ranks, as either of them sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// The microbatch.
    pub mb: u32,
    /// The other rank.
    pub peer: u32,
    /// What it carries.
    pub kind: Payload,
    /// The rows, in the order in which they are packed.
    pub pieces: Vec<Piece>,
}

/// One thing that a rank does.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "action", rename_all = "snake_case")]
pub enum Action {
    /// Forward of the rank's rows of a microbatch.
    Forward {
        /// The microbatch.
        mb: u32,
    },
    /// Backward of the rank's rows of a microbatch.
    Backward {
        /// The microbatch.
        mb: u32,
    },
    /// Starts to send.
    Send(Message),
    /// Starts to receive; the computation of the message's microbatch waits for it.
    Recv(Message),
    /// Sums gradients over all ranks that hold the same Params.
    Reduce,
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, message, direction) = match self {
            Self::Forward { mb } => return write!(f, "Forward(mb {mb})"),
            Self::Backward { mb } => return write!(f, "Backward(mb {mb})"),
            Self::Reduce => return f.write_str("Reduce"),
            Self::Send(message) => ("Send", message, "to"),
            Self::Recv(message) => ("Recv", message, "from"),
        };
        let kind = match message.kind {
            Payload::Value => "values",
            Payload::Grad => "gradients",
        };
        write!(f, "{name}(mb {}, {kind} {direction} rank {}:", message.mb, message.peer)?;
        for Piece { value, rows } in &message.pieces {
            write!(f, " {value}[{rows}]")?;
        }
        f.write_str(")")
    }
}

/// What one rank does.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankProgram {
    /// The rank.
    pub rank: u32,
    /// Its Stage.
    pub stage: u32,
    /// Which Replica of the Stage it is.
    pub replica: u32,
    /// The whole step of [`Call::Whole`], else all forwards.
    pub forward: Vec<Action>,
    /// All backwards of [`Call::Halves`], else nothing.
    pub backward: Vec<Action>,
}

/// What all ranks do for one batch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Program {
    /// How the call comes.
    pub call: Call,
    /// As in [`Batch`](crate::Batch).
    pub gather_inputs: bool,
    /// Rows of the global batch.
    pub total_rows: u64,
    /// Rows of each microbatch.
    pub microbatches: Vec<u64>,
    /// By rank, the local rows that it gives to each microbatch, by increasing microbatch.
    pub slices: Vec<Vec<Slice>>,
    /// By Stage, microbatch and Replica, the rows that it computes.
    pub stage_rows: Vec<Vec<Vec<Interval>>>,
    /// How inputs reach the Stages; backwards, how their gradients return. An input without rows
    /// goes whole from rank 0, once to each rank that computes, with the rows of its first microbatch.
    pub inputs: Vec<Transfer>,
    /// How outputs with rows reach the ranks; backwards, how their gradients return. Without
    /// `gather_inputs` every rank has the gradient of every row, and none needs to travel.
    pub outputs: Vec<Transfer>,
    /// By rank.
    pub ranks: Vec<RankProgram>,
}
