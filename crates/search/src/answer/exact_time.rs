//! The time that a Plan is said to take: its division run on the machine, with as many rows of a microbatch on
//! every Replica as on the largest.

use rannc_plan::{
    Call, Channel, Clock, Compute, Joint, Lane, Order, Payload, Road, Schedule, ScheduleKind, Script, ScriptWriter,
    Sharding, Slot, Step, Task, depths, run, with_messages,
};

use super::batch_links::BatchLink;
use super::links::{Moves, ReplicaLink};
use super::tied::TiedSum;
use crate::price::{BySize, Priced, StepModel};

impl StepModel {
    /// The time of a step of Stages with so many Replicas; infinite where they wait for each other for ever.
    pub(crate) fn exact_us(&self, schedule: &Schedule, stages: &[Priced], replicas: &[usize], moves: &Moves) -> f64 {
        let Moves { links, batch, tied } = moves;
        let stage_of: Vec<usize> =
            replicas.iter().enumerate().flat_map(|(stage, &count)| std::iter::repeat_n(stage, count)).collect();
        let mut writer = ScriptWriter::new(stage_of.len(), call_of(schedule));
        let mut prices = Prices { step: self, stages, stage_of: &stage_of, messages: Vec::new(), sums_us: Vec::new() };
        let mut lines = connect(&mut writer, &mut prices, links);
        connect_batch(&mut writer, &mut prices, batch, &mut lines);
        let together = Together::of_stages(&mut writer, &mut prices, tied);
        let microbatches = u32::try_from(self.microbatches).expect("as many as fit into a plan");
        let depths = depths(stages.len(), links.iter().map(|link| (stage_of[link.from], stage_of[link.to])));
        let order = |stage: usize| schedule.order(stage, depths[stage], microbatches);
        let orders: Vec<Order> = (0..stages.len()).map(order).collect();
        for ((rank, line), &stage) in (0..).zip(&lines).zip(&stage_of) {
            let mut has_sums = false;
            let lists = lists(&orders[stage], call_of(schedule));
            for (place, list) in (1..).zip(&lists) {
                let last_forward = list.iter().copied().rfind(|compute| matches!(compute, Compute::Forward(_)));
                line.give(&mut writer, self.microbatches, last_forward.is_some());
                with_messages(list.iter().copied(), |step| match step {
                    Step::Compute(compute) => together[stage].write(&mut writer, rank, compute, &mut has_sums),
                    Step::Receive(_) | Step::Send(_) => {
                        line.write(&mut writer, step);
                        if last_forward.is_some_and(|last| step == Step::Send(last)) {
                            line.take(&mut writer, microbatches);
                        }
                    }
                });
                if place == lists.len() {
                    together[stage].last.iter().for_each(|&sum| writer.add(rank, Task::Sum { sum }));
                }
                writer.settle(rank);
            }
            writer.add(rank, Task::Update);
        }
        let script: Script = writer.finish();
        run(&script, &prices, &mut ()).unwrap_or(f64::INFINITY)
    }
}

/// How the call comes whose steps are told: as often as it can. Where all forwards come first it may come in halves, between
/// which ranks wait for all that they have sent.
pub(super) fn call_of(schedule: &Schedule) -> Call {
    match schedule {
        Schedule::Named(ScheduleKind::FillDrain) => Call::Halves,
        Schedule::Explicit(orders) if orders.iter().all(Order::has_forwards_first) => Call::Halves,
        Schedule::Named(ScheduleKind::OneForwardOneBackward) | Schedule::Explicit(_) => Call::Whole,
    }
}

/// An order as lists of computations between which ranks wait for what they have sent.
fn lists(order: &Order, call: Call) -> Vec<Vec<Compute>> {
    let is_forward = |compute: &Compute| matches!(compute, Compute::Forward(_));
    match call {
        Call::Halves => {
            let (forwards, backwards) = order.0.iter().copied().partition(is_forward);
            vec![forwards, backwards]
        }
        Call::Forward | Call::Whole => vec![order.0.clone()],
    }
}

/// How long everything takes.
struct Prices<'a> {
    step: &'a StepModel,
    stages: &'a [Priced],
    stage_of: &'a [usize],
    /// By channel.
    messages: Vec<MessagePrice>,
    sums_us: Vec<f64>,
}

/// How long the messages of a channel take.
struct MessagePrice {
    us: BySize<f64>,
    /// The first one, where that is another one.
    first_us: Option<f64>,
}

impl Prices<'_> {
    /// Makes a channel.
    fn channel(&mut self, writer: &mut ScriptWriter, from: usize, to: usize, price: MessagePrice) -> u32 {
        self.messages.push(price);
        // What comes on one channel of the runtime does not wait for what is on another one here.
        writer.channel(Channel { src: number(from), dst: number(to), road: Road::Stages })
    }

    fn stage(&self, rank: u32) -> &Priced {
        &self.stages[self.stage_of[rank as usize]]
    }

    fn ranks_of(&self, stages: &[usize]) -> Vec<u32> {
        (0..).zip(self.stage_of).filter(|(_, stage)| stages.contains(stage)).map(|(rank, _)| rank).collect()
    }
}

impl Clock for Prices<'_> {
    fn compute(&self, rank: u32, compute: Compute) -> f64 {
        let stage = self.stage(rank);
        let pass = stage.by_size()[self.step.size_of(u64::from(compute.microbatch()))];
        match compute {
            Compute::Forward(_) => pass.forward_us,
            Compute::Backward(_) => pass.backward_us,
            Compute::BackwardInput(_) => pass.backward_us * stage.parts.input,
            Compute::BackwardWeight(_) => pass.backward_us * stage.parts.weight,
        }
    }
    fn message(&self, message: Slot) -> f64 {
        // A channel has a message for every microbatch.
        let MessagePrice { us, first_us } = &self.messages[message.channel as usize];
        let other = us[self.step.size_of(u64::from(message.place))];
        first_us.filter(|_| message.place == 0).unwrap_or(other)
    }
    fn sum(&self, sum: u32) -> f64 {
        self.sums_us[sum as usize]
    }
    fn update(&self, rank: u32) -> f64 {
        self.stage(rank).end.update_us
    }
}

/// The channels of a Replica, by what goes through them.
#[derive(Clone, Default)]
struct Line {
    values_in: Vec<u32>,
    values_out: Vec<u32>,
    grads_in: Vec<u32>,
    grads_out: Vec<u32>,
    /// Of its Stage's inputs, and of those that come once.
    inputs_in: Vec<u32>,
    inputs_once_in: Vec<u32>,
    outputs_out: Vec<u32>,
    output_grads_in: Vec<u32>,
    /// Of its own batch.
    inputs_out: Vec<u32>,
    inputs_once_out: Vec<u32>,
    outputs_in: Vec<u32>,
    output_grads_out: Vec<u32>,
}

impl Line {
    /// Its messages around a computation.
    fn write(&self, writer: &mut ScriptWriter, step: Step) {
        let mut receive = |channels: &[u32], payload, mb| {
            channels.iter().for_each(|&channel| writer.receive(channel, payload, mb));
        };
        match step {
            Step::Receive(Compute::Forward(mb)) => {
                receive(&self.values_in, Payload::Value, mb);
                receive(&self.inputs_in, Payload::Input, mb);
                if mb == 0 {
                    receive(&self.inputs_once_in, Payload::Input, mb);
                }
            }
            Step::Receive(Compute::Backward(mb) | Compute::BackwardInput(mb)) => {
                receive(&self.grads_in, Payload::Grad, mb);
                receive(&self.output_grads_in, Payload::OutputGrad, mb);
            }
            Step::Send(Compute::Forward(_)) => {
                self.values_out.iter().for_each(|&channel| writer.send(channel, Payload::Value));
                self.outputs_out.iter().for_each(|&channel| writer.send(channel, Payload::Output));
            }
            Step::Send(Compute::Backward(_) | Compute::BackwardInput(_)) => {
                self.grads_out.iter().for_each(|&channel| writer.send(channel, Payload::Grad));
            }
            Step::Receive(Compute::BackwardWeight(_)) | Step::Compute(_) | Step::Send(Compute::BackwardWeight(_)) => {}
        }
    }

    /// What it sends of its own batch at the beginning of a list.
    fn give(&self, writer: &mut ScriptWriter, microbatches: u64, has_forwards: bool) {
        let (all, payload) = match has_forwards {
            true => (&self.inputs_out, Payload::Input),
            false => (&self.output_grads_out, Payload::OutputGrad),
        };
        for _ in 0..microbatches {
            all.iter().for_each(|&channel| writer.send(channel, payload));
        }
        if has_forwards {
            self.inputs_once_out.iter().for_each(|&channel| writer.send(channel, payload));
        }
    }

    /// What it begins to receive for its own batch behind its last forward.
    fn take(&self, writer: &mut ScriptWriter, microbatches: u32) {
        for mb in 0..microbatches {
            self.outputs_in.iter().for_each(|&channel| writer.receive(channel, Payload::Output, mb));
        }
    }
}

/// Makes the channels between Stages; returns those of each Replica.
fn connect(writer: &mut ScriptWriter, prices: &mut Prices<'_>, links: &[ReplicaLink]) -> Vec<Line> {
    let mut lines = vec![Line::default(); prices.stage_of.len()];
    for &ReplicaLink { from, to, values_us, grads_us } in links {
        let channel = prices.channel(writer, from, to, MessagePrice { us: values_us, first_us: None });
        lines[from].values_out.push(channel);
        lines[to].values_in.push(channel);
        if let Some(us) = grads_us {
            let channel = prices.channel(writer, to, from, MessagePrice { us, first_us: None });
            lines[to].grads_out.push(channel);
            lines[from].grads_in.push(channel);
        }
    }
    lines
}

/// Makes those to and from the ranks' own batches.
fn connect_batch(writer: &mut ScriptWriter, prices: &mut Prices<'_>, links: &[BatchLink], lines: &mut [Line]) {
    for &BatchLink { kind, from, to, us, first_us } in links {
        if kind == Payload::OutputGrad && writer.call() != Call::Halves {
            continue;
        }
        let price = MessagePrice { us: us.unwrap_or_default(), first_us: Some(first_us) };
        let channel = prices.channel(writer, from, to, price);
        let out = |line: &mut Line| match (kind, us) {
            (Payload::Output, _) => line.outputs_out.push(channel),
            (Payload::OutputGrad, _) => line.output_grads_out.push(channel),
            (_, Some(_)) => line.inputs_out.push(channel),
            (_, None) => line.inputs_once_out.push(channel),
        };
        out(&mut lines[from]);
        let into = |line: &mut Line| match (kind, us) {
            (Payload::Output, _) => line.outputs_in.push(channel),
            (Payload::OutputGrad, _) => line.output_grads_in.push(channel),
            (_, Some(_)) => line.inputs_in.push(channel),
            (_, None) => line.inputs_once_in.push(channel),
        };
        into(&mut lines[to]);
    }
}

/// What the Replicas of a Stage do together.
#[derive(Default)]
struct Together {
    /// By microbatch, what they gather for its forward and for its backward, where they divide parameters.
    gathers: Vec<[u32; 2]>,
    /// By microbatch, the sum of its gradients, where they divide these.
    each: Vec<u32>,
    /// Behind all backwards: the sum of its own gradients, where they are whole, and the tied ones.
    last: Vec<u32>,
}

impl Together {
    /// By Stage, with the tied sums behind every Stage's own.
    fn of_stages(writer: &mut ScriptWriter, prices: &mut Prices<'_>, tied: &[TiedSum]) -> Vec<Self> {
        let mut stages: Vec<Self> = Vec::new();
        for (stage, priced) in prices.stages.iter().enumerate() {
            let members = prices.ranks_of(&[stage]);
            let mut joint = |lane: Lane, us: f64| {
                prices.sums_us.push(us);
                writer.joint(Joint { members: members.clone(), lane })
            };
            let microbatches = 0..prices.step.microbatches;
            let mut own = Self::default();
            if priced.end.divides == Sharding::Params {
                // The passes are priced with what they hide, and with what they do not: here Replicas only meet.
                own.gathers =
                    microbatches.clone().map(|_| [joint(Lane::Gathers, 0.0), joint(Lane::Gathers, 0.0)]).collect();
            }
            if priced.end.divides >= Sharding::Gradients {
                own.each = microbatches.map(|_| joint(Lane::Sums, priced.end.reduce_us)).collect();
            } else {
                own.last.push(joint(Lane::Sums, priced.end.reduce_us));
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

    /// A computation of a Replica, which before a backward waits for the sums that it has begun.
    fn write(&self, writer: &mut ScriptWriter, rank: u32, compute: Compute, has_sums: &mut bool) {
        let microbatch = compute.microbatch() as usize;
        let pass = usize::from(!matches!(compute, Compute::Forward(_)));
        if let Some(gathers) = self.gathers.get(microbatch) {
            writer.add(rank, Task::Sum { sum: gathers[pass] });
            writer.add(rank, Task::Await { lane: Lane::Gathers });
        }
        let sum = self.each.get(microbatch).filter(|_| compute.ends_microbatch());
        if sum.is_some() && std::mem::replace(has_sums, true) {
            writer.add(rank, Task::Await { lane: Lane::Sums });
        }
        writer.compute(rank, compute);
        if let Some(&sum) = sum {
            writer.add(rank, Task::Sum { sum });
        }
    }
}

fn number(place: usize) -> u32 {
    u32::try_from(place).expect("fewer than 2^32")
}
