//! Runs a Program where every computation takes one tick and messages take none.

use std::collections::{HashMap, VecDeque};

use super::{Blocked, Deadlock, GRAD_WINDOW};
use crate::program::{Action, Message, Payload, Program};
use crate::schedule::Compute;

/// When a rank computes what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tick {
    /// When it begins, in ticks.
    pub start: usize,
    /// What.
    pub compute: Compute,
}

/// By rank, its computations in order; or, when not all can finish, what holds up each rank.
pub(crate) fn ticks(program: &Program) -> Result<Vec<Vec<Tick>>, Deadlock> {
    let mut machine = Machine {
        ranks: program.ranks.iter().map(|_| RankState { queued: true, ..RankState::default() }).collect(),
        channels: HashMap::new(),
        ready: (0..program.ranks.len()).collect(),
    };
    while let Some(rank) = machine.ready.pop_front() {
        machine.ranks[rank].queued = false;
        let own = &program.ranks[rank];
        let mut actions = own.forward.iter().chain(&own.backward).skip(machine.ranks[rank].position);
        while actions.next().is_some_and(|action| machine.step(rank, action)) {
            machine.ranks[rank].position += 1;
        }
    }
    let blocked: Vec<Blocked> = (program.ranks.iter().zip(&machine.ranks))
        .filter_map(|(own, state)| {
            let action = own.forward.iter().chain(&own.backward).nth(state.position)?.clone();
            Some(Blocked { rank: own.rank, position: state.position, action })
        })
        .collect();
    if blocked.is_empty() {
        Ok(machine.ranks.into_iter().map(|state| state.ticks).collect())
    } else {
        Err(Deadlock(blocked))
    }
}

#[derive(Default)]
struct RankState {
    position: usize,
    clock: usize,
    queued: bool,
    ticks: Vec<Tick>,
    /// The messages that a computation waits for: who sends it, and its place in the channel.
    awaited: HashMap<(Payload, u32), Vec<(usize, usize)>>,
}

/// Times of the Sends and Recvs from one rank to another.
#[derive(Default)]
struct ChannelTicks {
    sent: Vec<usize>,
    received: Vec<usize>,
}

struct Machine {
    ranks: Vec<RankState>,
    channels: HashMap<(usize, usize), ChannelTicks>,
    ready: VecDeque<usize>,
}

impl Machine {
    /// Does the action, or returns false when it must wait.
    fn step(&mut self, rank: usize, action: &Action) -> bool {
        match action {
            Action::Forward { mb } => self.compute(rank, Payload::Value, Compute::Forward(*mb)),
            Action::Backward { mb } => self.compute(rank, Payload::Grad, Compute::Backward(*mb)),
            Action::Send(message) => self.send(rank, message),
            Action::Recv(message) => self.receive(rank, message),
            Action::Reduce => true,
        }
    }

    fn compute(&mut self, rank: usize, needs: Payload, compute: Compute) -> bool {
        let Self { ranks, channels, .. } = self;
        let state = &mut ranks[rank];
        let mut start = state.clock;
        for &(sender, place) in state.awaited.get(&(needs, compute.microbatch())).into_iter().flatten() {
            let Some(&sent) = channels.get(&(sender, rank)).and_then(|channel| channel.sent.get(place)) else {
                return false;
            };
            start = start.max(sent);
        }
        state.ticks.push(Tick { start, compute });
        state.clock = start + 1;
        true
    }

    fn send(&mut self, rank: usize, message: &Message) -> bool {
        let receiver = message.peer as usize;
        let channel = self.channels.entry((rank, receiver)).or_default();
        let clock = &mut self.ranks[rank].clock;
        if message.kind == Payload::Grad
            && let Some(earlier) = channel.sent.len().checked_sub(GRAD_WINDOW)
        {
            match channel.received.get(earlier) {
                Some(&received) => *clock = received.max(*clock),
                None => return false,
            }
        }
        channel.sent.push(*clock);
        self.wake(receiver);
        true
    }

    fn receive(&mut self, rank: usize, message: &Message) -> bool {
        let sender = message.peer as usize;
        let channel = self.channels.entry((sender, rank)).or_default();
        let state = &mut self.ranks[rank];
        state.awaited.entry((message.kind, message.mb)).or_default().push((sender, channel.received.len()));
        channel.received.push(state.clock);
        self.wake(sender);
        true
    }

    fn wake(&mut self, rank: usize) {
        if let Some(state) = self.ranks.get_mut(rank)
            && !std::mem::replace(&mut state.queued, true)
        {
            self.ready.push_back(rank);
        }
    }
}
