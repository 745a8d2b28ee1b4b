//! The time that a Plan is said to take: its division run on the machine, each Replica with its own rows.

use rannc_plan::{
    BatchKind, Call, Channel, Clock, Compute, ExchangePlaces, Joint, Lane, Needed, Order, Payload, Schedule,
    ScheduleKind, Script, ScriptWriter, Seated, Sharding, Slot, Step, Task, run, with_messages,
};

use super::batch_exchanges::BatchExchange;
use super::links::{Moves, ReplicaLink};
use super::tied::TiedSum;
use crate::price::{BySize, ReplicaPass, StepModel, TimedStage};

impl StepModel {
    /// The time of a step of Stages; infinite where they wait for each other for ever.
    pub(crate) fn exact_us(&self, schedule: &Schedule, stages: &[TimedStage], moves: &Moves) -> f64 {
        let Moves { links, exchanges, tied } = moves;
        let replicas = |(stage, timed): (usize, &TimedStage)| std::iter::repeat_n(stage, timed.passes.len());
        let stage_of: Vec<usize> = stages.iter().enumerate().flat_map(replicas).collect();
        let passes = stages.iter().flat_map(|timed| &timed.passes).collect();
        let call = call_of(schedule);
        let mut writer = ScriptWriter::new(stage_of.len(), call);
        let mut prices =
            Prices { step: self, stages, stage_of: &stage_of, passes, messages_us: Vec::new(), sums_us: Vec::new() };
        let lines = connect(&mut writer, &mut prices, links);
        let together = Together::of_stages(&mut writer, &mut prices, tied);
        let microbatches = u32::try_from(self.microbatches).expect("as many as fit into a plan");
        let met = meetings(&mut writer, &mut prices, exchanges, microbatches);
        let feeds: Vec<(usize, usize)> = links.iter().map(|link| (stage_of[link.from], stage_of[link.to])).collect();
        let ranks: Vec<Vec<u32>> = (0..stages.len()).map(|stage| prices.ranks_of(&[stage])).collect();
        let orders = schedule.stage_orders(&ranks, &feeds, microbatches);
        let lists: Vec<Vec<List>> = orders.iter().map(|order| lists(order, call)).collect();
        for ((rank, line), &stage) in (0..).zip(&lines).zip(&stage_of) {
            let member = Member { step: self, rank, line, together: &together[stage], met: &met[rank as usize] };
            let (mut has_sums, lists) = (false, &lists[stage]);
            for (index, list) in lists.iter().enumerate() {
                let is_here = |kind: BatchKind| lists.len() == 1 || kind.is_of_backward() == (index == 1);
                member.write(&mut writer, list, is_here, &mut has_sums);
                if index + 1 == lists.len() {
                    member.together.last.iter().for_each(|&sum| writer.add(rank, Task::Sum { sum }));
                }
                writer.add(rank, Task::Settle);
            }
            writer.add(rank, Task::Update);
        }
        let script: Script = writer.finish();
        run(&script, &prices, &mut ()).unwrap_or(f64::INFINITY)
    }
}

/// How the call comes whose steps are told: as often as it can. Where all forwards come first it may come in halves, between
/// which ranks wait for all that is under way.
pub(super) fn call_of(schedule: &Schedule) -> Call {
    match schedule {
        Schedule::Named(ScheduleKind::FillDrain) => Call::Halves,
        Schedule::Explicit(orders) if orders.iter().all(Order::has_forwards_first) => Call::Halves,
        Schedule::Named(ScheduleKind::OneForwardOneBackward) | Schedule::Explicit(_) => Call::Whole,
    }
}

/// Computations at whose end a rank waits for all that is under way, and where exchanges stand among them.
struct List {
    computes: Vec<Compute>,
    places: ExchangePlaces,
}

/// An order's computations, in one list or in two.
fn lists(order: &Order, call: Call) -> Vec<List> {
    let is_forward = |compute: &Compute| matches!(compute, Compute::Forward(_));
    let lists = match call {
        Call::Halves => {
            let (forwards, backwards): (Vec<Compute>, Vec<Compute>) = order.computes().partition(is_forward);
            vec![forwards, backwards]
        }
        Call::Forward | Call::Whole => vec![order.computes().collect()],
    };
    lists.into_iter().map(|computes| List { places: ExchangePlaces::new(computes.iter().copied()), computes }).collect()
}

/// An exchange that a rank takes part in.
#[derive(Clone, Copy)]
struct Met {
    kind: BatchKind,
    mb: u32,
    sum: u32,
}

/// Makes the exchanges; returns those of each rank, in order.
fn meetings(
    writer: &mut ScriptWriter,
    prices: &mut Prices<'_>,
    exchanges: &[BatchExchange],
    microbatches: u32,
) -> Vec<Vec<Met>> {
    let mut met: Vec<Vec<Met>> = vec![Vec::new(); prices.stage_of.len()];
    let halves = writer.call() == Call::Halves;
    for BatchExchange { kind, meetings, first } in
        exchanges.iter().filter(|own| halves || own.kind != BatchKind::OutputGrad)
    {
        for mb in 0..microbatches {
            let meeting = if mb == 0 { first } else { &meetings[prices.step.size_of(u64::from(mb))] };
            if meeting.members.is_empty() {
                continue;
            }
            let sum = writer.joint(Joint { members: meeting.members.clone(), lane: Lane::Exchanges });
            prices.sums_us.push(meeting.us);
            meeting.members.iter().for_each(|&rank| met[rank as usize].push(Met { kind: *kind, mb, sum }));
        }
    }
    met
}

/// A Replica with all that it does.
struct Member<'a> {
    step: &'a StepModel,
    rank: u32,
    line: &'a Line,
    together: &'a Together,
    met: &'a [Met],
}

impl Member<'_> {
    /// Its tasks of a list.
    fn write(&self, writer: &mut ScriptWriter, list: &List, is_here: impl Fn(BatchKind) -> bool, has_sums: &mut bool) {
        let mut coming = self.met.iter().filter(|met| is_here(met.kind)).peekable();
        let mut meet = |writer: &mut ScriptWriter, done: usize| {
            while let Some(met) = coming.next_if(|met| list.places.behind(met.kind, met.mb) <= done) {
                writer.add(self.rank, Task::Sum { sum: met.sum });
            }
        };
        let mut done = 0;
        meet(writer, done);
        with_messages(list.computes.iter().copied().map(Seated::from), |step| match step {
            Step::Compute(Seated { compute, .. }) => {
                self.together.write(writer, self.rank, compute, self.awaited(compute), has_sums);
            }
            Step::Receive(seated) => self.line.receive(writer, seated, self.size_of(seated.compute)),
            Step::Send(seated) => {
                self.line.send(writer, seated, self.size_of(seated.compute));
                done += 1;
                meet(writer, done);
            }
        });
    }

    fn size_of(&self, compute: Compute) -> usize {
        self.step.size_of(u64::from(compute.microbatch()))
    }

    /// The exchange that a computation waits for.
    fn awaited(&self, compute: Compute) -> Option<u32> {
        let needed = (BatchKind::awaited_by(compute)?, compute.microbatch());
        let found = self.met.binary_search_by_key(&needed, |met| (met.kind, met.mb)).ok()?;
        Some(self.met[found].sum)
    }
}

/// How long everything takes.
struct Prices<'a> {
    step: &'a StepModel,
    stages: &'a [TimedStage],
    stage_of: &'a [usize],
    /// By rank.
    passes: Vec<&'a BySize<ReplicaPass>>,
    /// By channel, its messages in order.
    messages_us: Vec<Vec<f64>>,
    sums_us: Vec<f64>,
}

impl Prices<'_> {
    fn ranks_of(&self, stages: &[usize]) -> Vec<u32> {
        (0..).zip(self.stage_of).filter(|(_, stage)| stages.contains(stage)).map(|(rank, _)| rank).collect()
    }
}

impl Clock for Prices<'_> {
    fn compute(&self, rank: u32, Seated { compute, .. }: Seated) -> f64 {
        self.passes[rank as usize][self.step.size_of(u64::from(compute.microbatch()))].us(compute)
    }
    fn message(&self, message: Slot) -> f64 {
        self.messages_us[message.channel as usize][message.place as usize]
    }
    fn sum(&self, sum: u32) -> f64 {
        self.sums_us[sum as usize]
    }
    fn update(&self, rank: u32) -> f64 {
        self.stages[self.stage_of[rank as usize]].end.update_us
    }
}

/// The channels of a Replica, by the way of what goes through them, and by size of the microbatch.
#[derive(Clone, Default)]
struct Line {
    values_in: BySize<Vec<u32>>,
    values_out: BySize<Vec<u32>>,
    grads_in: BySize<Vec<u32>>,
    grads_out: BySize<Vec<u32>>,
}

impl Line {
    fn receive(&self, writer: &mut ScriptWriter, seated: Seated, size: usize) {
        let Some(needed) = Needed::by(seated) else { return };
        let channels = if needed.payload == Payload::Value { &self.values_in } else { &self.grads_in };
        channels[size].iter().for_each(|&channel| writer.receive(channel, needed));
    }

    fn send(&self, writer: &mut ScriptWriter, seated: Seated, size: usize) {
        let Some(payload) = Payload::of(seated.compute) else { return };
        let channels = if payload == Payload::Value { &self.values_out } else { &self.grads_out };
        channels[size].iter().for_each(|&channel| writer.send(channel, payload));
    }
}

/// Makes the channels; returns those of each Replica.
fn connect(writer: &mut ScriptWriter, prices: &mut Prices<'_>, links: &[ReplicaLink]) -> Vec<Line> {
    let mut lines = vec![Line::default(); prices.stage_of.len()];
    let mut channel = |from: usize, to: usize, us: BySize<Option<f64>>| {
        prices.messages_us.push((0..prices.step.microbatches).filter_map(|mb| us[prices.step.size_of(mb)]).collect());
        writer.channel(Channel { src: number(from), dst: number(to), stages: None })
    };
    let add = |ends: &mut BySize<Vec<u32>>, channel: u32, us: BySize<Option<f64>>| {
        ends.iter_mut().zip(us).filter(|(_, us)| us.is_some()).for_each(|(channels, _)| channels.push(channel));
    };
    for &ReplicaLink { from, to, values_us, grads_us } in links {
        let (values, grads) = (channel(from, to, values_us), channel(to, from, grads_us));
        add(&mut lines[from].values_out, values, values_us);
        add(&mut lines[to].values_in, values, values_us);
        add(&mut lines[to].grads_out, grads, grads_us);
        add(&mut lines[from].grads_in, grads, grads_us);
    }
    lines
}

/// What the Replicas of a Stage do together.
#[derive(Default)]
struct Together {
    /// By microbatch, what they gather for its forward and for its backward, where they divide parameters.
    gathers: Vec<[Option<u32>; 2]>,
    /// By microbatch, the sum of its gradients, where they divide these.
    each: Vec<u32>,
    /// Behind all backwards: the sum of its own gradients, where they are whole, and the tied ones.
    last: Vec<u32>,
}

impl Together {
    /// By Stage, with the tied sums behind every Stage's own.
    fn of_stages(writer: &mut ScriptWriter, prices: &mut Prices<'_>, tied: &[TiedSum]) -> Vec<Self> {
        let halves = writer.call() == Call::Halves;
        let mut stages: Vec<Self> = Vec::new();
        for (stage, timed) in prices.stages.iter().enumerate() {
            let members = prices.ranks_of(&[stage]);
            let mut joint = |lane: Lane, us: f64| {
                prices.sums_us.push(us);
                writer.joint(Joint { members: members.clone(), lane })
            };
            let microbatches = 0..prices.step.microbatches;
            let mut own = Self::default();
            // Passes and updates are priced with what shows of gathers: here Replicas only meet.
            let mut meets = |is_met: bool| is_met.then(|| joint(Lane::Gathers, 0.0));
            match timed.end.divides {
                Sharding::Params => own.gathers = microbatches.clone().map(|_| [meets(true), meets(true)]).collect(),
                Sharding::KeptParams => own.gathers.push([meets(true), meets(halves)]),
                Sharding::None | Sharding::Optimizer | Sharding::Gradients => {}
            }
            if timed.end.divides >= Sharding::Gradients {
                own.each = microbatches.map(|_| joint(Lane::Sums, timed.end.reduce_us)).collect();
            } else {
                own.last.push(joint(Lane::Sums, timed.end.reduce_us));
            }
            stages.push(own);
        }
        for sum in tied {
            let number = writer.sum(prices.ranks_of(&sum.stages));
            prices.sums_us.push(sum.us);
            sum.stages.iter().for_each(|&stage| stages[stage].last.push(number));
        }
        stages
    }

    /// A computation of a Replica, which before a backward waits for the sums that it has begun, and then for an exchange.
    fn write(&self, writer: &mut ScriptWriter, rank: u32, compute: Compute, awaited: Option<u32>, has_sums: &mut bool) {
        let microbatch = compute.microbatch() as usize;
        let pass = usize::from(!matches!(compute, Compute::Forward(_)));
        if let Some(sum) = self.gathers.get(microbatch).and_then(|gathers| gathers[pass]) {
            writer.add(rank, Task::Sum { sum });
            writer.add(rank, Task::Await { lane: Lane::Gathers });
        }
        let sum = self.each.get(microbatch).filter(|_| compute.ends_microbatch());
        if sum.is_some() && std::mem::replace(has_sums, true) {
            writer.add(rank, Task::Await { lane: Lane::Sums });
        }
        awaited.into_iter().for_each(|sum| writer.add(rank, Task::Meet { sum }));
        writer.compute(rank, compute.into());
        if let Some(&sum) = sum {
            writer.add(rank, Task::Sum { sum });
        }
    }
}

fn number(place: usize) -> u32 {
    u32::try_from(place).expect("fewer than 2^32")
}
