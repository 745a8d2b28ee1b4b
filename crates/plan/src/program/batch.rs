//! Messages between the ranks' own batches and the Stages: what the Transfers of a Program say and does not stay where it
//! is.
//!
//! A rank gives what it has at the beginning of a list, and takes what it gets where nothing of its own waits any more.
//! Each end of a channel has its messages in the order in which the Replica computes.

use std::collections::{BTreeMap, BTreeSet};

use rannc_ir::ValueId;

use super::Transfer;
use super::action::{Action, Message, Payload, Piece};
use super::messages::Mailbox;
use crate::partition::{OutputSource, Partition};
use crate::schedule::{Call, Compute};

/// Where the Transfers of a batch go.
pub(super) struct BatchRoutes<'a> {
    pub partition: &'a Partition,
    pub call: Call,
    pub gather_inputs: bool,
    pub inputs: &'a [Transfer],
    pub outputs: &'a [Transfer],
    /// The Stage of each rank.
    pub stage_of: &'a [u32],
    /// By Stage, its computations.
    pub orders: &'a [Vec<Compute>],
}

/// What one message carries, by what it is sorted by: place among the Replica's messages, Replica, rank with the rows,
/// microbatch.
type Parcels = BTreeMap<(usize, u32, u32, u32), Vec<Piece>>;

impl BatchRoutes<'_> {
    /// Puts the messages into the ranks' mailboxes.
    pub(super) fn add_to(&self, mailboxes: &mut [Mailbox]) {
        let forward = |compute: Compute| matches!(compute, Compute::Forward(_));
        let backward = |compute: Compute| matches!(compute, Compute::Backward(_) | Compute::BackwardInput(_));
        let made = |transfer: &&Transfer| self.made().contains(&transfer.value);
        let outputs: Vec<&Transfer> = self.outputs.iter().filter(made).collect();
        for ((_, replica, owner, mb), pieces) in self.parcels(self.inputs.iter(), forward, |own| (own.dst, own.src)) {
            let message = |peer| Message { mb, peer, kind: Payload::Input, pieces: pieces.clone() };
            mailboxes[owner as usize].batch.inputs.push(Action::Send(message(replica)));
            mailboxes[replica as usize].receive(message(owner));
        }
        for ((_, replica, owner, mb), pieces) in
            self.parcels(outputs.iter().copied(), forward, |own| (own.src, own.dst))
        {
            let message = |peer| Message { mb, peer, kind: Payload::Output, pieces: pieces.clone() };
            mailboxes[replica as usize].send(message(owner));
            mailboxes[owner as usize].batch.outputs.push(Action::Recv(message(replica)));
        }
        if self.call == Call::Halves && self.gather_inputs {
            let differentiable = self.differentiable_outputs();
            let sent = outputs.into_iter().filter(|own| differentiable.contains(&own.value));
            for ((_, replica, owner, mb), pieces) in self.parcels(sent, backward, |own| (own.src, own.dst)) {
                let message = |peer| Message { mb, peer, kind: Payload::OutputGrad, pieces: pieces.clone() };
                mailboxes[owner as usize].batch.output_grads.push(Action::Send(message(replica)));
                mailboxes[replica as usize].receive(message(owner));
            }
        }
        if self.call.trains() {
            self.add_input_grads(mailboxes, backward);
        }
    }

    fn add_input_grads(&self, mailboxes: &mut [Mailbox], backward: impl Fn(Compute) -> bool + Copy) {
        let has_rows = self.differentiable_inputs();
        for rows in [true, false] {
            let sent = self.inputs.iter().filter(|own| has_rows.get(&own.value) == Some(&rows));
            for ((_, replica, owner, mb), pieces) in self.parcels(sent, backward, |own| (own.dst, own.src)) {
                let message = |peer| Message { mb, peer, kind: Payload::InputGrad, pieces: pieces.clone() };
                if rows {
                    mailboxes[replica as usize].send(message(owner));
                } else {
                    mailboxes[replica as usize].batch.summed_grads.push(Action::Send(message(owner)));
                }
                mailboxes[owner as usize].batch.input_grads.push(Action::Recv(message(replica)));
            }
        }
    }

    /// The messages of some Transfers, in the order of certain computations of the Replicas; `ends` tells the Replica and
    /// the rank that has the rows.
    fn parcels<'t>(
        &self,
        transfers: impl Iterator<Item = &'t Transfer>,
        is_of: impl Fn(Compute) -> bool,
        ends: impl Fn(&Transfer) -> (u32, u32),
    ) -> Parcels {
        let places: Vec<BTreeMap<u32, usize>> = self
            .orders
            .iter()
            .map(|order| {
                let own = order.iter().copied().filter(|&compute| is_of(compute));
                own.enumerate().map(|(place, compute)| (compute.microbatch(), place)).collect()
            })
            .collect();
        let mut parcels = Parcels::new();
        for transfer in transfers.filter(|transfer| transfer.src != transfer.dst) {
            let (replica, owner) = ends(transfer);
            let stage = self.stage_of[replica as usize] as usize;
            // A listed order may lack it, which the checker finds.
            let place = places[stage].get(&transfer.mb).copied().unwrap_or(usize::MAX);
            let pieces = parcels.entry((place, replica, owner, transfer.mb)).or_default();
            pieces.push(Piece { value: transfer.value, rows: transfer.rows });
        }
        parcels
    }

    /// The outputs that some Stage makes.
    fn made(&self) -> BTreeSet<ValueId> {
        let outputs = self.partition.outputs.iter();
        outputs.filter(|output| matches!(output.source, OutputSource::Stage(_))).map(|output| output.value).collect()
    }

    fn differentiable_outputs(&self) -> BTreeSet<ValueId> {
        self.partition.outputs.iter().filter(|output| output.requires_grad).map(|output| output.value).collect()
    }

    /// The inputs that gradients flow into, and whether they have rows.
    fn differentiable_inputs(&self) -> BTreeMap<ValueId, bool> {
        let inputs = self.partition.stages.iter().flat_map(|stage| &stage.inputs);
        inputs.filter(|input| input.requires_grad).map(|input| (input.value, input.has_rows)).collect()
    }
}
