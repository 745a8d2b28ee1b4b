//! What the machine runs: by rank its tasks, channels and sums, without rows.

use std::collections::HashMap;

use super::blocked::{Blocked, Deadlock, Halt, Stuck};
use crate::program::{Action, BatchKind, Exchange, Message, Needed, Pass, Payload, Program, RankProgram};
use crate::schedule::{Call, Seated};

/// What a rank does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Task {
    /// Computes, once the messages that it awaits have arrived.
    Compute {
        /// What.
        seated: Seated,
        /// Place of the first of those messages among the script's.
        first: u32,
        /// One past the place of the last.
        end: u32,
    },
    /// Starts to send the next message of a channel. If it is bounded, it waits while more are under way than the
    /// window allows.
    Send {
        /// The channel.
        channel: u32,
        /// At most [`WINDOW`](crate::WINDOW) may be under way.
        bounded: bool,
    },
    /// Starts to receive the next message of a channel.
    Recv {
        /// The channel.
        channel: u32,
    },
    /// Is ready for a sum.
    Sum {
        /// The sum.
        sum: u32,
    },
    /// Waits until an exchange that it is ready for is done.
    Meet {
        /// Its place among the sums.
        sum: u32,
    },
    /// Waits until all sums or gathers that it is ready for are done.
    Await {
        /// Which.
        lane: Lane,
    },
    /// Waits until all that was sent has arrived, and all sums that it is ready for are done.
    Settle,
    /// Updates parameters.
    Update,
}

/// Messages from one seat to one of another rank, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Channel {
    /// The sender.
    pub src: u32,
    /// The receiver.
    pub dst: u32,
    /// From which Stage to which, where either has several.
    pub stages: Option<(u32, u32)>,
}

/// A message: the `place`-th of a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// The channel.
    pub channel: u32,
    /// Place among its messages.
    pub place: u32,
}

/// Which of the sums of a rank follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Lane {
    /// Of gradients.
    Sums,
    /// What is no sum: parts of Params are gathered.
    Gathers,
    /// Nor this: rows move between the ranks' own batches and the Stages.
    Exchanges,
}

impl Lane {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Sums, Self::Gathers, Self::Exchanges];
}

/// What several ranks do together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Joint {
    /// The ranks that take part.
    pub members: Vec<u32>,
    /// What it follows.
    pub lane: Lane,
}

/// What all ranks do.
#[derive(Clone, Debug, Default)]
pub struct Script {
    /// By rank.
    pub ranks: Vec<Vec<Task>>,
    /// All channels.
    pub channels: Vec<Channel>,
    /// All sums, gathers, and exchanges.
    pub sums: Vec<Joint>,
    /// Messages that computations wait for.
    pub(super) awaited: Vec<Slot>,
}

/// Writes a [`Script`], each rank's tasks in their order.
#[derive(Debug)]
pub struct ScriptWriter {
    call: Call,
    script: Script,
    /// By channel, how many messages its receiver has begun to receive.
    posted: Vec<u32>,
    /// By rank, what it has begun to receive for computations to come.
    coming: Vec<Vec<(Needed, Slot)>>,
}

impl ScriptWriter {
    /// A script for so many ranks, which do nothing yet.
    pub fn new(ranks: usize, call: Call) -> Self {
        let script = Script { ranks: vec![Vec::new(); ranks], ..Script::default() };
        Self { call, script, posted: Vec::new(), coming: vec![Vec::new(); ranks] }
    }

    /// How the call comes.
    pub fn call(&self) -> Call {
        self.call
    }

    /// One more channel.
    pub fn channel(&mut self, channel: Channel) -> u32 {
        self.script.channels.push(channel);
        self.posted.push(0);
        number(self.script.channels.len() - 1)
    }

    /// One more sum of these ranks.
    pub fn sum(&mut self, members: Vec<u32>) -> u32 {
        self.joint(Joint { members, lane: Lane::Sums })
    }

    /// One more thing that several ranks do together.
    pub fn joint(&mut self, joint: Joint) -> u32 {
        self.script.sums.push(joint);
        number(self.script.sums.len() - 1)
    }

    /// The receiver of a channel begins to receive what a computation needs.
    pub fn receive(&mut self, channel: u32, needed: Needed) {
        let rank = self.script.channels[channel as usize].dst;
        let place = self.posted[channel as usize];
        self.posted[channel as usize] += 1;
        self.coming[rank as usize].push((needed, Slot { channel, place }));
        self.add(rank, Task::Recv { channel });
    }

    /// A rank computes, once all has arrived that it has begun to receive for that.
    pub fn compute(&mut self, rank: u32, seated: Seated) {
        let first = number(self.script.awaited.len());
        if let Some(needed) = Needed::by(seated) {
            let coming = self.coming[rank as usize].extract_if(.., |(message, _)| *message == needed);
            self.script.awaited.extend(coming.map(|(_, slot)| slot));
        }
        self.add(rank, Task::Compute { seated, first, end: number(self.script.awaited.len()) });
    }

    /// The sender of a channel starts to send.
    pub fn send(&mut self, channel: u32, payload: Payload) {
        let bounded = payload.window(self.call).is_some();
        self.add(self.script.channels[channel as usize].src, Task::Send { channel, bounded });
    }

    /// A rank does something else.
    pub fn add(&mut self, rank: u32, task: Task) {
        self.script.ranks[rank as usize].push(task);
    }

    /// The script.
    pub fn finish(self) -> Script {
        self.script
    }
}

/// What ranks of a Program do together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Collective {
    /// Something with a bucket.
    Bucket {
        /// Its place among the Program's.
        bucket: u32,
        /// What.
        kind: CollectiveKind,
    },
    /// All their exchanges of a kind for a microbatch.
    Exchange {
        /// The kind.
        kind: BatchKind,
        /// The microbatch.
        mb: u32,
    },
}

/// What ranks do together with a bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CollectiveKind {
    /// Sum.
    AllReduce,
    /// Sum one microbatch's gradients, so that each rank gets its part.
    ReduceScatter(u32),
    /// Gather all parts for a computation of a microbatch.
    AllGather(u32, Pass),
}

/// The script of a Program, and by rank and task the place of its Action among the rank's.
#[derive(Clone, Debug)]
pub struct ProgramScript {
    /// The script.
    pub script: Script,
    /// What its sums are.
    pub sums: Vec<Collective>,
    positions: Vec<Vec<usize>>,
}

impl ProgramScript {
    /// The script of a Program.
    ///
    /// # Errors
    /// When the Program's lists do not fit together.
    pub fn new(program: &Program) -> Result<Self, Halt> {
        if !(0..).zip(&program.ranks).all(|(rank, own)| own.rank == rank) {
            return Err(Halt::Shape("the ranks are not numbered in order"));
        }
        let mut translator = Translator {
            writer: ScriptWriter::new(program.ranks.len(), program.call),
            program,
            channels: HashMap::new(),
            sums: Vec::new(),
            known_sums: HashMap::new(),
            exchanging: exchanging(program),
        };
        for bucket in &program.buckets {
            let members =
                program.groups.get(bucket.group as usize).ok_or(Halt::Shape("a bucket's group does not exist"))?;
            if members.iter().any(|&rank| rank as usize >= program.ranks.len()) {
                return Err(Halt::Shape("a group has a rank that does not exist"));
            }
        }
        let positions = program.ranks.iter().map(|own| translator.rank(own)).collect::<Result<_, _>>()?;
        Ok(Self { script: translator.writer.finish(), sums: translator.sums, positions })
    }

    /// The Actions at which the ranks of a Program wait.
    pub fn deadlock(&self, program: &Program, stuck: &[Stuck]) -> Deadlock {
        let blocked = stuck.iter().filter_map(|&(rank, task)| {
            let own = &program.ranks[rank as usize];
            let position = *self.positions[rank as usize].get(task)?;
            let action = own.forward.iter().chain(&own.backward).nth(position)?.clone();
            Some(Blocked { rank, position, action })
        });
        Deadlock(blocked.collect())
    }
}

struct Translator<'a> {
    writer: ScriptWriter,
    program: &'a Program,
    channels: HashMap<Channel, u32>,
    sums: Vec<Collective>,
    known_sums: HashMap<Collective, u32>,
    /// Who takes part in which exchange.
    exchanging: HashMap<Collective, Vec<u32>>,
}

impl Translator<'_> {
    /// Writes a rank's tasks; returns the place of each one's Action.
    fn rank(&mut self, own: &RankProgram) -> Result<Vec<usize>, Halt> {
        let mut positions = Vec::new();
        let all = own.forward.len() + own.backward.len();
        let actions = || own.forward.iter().chain(&own.backward);
        let filling: Vec<(u32, usize)> = actions().enumerate().filter_map(fills).collect();
        let last_filling = filling.last().map(|&(_, position)| position);
        let filling_of: HashMap<u32, usize> = filling.into_iter().collect();
        let mut under_way: Vec<Started> = Vec::new();
        let mut divided = None;
        let mut gathering = None;
        let mut begun = Vec::new();
        for (position, action) in actions().enumerate() {
            if gathering.take_if(|before| *before != gathered_for(action)).is_some() {
                self.writer.add(own.rank, Task::Await { lane: Lane::Gathers });
                positions.push(position);
            }
            match action {
                Action::Forward { .. }
                | Action::Backward { .. }
                | Action::BackwardInput { .. }
                | Action::BackwardWeight { .. } => {
                    action.computed().into_iter().for_each(|seated| self.compute(own.rank, seated, &begun));
                }
                &Action::Exchange(Exchange { kind, mb, .. }) => {
                    let sum = self.sum(Collective::Exchange { kind, mb })?;
                    self.writer.add(own.rank, Task::Sum { sum });
                    begun.push((kind, mb, sum));
                }
                &Action::Send(Message { peer: dst, kind, stages, .. }) => {
                    let channel = self.channel(Channel { src: own.rank, dst, stages })?;
                    self.writer.send(channel, kind);
                }
                &Action::Recv(Message { mb, peer: src, kind: payload, stages, .. }) => {
                    let channel = self.channel(Channel { src, dst: own.rank, stages })?;
                    let stage = stages.map(|(_, to)| to).filter(|_| own.has_several_seats());
                    self.writer.receive(channel, Needed { payload, stage, mb });
                }
                Action::AllReduce { bucket, .. } => {
                    let sum = self.sum(Collective::Bucket { bucket: *bucket, kind: CollectiveKind::AllReduce })?;
                    under_way.push(Started { position, sum, filled: last_filling });
                }
                Action::AllGather { bucket, mb, pass, .. } => {
                    gathering = Some(gathered_for(action));
                    let sum =
                        self.sum(Collective::Bucket { bucket: *bucket, kind: CollectiveKind::AllGather(*mb, *pass) })?;
                    self.writer.add(own.rank, Task::Sum { sum });
                }
                Action::ReduceScatter { bucket, mb, .. } => {
                    if divided.replace(*mb).is_some_and(|before| before != *mb) {
                        self.writer.add(own.rank, Task::Await { lane: Lane::Sums });
                    }
                    let sum =
                        self.sum(Collective::Bucket { bucket: *bucket, kind: CollectiveKind::ReduceScatter(*mb) })?;
                    under_way.push(Started { position, sum, filled: filling_of.get(mb).copied() });
                }
            }
            positions.resize(self.writer.script.ranks[own.rank as usize].len(), position);
            // What stands before a computation that fills it is ready as soon as that is done; sums keep their order.
            let is_ready = |next: &&Started| next.filled.is_none_or(|filled| position >= filled);
            let ready = under_way.iter().take_while(is_ready).count();
            for Started { position, sum, .. } in under_way.drain(..ready) {
                self.writer.add(own.rank, Task::Sum { sum });
                positions.push(position);
            }
            let list_ends = position + 1 == own.forward.len() || position + 1 == all;
            if list_ends {
                self.writer.add(own.rank, Task::Settle);
                positions.push(position);
            }
        }
        if self.writer.call.trains() {
            self.writer.add(own.rank, Task::Update);
            positions.push(all.saturating_sub(1));
        }
        Ok(positions)
    }

    /// A computation, once the exchange that it waits for is done.
    fn compute(&mut self, rank: u32, seated: Seated, begun: &[(BatchKind, u32, u32)]) {
        let needed = (BatchKind::awaited_by(seated.compute), seated.compute.microbatch());
        let awaited = begun.iter().find(|&&(kind, mb, _)| (Some(kind), mb) == needed);
        awaited.into_iter().for_each(|&(_, _, sum)| self.writer.add(rank, Task::Meet { sum }));
        self.writer.compute(rank, seated);
    }

    /// The number of a sum.
    fn sum(&mut self, sum: Collective) -> Result<u32, Halt> {
        if let Some(&known) = self.known_sums.get(&sum) {
            return Ok(known);
        }
        let joint = match sum {
            Collective::Bucket { bucket, kind } => {
                let bucket = self.program.buckets.get(bucket as usize).ok_or(Halt::Shape("a bucket does not exist"))?;
                let lane = if matches!(kind, CollectiveKind::AllGather(..)) { Lane::Gathers } else { Lane::Sums };
                Joint { members: self.program.groups[bucket.group as usize].clone(), lane }
            }
            Collective::Exchange { .. } => Joint { members: self.exchanging[&sum].clone(), lane: Lane::Exchanges },
        };
        let number = self.writer.joint(joint);
        self.sums.push(sum);
        self.known_sums.insert(sum, number);
        Ok(number)
    }

    fn channel(&mut self, channel: Channel) -> Result<u32, Halt> {
        if channel.src.max(channel.dst) as usize >= self.program.ranks.len() {
            return Err(Halt::Shape("a message comes from or goes to a rank that does not exist"));
        }
        let writer = &mut self.writer;
        Ok(*self.channels.entry(channel).or_insert_with(|| writer.channel(channel)))
    }
}

/// The ranks that take part in each exchange.
fn exchanging(program: &Program) -> HashMap<Collective, Vec<u32>> {
    let mut members: HashMap<Collective, Vec<u32>> = HashMap::new();
    for own in &program.ranks {
        for action in own.forward.iter().chain(&own.backward) {
            if let &Action::Exchange(Exchange { kind, mb, .. }) = action {
                let known = members.entry(Collective::Exchange { kind, mb }).or_default();
                if known.last() != Some(&own.rank) {
                    known.push(own.rank);
                }
            }
        }
    }
    members
}

/// A sum that a rank has come to.
struct Started {
    /// Place of its Action.
    position: usize,
    sum: u32,
    /// Place of the computation that fills the bucket, if one does.
    filled: Option<usize>,
}

/// The computation for which Params are gathered.
fn gathered_for(action: &Action) -> Option<(u32, Pass)> {
    if let Action::AllGather { mb, pass, .. } = action { Some((*mb, *pass)) } else { None }
}

/// The microbatch of a computation behind which nothing adds to its gradients, with its place.
fn fills((position, action): (usize, &Action)) -> Option<(u32, usize)> {
    let compute = action.computed().map(|seated| seated.compute).filter(|compute| compute.ends_microbatch());
    compute.map(|compute| (compute.microbatch(), position))
}

fn number(place: usize) -> u32 {
    u32::try_from(place).expect("fewer than 2^32")
}
