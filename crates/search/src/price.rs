//! The objective: time and memory of a Stage, and time of a step.
//!
//! For a Stage s with forward `f_s` and backward `b_s` of the largest microbatch on its largest
//! Replica, the host's time for the two Actions included:
//!
//! * `c_s`, its communication: half the time of the Values that it receives and sends and of their
//!   gradients, as the other half is counted where they come from or go to;
//! * `t_s = f_s + b_s + c_s`;
//! * `u_s`, the end of its step: gradients are summed over the Replicas, the optimizer updates.
//!
//! With M microbatches over Stages 0..S, filling and draining included, a step takes
//!
//! ```text
//! step = sum of t_s + (M - 1) * max of t_s + e_0,    e_s = max(u_s, e_(s+1) - b_s),    e_S = 0
//! ```
//!
//! `e_0` is what the ends of the Stages add after the last backward: a later Stage ends its step
//! while the earlier ones still run backward. Both schedules take this time; they differ in memory.

use std::ops::Range;

use rannc_cost::{Cluster, Group, Link, update_us};
use rannc_plan::{MemoryPrediction, ScheduleKind};

use crate::chain::{AffineSums, Chain, Times};
use crate::settings::Settings;

/// Gradients in transfer at a time: one in use, one on its way.
const GRADS_ON_THE_WAY: f64 = 2.0;

/// A run of Blocks on a run of ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) first: usize,
    pub(crate) end: usize,
    pub(crate) replicas: u32,
}

/// The links that a Stage uses.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Links {
    /// To its neighbours.
    pub(crate) transfer: Link,
    /// Among its Replicas.
    pub(crate) reduce: Group,
}

/// Times of a Stage.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct StageTime {
    pub(crate) forward_us: f64,
    pub(crate) backward_us: f64,
    pub(crate) transfer_us: f64,
    pub(crate) reduce_us: f64,
    pub(crate) update_us: f64,
}

impl StageTime {
    /// `t_s`.
    pub(crate) fn microbatch_us(&self) -> f64 {
        self.forward_us + self.backward_us + self.transfer_us
    }
    /// `u_s`.
    pub(crate) fn end_us(&self) -> f64 {
        self.reduce_us + self.update_us
    }
}

/// Memory of a Stage.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Footprint {
    pub(crate) fixed_bytes: f64,
    /// For each microbatch in flight.
    pub(crate) microbatch_bytes: f64,
}

/// Prices runs of Blocks for one number of microbatches.
pub(crate) struct Pricing<'a> {
    pub(crate) chain: &'a Chain,
    pub(crate) cluster: &'a Cluster,
    pub(crate) settings: &'a Settings,
    pub(crate) microbatches: u64,
    /// Rows of the largest microbatch.
    rows: u64,
    /// By the number of Replicas less one.
    times: Vec<Times>,
}

impl<'a> Pricing<'a> {
    pub(crate) fn new(chain: &'a Chain, cluster: &'a Cluster, settings: &'a Settings, microbatches: u64) -> Self {
        let rows = settings.largest_microbatch_rows(microbatches);
        // Further microbatches have no rows.
        let microbatches = microbatches.min(settings.most_rank_rows());
        let mut times: Vec<Times> = Vec::new();
        for replicas in 1..=u64::from(settings.world_size) {
            let replica_rows = rows.div_ceil(replicas);
            let known = times.last().filter(|last| last.rows == replica_rows).cloned();
            times.push(known.unwrap_or_else(|| chain.times(&cluster.kinds[0], replica_rows)));
        }
        Self { chain, cluster, settings, microbatches, rows, times }
    }

    fn times(&self, replicas: u32) -> &Times {
        &self.times[replicas as usize - 1]
    }

    /// Rows of a microbatch on the largest Replica.
    pub(crate) fn replica_rows(&self, replicas: u32) -> u64 {
        self.rows.div_ceil(u64::from(replicas))
    }

    /// The links of a Stage on these ranks.
    pub(crate) fn links(&self, ranks: Range<u32>) -> Links {
        let neighbours = ranks.start.saturating_sub(1)..(ranks.end + 1).min(self.settings.world_size);
        Links {
            transfer: self.cluster.levels[self.cluster.level_between(neighbours.start, neighbours.end - 1)].send,
            reduce: self.cluster.group(&ranks.collect::<Vec<u32>>()),
        }
    }

    /// Forward and backward of a run without anything around it; grows with the run.
    pub(crate) fn compute_us(&self, span: Span) -> f64 {
        let times = self.times(span.replicas);
        times.forward_us(span.first, span.end) + times.backward_us(span.first, span.end)
    }

    /// Times of a Stage.
    pub(crate) fn time(&self, span: Span, links: &Links) -> StageTime {
        let Span { first, end, replicas } = span;
        let (chain, device, times) = (self.chain, &self.cluster.kinds[0], self.times(replicas));
        let rows = self.replica_rows(replicas);
        let transfers = [&chain.in_bytes, &chain.in_grad_bytes, &chain.out_bytes, &chain.out_grad_bytes];
        let send_us = |bytes: f64| links.transfer.send_us(bytes);
        let trainable_bytes = chain.trainable_bytes.at(first, end);
        let optimizer_bytes = trainable_bytes * self.settings.optimizer_bytes_per_param_byte;
        StageTime {
            forward_us: times.forward_us(first, end) + chain.clone_forward_us.at(first, end) + device.action_us,
            backward_us: times.backward_us(first, end) + chain.clone_backward_us.at(first, end) + device.action_us,
            transfer_us: transfers.iter().map(|bytes| send_us(bytes.at(first, end, rows))).sum::<f64>() / 2.0,
            reduce_us: self.cluster.all_reduce_us(links.reduce, trainable_bytes),
            update_us: update_us(device, trainable_bytes, optimizer_bytes),
        }
    }

    /// Largest temporary memory of a Block.
    pub(crate) fn workspace_bytes(&self, block: usize, replicas: u32) -> f64 {
        self.chain.workspace_bytes(block, self.replica_rows(replicas))
    }

    fn comm_bytes(&self, span: Span) -> f64 {
        let Span { first, end, replicas } = span;
        let rows = self.replica_rows(replicas);
        let grads_bytes =
            self.chain.in_grad_bytes.at(first, end, rows) + self.chain.out_grad_bytes.at(first, end, rows);
        let outputs_bytes = self.chain.output_bytes.at(first, end, rows) * self.microbatches as f64;
        // One microbatch is received ahead.
        self.chain.in_bytes.at(first, end, rows) + GRADS_ON_THE_WAY * grads_bytes + outputs_bytes
    }

    /// Memory of parameters, gradients and optimizer state; grows with the run.
    pub(crate) fn model_bytes(&self, span: Span) -> f64 {
        let trainable_bytes = self.chain.trainable_bytes.at(span.first, span.end);
        let factor = 1.0 + self.settings.optimizer_bytes_per_param_byte;
        self.chain.state_bytes.at(span.first, span.end) + trainable_bytes * factor
    }

    /// Memory of a Stage whose Blocks need `workspace_bytes`.
    pub(crate) fn footprint(&self, span: Span, workspace_bytes: f64) -> Footprint {
        let rows = self.replica_rows(span.replicas);
        let framework_bytes = self.cluster.kinds[0].framework_bytes as f64;
        let held = |bytes: &AffineSums| bytes.at(span.first, span.end, rows);
        Footprint {
            fixed_bytes: self.model_bytes(span) + workspace_bytes + self.comm_bytes(span) + framework_bytes,
            microbatch_bytes: held(&self.chain.kept_bytes) + held(&self.chain.out_bytes),
        }
    }

    /// Microbatches that a Stage holds, `from_end` Stages from the end, itself included.
    pub(crate) fn in_flight(&self, from_end: usize) -> u64 {
        match self.settings.schedule() {
            ScheduleKind::FillDrain => self.microbatches,
            ScheduleKind::OneForwardOneBackward => self.microbatches.min(from_end as u64),
        }
    }

    /// Memory of a Stage, by use.
    pub(crate) fn memory(&self, span: Span, in_flight: u64) -> MemoryPrediction {
        let blocks = span.first..span.end;
        let workspace_bytes = blocks.map(|block| self.workspace_bytes(block, span.replicas)).fold(0.0, f64::max);
        let trainable_bytes = self.chain.trainable_bytes.at(span.first, span.end);
        let optimizer_bytes = trainable_bytes * self.settings.optimizer_bytes_per_param_byte;
        let microbatch_bytes = self.footprint(span, workspace_bytes).microbatch_bytes;
        MemoryPrediction {
            params_bytes: self.chain.state_bytes.at(span.first, span.end) as u64,
            grads_bytes: trainable_bytes as u64,
            optimizer_bytes: optimizer_bytes as u64,
            activations_bytes: (microbatch_bytes * in_flight as f64) as u64,
            workspace_bytes: workspace_bytes as u64,
            comm_bytes: self.comm_bytes(span) as u64,
            framework_bytes: self.cluster.kinds[0].framework_bytes,
        }
    }
}

/// A step in the making, from the last Stage to the first.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct StepTime {
    /// Sum of `t_s`.
    pub(crate) sum_us: f64,
    /// Largest `t_s`.
    pub(crate) max_us: f64,
    /// `e_s` of the first Stage so far.
    pub(crate) tail_us: f64,
}

impl StepTime {
    /// The step with one more Stage before it.
    pub(crate) fn prepend(self, microbatch_us: f64, backward_us: f64, end_us: f64) -> Self {
        Self {
            sum_us: self.sum_us + microbatch_us,
            max_us: self.max_us.max(microbatch_us),
            tail_us: end_us.max(self.tail_us - backward_us),
        }
    }

    /// The whole step.
    pub(crate) fn step_us(&self, microbatches: u64) -> f64 {
        self.sum_us + (microbatches - 1) as f64 * self.max_us + self.tail_us
    }

    /// True when no Plan that goes on from `other` is better than from this one.
    pub(crate) fn dominates(&self, other: &Self) -> bool {
        self.sum_us <= other.sum_us && self.max_us <= other.max_us && self.tail_us <= other.tail_us
    }
}
