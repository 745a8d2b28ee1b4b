//! The static checker: proves before anything runs that a Program does what its Partition needs.
//!
//! It shares no code with the builder. What it proves:
//! 1. The ranks' slices, and each Stage's Replicas' rows, divide every microbatch without gap or overlap.
//! 2. Every rank gets each row of each input that its seats compute with exactly once from a rank that has it, and
//!    its own rows of each output. What does not stay on its rank is exchanged once, packed alike at both ends: inputs
//!    before their microbatch's Forward, outputs after it, and gradients of both likewise around the Backward.
//! 3. Every seat runs Forward, and in training Backward or both its parts, exactly once for every microbatch of which it
//!    has rows, Backward after Forward.
//! 4. Before a Forward, each row of each Value that the Stage takes has been received exactly once, or another seat of the
//!    rank has made it; before a Backward, or the first part of it, the same of each row of each gradient, once from each
//!    Stage that uses the Value.
//! 5. Nothing is sent before it is computed, or by a rank that does not have it.
//! 6. On each channel, which goes from seat to seat, Sends and Recvs agree in number, order, rows and packing.
//! 7. Every gradient is summed in exactly one bucket, over exactly the ranks that hold its Param, after everything that
//!    adds to it: once a batch, or where the ranks divide gradients, once for each microbatch. The members of a group sum
//!    the same buckets of the same size in the same order.
//!    Ranks with several seats divide no gradients.
//! 8. Where ranks divide Params, each computation stands behind the gathers of all of them, in the order of its Spans;
//!    these have their place in the order of what the members of a group do together. Where Params stay whole, the first
//!    computation of each list of Actions does.
//! 9. All ranks come to their end (see [`machine`](crate::machine) for what blocks).
//! 10. What a rank holds at a time is no more than its Plan promises ([`check_memory`]): Params and gradients that are
//!     whole for a while although Replicas divide them; and where it trains in the microbatches that the Plan was made for,
//!     activations and messages.

mod actions;
mod carried;
mod collectives;
mod layout;
mod memory;
mod transfers;

pub use self::memory::{Holding, Promises, check_memory};
use rannc_ir::{ParamId, ValueId};
use thiserror::Error;

use crate::machine::{Deadlock, Halt, ticks};
use crate::partition::Partition;
use crate::program::{Action, BatchKind, Gradient, Interval, Program, Transfer};
use crate::saver::Sharding;
use crate::schedule::Call;

/// What is wrong with an Action.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum ActionFault {
    /// Of a microbatch that does not exist or of which the rank has no rows.
    #[error("the rank has no rows of this microbatch")]
    NoRows,
    /// A second time.
    #[error("it was done before")]
    Repeated,
    /// Backward first.
    #[error("the forward of this microbatch comes later")]
    BeforeForward,
    /// The second part of a backward first.
    #[error("the first part of this backward comes later")]
    BeforeInput,
    /// Of a Stage that the rank does not have, or of none where it has several.
    #[error("the rank does not have this stage, or has several and must name one")]
    WrongSeat,
    /// In the wrong list, or in a Program without backward.
    #[error("it does not belong into this list of a program whose call is {0}")]
    WrongList(Call),
    /// A sum of gradients that are not complete.
    #[error("backwards behind the next one still add to these gradients")]
    NotFilled,
    /// A sum of gradients that another backward has come after.
    #[error("the backward that fills it for this microbatch comes earlier")]
    Overfilled,
    /// Params that are gathered in another order than their Spans need them.
    #[error("a span that needs it comes later")]
    WrongSpan,
    /// A whole bucket of which ranks must get parts, or the reverse.
    #[error("the ranks divide {0:?} of this bucket")]
    WrongSharding(Sharding),
    /// A bucket, or a group of it, that does not exist, or of which the rank is no member.
    #[error("it is no sum of this rank")]
    WrongGroup,
    /// A size that is not the bucket's.
    #[error("the bucket has {0} bytes")]
    WrongBytes(u64),
    /// A Send too early.
    #[error("it sends what is computed later")]
    NotComputed,
    /// A Recv too late.
    #[error("the computation that needs it comes earlier")]
    TooLate,
    /// A peer that does not exist, or whose Stage does not use or make the Value.
    #[error("{0} does not go between these two stages")]
    WrongPeer(ValueId),
    /// Rows that the sender or the receiver does not have, or none at all.
    #[error("rows {rows} of {value} are not rows of both ranks")]
    WrongRows {
        /// The Value.
        value: ValueId,
        /// The rows.
        rows: Interval,
    },
    /// A message without content.
    #[error("it carries nothing")]
    Empty,
    /// Rows that no transfer takes there, or that have been exchanged before.
    #[error("rows {rows} of {value} are not to go there, or have gone before")]
    NotAsked {
        /// The Value.
        value: ValueId,
        /// The rows.
        rows: Interval,
    },
}

/// Why a Program must not run.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum CheckError {
    /// Lists of the Program, or of the Partition, have lengths or indices that do not fit together.
    #[error("the program's lists do not fit together: {0}")]
    Shape(&'static str),
    /// The ranks' slices do not make up the batch.
    #[error("the slice of rank {rank} for microbatch {mb} leaves a gap or an overlap")]
    Slices {
        /// The rank.
        rank: usize,
        /// The microbatch.
        mb: u32,
    },
    /// The Replicas' rows do not make up the microbatch.
    #[error("the rows of stage {stage} do not divide microbatch {mb}")]
    StageRows {
        /// The Stage.
        stage: usize,
        /// The microbatch.
        mb: usize,
    },
    /// A transfer of rows that its source does not have, or that nobody asked for.
    #[error(
        "{list} transfer of {}[{}] of microbatch {} from rank {} to rank {}: {problem}",
        transfer.value, transfer.rows, transfer.mb, transfer.src, transfer.dst
    )]
    Transfer {
        /// `input` or `output`.
        list: &'static str,
        /// The transfer.
        transfer: Transfer,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// Rows that a rank must get are missing or come twice.
    #[error("rank {rank} needs rows {rows} of {list} {value} of microbatch {mb} exactly once")]
    TransferRows {
        /// `input` or `output`.
        list: &'static str,
        /// The rank.
        rank: u32,
        /// The microbatch.
        mb: u32,
        /// The Value.
        value: ValueId,
        /// The rows.
        rows: Interval,
    },
    /// An Action that must not stand where it does.
    #[error("rank {rank}, action {position}, {action}: {fault}")]
    Action {
        /// The rank.
        rank: u32,
        /// Place among its forward and backward Actions.
        position: usize,
        /// The Action.
        action: Action,
        /// What is wrong with it.
        fault: ActionFault,
    },
    /// A computation without all it needs.
    #[error(
        "rank {rank}, action {position}, {action}: rows {rows} of {value} must have come exactly once from stage {stage}"
    )]
    Rows {
        /// The rank.
        rank: u32,
        /// Place among its forward and backward Actions.
        position: usize,
        /// The computation.
        action: Action,
        /// The Value, or the Value whose gradient it is.
        value: ValueId,
        /// The Stage that sends it.
        stage: u32,
        /// The rows.
        rows: Interval,
    },
    /// A computation or a sum that nobody does.
    #[error("rank {rank} lacks {action}")]
    Missing {
        /// The rank.
        rank: u32,
        /// What it lacks.
        action: Action,
    },
    /// A Send without Recv, or the reverse.
    #[error("rank {rank}, action {position}, {action}: the peer has no counterpart")]
    Unmatched {
        /// The rank.
        rank: u32,
        /// Place among its forward and backward Actions.
        position: usize,
        /// The Send or Recv.
        action: Action,
    },
    /// A Send that meets a different Recv.
    #[error("rank {src}, action {position}, {send} meets {recv} of rank {dst}")]
    Mismatch {
        /// The sender.
        src: u32,
        /// Place among the sender's forward and backward Actions.
        position: usize,
        /// The Send.
        send: Box<Action>,
        /// The receiver.
        dst: u32,
        /// The Recv in the same place of the channel.
        recv: Box<Action>,
    },
    /// Rows that arrive in another order than they are taken.
    #[error("rank {src} packs {kind} of microbatch {mb} for rank {dst} otherwise than that rank takes them")]
    Packing {
        /// What.
        kind: BatchKind,
        /// The microbatch.
        mb: u32,
        /// The sender.
        src: u32,
        /// The receiver.
        dst: u32,
    },
    /// A gradient that is not summed once over its holders.
    #[error("the gradient of {param} {problem}")]
    Gradient {
        /// Whose gradient it is.
        param: ParamId,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// Two members of a group that do what they do together in different orders.
    #[error("rank {rank} comes to {own} where rank {other} of its group comes to {others}")]
    Order {
        /// A member.
        rank: u32,
        /// The first in which the members differ.
        own: Box<Action>,
        /// The first member.
        other: u32,
        /// What it does there.
        others: Box<Action>,
    },
    /// A rank that holds more than was promised.
    #[error(
        "rank {rank}, action {position}, {action}: {what} take {bytes} bytes, where the plan promises at most {promised}; \
         make the plan anew"
    )]
    Memory {
        /// The rank.
        rank: u32,
        /// Place among its forward and backward Actions.
        position: usize,
        /// The Action.
        action: Action,
        /// What takes the memory.
        what: Holding,
        /// How much of it there is then.
        bytes: u64,
        /// What its Plan promises.
        promised: u64,
    },
    /// Ranks wait for each other.
    #[error(transparent)]
    Deadlock(#[from] Deadlock),
}

impl From<Halt> for CheckError {
    fn from(halt: Halt) -> Self {
        match halt {
            Halt::Shape(problem) => Self::Shape(problem),
            Halt::Deadlock(deadlock) => Self::Deadlock(deadlock),
        }
    }
}

/// Proves that the Program does what the Partition needs, sums these gradients, and comes to its end.
///
/// # Errors
/// The first thing that is wrong.
pub fn check(program: &Program, partition: &Partition, gradients: &[Gradient]) -> Result<(), CheckError> {
    let layout = layout::Layout::new(program, partition)?;
    transfers::check_inputs(program, partition, &layout)?;
    transfers::check_outputs(program, partition, &layout)?;
    actions::check_ranks(program, partition)?;
    actions::check_channels(program)?;
    collectives::check_buckets(program, gradients)?;
    collectives::check_sums(program)?;
    ticks(program)?;
    Ok(())
}

/// True when the intervals, in any order, make up `whole` without gap or overlap, and none is empty.
fn covers_once(intervals: &mut [Interval], whole: Interval) -> bool {
    let runs = if whole.is_empty() { Vec::new() } else { vec![whole] };
    joined(intervals) == Some(runs)
}

/// The intervals, in any order, as runs that do not touch; nothing where they overlap or one is empty.
fn joined(intervals: &mut [Interval]) -> Option<Vec<Interval>> {
    intervals.sort_unstable();
    let mut runs: Vec<Interval> = Vec::new();
    for &interval in intervals.iter() {
        match runs.last_mut() {
            _ if interval.is_empty() => return None,
            Some(last) if interval.lo < last.hi => return None,
            Some(last) if interval.lo == last.hi => last.hi = interval.hi,
            _ => runs.push(interval),
        }
    }
    Some(runs)
}

/// True when all of `inner` lies in `outer`.
fn within(inner: Interval, outer: Interval) -> bool {
    outer.lo <= inner.lo && inner.lo < inner.hi && inner.hi <= outer.hi
}
