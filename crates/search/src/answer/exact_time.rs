//! The time that a Plan is said to take: its division run on the machine, with as many rows of a microbatch on
//! every Replica as on the largest.

use rannc_plan::{
    Call, Clock, Compute, Order, Payload, Schedule, Script, ScriptWriter, Slot, Step, Task, depths, run, with_messages,
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
        let sums = gather(&mut writer, &mut prices, tied);
        let microbatches = u32::try_from(self.microbatches).expect("as many as fit into a plan");
        let depths = depths(stages.len(), links.iter().map(|link| (stage_of[link.from], stage_of[link.to])));
        let order = |stage: usize| schedule.order(stage, depths[stage], microbatches);
        let orders: Vec<Order> = (0..stages.len()).map(order).collect();
        for ((rank, line), &stage) in (0..).zip(&lines).zip(&stage_of) {
            with_messages(orders[stage].0.iter().copied(), |step| line.write(&mut writer, rank, step));
            for &(_, sum) in sums.iter().filter(|(members, _)| members.contains(&stage)) {
                writer.add(rank, Task::Sum { sum });
            }
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
        let pass = self.stage(rank).by_size()[self.step.size_of(u64::from(compute.microbatch()))];
        match compute {
            Compute::Forward(_) => pass.forward_us,
            Compute::Backward(_) => pass.backward_us,
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
    fn write(&self, writer: &mut ScriptWriter, rank: u32, step: Step) {
        match step {
            Step::Receive(Compute::Forward(mb)) => {
                self.values_in.iter().for_each(|&channel| writer.receive(channel, Payload::Value, mb));
            }
            Step::Receive(Compute::Backward(mb)) => {
                self.grads_in.iter().for_each(|&channel| writer.receive(channel, Payload::Grad, mb));
            }
            Step::Compute(compute) => writer.compute(rank, compute),
            Step::Send(Compute::Forward(_)) => {
                self.values_out.iter().for_each(|&channel| writer.send(channel, Payload::Value));
            }
            Step::Send(Compute::Backward(_)) => {
                self.grads_out.iter().for_each(|&channel| writer.send(channel, Payload::Grad));
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

/// Makes the sums: what every Stage's own adds after its last backward, then the tied ones. Returns the Stages of each.
fn gather(writer: &mut ScriptWriter, prices: &mut Prices<'_>, tied: &[TiedSum]) -> Vec<(Vec<usize>, u32)> {
    let own = prices.stages.iter().enumerate().map(|(stage, priced)| (vec![stage], priced.end.reduce_us));
    let tied = tied.iter().map(|sum| (sum.stages.clone(), sum.us));
    let mut sums = Vec::new();
    for (stages, us) in own.chain(tied).collect::<Vec<_>>() {
        sums.push((stages.clone(), writer.sum(prices.ranks_of(&stages))));
        prices.sums_us.push(us);
    }
    sums
}

fn number(place: usize) -> u32 {
    u32::try_from(place).expect("fewer than 2^32")
}
