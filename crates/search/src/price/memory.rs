//! Memory of a Stage with everything kept.

use std::ops::Range;

use rannc_plan::{MemoryPrediction, Sharding};

use super::at::{At, Pricing};
use super::saver::Saver;
use super::sizes::LARGER;

/// Gradients in transfer at a time: one in use, one on its way.
const GRADS_ON_THE_WAY: f64 = 2.0;
/// Blocks whose sharded parameters are whole at a time: one in use, one ahead.
const GATHERED_BLOCKS: f64 = 2.0;

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

impl Pricing<'_> {
    /// Memory with everything kept.
    pub(crate) fn memory(&self, run: &Range<usize>, at: &At<'_>, saver: Saver, workspace_bytes: f64) -> StageMemory {
        let Range { start: first, end } = *run;
        let chain = self.chain;
        let trainable_bytes = chain.trainable_bytes.at(first, end);
        let shared = |level| if saver.sharding >= level { f64::from(at.place.replicas) } else { 1.0 };
        let optimizer_bytes = trainable_bytes * self.problem.settings.optimizer_bytes_per_param_byte;
        let frozen_bytes = chain.state_bytes.at(first, end) - trainable_bytes;
        let gathered_bytes = if saver.sharding == Sharding::Params {
            let block_bytes = run.clone().map(|block| chain.trainable_bytes.at(block, block + 1)).fold(0.0, f64::max);
            (GATHERED_BLOCKS * block_bytes).min(trainable_bytes)
        } else {
            0.0
        };
        StageMemory {
            params_bytes: frozen_bytes + trainable_bytes / shared(Sharding::Params) + gathered_bytes,
            grads_bytes: (trainable_bytes + chain.other_sums_bytes.at(first, end)) / shared(Sharding::Gradients),
            optimizer_bytes: if saver.offload { 0.0 } else { optimizer_bytes / shared(Sharding::Optimizer) },
            workspace_bytes,
            comm_bytes: self.comm_bytes(run, at),
            framework_bytes: at.framework_bytes,
            microbatch_bytes: self.kept_bytes(run, at),
        }
    }

    fn comm_bytes(&self, run: &Range<usize>, at: &At<'_>) -> f64 {
        let Range { start: first, end } = *run;
        let (chain, rows) = (self.chain, at.most_rows());
        let grads_bytes =
            chain.traffic.in_grad_bytes.at(first, end, rows) + chain.traffic.out_grad_bytes.at(first, end, rows);
        let outputs = at.rows.iter().zip(self.sizes.counts).filter(|&(_, count)| count > 0);
        let outputs_bytes: f64 =
            outputs.map(|(&rows, count)| chain.output_bytes.at(first, end, rows) * count as f64).sum();
        // One microbatch is received ahead.
        chain.traffic.in_bytes.at(first, end, rows) + GRADS_ON_THE_WAY * grads_bytes + outputs_bytes
    }

    /// What a run keeps for the backward of a microbatch, on the device that keeps most.
    pub(super) fn kept_bytes(&self, run: &Range<usize>, at: &At<'_>) -> f64 {
        let times = at.devices.iter().map(|device| &*device.times[LARGER]);
        self.chain.kept_bytes(times, run.start, run.end, at.most_rows())
    }

    /// Largest temporary memory of a Block.
    pub(crate) fn workspace_bytes(&self, block: usize, at: &At<'_>) -> f64 {
        at.devices.iter().map(|device| device.times[LARGER].workspace_bytes(block)).fold(0.0, f64::max)
    }

    /// Largest temporary memory of the Blocks of a run.
    pub(crate) fn run_workspace_bytes(&self, run: Range<usize>, at: &At<'_>) -> f64 {
        run.map(|block| self.workspace_bytes(block, at)).fold(0.0, f64::max)
    }

    /// True when a Block of a run ran out of memory while it was measured.
    pub(crate) fn is_too_large(&self, run: &Range<usize>, at: &At<'_>) -> bool {
        at.devices.iter().any(|device| device.times[LARGER].is_too_large(run.start, run.end))
    }
}
