//! The machine itself: ranks go on in turn until each waits or has ended; the order in which they do so changes no
//! time.

use std::collections::VecDeque;

use super::blocked::Stuck;
use super::clock::{Clock, Observer, Pause, Span};
use super::script::{Channel, Joint, Lane, Script, Slot, Task};
use crate::schedule::WINDOW;

/// Runs a script to its end, and returns when that is.
///
/// # Errors
/// When ranks wait for each other: all that cannot go on.
pub fn run(script: &Script, clock: &impl Clock, observer: &mut impl Observer) -> Result<f64, Vec<Stuck>> {
    let mut machine = Machine {
        script,
        clock,
        observer,
        ranks: script.ranks.iter().map(|_| RankState { queued: true, ..RankState::default() }).collect(),
        traffic: script.channels.iter().map(|_| Traffic::default()).collect(),
        gatherings: script.sums.iter().map(|_| Gathering::default()).collect(),
        ready: (0..).take(script.ranks.len()).collect(),
        spans: Vec::new(),
    };
    while let Some(rank) = machine.ready.pop_front() {
        machine.advance(rank);
    }
    let ends = (0..).zip(machine.ranks.iter().zip(&script.ranks));
    let stuck = ends.filter_map(|(rank, (state, tasks))| Some((rank, state.waits_in(script, tasks)?)));
    let stuck: Vec<Stuck> = stuck.collect();
    if stuck.is_empty() { Ok(machine.ranks.iter().map(|state| state.now).fold(0.0, f64::max)) } else { Err(stuck) }
}

/// When the messages of a channel are ready at either end, and when they move.
#[derive(Default)]
struct Traffic {
    sent: Vec<f64>,
    posted: Vec<f64>,
    moved: Vec<Span>,
}

/// The members of a sum on their way to it.
#[derive(Default)]
struct Gathering {
    arrived: usize,
    ready: f64,
    span: Option<Span>,
}

/// How far a rank is.
#[derive(Default)]
struct RankState {
    next: usize,
    queued: bool,
    now: f64,
    /// What it has sent since it last settled.
    sent: Vec<Slot>,
    /// Its sums, its gathers and its exchanges, each in order.
    sums: Queue,
    gathers: Queue,
    exchanges: Queue,
}

/// The sums that a rank has been ready for, in order.
#[derive(Default)]
struct Queue {
    all: Vec<u32>,
    /// How many of them are done, and how many it has waited for.
    done: usize,
    settled: usize,
}

impl Queue {
    /// The one that it is ready for and that comes next.
    fn next(&self) -> Option<u32> {
        self.all.get(self.done).copied()
    }
}

struct Machine<'a, C, O> {
    script: &'a Script,
    clock: &'a C,
    observer: &'a mut O,
    ranks: Vec<RankState>,
    traffic: Vec<Traffic>,
    gatherings: Vec<Gathering>,
    ready: VecDeque<u32>,
    /// What a rank is about to wait for; empty in between.
    spans: Vec<(Span, Pause)>,
}

impl<C: Clock, O: Observer> Machine<'_, C, O> {
    /// Runs a rank as far as it gets.
    fn advance(&mut self, rank: u32) {
        let tasks = &self.script.ranks[rank as usize];
        self.ranks[rank as usize].queued = false;
        while let Some(&task) = tasks.get(self.ranks[rank as usize].next) {
            if !self.perform(rank, task) {
                return;
            }
            self.ranks[rank as usize].next += 1;
        }
    }

    /// Does the task, or returns false when it must wait.
    fn perform(&mut self, rank: u32, task: Task) -> bool {
        match task {
            Task::Compute { seated, first, end } => {
                let script = self.script;
                if !self.wait(rank, &script.awaited[first as usize..end as usize]) {
                    return false;
                }
                let us = self.clock.compute(rank, seated);
                let span = self.spend(rank, us);
                self.observer.computed(rank, seated, span);
            }
            Task::Send { channel, bounded } => return self.send(rank, channel, bounded),
            Task::Recv { channel } => {
                self.traffic[channel as usize].posted.push(self.ranks[rank as usize].now);
                self.transfer(channel);
            }
            Task::Sum { sum } => self.gather(rank, sum),
            Task::Meet { sum } => return self.meet(rank, sum),
            Task::Await { lane } => return self.settle_sums(rank, lane),
            Task::Settle => return self.settle(rank),
            Task::Update => {
                let us = self.clock.update(rank);
                let span = self.spend(rank, us);
                self.observer.updated(rank, span);
            }
        }
        true
    }

    fn spend(&mut self, rank: u32, us: f64) -> Span {
        let now = &mut self.ranks[rank as usize].now;
        let start = std::mem::replace(now, *now + us);
        Span { start, end: *now }
    }

    /// Idles until these messages have arrived; false when it is not known yet when one will.
    fn wait(&mut self, rank: u32, slots: &[Slot]) -> bool {
        for slot in slots {
            let Some(&span) = self.traffic[slot.channel as usize].moved.get(slot.place as usize) else {
                self.spans.clear();
                return false;
            };
            self.spans.push((span, Pause::Message));
        }
        self.pause(rank);
        true
    }

    /// Idles until what was put into `spans` has ended.
    fn pause(&mut self, rank: u32) {
        self.spans.sort_by(|(a, _), (b, _)| a.start.total_cmp(&b.start));
        let now = &mut self.ranks[rank as usize].now;
        for (Span { start, end }, pause) in self.spans.drain(..) {
            if end > *now {
                self.observer.paused(rank, end - start.max(*now), pause);
                *now = end;
            }
        }
    }

    fn send(&mut self, rank: u32, channel: u32, bounded: bool) -> bool {
        let place = self.traffic[channel as usize].sent.len();
        if bounded && let Some(earlier) = place.checked_sub(WINDOW) {
            let earlier = Slot { channel, place: number(earlier) };
            if !self.wait(rank, &[earlier]) {
                return false;
            }
        }
        let state = &mut self.ranks[rank as usize];
        self.traffic[channel as usize].sent.push(state.now);
        state.sent.push(Slot { channel, place: number(place) });
        self.transfer(channel);
        true
    }

    /// Moves what is ready at both ends of a channel.
    fn transfer(&mut self, channel: u32) {
        let Traffic { sent, posted, moved } = &mut self.traffic[channel as usize];
        let known = moved.len();
        for place in known..sent.len().min(posted.len()) {
            let free = moved.last().map_or(0.0, |span| span.end);
            let start = sent[place].max(posted[place]).max(free);
            let slot = Slot { channel, place: number(place) };
            let span = Span { start, end: start + self.clock.message(slot) };
            moved.push(span);
            self.observer.moved(slot, span);
        }
        if moved.len() > known {
            let Channel { src, dst, .. } = self.script.channels[channel as usize];
            self.wake(src);
            self.wake(dst);
        }
    }

    /// Notes that a rank is ready for a sum. A rank's sums run one after another, in its own order.
    fn gather(&mut self, rank: u32, sum: u32) {
        let lane = self.script.sums[sum as usize].lane;
        let state = &mut self.ranks[rank as usize];
        state.queue_mut(lane).all.push(sum);
        let gathering = &mut self.gatherings[sum as usize];
        gathering.arrived += 1;
        gathering.ready = gathering.ready.max(state.now);
        let mut open = vec![sum];
        while let Some(sum) = open.pop() {
            if self.run_sum(sum) {
                let members = &self.script.sums[sum as usize].members;
                open.extend(members.iter().filter_map(|&member| self.ranks[member as usize].queue(lane).next()));
            }
        }
    }

    /// Runs a sum if all its members have come to it.
    fn run_sum(&mut self, sum: u32) -> bool {
        let Joint { members, lane } = &self.script.sums[sum as usize];
        let Gathering { arrived, ready, span } = self.gatherings[sum as usize];
        let next = |member: u32| self.ranks[member as usize].queue(*lane).next();
        if span.is_some() || arrived < members.len() || members.iter().any(|&rank| next(rank) != Some(sum)) {
            return false;
        }
        let before = members.iter().filter_map(|&member| self.last_sum(member, *lane)).map(|span| span.end);
        let start = before.fold(ready, f64::max);
        let span = Span { start, end: start + self.clock.sum(sum) };
        self.gatherings[sum as usize].span = Some(span);
        self.observer.summed(sum, span);
        for &member in members {
            self.ranks[member as usize].queue_mut(*lane).done += 1;
            self.wake(member);
        }
        true
    }

    /// The last sum of a rank that is done.
    fn last_sum(&self, rank: u32, lane: Lane) -> Option<Span> {
        let queue = self.ranks[rank as usize].queue(lane);
        let last = queue.all[..queue.done].last()?;
        self.gatherings[*last as usize].span
    }

    /// Waits for an exchange; false when it is not known yet when that ends.
    fn meet(&mut self, rank: u32, sum: u32) -> bool {
        let Some(span) = self.gatherings[sum as usize].span else { return false };
        self.spans.push((span, Pause::Message));
        self.pause(rank);
        true
    }

    /// Waits for its sums; false when it is not known yet when they end.
    fn settle_sums(&mut self, rank: u32, lane: Lane) -> bool {
        if self.ranks[rank as usize].queue(lane).next().is_some() {
            return false;
        }
        self.add_sums(rank, lane);
        self.pause(rank);
        true
    }

    /// Puts the sums that a rank waits for into `spans`; all are known.
    fn add_sums(&mut self, rank: u32, lane: Lane) {
        let queue = self.ranks[rank as usize].queue_mut(lane);
        let settled = std::mem::replace(&mut queue.settled, queue.all.len());
        let sums = queue.all[settled..].iter().filter_map(|&sum| self.gatherings[sum as usize].span);
        let pause = if lane == Lane::Exchanges { Pause::Message } else { Pause::Sum };
        self.spans.extend(sums.map(|span| (span, pause)));
    }

    /// Waits for all that is under way; false when it is not known yet when that ends.
    fn settle(&mut self, rank: u32) -> bool {
        let state = &self.ranks[rank as usize];
        if Lane::ALL.iter().any(|&lane| state.queue(lane).next().is_some()) {
            return false;
        }
        for &Slot { channel, place } in &state.sent {
            let Some(&span) = self.traffic[channel as usize].moved.get(place as usize) else {
                self.spans.clear();
                return false;
            };
            self.spans.push((span, Pause::Message));
        }
        self.ranks[rank as usize].sent.clear();
        // Of what starts together, sums count first.
        let messages = std::mem::take(&mut self.spans);
        Lane::ALL.iter().for_each(|&lane| self.add_sums(rank, lane));
        self.spans.extend(messages);
        self.pause(rank);
        true
    }

    fn wake(&mut self, rank: u32) {
        if !std::mem::replace(&mut self.ranks[rank as usize].queued, true) {
            self.ready.push_back(rank);
        }
    }
}

impl RankState {
    /// The task that waits; where that waits for sums, the sum that does not end.
    fn waits_in(&self, script: &Script, tasks: &[Task]) -> Option<usize> {
        let waiting = tasks.get(self.next)?;
        let lane = match waiting {
            Task::Await { lane } => Some(*lane),
            Task::Meet { .. } => Some(Lane::Exchanges),
            Task::Settle => Lane::ALL.into_iter().find(|&lane| self.queue(lane).next().is_some()),
            _ => None,
        };
        let is_sum =
            |task: &Task, lane: Lane| matches!(task, Task::Sum { sum } if script.sums[*sum as usize].lane == lane);
        let sum =
            lane.and_then(|lane| (0..self.next).filter(|&task| is_sum(&tasks[task], lane)).nth(self.queue(lane).done));
        Some(sum.unwrap_or(self.next))
    }

    fn queue(&self, lane: Lane) -> &Queue {
        match lane {
            Lane::Sums => &self.sums,
            Lane::Gathers => &self.gathers,
            Lane::Exchanges => &self.exchanges,
        }
    }

    fn queue_mut(&mut self, lane: Lane) -> &mut Queue {
        match lane {
            Lane::Sums => &mut self.sums,
            Lane::Gathers => &mut self.gathers,
            Lane::Exchanges => &mut self.exchanges,
        }
    }
}

fn number(place: usize) -> u32 {
    u32::try_from(place).expect("fewer than 2^32")
}
