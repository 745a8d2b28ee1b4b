//! The Program of one batch: what every rank does, in order, and which rows go where.

mod action;
mod batch;
mod buckets;
mod build;
mod collectives;
mod messages;
mod routes;
mod seat;
mod view;

use rannc_ir::ValueId;
use serde::{Deserialize, Serialize};

pub use self::action::{Action, BatchKind, Exchange, Message, Parcel, Pass, Payload, Piece};
pub use self::batch::ExchangePlaces;
pub use self::buckets::{Bucket, Buckets, Division, Gradient, ReduceDType, Trained};
pub use self::build::{Batch, ProgramError, build};
pub use self::messages::{Needed, Step, plan_channels, with_messages};
pub use self::routes::{Interval, Overlap, Slice, overlaps, split_even};
pub use self::seat::Seat;
pub use self::view::{RankView, SeatView};
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

/// What one rank does.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankProgram {
    /// The rank.
    pub rank: u32,
    /// What it has of which Stages, by increasing Stage.
    pub seats: Vec<Seat>,
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
    /// How inputs reach the Stages; backwards, how their gradients return. What several seats of a rank use comes once, and
    /// its gradient is their sum. An input without rows goes whole from rank 0, once to each rank that computes with it, with
    /// the rows of its first microbatch. What does not stay where it is stands in an exchange.
    pub inputs: Vec<Transfer>,
    /// How outputs with rows reach the ranks; backwards, how their gradients return. Without
    /// `gather_inputs` every rank has the gradient of every row, and none needs to travel.
    pub outputs: Vec<Transfer>,
    /// Sets of ranks that sum gradients, each increasing.
    pub groups: Vec<Vec<u32>>,
    /// The gradients that are summed together.
    pub buckets: Vec<Bucket>,
    /// By rank.
    pub ranks: Vec<RankProgram>,
}
