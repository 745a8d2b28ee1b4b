//! Activations and messages: what is received is there from its Recv on, what was sent is let go of when as many messages
//! are under way behind it as the window allows, a microbatch is kept from its forward to the end of its backward. Inputs and
//! outputs, and their gradients, are the caller's: they are as large as the batch, whatever a Program does.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};

use super::promises::{HeldPromise, Promises};
use super::{Holding, actions, refused};
use crate::check::CheckError;
use crate::check::layout::computed_rows;
use crate::partition::Partition;
use crate::program::{Action, Message, Payload, Program, RankProgram};
use crate::schedule::{Call, WINDOW};

/// Checks what a rank holds of a step that trains in the microbatches that its Plan was made for; `held` is promised of each
/// Stage, to all of a rank's together. Nothing is promised of a call in halves, between which all microbatches are held,
/// where the Plan has another in mind, nor of a rank whose gradients go to other ranks from one microbatch to the next, which
/// has more messages under way than of two of them.
pub(super) fn check_held(
    program: &Program,
    partition: &Partition,
    own: &RankProgram,
    promises: &Promises,
    held: &[Option<HeldPromise>],
) -> Result<(), CheckError> {
    let mut live = Live::new(program, partition, own, promises);
    let mut promised: u64 = 0;
    for seat in &own.seats {
        let Some(promise) = held.get(seat.stage as usize).copied().flatten() else { return Ok(()) };
        let in_mind = match program.call {
            Call::Forward => false,
            Call::Whole => true,
            Call::Halves => promise.holds_all,
        };
        if !in_mind {
            return Ok(());
        }
        let bytes = promise.bytes.saturating_sub(promises.outputs_bytes(program, partition, seat.stage));
        promised = promised.saturating_add(bytes);
        live.kept_bytes.insert(seat.stage, promise.kept_bytes);
    }
    if !sends_back_alike(own) {
        return Ok(());
    }
    for (position, action) in actions(own).enumerate() {
        let bytes = live.most_during(action);
        if bytes > promised {
            return Err(refused(own, position, Holding::Activations, bytes, promised));
        }
    }
    Ok(())
}

/// True when the gradients of every microbatch go to the same ranks.
fn sends_back_alike(own: &RankProgram) -> bool {
    let mut peers: BTreeMap<u32, BTreeSet<u32>> = BTreeMap::new();
    for action in actions(own) {
        if let Action::Send(Message { mb, peer, kind: Payload::Grad, .. }) = action {
            peers.entry(*mb).or_default().insert(*peer);
        }
    }
    let mut sets = peers.values();
    sets.next().is_none_or(|first| sets.all(|other| other == first))
}

/// A microbatch of a Stage.
type Computed = (u32, u32);

/// What a rank holds on its way through its Actions.
struct Live<'a> {
    program: &'a Program,
    partition: &'a Partition,
    own: &'a RankProgram,
    promises: &'a Promises,
    /// By Stage, of one microbatch between its forward and its backward.
    kept_bytes: HashMap<u32, u64>,
    held: HashSet<Computed>,
    /// Received or about to be, or made by another seat, by what waits for it.
    arriving: HashMap<(Payload, Computed), u64>,
    /// By receiver and its Stage, gradients that may be under way.
    leaving: HashMap<(u32, Option<u32>), VecDeque<u64>>,
}

impl<'a> Live<'a> {
    fn new(program: &'a Program, partition: &'a Partition, own: &'a RankProgram, promises: &'a Promises) -> Self {
        let (kept_bytes, held) = (HashMap::new(), HashSet::new());
        let (arriving, leaving) = (HashMap::new(), HashMap::new());
        Self { program, partition, own, promises, kept_bytes, held, arriving, leaving }
    }

    /// Does an Action, and returns the most that is held at any time of it.
    fn most_during(&mut self, action: &Action) -> u64 {
        match action {
            Action::Forward { mb, stage } => {
                let own = self.computed(*stage, *mb);
                self.held.insert(own);
                // What has arrived is part of what is kept.
                self.arriving.remove(&(Payload::Value, own));
                self.bytes()
            }
            Action::Backward { mb, stage } => {
                let bytes = self.pass_gradients(*stage, *mb);
                self.held.remove(&self.computed(*stage, *mb));
                bytes
            }
            Action::BackwardInput { mb, stage } => self.pass_gradients(*stage, *mb),
            Action::BackwardWeight { mb, stage } => {
                let bytes = self.bytes();
                self.held.remove(&self.computed(*stage, *mb));
                bytes
            }
            Action::Exchange(_) => self.bytes(),
            Action::Recv(message) => {
                let bytes = self.message_bytes(message);
                let to = message.stages.map(|(_, to)| to).filter(|_| self.own.has_several_seats());
                let needed = self.computed(to, message.mb);
                *self.arriving.entry((message.kind, needed)).or_default() += bytes;
                self.bytes()
            }
            Action::Send(message) => {
                // Values are part of what is kept for the backward.
                if message.kind == Payload::Grad {
                    let bytes = self.message_bytes(message);
                    let channel = (message.peer, message.stages.map(|(_, to)| to));
                    let under_way = self.leaving.entry(channel).or_default();
                    under_way.push_back(bytes);
                    if under_way.len() > WINDOW {
                        under_way.pop_front();
                    }
                }
                self.bytes()
            }
            Action::AllReduce { .. } | Action::ReduceScatter { .. } | Action::AllGather { .. } => self.bytes(),
        }
    }

    fn computed(&self, named: Option<u32>, mb: u32) -> Computed {
        (self.own.seat(named).map_or(0, |seat| seat.stage), mb)
    }

    /// A backward: it uses the gradients that have come, and makes those that wait for other seats of the rank.
    fn pass_gradients(&mut self, named: Option<u32>, mb: u32) -> u64 {
        let Some(seat) = self.own.seat(named) else { return self.bytes() };
        for crossing in self.partition.crossings.iter().filter(|own| own.requires_grad && own.to.contains(&seat.stage))
        {
            let Some(maker) = self.own.seat_of(crossing.from) else { continue };
            let rows = |seat| computed_rows(self.program, seat, mb as usize);
            let bytes = self.promises.value_bytes(crossing.value, rows(seat).overlap(rows(maker)).rows());
            *self.arriving.entry((Payload::Grad, (maker.stage, mb))).or_default() += bytes;
        }
        let bytes = self.bytes();
        self.arriving.remove(&(Payload::Grad, (seat.stage, mb)));
        bytes
    }

    fn message_bytes(&self, message: &Message) -> u64 {
        message.pieces.iter().map(|piece| self.promises.value_bytes(piece.value, piece.rows.rows())).sum()
    }

    fn bytes(&self) -> u64 {
        let held = self.held.iter().fold(0, |sum: u64, (stage, _)| sum.saturating_add(self.kept_bytes[stage]));
        let moving = self.arriving.values().chain(self.leaving.values().flatten()).sum::<u64>();
        held.saturating_add(moving)
    }
}
