//! Activations and messages: what is received is there from its Recv on, what was sent is let go of when as many messages
//! are under way behind it as the window allows, a microbatch is kept from its forward to the end of its backward. Inputs and
//! outputs, and their gradients, are the caller's: they are as large as the batch, whatever a Program does.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};

use super::promises::{HeldPromise, Promises};
use super::{Holding, actions, refused};
use crate::check::CheckError;
use crate::partition::Partition;
use crate::program::{Action, Message, Payload, Program, RankProgram, WINDOW};
use crate::schedule::Call;

/// Checks what a rank holds of a step that trains in the microbatches that its Plan was made for. Nothing is promised of a
/// call in halves, between which all microbatches are held, where the Plan has another in mind, nor of a rank whose
/// gradients go to other ranks from one microbatch to the next, which has more messages under way than of two of them.
pub(super) fn check_held(
    program: &Program,
    partition: &Partition,
    own: &RankProgram,
    promises: &Promises,
) -> Result<(), CheckError> {
    let stage = promises.stage(own.stage);
    let promise = promises.held(program, own.stage).filter(|_| stage.knows_sizes(program));
    let Some(promise) = promise else { return Ok(()) };
    let in_mind = match program.call {
        Call::Forward => false,
        Call::Whole => true,
        Call::Halves => promise.holds_all,
    };
    if !in_mind || !sends_back_alike(own) {
        return Ok(());
    }
    let promised = promise.bytes.saturating_sub(promises.outputs_bytes(program, partition, own.stage));
    let mut live = Live::new(promises, promise);
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

/// What a rank holds on its way through its Actions.
struct Live<'a> {
    promises: &'a Promises,
    promise: HeldPromise,
    held: HashSet<u32>,
    /// Received or about to be, by what waits for it.
    arriving: HashMap<(Payload, u32), u64>,
    /// By receiver, gradients that may be under way.
    leaving: HashMap<u32, VecDeque<u64>>,
}

impl<'a> Live<'a> {
    fn new(promises: &'a Promises, promise: HeldPromise) -> Self {
        let (arriving, leaving) = (HashMap::new(), HashMap::new());
        Self { promises, promise, held: HashSet::new(), arriving, leaving }
    }

    /// Does an Action, and returns the most that is held at any time of it.
    fn most_during(&mut self, action: &Action) -> u64 {
        match action {
            Action::Forward { mb } => {
                self.held.insert(*mb);
                // What has arrived is part of what is kept.
                self.arriving.remove(&(Payload::Value, *mb));
                self.bytes()
            }
            Action::Backward { mb } => {
                let bytes = self.bytes();
                self.held.remove(mb);
                self.arriving.remove(&(Payload::Grad, *mb));
                bytes
            }
            Action::BackwardInput { mb } => {
                let bytes = self.bytes();
                self.arriving.remove(&(Payload::Grad, *mb));
                bytes
            }
            Action::BackwardWeight { mb } => {
                let bytes = self.bytes();
                self.held.remove(mb);
                bytes
            }
            Action::Exchange(_) => self.bytes(),
            Action::Recv(message) => {
                let bytes = self.message_bytes(message);
                *self.arriving.entry((message.kind, message.mb)).or_default() += bytes;
                self.bytes()
            }
            Action::Send(message) => {
                // Values are part of what is kept for the backward.
                if message.kind == Payload::Grad {
                    let bytes = self.message_bytes(message);
                    let under_way = self.leaving.entry(message.peer).or_default();
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

    fn message_bytes(&self, message: &Message) -> u64 {
        message.pieces.iter().map(|piece| self.promises.value_bytes(piece.value, piece.rows.rows())).sum()
    }

    fn bytes(&self) -> u64 {
        let held = (self.held.len() as u64).saturating_mul(self.promise.kept_bytes);
        let moving = self.arriving.values().chain(self.leaving.values().flatten()).sum::<u64>();
        held.saturating_add(moving)
    }
}
