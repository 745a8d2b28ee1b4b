//! Messages between Stages, and their places among a rank's Actions.

use std::collections::BTreeMap;

use rannc_ir::ValueId;

use super::action::{Action, Message, Payload, Piece};
use super::collectives::Collectives;
use super::routes::{Interval, overlaps};
use crate::partition::Partition;
use crate::plan::Placement;
use crate::schedule::{Call, Compute};

/// All directed rank pairs between which a message between Stages may go, whatever the batch; sorted.
pub fn plan_channels(placement: &Placement, partition: &Partition) -> Vec<(u32, u32)> {
    let ranks_of = |stage: u32| placement.ranks.get(stage as usize).into_iter().flatten().copied();
    let mut pairs = Vec::new();
    for (from, to) in carried_between(partition).into_keys() {
        for sender in ranks_of(from) {
            pairs.extend(ranks_of(to).flat_map(|receiver| [(sender, receiver), (receiver, sender)]));
        }
    }
    pairs.sort_unstable();
    pairs
}

/// The Values that go directly from one Stage to another, and those of them whose gradients return.
#[derive(Default)]
struct Carried {
    values: Vec<ValueId>,
    grads: Vec<ValueId>,
}

fn carried_between(partition: &Partition) -> BTreeMap<(u32, u32), Carried> {
    let mut all: BTreeMap<(u32, u32), Carried> = BTreeMap::new();
    for crossing in &partition.crossings {
        for &to in &crossing.to {
            let carried = all.entry((crossing.from, to)).or_default();
            carried.values.push(crossing.value);
            if crossing.requires_grad {
                carried.grads.push(crossing.value);
            }
        }
    }
    all
}

/// Messages of one rank.
#[derive(Clone, Default)]
pub(super) struct Mailbox {
    /// By what waits for them, and microbatch.
    recvs: BTreeMap<(Payload, u32), Vec<Action>>,
    /// By what makes them, and microbatch.
    sends: BTreeMap<(Payload, u32), Vec<Action>>,
    /// Between the rank's own batch and the Stages.
    pub(super) batch: OwnBatch,
}

/// Messages between a rank's own batch and the Stages that no computation of the rank makes or waits for, each kind in
/// its order.
#[derive(Clone, Default)]
pub(super) struct OwnBatch {
    /// Sends: inputs.
    pub(super) inputs: Vec<Action>,
    /// Recvs: outputs.
    pub(super) outputs: Vec<Action>,
    /// Sends: gradients of outputs.
    pub(super) output_grads: Vec<Action>,
    /// Sends: gradients of inputs that all backwards of the rank add to.
    pub(super) summed_grads: Vec<Action>,
    /// Recvs: gradients of inputs.
    pub(super) input_grads: Vec<Action>,
}

impl Mailbox {
    /// Adds a message that the computation of its microbatch waits for.
    pub(super) fn receive(&mut self, message: Message) {
        self.recvs.entry((message.kind, message.mb)).or_default().push(Action::Recv(message));
    }

    /// Adds a message that the computation of its microbatch makes.
    pub(super) fn send(&mut self, message: Message) {
        self.sends.entry((message.kind, message.mb)).or_default().push(Action::Send(message));
    }

    /// The forward and the backward list of the rank, with these computations in their order.
    pub(super) fn lists(
        &mut self,
        call: Call,
        computes: &[Compute],
        collectives: &Collectives<'_>,
    ) -> (Vec<Action>, Vec<Action>) {
        let (forwards, backwards): (Vec<Compute>, Vec<Compute>) =
            computes.iter().partition(|compute| is_forward(compute));
        let OwnBatch { inputs, outputs, output_grads, summed_grads, input_grads } = std::mem::take(&mut self.batch);
        let last = [summed_grads, input_grads].concat();
        match call {
            Call::Forward => {
                (collectives.within(self.actions(&forwards, inputs, outputs, last), is_forward, false), Vec::new())
            }
            Call::Whole => {
                (collectives.within(self.actions(computes, inputs, outputs, last), |_| true, true), Vec::new())
            }
            Call::Halves => {
                let forward = self.actions(&forwards, inputs, outputs, Vec::new());
                let backward = self.actions(&backwards, output_grads, Vec::new(), last);
                (
                    collectives.within(forward, is_forward, false),
                    collectives.within(backward, |compute| !is_forward(compute), true),
                )
            }
        }
    }

    /// The computations with their messages, between what comes first and what comes last; `outputs` stand behind the
    /// last forward.
    fn actions(
        &mut self,
        computes: &[Compute],
        first: Vec<Action>,
        mut outputs: Vec<Action>,
        last: Vec<Action>,
    ) -> Vec<Action> {
        let last_forward = computes.iter().copied().rfind(is_forward);
        let mut actions = first;
        if last_forward.is_none() {
            actions.append(&mut outputs);
        }
        with_messages(computes.iter().copied(), |step| match step {
            Step::Receive(compute) => actions.extend(take(&mut self.recvs, Payload::awaited_by(compute), compute)),
            Step::Compute(compute) => actions.push(compute.into()),
            Step::Send(compute) => {
                actions.extend(take(&mut self.sends, Payload::made_by(compute), compute));
                if last_forward == Some(compute) {
                    actions.append(&mut outputs);
                }
            }
        });
        actions.extend(last);
        actions
    }
}

fn is_forward(compute: &Compute) -> bool {
    matches!(compute, Compute::Forward(_))
}

/// Takes out the messages of a computation.
fn take(messages: &mut BTreeMap<(Payload, u32), Vec<Action>>, kinds: &[Payload], compute: Compute) -> Vec<Action> {
    kinds.iter().flat_map(|&kind| messages.remove(&(kind, compute.microbatch())).unwrap_or_default()).collect()
}

/// What belongs to a computation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Begin to receive what it needs.
    Receive(Compute),
    /// Do it.
    Compute(Compute),
    /// Send what it has made.
    Send(Compute),
}

/// Computations in their order, with the places of their messages: a rank receives one computation that has messages
/// ahead, and sends right after.
pub fn with_messages(computes: impl Iterator<Item = Compute> + Clone, mut act: impl FnMut(Step)) {
    let waits = |compute: &Compute| !Payload::awaited_by(*compute).is_empty();
    let mut coming = computes.clone().filter(waits);
    coming.next().into_iter().for_each(|first| act(Step::Receive(first)));
    for compute in computes {
        if waits(&compute) {
            coming.next().into_iter().for_each(|next| act(Step::Receive(next)));
        }
        act(Step::Compute(compute));
        act(Step::Send(compute));
    }
}

/// What each rank sends and receives, by rank. `stage_rows` is as in [`Program`](super::Program).
pub(super) fn mailboxes(
    placement: &Placement,
    partition: &Partition,
    stage_rows: &[Vec<Vec<Interval>>],
    call: Call,
) -> Vec<Mailbox> {
    let microbatches = stage_rows.first().map_or(0, Vec::len);
    let world_size = placement.ranks.iter().map(Vec::len).sum();
    let mut mailboxes = vec![Mailbox::default(); world_size];
    for ((from, to), carried) in carried_between(partition) {
        let (from, to) = (from as usize, to as usize);
        for (mb, index) in (0..).zip(0..microbatches) {
            for overlap in overlaps(&stage_rows[from][index], &stage_rows[to][index]) {
                let maker = placement.ranks[from][overlap.from];
                let user = placement.ranks[to][overlap.to];
                let message = |kind, values: &[ValueId], peer| {
                    let piece = |&value| Piece { value, rows: overlap.rows };
                    Message { mb, peer, kind, pieces: values.iter().map(piece).collect() }
                };
                mailboxes[maker as usize].send(message(Payload::Value, &carried.values, user));
                mailboxes[user as usize].receive(message(Payload::Value, &carried.values, maker));
                if call.trains() && !carried.grads.is_empty() {
                    mailboxes[user as usize].send(message(Payload::Grad, &carried.grads, maker));
                    mailboxes[maker as usize].receive(message(Payload::Grad, &carried.grads, user));
                }
            }
        }
    }
    mailboxes
}
