//! Runs a script. Ranks go on in turn until each waits or has ended; the order in which they do so
//! changes no time.

use std::collections::{BTreeMap, HashMap, VecDeque};

use rannc_plan::{Blocked, CheckError, Compute, Deadlock, GRAD_WINDOW, Payload, Program, RankProgram};

use crate::costs::{Costs, RowCosts};
use crate::error::SimError;
use crate::links::Channel;
use crate::script::{Script, Slot, Task};
use crate::timeline::{Event, RankTimeline, Timeline, What};

/// Simulates one step of a Program that passes [`check`](rannc_plan::check()).
///
/// # Errors
/// When the Program's lists do not fit together, when its ranks wait for each other, or when a cost is
/// not a time.
pub fn simulate(program: &Program, costs: &dyn Costs) -> Result<Timeline, SimError> {
    let script = Script::new(program, costs)?;
    let mut machine = Machine::new(program, costs, &script);
    while let Some(rank) = machine.ready.pop_front() {
        machine.advance(rank);
    }
    let blocked = machine.blocked();
    if blocked.is_empty() { Ok(machine.timeline()) } else { Err(CheckError::from(Deadlock(blocked)).into()) }
}

/// When a message moves.
#[derive(Clone, Copy, Debug)]
struct Span {
    start_us: f64,
    end_us: f64,
}

/// When the messages of a channel are ready at either end, and when they move.
#[derive(Default)]
struct Traffic {
    sent_us: Vec<f64>,
    posted_us: Vec<f64>,
    moved: Vec<Span>,
}

/// The ranks of a Stage on their way to their reduction.
#[derive(Default)]
struct Gathering {
    members: Vec<u32>,
    arrived: usize,
    last_us: f64,
}

struct Machine<'a> {
    program: &'a Program,
    script: &'a Script,
    ranks: Vec<RankState>,
    traffic: Vec<Traffic>,
    gatherings: BTreeMap<u32, Gathering>,
    ready: VecDeque<u32>,
}

impl<'a> Machine<'a> {
    fn new(program: &'a Program, costs: &dyn Costs, script: &'a Script) -> Self {
        let mut gatherings: BTreeMap<u32, Gathering> = BTreeMap::new();
        for own in &program.ranks {
            gatherings.entry(own.stage).or_default().members.push(own.rank);
        }
        Self {
            program,
            script,
            ranks: program.ranks.iter().map(|own| RankState::new(own, costs.fixed_bytes(own.stage))).collect(),
            traffic: script.channels.iter().map(|_| Traffic::default()).collect(),
            gatherings,
            ready: program.ranks.iter().map(|own| own.rank).collect(),
        }
    }

    /// Runs a rank as far as it gets.
    fn advance(&mut self, rank: u32) {
        let script = &self.script.ranks[rank as usize];
        self.ranks[rank as usize].queued = false;
        while let Some(&(_, task)) = script.get(self.ranks[rank as usize].next) {
            if !self.perform(rank, task) {
                return;
            }
            self.ranks[rank as usize].next += 1;
        }
    }

    /// Does the Task, or returns false when it must wait.
    fn perform(&mut self, rank: u32, task: Task) -> bool {
        let state = &mut self.ranks[rank as usize];
        match task {
            Task::Compute { compute, costs } => {
                let needs = match compute {
                    Compute::Forward(_) => Payload::Value,
                    Compute::Backward(_) => Payload::Grad,
                };
                let awaited = state.awaited.remove(&(needs, compute.microbatch())).unwrap_or_default();
                state.waits.extend(awaited);
                if !state.wait(&self.traffic) {
                    return false;
                }
                state.compute(compute, costs, self.program.call.trains());
            }
            Task::Send { slot } => return self.send(rank, slot),
            Task::Recv { channel, payload, mb } => {
                let posted_us = &mut self.traffic[channel].posted_us;
                let place = posted_us.len();
                posted_us.push(state.clock_us);
                state.awaited.entry((payload, mb)).or_default().push(Slot { channel, place });
                self.transfer(channel);
            }
            Task::Settle => {
                state.waits.append(&mut state.sent);
                return state.wait(&self.traffic);
            }
            Task::Reduce { us } => return self.reduce(rank, us),
            Task::Update { us } => {
                state.spend(us, What::Update);
                state.record.update_us += us;
            }
        }
        true
    }

    fn send(&mut self, rank: u32, slot: Slot) -> bool {
        let state = &mut self.ranks[rank as usize];
        let bounded = !self.program.call.trains() || self.script.parcel(slot).payload == Payload::Grad;
        if bounded && let Some(place) = slot.place.checked_sub(GRAD_WINDOW) {
            state.waits = vec![Slot { place, ..slot }];
            if !state.wait(&self.traffic) {
                return false;
            }
        }
        self.traffic[slot.channel].sent_us.push(state.clock_us);
        state.sent.push(slot);
        self.transfer(slot.channel);
        true
    }

    /// Moves what is ready at both ends of a channel.
    fn transfer(&mut self, channel: usize) {
        let Channel { src, dst, parcels } = &self.script.channels[channel];
        let Traffic { sent_us, posted_us, moved } = &mut self.traffic[channel];
        let known = moved.len();
        for place in known..sent_us.len().min(posted_us.len()) {
            let free_us = moved.last().map_or(0.0, |span| span.end_us);
            let start_us = sent_us[place].max(posted_us[place]).max(free_us);
            let end_us = start_us + parcels[place].us;
            moved.push(Span { start_us, end_us });
            let (mb, payload) = (parcels[place].mb, parcels[place].payload);
            let event = |what| Event { start_us, end_us, what };
            self.ranks[*src as usize].record.events.push(event(What::Send { mb, peer: *dst, payload }));
            self.ranks[*dst as usize].record.events.push(event(What::Recv { mb, peer: *src, payload }));
        }
        if moved.len() > known {
            self.wake(*src);
            self.wake(*dst);
        }
    }

    fn reduce(&mut self, rank: u32, us: f64) -> bool {
        let state = &mut self.ranks[rank as usize];
        let stage = self.program.ranks[rank as usize].stage;
        let gathering = self.gatherings.get_mut(&stage).expect("every rank's Stage has a gathering");
        if !std::mem::replace(&mut state.gathered, true) {
            gathering.arrived += 1;
            gathering.last_us = gathering.last_us.max(state.clock_us);
            if gathering.arrived == gathering.members.len() {
                for member in gathering.members.clone() {
                    self.wake(member);
                }
            }
        }
        let (state, gathering) = (&mut self.ranks[rank as usize], &self.gatherings[&stage]);
        if gathering.arrived < gathering.members.len() {
            return false;
        }
        state.clock_us = state.clock_us.max(gathering.last_us);
        state.spend(us, What::Reduce);
        state.record.reduce_us += us;
        true
    }

    fn wake(&mut self, rank: u32) {
        if !std::mem::replace(&mut self.ranks[rank as usize].queued, true) {
            self.ready.push_back(rank);
        }
    }

    /// The ranks that have not come to their end, and the Actions at which they wait.
    fn blocked(&self) -> Vec<Blocked> {
        let waiting = self.ranks.iter().zip(&self.script.ranks).zip(&self.program.ranks);
        let blocked = waiting.filter_map(|((state, script), own)| {
            let &(position, _) = script.get(state.next)?;
            let action = own.forward.iter().chain(&own.backward).nth(position)?.clone();
            Some(Blocked { rank: own.rank, position, action })
        });
        blocked.collect()
    }

    fn timeline(self) -> Timeline {
        let step_us = self.ranks.iter().map(|state| state.clock_us).fold(0.0, f64::max);
        Timeline { step_us, ranks: self.ranks.into_iter().map(|state| state.finish(step_us)).collect() }
    }
}

/// How far a rank is.
struct RankState {
    next: usize,
    queued: bool,
    gathered: bool,
    clock_us: f64,
    /// What each computation waits for.
    awaited: HashMap<(Payload, u32), Vec<Slot>>,
    /// What it has sent since it last settled.
    sent: Vec<Slot>,
    /// What the current Task waits for.
    waits: Vec<Slot>,
    /// What the current Task has waited for.
    waited: Vec<Span>,
    held_bytes: u64,
    record: RankTimeline,
}

impl RankState {
    fn new(own: &RankProgram, fixed_bytes: u64) -> Self {
        let record = RankTimeline {
            rank: own.rank,
            stage: own.stage,
            replica: own.replica,
            events: Vec::new(),
            busy_us: 0.0,
            waiting_us: 0.0,
            reduce_us: 0.0,
            update_us: 0.0,
            bubble_us: 0.0,
            peak_bytes: fixed_bytes,
            memory: vec![(0.0, fixed_bytes)],
        };
        Self {
            next: 0,
            queued: true,
            gathered: false,
            clock_us: 0.0,
            awaited: HashMap::new(),
            sent: Vec::new(),
            waits: Vec::new(),
            waited: Vec::new(),
            held_bytes: fixed_bytes,
            record,
        }
    }

    /// Idles until the messages in `waits` have arrived; false when it is not known yet when one will.
    fn wait(&mut self, traffic: &[Traffic]) -> bool {
        while let Some(slot) = self.waits.last() {
            let Some(&span) = traffic[slot.channel].moved.get(slot.place) else { return false };
            self.waits.pop();
            self.waited.push(span);
        }
        self.waited.sort_by(|a, b| a.start_us.total_cmp(&b.start_us));
        for span in self.waited.drain(..) {
            if span.end_us > self.clock_us {
                self.record.waiting_us += span.end_us - span.start_us.max(self.clock_us);
                self.clock_us = span.end_us;
            }
        }
        true
    }

    fn compute(&mut self, compute: Compute, costs: RowCosts, trains: bool) {
        let (us, what) = match compute {
            Compute::Forward(mb) => (costs.forward_us, What::Forward { mb }),
            Compute::Backward(mb) => (costs.backward_us, What::Backward { mb }),
        };
        let is_forward = matches!(compute, Compute::Forward(_));
        if is_forward {
            self.held_bytes = self.held_bytes.saturating_add(costs.microbatch_bytes);
        }
        self.note_memory(self.held_bytes.saturating_add(costs.workspace_bytes));
        self.spend(us, what);
        self.record.busy_us += us;
        if !is_forward || !trains {
            self.held_bytes = self.held_bytes.saturating_sub(costs.microbatch_bytes);
        }
        self.note_memory(self.held_bytes);
    }

    fn spend(&mut self, us: f64, what: What) {
        let start_us = self.clock_us;
        self.clock_us += us;
        self.record.events.push(Event { start_us, end_us: self.clock_us, what });
    }

    fn note_memory(&mut self, bytes: u64) {
        self.record.peak_bytes = self.record.peak_bytes.max(bytes);
        match self.record.memory.last_mut() {
            Some((since_us, level)) if *since_us == self.clock_us => *level = bytes,
            _ => self.record.memory.push((self.clock_us, bytes)),
        }
    }

    fn finish(self, step_us: f64) -> RankTimeline {
        let mut record = self.record;
        record.events.sort_by(|a, b| a.start_us.total_cmp(&b.start_us));
        let spent_us = record.busy_us + record.waiting_us + record.reduce_us + record.update_us;
        record.bubble_us = (step_us - spent_us).max(0.0);
        record
    }
}
