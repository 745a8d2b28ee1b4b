//! The time that a Plan is said to take: its division run on the machine, with as many rows of a microbatch on
//! every Replica as on the largest.

use rannc_plan::{
    Call, Clock, Compute, Joint, Lane, Order, Payload, Schedule, Script, ScriptWriter, Sharding, Slot, Step, Task,
    depths, run, with_messages,
};

use super::links::ReplicaLink;
use super::tied::TiedSum;
use crate::price::{BySize, Priced, StepModel};

impl StepModel {
    /// The time of a step of Stages with so many Replicas; infinite where they wait for each other for ever.
    pub(crate) fn exact_us(
        &self,
        schedule: &Schedule,
        stages: &[Priced],
        replicas: &[usize],
        links: &[ReplicaLink],
        tied: &[TiedSum],
    ) -> f64 {
        let stage_of: Vec<usize> =
            replicas.iter().enumerate().flat_map(|(stage, &count)| std::iter::repeat_n(stage, count)).collect();
        let mut writer = ScriptWriter::new(stage_of.len(), Call::Whole);
        let mut prices =
            Prices { step: self, stages, stage_of: &stage_of, messages_us: Vec::new(), sums_us: Vec::new() };
        let lines = connect(&mut writer, &mut prices, links);
        let together = Together::of_stages(&mut writer, &mut prices, tied);
        let microbatches = u32::try_from(self.microbatches).expect("as many as fit into a plan");
        let depths = depths(stages.len(), links.iter().map(|link| (stage_of[link.from], stage_of[link.to])));
        let order = |stage: usize| schedule.order(stage, depths[stage], microbatches);
        let orders: Vec<Order> = (0..stages.len()).map(order).collect();
        for ((rank, line), &stage) in (0..).zip(&lines).zip(&stage_of) {
            let mut has_sums = false;
            with_messages(orders[stage].0.iter().copied(), |step| match step {
                Step::Compute(compute) => together[stage].write(&mut writer, rank, compute, &mut has_sums),
                Step::Receive(_) | Step::Send(_) => line.write(&mut writer, step),
            });
            together[stage].last.iter().for_each(|&sum| writer.add(rank, Task::Sum { sum }));
            writer.add(rank, Task::Settle);
            writer.add(rank, Task::Update);
        }
        let script: Script = writer.finish();
        run(&script, &prices, &mut ()).unwrap_or(f64::INFINITY)
    }
}

/// How long everything takes.
struct Prices<'a> {
    step: &'a StepModel,
    stages: &'a [Priced],
    stage_of: &'a [usize],
    /// By channel.
    messages_us: Vec<BySize<f64>>,
    sums_us: Vec<f64>,
}

impl Prices<'_> {
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
        self.messages_us[message.channel as usize][self.step.size_of(u64::from(message.place))]
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
}

impl Line {
    fn write(&self, writer: &mut ScriptWriter, step: Step) {
        match step {
            Step::Receive(compute) => {
                let Some(payload) = Payload::of(compute) else { return };
                let channels = if payload == Payload::Value { &self.values_in } else { &self.grads_in };
                channels.iter().for_each(|&channel| writer.receive(channel, payload, compute.microbatch()));
            }
            Step::Compute(_) => {}
            Step::Send(compute) => {
                let Some(payload) = Payload::of(compute) else { return };
                let channels = if payload == Payload::Value { &self.values_out } else { &self.grads_out };
                channels.iter().for_each(|&channel| writer.send(channel, payload));
            }
        }
    }
}

/// Makes the channels; returns those of each Replica.
fn connect(writer: &mut ScriptWriter, prices: &mut Prices<'_>, links: &[ReplicaLink]) -> Vec<Line> {
    let mut lines = vec![Line::default(); prices.stage_of.len()];
    for &ReplicaLink { from, to, values_us, grads_us } in links {
        let channel = writer.channel(number(from), number(to));
        lines[from].values_out.push(channel);
        lines[to].values_in.push(channel);
        prices.messages_us.push(values_us);
        if let Some(grads_us) = grads_us {
            let channel = writer.channel(number(to), number(from));
            lines[to].grads_out.push(channel);
            lines[from].grads_in.push(channel);
            prices.messages_us.push(grads_us);
        }
    }
    lines
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
