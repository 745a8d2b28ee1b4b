//! What one rank needs of a Program.

use serde::{Deserialize, Serialize};

use super::{Action, Interval, Payload, Program, Seat, Slice, Transfer};
use crate::schedule::Call;

/// A seat of a rank, with its rows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SeatView {
    /// The Stage.
    pub stage: u32,
    /// Which Replica of the Stage it is.
    pub replica: u32,
    /// By microbatch, the rows that it computes, possibly none.
    pub rows: Vec<Interval>,
    /// The same rows as they stand in the global batch, which is the ranks' batches one after another.
    pub global_rows: Vec<Vec<Interval>>,
}

/// One rank's part of a [`Program`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankView {
    /// The rank.
    pub rank: u32,
    /// What it has of which Stages.
    pub seats: Vec<SeatView>,
    /// How the call comes.
    pub call: Call,
    /// As in [`Batch`](crate::Batch).
    pub gather_inputs: bool,
    /// Rows of the global batch.
    pub total_rows: u64,
    /// Rows of each microbatch.
    pub microbatches: Vec<u64>,
    /// The local rows that this rank gives to each microbatch.
    pub slices: Vec<Slice>,
    /// Input transfers from or to this rank, in the order common to all ranks.
    pub inputs: Vec<Transfer>,
    /// Output transfers from or to this rank, in the order common to all ranks.
    pub outputs: Vec<Transfer>,
    /// True when ranks exchange rows, be it this one or others.
    pub exchanges: bool,
    /// Messages with Values that may be under way on a channel before the sender waits; `None` when it never does.
    pub value_window: Option<usize>,
    /// The same of messages with gradients.
    pub grad_window: Option<usize>,
    /// The whole step of [`Call::Whole`], else all forwards.
    pub forward: Vec<Action>,
    /// All backwards of [`Call::Halves`], else nothing.
    pub backward: Vec<Action>,
}

impl Program {
    /// The part of `rank`; `None` when there is no such rank.
    pub fn rank_view(&self, rank: u32) -> Option<RankView> {
        let program = self.ranks.get(rank as usize)?;
        let touching = |transfers: &[Transfer]| {
            transfers.iter().copied().filter(|transfer| transfer.src == rank || transfer.dst == rank).collect()
        };
        Some(RankView {
            rank,
            seats: program.seats.iter().map(|&seat| self.seat_view(seat)).collect::<Option<_>>()?,
            call: self.call,
            gather_inputs: self.gather_inputs,
            total_rows: self.total_rows,
            microbatches: self.microbatches.clone(),
            slices: self.slices.get(rank as usize)?.clone(),
            inputs: touching(&self.inputs),
            outputs: touching(&self.outputs),
            exchanges: self.exchanges(),
            value_window: Payload::Value.window(self.call),
            grad_window: Payload::Grad.window(self.call),
            forward: program.forward.clone(),
            backward: program.backward.clone(),
        })
    }

    fn seat_view(&self, Seat { stage, replica }: Seat) -> Option<SeatView> {
        let rows_of = |replicas: &Vec<Interval>| replicas.get(replica as usize).copied();
        let rows: Vec<Interval> = self.stage_rows.get(stage as usize)?.iter().map(rows_of).collect::<Option<_>>()?;
        let global_rows = (0..).zip(&rows).map(|(mb, &rows)| self.global_rows(mb, rows)).collect();
        Some(SeatView { stage, replica, rows, global_rows })
    }

    /// Rows of a microbatch as they stand in the global batch: runs that do not touch, in the microbatch's order.
    fn global_rows(&self, mb: u32, rows: Interval) -> Vec<Interval> {
        let mut found: Vec<Interval> = Vec::new();
        let mut first_of_rank = 0;
        for slices in &self.slices {
            for slice in slices.iter().filter(|slice| slice.mb == mb) {
                let here = slice.within().overlap(rows);
                let lo = first_of_rank + slice.local.lo + (here.lo - slice.at);
                match found.last_mut() {
                    _ if here.is_empty() => {}
                    Some(last) if last.hi == lo => last.hi += here.rows(),
                    _ => found.push(Interval::new(lo, lo + here.rows())),
                }
            }
            first_of_rank += slices.last().map_or(0, |slice| slice.local.hi);
        }
        found
    }

    fn exchanges(&self) -> bool {
        let mut actions = self.ranks.iter().flat_map(|own| own.forward.iter().chain(&own.backward));
        actions.any(|action| matches!(action, Action::Exchange(_)))
    }

    /// The directed rank pairs between which messages between Stages go; sorted.
    pub fn channels(&self) -> Vec<(u32, u32)> {
        let mut pairs: Vec<(u32, u32)> = Vec::new();
        for program in &self.ranks {
            pairs.extend(program.forward.iter().chain(&program.backward).filter_map(|action| match action {
                Action::Send(message) => Some((program.rank, message.peer)),
                Action::Recv(message) => Some((message.peer, program.rank)),
                _ => None,
            }));
        }
        pairs.sort_unstable();
        pairs.dedup();
        pairs
    }
}
