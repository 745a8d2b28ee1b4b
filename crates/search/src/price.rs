//! Time and memory of a Stage.

use std::ops::{Range, RangeInclusive};
use std::sync::Arc;

use rannc_cost::{Cluster, ComputeCost, Device, update_us};
use rannc_plan::{BUCKET_BYTES, MemoryPrediction, ScheduleKind, Sharding, StagePrediction};

use crate::chain::{Chain, Times};
use crate::measured::Measured;
use crate::place::Place;
use crate::recompute::{Choice, Saving, cheapest_first, largest_bytes};
use crate::settings::Settings;
use crate::step::{StageCost, StepModel};
use crate::variant::{Again, Variant};

/// Gradients in transfer at a time: one in use, one on its way.
const GRADS_ON_THE_WAY: f64 = 2.0;
/// Blocks whose sharded parameters are whole at a time: one in use, one ahead.
const GATHERED_BLOCKS: f64 = 2.0;

/// What there is to price: a model on a cluster.
#[derive(Clone, Copy)]
pub(crate) struct Problem<'a> {
    pub(crate) chain: &'a Chain,
    pub(crate) cluster: &'a Cluster,
    /// By kind of device.
    pub(crate) measured: &'a [Option<Measured>],
    pub(crate) settings: &'a Settings,
    /// True when parts of Blocks may be computed again: no choice of Blocks costs less.
    pub(crate) in_parts: bool,
    /// True when only those transfers take time that surely are between a Stage and the very next one.
    pub(crate) direct: bool,
}

/// Prices Stages for one Schedule and number of microbatches.
pub(crate) struct Pricing<'a> {
    pub(crate) problem: Problem<'a>,
    pub(crate) chain: &'a Chain,
    pub(crate) step: StepModel,
    /// Rows of the largest microbatch.
    rows: u64,
    /// By kind of device, by place in the list of different row counts.
    times: Vec<Vec<Arc<Times>>>,
    /// By the number of Replicas less one, place in the list of different row counts.
    time_of: Vec<usize>,
}

/// A place, with what does not depend on the Stage that is there.
pub(crate) struct At<'p> {
    pub(crate) place: &'p Place,
    /// Memory that a Plan may use on each device.
    pub(crate) usable_bytes: f64,
    /// Rows of a microbatch on the largest Replica.
    rows: u64,
    /// For each kind of its devices.
    devices: Vec<(&'p Device, Arc<Times>)>,
    framework_bytes: f64,
    /// What one Block of each kind surely frees when it is computed again, and what that takes at most; the
    /// cheapest memory first.
    savings: Vec<Saving>,
}

/// A priced Stage.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Priced {
    pub(crate) cost: StageCost,
    /// Part of the end: gradient reduction that the backward does not hide, and what it costs the backward.
    pub(crate) reduce_us: f64,
    /// Part of the end: the optimizer.
    pub(crate) update_us: f64,
    pub(crate) memory: StageMemory,
}

/// Memory of a device that runs a Stage.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct StageMemory {
    pub(crate) params_bytes: f64,
    pub(crate) grads_bytes: f64,
    pub(crate) optimizer_bytes: f64,
    pub(crate) workspace_bytes: f64,
    pub(crate) comm_bytes: f64,
    pub(crate) framework_bytes: f64,
    /// Kept for each microbatch in flight.
    pub(crate) microbatch_bytes: f64,
}

impl StageMemory {
    /// What does not depend on the microbatches in flight.
    pub(crate) fn fixed_bytes(&self) -> f64 {
        self.model_bytes() + self.workspace_bytes + self.comm_bytes + self.framework_bytes
    }

    /// Parameters, gradients and optimizer state.
    pub(crate) fn model_bytes(&self) -> f64 {
        self.params_bytes + self.grads_bytes + self.optimizer_bytes
    }

    /// The peak with so many microbatches in flight.
    pub(crate) fn peak_bytes(&self, in_flight: u64) -> f64 {
        self.fixed_bytes() + self.microbatch_bytes * in_flight as f64
    }

    /// The most microbatches in flight for which `usable_bytes` suffice.
    pub(crate) fn room(&self, usable_bytes: f64) -> u64 {
        let free_bytes = usable_bytes - self.fixed_bytes();
        if free_bytes < 0.0 {
            0
        } else if self.microbatch_bytes <= 0.0 {
            u64::MAX
        } else {
            (free_bytes / self.microbatch_bytes) as u64
        }
    }

    /// By use, for the plan file.
    pub(crate) fn prediction(&self, in_flight: u64) -> MemoryPrediction {
        MemoryPrediction {
            params_bytes: self.params_bytes as u64,
            grads_bytes: self.grads_bytes as u64,
            optimizer_bytes: self.optimizer_bytes as u64,
            activations_bytes: (self.microbatch_bytes * in_flight as f64) as u64,
            workspace_bytes: self.workspace_bytes as u64,
            comm_bytes: self.comm_bytes as u64,
            framework_bytes: self.framework_bytes as u64,
        }
    }
}

/// Forward and backward of a run, for one microbatch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct RunTime {
    forward_us: f64,
    backward_us: f64,
}

impl RunTime {
    /// What takes `cost` on a device. A host that starts what its device computes runs ahead of it, so that over many
    /// microbatches the slower of them counts; the device then waits in proportion to the work of the host.
    fn new(cost: ComputeCost, device: &Device) -> Self {
        let ComputeCost { forward_us, backward_us, forward_host_us, backward_host_us } = cost;
        if device.host {
            let action_us = device.action_us;
            return Self { forward_us: forward_us + action_us, backward_us: backward_us + action_us };
        }
        let forward_host_us = forward_host_us + device.action_us;
        let host_us = forward_host_us + backward_host_us + device.action_us;
        let waiting_us = host_us - (forward_us + backward_us);
        if waiting_us <= 0.0 {
            return Self { forward_us, backward_us };
        }
        let forward_waiting_us = waiting_us * (forward_host_us / host_us);
        Self { forward_us: forward_us + forward_waiting_us, backward_us: backward_us + waiting_us - forward_waiting_us }
    }
}

impl<'a> Pricing<'a> {
    pub(crate) fn new(problem: Problem<'a>, schedule: ScheduleKind, microbatches: u64) -> Self {
        let Problem { chain, cluster, measured, settings, .. } = problem;
        let rows = settings.largest_microbatch_rows(microbatches);
        let mut row_counts: Vec<u64> = Vec::new();
        let mut time_of = Vec::new();
        for replicas in 1..=u64::from(settings.world_size) {
            let replica_rows = rows.div_ceil(replicas);
            if row_counts.last() != Some(&replica_rows) {
                row_counts.push(replica_rows);
            }
            time_of.push(row_counts.len() - 1);
        }
        let times = |(kind, device): (usize, &Device)| {
            let measured = measured[kind].as_ref();
            row_counts.iter().map(|&rows| Arc::new(chain.times(kind, device, measured, rows))).collect()
        };
        // Further microbatches have no rows.
        let microbatches = microbatches.min(settings.most_rank_rows());
        let times = cluster.kinds.iter().enumerate().map(times).collect();
        Self { problem, chain, step: StepModel { schedule, microbatches }, rows, times, time_of }
    }

    /// Rows of a microbatch on the largest Replica.
    pub(crate) fn replica_rows(&self, replicas: u32) -> u64 {
        self.rows.div_ceil(u64::from(replicas))
    }

    /// Numbers of Replicas that have equally many rows each, increasing.
    pub(crate) fn equal_replicas(&self) -> Vec<RangeInclusive<u32>> {
        let mut equal: Vec<RangeInclusive<u32>> = Vec::new();
        for (replicas, &time) in (1..).zip(&self.time_of) {
            match equal.get_mut(time) {
                Some(range) => *range = *range.start()..=replicas,
                None => equal.push(replicas..=replicas),
            }
        }
        equal
    }

    /// Prepares a place.
    pub(crate) fn at<'p>(&'p self, place: &'p Place) -> At<'p> {
        let time = self.time_of[place.replicas as usize - 1];
        self.at_rows(place, self.replica_rows(place.replicas), |kind| Arc::clone(&self.times[kind][time]))
    }

    /// Prepares a place for Replicas with fewer rows.
    pub(crate) fn at_fewer_rows<'p>(&'p self, place: &'p Place, rows: u64) -> At<'p> {
        let Problem { chain, cluster, measured, .. } = self.problem;
        let times = |kind: usize| chain.times(kind, &cluster.kinds[kind], measured[kind].as_ref(), rows);
        self.at_rows(place, rows, |kind| Arc::new(times(kind)))
    }

    fn at_rows<'p>(&'p self, place: &'p Place, rows: u64, times: impl Fn(usize) -> Arc<Times>) -> At<'p> {
        let Problem { cluster, settings, .. } = self.problem;
        let devices: Vec<_> = place.kinds().map(|kind| (&cluster.kinds[kind], times(kind))).collect();
        let usable = devices.iter().map(|(device, _)| settings.usable_bytes(device.memory_bytes));
        let framework = devices.iter().map(|(device, _)| device.framework_bytes).max();
        let mut at = At {
            place,
            usable_bytes: usable.fold(f64::INFINITY, f64::min),
            rows,
            framework_bytes: framework.unwrap_or(0) as f64,
            devices,
            savings: Vec::new(),
        };
        if self.problem.settings.capabilities.recompute {
            at.savings = self.savings_of_kinds(&at);
        }
        at
    }

    fn savings_of_kinds(&self, at: &At<'_>) -> Vec<Saving> {
        let mut savings: Vec<Saving> = Vec::new();
        for block in 0..self.chain.len() {
            let own = self.saving(block, at);
            match savings.iter_mut().find(|saving| saving.kind == own.kind) {
                Some(saving) => (saving.bytes, saving.us) = (saving.bytes.min(own.bytes), saving.us.max(own.us)),
                None => savings.push(own),
            }
        }
        cheapest_first(savings)
    }

    /// Forward and backward of a run, on the slowest device of a place.
    fn compute(&self, run: &Range<usize>, at: &At<'_>) -> RunTime {
        let on = |(device, times): &(&Device, Arc<Times>)| {
            RunTime::new(self.chain.run_cost(times, run.start, run.end), device)
        };
        at.devices.iter().map(on).fold(RunTime::default(), |slowest, time| RunTime {
            forward_us: slowest.forward_us.max(time.forward_us),
            backward_us: slowest.backward_us.max(time.backward_us),
        })
    }

    /// Time and memory of a Stage whose Blocks need `workspace_bytes`.
    pub(crate) fn stage(&self, run: Range<usize>, at: &At<'_>, variant: Variant, workspace_bytes: f64) -> Priced {
        let plain = self.plain(&run, at, variant, workspace_bytes);
        self.with_variant(&run, at, variant, &plain)
    }

    /// What a Plan says of a priced Stage that holds so many microbatches.
    pub(crate) fn prediction(
        &self,
        run: &Range<usize>,
        replicas: u32,
        priced: &Priced,
        in_flight: u64,
    ) -> StagePrediction {
        let rows = self.replica_rows(replicas);
        StagePrediction {
            forward_us: priced.cost.forward_us,
            backward_us: priced.cost.backward_us,
            transfer_us: priced.cost.transfer_us(),
            reduce_us: priced.reduce_us,
            update_us: priced.update_us,
            in_bytes: self.chain.traffic.in_bytes.at(run.start, run.end, rows) as u64,
            out_bytes: self.chain.traffic.out_bytes.at(run.start, run.end, rows) as u64,
            memory: priced.memory.prediction(in_flight),
        }
    }

    /// A Stage that computes nothing again, without the end of its step.
    pub(crate) fn plain(
        &self,
        run: &Range<usize>,
        at: &At<'_>,
        variant: Variant,
        workspace_bytes: f64,
    ) -> (StageCost, StageMemory) {
        let &At { place, rows, .. } = at;
        let time = self.compute(run, at);
        let traffic = if self.problem.direct { &self.chain.direct } else { &self.chain.traffic };
        // Less than a byte is what rounding leaves of nothing.
        let half_us = |level: usize, bytes: f64| match bytes {
            ..1.0 => 0.0,
            bytes => self.problem.cluster.send_us(level, bytes) / 2.0,
        };
        let cost = StageCost {
            forward_us: time.forward_us,
            backward_us: time.backward_us,
            in_us: half_us(place.in_level, traffic.in_bytes.at(run.start, run.end, rows)),
            in_grad_us: half_us(place.in_level, traffic.in_grad_bytes.at(run.start, run.end, rows)),
            out_us: half_us(place.out_level, traffic.out_bytes.at(run.start, run.end, rows)),
            out_grad_us: half_us(place.out_level, traffic.out_grad_bytes.at(run.start, run.end, rows)),
            end_us: 0.0,
        };
        (cost, self.memory(run, at, variant, workspace_bytes))
    }

    /// The Stage that computes again what the variant asks for, otherwise as this plain one.
    pub(crate) fn with_variant(
        &self,
        run: &Range<usize>,
        at: &At<'_>,
        variant: Variant,
        &(plain, mut memory): &(StageCost, StageMemory),
    ) -> Priced {
        let mut time = RunTime { forward_us: plain.forward_us, backward_us: plain.backward_us };
        self.compute_again(run, at, variant.again, &mut time, &mut memory);
        let (reduce_us, update_us) = self.end_us(run, at, variant, &mut time);
        let RunTime { forward_us, backward_us } = time;
        let cost = StageCost { forward_us, backward_us, end_us: reduce_us + update_us, ..plain };
        Priced { cost, reduce_us, update_us, memory }
    }

    /// Gradient reduction and optimizer. Sharded parameters and gradients also travel with every
    /// microbatch, beside its computation.
    fn end_us(&self, run: &Range<usize>, at: &At<'_>, variant: Variant, time: &mut RunTime) -> (f64, f64) {
        let (cluster, place) = (self.problem.cluster, at.place);
        let bytes = self.chain.trainable_bytes.at(run.start, run.end);
        let mut reduction_us = cluster.all_reduce_us(place.group, bytes);
        let mut gather_us = 0.0;
        if variant.sharding > Sharding::None {
            reduction_us = cluster.reduce_scatter_us(place.group, bytes);
            gather_us = cluster.all_gather_us(place.group, bytes);
        }
        if variant.sharding >= Sharding::Gradients && self.step.microbatches > 1 {
            time.backward_us = time.backward_us.max(reduction_us);
        }
        if variant.sharding == Sharding::Params {
            time.forward_us = time.forward_us.max(gather_us);
            time.backward_us = time.backward_us.max(gather_us + reduction_us);
            gather_us = 0.0;
        }
        let last_us = if bytes > 0.0 { reduction_us * (BUCKET_BYTES as f64 / bytes).min(1.0) } else { 0.0 };
        let exposed_us = (reduction_us - time.backward_us).max(last_us);
        let reduce_us = exposed_us + self.collective_slowdown(at.place) * (reduction_us - exposed_us);
        (reduce_us, gather_us + self.update_us(bytes, at, variant))
    }

    /// The largest of the place's devices.
    fn collective_slowdown(&self, place: &Place) -> f64 {
        let Problem { cluster, measured, .. } = self.problem;
        let of_kind = |kind: usize| {
            let measured = measured[kind].as_ref().and_then(|measured| measured.collective_slowdown);
            measured.unwrap_or(cluster.kinds[kind].collective_slowdown)
        };
        place.kinds().map(of_kind).fold(0.0, f64::max)
    }

    fn update_us(&self, trainable_bytes: f64, at: &At<'_>, variant: Variant) -> f64 {
        let share = if variant.sharding > Sharding::None { f64::from(at.place.replicas) } else { 1.0 };
        let bytes = trainable_bytes / share;
        let state_bytes = bytes * self.problem.settings.optimizer_bytes_per_param_byte;
        let Problem { cluster, measured, .. } = self.problem;
        let on = |kind: usize| {
            let device = &cluster.kinds[kind];
            let measured = measured[kind].as_ref().and_then(|measured| measured.update_us_per_byte);
            let update_us = measured.map_or_else(|| update_us(device, bytes, state_bytes), |each_us| each_us * bytes);
            // The state comes from the host and goes back.
            let travel_us = 2.0 * state_bytes / device.host_bytes_per_s * 1e6;
            if variant.offload { update_us.max(travel_us) } else { update_us }
        };
        at.place.kinds().map(on).fold(0.0, f64::max)
    }

    /// Memory with everything kept.
    pub(crate) fn memory(
        &self,
        run: &Range<usize>,
        at: &At<'_>,
        variant: Variant,
        workspace_bytes: f64,
    ) -> StageMemory {
        let Range { start: first, end } = *run;
        let (chain, rows) = (self.chain, at.rows);
        let trainable_bytes = chain.trainable_bytes.at(first, end);
        let shared = |level| if variant.sharding >= level { f64::from(at.place.replicas) } else { 1.0 };
        let optimizer_bytes = trainable_bytes * self.problem.settings.optimizer_bytes_per_param_byte;
        let frozen_bytes = chain.state_bytes.at(first, end) - trainable_bytes;
        let gathered_bytes = if variant.sharding == Sharding::Params {
            let block_bytes = run.clone().map(|block| chain.trainable_bytes.at(block, block + 1)).fold(0.0, f64::max);
            (GATHERED_BLOCKS * block_bytes).min(trainable_bytes)
        } else {
            0.0
        };
        StageMemory {
            params_bytes: frozen_bytes + trainable_bytes / shared(Sharding::Params) + gathered_bytes,
            grads_bytes: trainable_bytes / shared(Sharding::Gradients),
            optimizer_bytes: if variant.offload { 0.0 } else { optimizer_bytes / shared(Sharding::Optimizer) },
            workspace_bytes,
            comm_bytes: self.comm_bytes(run, rows),
            framework_bytes: at.framework_bytes,
            microbatch_bytes: chain.kept_bytes.at(first, end, rows) + chain.traffic.out_bytes.at(first, end, rows),
        }
    }

    fn comm_bytes(&self, run: &Range<usize>, rows: u64) -> f64 {
        let Range { start: first, end } = *run;
        let chain = self.chain;
        let grads_bytes =
            chain.traffic.in_grad_bytes.at(first, end, rows) + chain.traffic.out_grad_bytes.at(first, end, rows);
        let outputs_bytes = chain.output_bytes.at(first, end, rows) * self.step.microbatches as f64;
        // One microbatch is received ahead.
        chain.traffic.in_bytes.at(first, end, rows) + GRADS_ON_THE_WAY * grads_bytes + outputs_bytes
    }

    /// Trades memory for time.
    fn compute_again(
        &self,
        run: &Range<usize>,
        at: &At<'_>,
        again: Again,
        time: &mut RunTime,
        memory: &mut StageMemory,
    ) {
        let rows = at.rows;
        match again {
            Again::Nothing => {}
            Again::Everything => {
                let kept_bytes = self.chain.kept_bytes.at(run.start, run.end, rows);
                let in_bytes = self.chain.traffic.in_bytes.at(run.start, run.end, rows).min(kept_bytes);
                memory.microbatch_bytes -= kept_bytes - in_bytes;
                memory.workspace_bytes += kept_bytes - in_bytes;
                time.backward_us += time.forward_us;
            }
            Again::ToHold(in_flight) => {
                let Some(choice) = self.savings(run, at, in_flight, memory) else { return };
                let us = if self.problem.in_parts { choice.least_us() } else { choice.cheapest_us() };
                match us {
                    Some(us) => {
                        memory.microbatch_bytes -= choice.needed_bytes;
                        memory.workspace_bytes += largest_bytes(&choice.savings);
                        time.backward_us += us;
                    }
                    None => memory.microbatch_bytes = f64::INFINITY,
                }
            }
        }
    }

    /// What each kind of Block of a run can free, and how much is needed to hold `in_flight` microbatches; `None`
    /// when everything fits as it is. One Block at a time holds again what it has freed.
    pub(crate) fn savings(
        &self,
        run: &Range<usize>,
        at: &At<'_>,
        in_flight: u64,
        memory: &StageMemory,
    ) -> Option<Choice> {
        let usable_bytes = at.usable_bytes;
        if memory.peak_bytes(in_flight) <= usable_bytes {
            return None;
        }
        let in_run = |saving: &Saving| Saving { count: self.chain.count(saving.kind, run), ..*saving };
        let savings: Vec<Saving> = at.savings.iter().map(in_run).filter(|saving| saving.count > 0).collect();
        let room_bytes = (usable_bytes - memory.fixed_bytes() - largest_bytes(&savings)) / in_flight as f64;
        Some(Choice { savings, needed_bytes: memory.microbatch_bytes - room_bytes })
    }

    /// What one Block frees, and what it costs.
    pub(crate) fn saving(&self, block: usize, at: &At<'_>) -> Saving {
        let us = at.devices.iter().map(|(_, times)| {
            let cost = times.blocks(block, block + 1);
            cost.forward_us.max(cost.forward_host_us)
        });
        let us = us.fold(0.0, f64::max);
        let bytes = self.chain.kept_inside_bytes(block, at.rows);
        Saving { kind: self.chain.kind(block), bytes, us, count: 1 }
    }

    /// Largest temporary memory of a Block.
    pub(crate) fn workspace_bytes(&self, block: usize, replicas: u32) -> f64 {
        self.chain.workspace_bytes(block, self.replica_rows(replicas))
    }

    /// Largest temporary memory of the Blocks of a run.
    pub(crate) fn run_workspace_bytes(&self, run: Range<usize>, replicas: u32) -> f64 {
        run.map(|block| self.workspace_bytes(block, replicas)).fold(0.0, f64::max)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn device(host: bool, action_us: f64) -> Device {
        let mut cluster = Cluster::preset("H200", 1, 1).expect("a preset");
        Device { host, action_us, ..cluster.kinds.remove(0) }
    }

    proptest! {
        #[test]
        fn the_slower_of_device_and_host_counts(us in prop::array::uniform4(0.0..1e4_f64), action_us in 1.0..1e3_f64) {
            let [forward_us, backward_us, forward_host_us, backward_host_us] = us;
            let cost = ComputeCost { forward_us, backward_us, forward_host_us, backward_host_us };
            let time = RunTime::new(cost, &device(false, action_us));
            let slower_us = (forward_us + backward_us).max(forward_host_us + backward_host_us + 2.0 * action_us);
            prop_assert!((time.forward_us + time.backward_us - slower_us).abs() <= 1e-9 * slower_us);
            prop_assert!(time.forward_us >= forward_us && time.backward_us >= backward_us);
        }
    }

    #[test]
    fn a_host_that_computes_itself_adds_its_actions() {
        let cost = ComputeCost { forward_us: 10.0, backward_us: 20.0, ..ComputeCost::default() };
        assert_eq!(RunTime::new(cost, &device(true, 3.0)), RunTime { forward_us: 13.0, backward_us: 23.0 });
    }
}
