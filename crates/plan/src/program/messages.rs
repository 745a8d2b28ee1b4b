//! Messages between Stages, and their places among a rank's Actions.

use std::collections::BTreeMap;

use rannc_ir::ValueId;

use super::action::{Action, Exchange, Message, Payload, Piece};
use super::batch::ExchangePlaces;
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

/// Messages of one rank, by microbatch.
#[derive(Clone)]
pub(super) struct Mailbox {
    value_recvs: Vec<Vec<Action>>,
    value_sends: Vec<Vec<Action>>,
    grad_recvs: Vec<Vec<Action>>,
    grad_sends: Vec<Vec<Action>>,
}

impl Mailbox {
    fn new(microbatches: usize) -> Self {
        let empty = vec![Vec::new(); microbatches];
        Self { value_recvs: empty.clone(), value_sends: empty.clone(), grad_recvs: empty.clone(), grad_sends: empty }
    }

    fn take_recvs(&mut self, compute: Compute) -> Vec<Action> {
        let mb = compute.microbatch() as usize;
        match Payload::of(compute) {
            Some(Payload::Value) => std::mem::take(&mut self.value_recvs[mb]),
            Some(Payload::Grad) => std::mem::take(&mut self.grad_recvs[mb]),
            None => Vec::new(),
        }
    }

    fn take_sends(&mut self, compute: Compute) -> Vec<Action> {
        let mb = compute.microbatch() as usize;
        match Payload::of(compute) {
            Some(Payload::Value) => std::mem::take(&mut self.value_sends[mb]),
            Some(Payload::Grad) => std::mem::take(&mut self.grad_sends[mb]),
            None => Vec::new(),
        }
    }

    /// The forward and the backward list of the rank, with these computations and exchanges in their order.
    pub(super) fn lists(
        &mut self,
        call: Call,
        computes: &[Compute],
        exchanges: Vec<Exchange>,
        collectives: &Collectives<'_>,
    ) -> (Vec<Action>, Vec<Action>) {
        let is_forward = |compute: &Compute| matches!(compute, Compute::Forward(_));
        let (forwards, backwards): (Vec<Compute>, Vec<Compute>) =
            computes.iter().partition(|compute| is_forward(compute));
        match call {
            Call::Forward => (collectives.within(self.actions(&forwards, exchanges), is_forward, false), Vec::new()),
            Call::Whole => (collectives.within(self.actions(computes, exchanges), |_| true, true), Vec::new()),
            Call::Halves => {
                let (late, early) = exchanges.into_iter().partition(|exchange| exchange.kind.is_of_backward());
                (
                    collectives.within(self.actions(&forwards, early), is_forward, false),
                    collectives.within(self.actions(&backwards, late), |compute| !is_forward(compute), true),
                )
            }
        }
    }

    /// The computations with their messages, and each exchange where it and those before it may stand.
    fn actions(&mut self, computes: &[Compute], exchanges: Vec<Exchange>) -> Vec<Action> {
        let places = ExchangePlaces::new(computes);
        let mut coming = exchanges.into_iter().peekable();
        let mut exchanged = |done: usize, actions: &mut Vec<Action>| {
            let may_stand = |next: &Exchange| places.behind(next.kind, next.mb) <= done;
            while let Some(next) = coming.next_if(may_stand) {
                actions.push(Action::Exchange(next));
            }
        };
        let (mut actions, mut done) = (Vec::new(), 0);
        exchanged(done, &mut actions);
        with_messages(computes.iter().copied(), |step| match step {
            Step::Receive(compute) => actions.extend(self.take_recvs(compute)),
            Step::Compute(compute) => actions.push(compute.into()),
            Step::Send(compute) => {
                actions.extend(self.take_sends(compute));
                done += 1;
                exchanged(done, &mut actions);
            }
        });
        actions
    }
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
    let mut coming = computes.clone().filter(|&compute| Payload::of(compute).is_some());
    coming.next().into_iter().for_each(|first| act(Step::Receive(first)));
    for compute in computes {
        if Payload::of(compute).is_some() {
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
    let mut mailboxes = vec![Mailbox::new(microbatches); world_size];
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
                let sent = Action::Send(message(Payload::Value, &carried.values, user));
                mailboxes[maker as usize].value_sends[index].push(sent);
                let received = Action::Recv(message(Payload::Value, &carried.values, maker));
                mailboxes[user as usize].value_recvs[index].push(received);
                if call.trains() && !carried.grads.is_empty() {
                    let sent = Action::Send(message(Payload::Grad, &carried.grads, maker));
                    mailboxes[user as usize].grad_sends[index].push(sent);
                    let received = Action::Recv(message(Payload::Grad, &carried.grads, user));
                    mailboxes[maker as usize].grad_recvs[index].push(received);
                }
            }
        }
    }
    mailboxes
}
