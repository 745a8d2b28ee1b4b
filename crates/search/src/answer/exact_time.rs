//! The longest path through a step, computation by computation: the time that a Plan is said to take.
//!
//! It follows the runtime, with as many rows of a microbatch on every Replica as on the largest:
//!
//! * A Replica computes in the order of its Stage's Schedule. It begins to receive for a computation when it is
//!   done with the last but one before it.
//! * A message moves once it is sent, its receiver has begun to receive, and the message before it on its channel
//!   has arrived.
//! * A gradient waits, and its sender with it, until of the earlier ones on its channel fewer than [`GRAD_WINDOW`]
//!   are under way.
//! * The optimizer waits until the gradients are reduced and all that was sent has arrived.

use std::iter::Peekable;

use rannc_plan::{Compute, GRAD_WINDOW};

use super::links::ReplicaLink;
use crate::price::{BySize, Priced, StepModel};

impl StepModel {
    /// The time of a step of Stages with so many Replicas.
    pub(crate) fn longest_path_us(&self, stages: &[Priced], replicas: &[usize], links: &[ReplicaLink]) -> f64 {
        let number = |place: usize| u32::try_from(place).expect("fewer than 2^32");
        let microbatches = u32::try_from(self.microbatches).expect("as many as fit into a plan");
        let order = |stage| self.schedule.order(number(stage), number(stages.len()), microbatches);
        let stage_of: Vec<usize> =
            replicas.iter().enumerate().flat_map(|(stage, &count)| std::iter::repeat_n(stage, count)).collect();
        let mut lines: Vec<Line<'_, _>> =
            stage_of.iter().map(|&stage| Line::new(self, &stages[stage], order(stage))).collect();
        let mut channels = connect(self, &mut lines, links);
        let mut moved = true;
        while std::mem::take(&mut moved) {
            for line in &mut lines {
                while line.advance(&mut channels) {
                    moved = true;
                }
            }
        }
        let end_us = |(line, &stage): (&Line<'_, _>, &usize)| {
            let reduced_us = line.clock_us + stages[stage].reduce_us;
            line.sent_us(&channels).max(reduced_us) + stages[stage].update_us
        };
        lines.iter().zip(&stage_of).map(end_us).fold(0.0, f64::max)
    }
}

/// Makes the channels.
fn connect<'a, I: Iterator>(
    step: &'a StepModel,
    lines: &mut [Line<'a, I>],
    links: &[ReplicaLink],
) -> Vec<TimedChannel<'a>> {
    let mut channels = Vec::new();
    for &ReplicaLink { from, to, values_us, grads_us } in links {
        lines[from].forward.to.push(channels.len());
        lines[to].forward.from.push(channels.len());
        channels.push(TimedChannel::new(step, values_us, usize::MAX));
        if let Some(grads_us) = grads_us {
            lines[to].backward.to.push(channels.len());
            lines[from].backward.from.push(channels.len());
            channels.push(TimedChannel::new(step, grads_us, GRAD_WINDOW));
        }
    }
    channels
}

/// The messages from one Replica to another, by microbatch.
struct TimedChannel<'a> {
    step: &'a StepModel,
    transfer_us: BySize<f64>,
    /// Most messages under way at a time.
    window: usize,
    sent_us: Vec<f64>,
    arrived_us: Vec<f64>,
}

impl<'a> TimedChannel<'a> {
    fn new(step: &'a StepModel, transfer_us: BySize<f64>, window: usize) -> Self {
        Self { step, transfer_us, window, sent_us: Vec::new(), arrived_us: Vec::new() }
    }

    /// When there is room for one more message; `None` while that is not known.
    fn room_us(&self) -> Option<f64> {
        match self.sent_us.len().checked_sub(self.window) {
            Some(earlier) => self.arrived_us.get(earlier).copied(),
            None => Some(0.0),
        }
    }

    /// Sends the next message; returns when that is done.
    fn send(&mut self, ready_us: f64) -> f64 {
        let sent_us = self.room_us().map_or(ready_us, |room_us| room_us.max(ready_us));
        self.sent_us.push(sent_us);
        sent_us
    }

    /// True when the message is sent that is received next.
    fn has_next(&self) -> bool {
        self.arrived_us.len() < self.sent_us.len()
    }

    /// When the next message arrives at a Replica that is ready for it since `posted_us`.
    fn receive(&mut self, posted_us: f64) -> f64 {
        let microbatch = self.arrived_us.len();
        let transfer_us = self.transfer_us[self.step.size_of(microbatch as u64)];
        let arrived_us = self.sent_us[microbatch].max(posted_us).max(self.free_us()) + transfer_us;
        self.arrived_us.push(arrived_us);
        arrived_us
    }

    /// When all messages so far have arrived.
    fn free_us(&self) -> f64 {
        self.arrived_us.last().copied().unwrap_or(0.0)
    }
}

/// A Replica's forward or backward of a microbatch, and its channels.
struct Computation {
    us: BySize<f64>,
    from: Vec<usize>,
    to: Vec<usize>,
}

impl Computation {
    fn new(us: BySize<f64>) -> Self {
        Self { us, from: Vec::new(), to: Vec::new() }
    }
}

/// A Replica and what it still has to compute.
struct Line<'a, I: Iterator> {
    step: &'a StepModel,
    forward: Computation,
    backward: Computation,
    coming: Peekable<I>,
    /// When it was done with the last computation, messages sent.
    clock_us: f64,
    /// When it was done with the one before, and began to receive for the next one.
    posted_us: f64,
}

impl<'a, I: Iterator<Item = Compute>> Line<'a, I> {
    fn new(step: &'a StepModel, stage: &Priced, order: I) -> Self {
        Self {
            step,
            forward: Computation::new(stage.by_size().map(|pass| pass.forward_us)),
            backward: Computation::new(stage.by_size().map(|pass| pass.backward_us)),
            coming: order.peekable(),
            clock_us: 0.0,
            posted_us: 0.0,
        }
    }

    /// Computes once more, if something is left and all that it waits for is known.
    fn advance(&mut self, channels: &mut [TimedChannel<'_>]) -> bool {
        let (work, microbatch) = match self.coming.peek() {
            Some(&Compute::Forward(microbatch)) => (&self.forward, microbatch),
            Some(&Compute::Backward(microbatch)) => (&self.backward, microbatch),
            None => return false,
        };
        let has_all = work.from.iter().all(|&channel| channels[channel].has_next());
        if !has_all || work.to.iter().any(|&channel| channels[channel].room_us().is_none()) {
            return false;
        }
        let arrived_us = work.from.iter().map(|&channel| channels[channel].receive(self.posted_us));
        let begun_us = arrived_us.fold(self.clock_us, f64::max);
        self.posted_us = self.clock_us;
        let send = |ready_us, &channel: &usize| channels[channel].send(ready_us);
        let work_us = work.us[self.step.size_of(u64::from(microbatch))];
        self.clock_us = work.to.iter().fold(begun_us + work_us, send);
        self.coming.next();
        true
    }

    /// When the last gradient that it has sent has arrived.
    fn sent_us(&self, channels: &[TimedChannel<'_>]) -> f64 {
        self.backward.to.iter().map(|&channel| channels[channel].free_us()).fold(0.0, f64::max)
    }
}
