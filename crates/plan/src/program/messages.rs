//! Messages between Stages, and their places among a rank's Actions.

use std::collections::{BTreeMap, HashMap};

use rannc_ir::ValueId;

use super::action::{Action, Exchange, Message, Payload, Piece};
use super::batch::ExchangePlaces;
use super::collectives::Collectives;
use super::routes::{Interval, overlaps};
use crate::partition::Partition;
use crate::plan::Placement;
use crate::schedule::{Call, Compute, Crew, Seated};

/// All directed rank pairs between which a message between Stages may go, whatever the batch; sorted.
pub fn plan_channels(placement: &Placement, partition: &Partition) -> Vec<(u32, u32)> {
    let ranks_of = |stage: u32| placement.ranks.get(stage as usize).into_iter().flatten().copied();
    let mut pairs = Vec::new();
    for (from, to) in carried_between(partition).into_keys() {
        for sender in ranks_of(from) {
            let others = ranks_of(to).filter(|receiver| *receiver != sender);
            pairs.extend(others.flat_map(|receiver| [(sender, receiver), (receiver, sender)]));
        }
    }
    pairs.sort_unstable();
    pairs.dedup();
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

/// The computation that messages of a rank belong to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Needed {
    /// What it waits for, and makes.
    pub payload: Payload,
    /// Its Stage, where the rank has several.
    pub stage: Option<u32>,
    /// Its microbatch.
    pub mb: u32,
}

impl Needed {
    /// What a computation waits for and makes, if it is anything.
    pub fn by(Seated { compute, stage }: Seated) -> Option<Self> {
        Some(Self { payload: Payload::of(compute)?, stage, mb: compute.microbatch() })
    }
}

/// Messages of one rank, by the computation that they belong to.
#[derive(Clone, Default)]
pub(super) struct Mailbox {
    recvs: HashMap<Needed, Vec<Action>>,
    sends: HashMap<Needed, Vec<Action>>,
}

impl Mailbox {
    /// The forward and the backward list of the rank, with these computations and exchanges in their order.
    pub(super) fn lists(
        &mut self,
        call: Call,
        computes: &[Seated],
        exchanges: Vec<Exchange>,
        collectives: &Collectives<'_>,
    ) -> (Vec<Action>, Vec<Action>) {
        let is_forward = |seated: &Seated| matches!(seated.compute, Compute::Forward(_));
        let (forwards, backwards): (Vec<Seated>, Vec<Seated>) = computes.iter().partition(|seated| is_forward(seated));
        match call {
            Call::Forward => (collectives.within(self.actions(&forwards, exchanges), is_forward, false), Vec::new()),
            Call::Whole => (collectives.within(self.actions(computes, exchanges), |_| true, true), Vec::new()),
            Call::Halves => {
                let (late, early) = exchanges.into_iter().partition(|exchange| exchange.kind.is_of_backward());
                (
                    collectives.within(self.actions(&forwards, early), is_forward, false),
                    collectives.within(self.actions(&backwards, late), |seated| !is_forward(seated), true),
                )
            }
        }
    }

    /// The computations with their messages, and each exchange where it and those before it may stand.
    fn actions(&mut self, computes: &[Seated], exchanges: Vec<Exchange>) -> Vec<Action> {
        let places = ExchangePlaces::new(computes.iter().map(|seated| seated.compute));
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
            Step::Receive(seated) => {
                actions.extend(Needed::by(seated).and_then(|own| self.recvs.remove(&own)).into_iter().flatten());
            }
            Step::Compute(seated) => actions.push(seated.into()),
            Step::Send(seated) => {
                actions.extend(Needed::by(seated).and_then(|own| self.sends.remove(&own)).into_iter().flatten());
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
    Receive(Seated),
    /// Do it.
    Compute(Seated),
    /// Send what it has made.
    Send(Seated),
}

/// Computations in their order, with the places of their messages: a rank receives one computation that has messages
/// ahead, and sends right after.
pub fn with_messages(computes: impl Iterator<Item = Seated> + Clone, mut act: impl FnMut(Step)) {
    let has_messages = |seated: &Seated| Payload::of(seated.compute).is_some();
    let mut coming = computes.clone().filter(has_messages);
    coming.next().into_iter().for_each(|first| act(Step::Receive(first)));
    for seated in computes {
        if has_messages(&seated) {
            coming.next().into_iter().for_each(|next| act(Step::Receive(next)));
        }
        act(Step::Compute(seated));
        act(Step::Send(seated));
    }
}

/// What each rank sends and receives, by rank. What one seat of a rank makes and another uses stays where it is, without a
/// message. `stage_rows` is as in [`Program`](super::Program).
pub(super) fn mailboxes(
    placement: &Placement,
    partition: &Partition,
    stage_rows: &[Vec<Vec<Interval>>],
    call: Call,
) -> Vec<Mailbox> {
    let mut post = Post::new(placement);
    for ((from, to), carried) in carried_between(partition) {
        for (mb, (made, used)) in (0..).zip(stage_rows[from as usize].iter().zip(&stage_rows[to as usize])) {
            for overlap in overlaps(made, used) {
                let maker = (placement.ranks[from as usize][overlap.from], from);
                let user = (placement.ranks[to as usize][overlap.to], to);
                if maker.0 == user.0 {
                    continue;
                }
                let pieces = |values: &[ValueId]| -> Vec<Piece> {
                    values.iter().map(|&value| Piece { value, rows: overlap.rows }).collect()
                };
                post.send(Payload::Value, mb, maker, user, pieces(&carried.values));
                if call.trains() && !carried.grads.is_empty() {
                    post.send(Payload::Grad, mb, user, maker, pieces(&carried.grads));
                }
            }
        }
    }
    post.mailboxes
}

/// The mailboxes of all ranks.
struct Post {
    mailboxes: Vec<Mailbox>,
    /// By rank, true where it has several Stages.
    shared: Vec<bool>,
}

impl Post {
    fn new(placement: &Placement) -> Self {
        let crews = Crew::of_stages(&placement.ranks);
        let world_size = crews.iter().map(|crew| crew.ranks.len()).sum();
        let mut shared = vec![false; world_size];
        let sharing = crews.iter().filter(|crew| crew.is_shared()).flat_map(|crew| &crew.ranks);
        sharing.for_each(|&rank| shared[rank as usize] = true);
        Self { mailboxes: vec![Mailbox::default(); world_size], shared }
    }

    /// Puts a message from one rank's Stage to another's at both ends.
    fn send(&mut self, kind: Payload, mb: u32, src: (u32, u32), dst: (u32, u32), pieces: Vec<Piece>) {
        let is_shared = |rank: u32| self.shared[rank as usize];
        let stages = (is_shared(src.0) || is_shared(dst.0)).then_some((src.1, dst.1));
        let needed = |(rank, stage): (u32, u32)| Needed { payload: kind, stage: is_shared(rank).then_some(stage), mb };
        let (made_by, needed_by) = (needed(src), needed(dst));
        let message = |peer: u32, pieces: Vec<Piece>| Message { mb, peer, kind, stages, pieces };
        let (sent, received) = (Action::Send(message(dst.0, pieces.clone())), Action::Recv(message(src.0, pieces)));
        self.mailboxes[src.0 as usize].sends.entry(made_by).or_default().push(sent);
        self.mailboxes[dst.0 as usize].recvs.entry(needed_by).or_default().push(received);
    }
}
