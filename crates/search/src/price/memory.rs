//! Memory of a Stage with everything kept.

use std::ops::Range;

use rannc_plan::{MemoryPrediction, Sharding, WholePrediction, full_bytes};

use super::at::{At, Pricing};
use super::saver::Saver;
use super::sizes::LARGER;
use crate::chain::{ByCount, IntervalSums};

/// Gradients in transfer at a time: one in use, one on its way.
pub(crate) const GRADS_ON_THE_WAY: f64 = 2.0;
/// Spans whose sharded parameters are whole at a time: one in use, one ahead. Likewise their gradients: one that fills,
/// one whose sum is on its way.
const WHOLE_SPANS: f64 = 2.0;

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
    /// Of the parameters, those that are whole for a while although Replicas divide them.
    pub(crate) whole_params_bytes: f64,
    /// Of the gradients likewise.
    pub(crate) whole_grads_bytes: f64,
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

    /// By use, for the plan file, with so much for the microbatches in flight.
    pub(crate) fn prediction(&self, activations_bytes: f64) -> MemoryPrediction {
        MemoryPrediction {
            params_bytes: self.params_bytes as u64,
            grads_bytes: self.grads_bytes as u64,
            optimizer_bytes: self.optimizer_bytes as u64,
            activations_bytes: activations_bytes as u64,
            workspace_bytes: self.workspace_bytes as u64,
            comm_bytes: self.comm_bytes as u64,
            framework_bytes: self.framework_bytes as u64,
        }
    }

    /// What of that is there for a while only.
    pub(crate) fn whole(&self) -> WholePrediction {
        WholePrediction { params_bytes: self.whole_params_bytes as u64, grads_bytes: self.whole_grads_bytes as u64 }
    }
}

/// How many Replicas divide something.
#[derive(Clone, Copy)]
struct Held {
    replicas: u32,
}

impl Held {
    /// What one of them holds of all, of which a part is divided.
    fn bytes(self, all_bytes: f64, divided_bytes: f64) -> f64 {
        let divided_bytes = divided_bytes.min(all_bytes);
        all_bytes - divided_bytes + divided_bytes / f64::from(self.replicas)
    }
}

impl Pricing<'_> {
    /// Memory with everything kept.
    pub(crate) fn memory(&self, run: &Range<usize>, at: &At<'_>, saver: Saver, workspace_bytes: f64) -> StageMemory {
        let Range { start: first, end } = *run;
        let sharding = at.place.divides(saver.sharding);
        let held = |level: Sharding| Held { replicas: if sharding >= level { at.place.replicas } else { 1 } };
        let bytes = |sums: &IntervalSums| sums.at(first, end);
        let (chain, own) = (self.chain, &self.chain.own);
        // What is gathered is converted on its way.
        let gathered_copy_bytes = if sharding.divides_params() { bytes(&own.spanned_copy_bytes) } else { 0.0 };
        let copy_bytes = (bytes(&chain.copy_bytes) - gathered_copy_bytes).max(0.0);
        let params_bytes =
            held(Sharding::KeptParams).bytes(bytes(&chain.state_bytes), bytes(&own.spanned_bytes)) + copy_bytes;
        let grad_bytes = |of: &ByCount<IntervalSums>| bytes(&of[self.sizes.by_count]);
        let kept_bytes = held(Sharding::Gradients).bytes(grad_bytes(&chain.grad_bytes), grad_bytes(&own.grad_bytes));
        // Divided gradients leave one by one, others all in the last backward.
        let leave_together = at.place.fewest() > 1 && sharding < Sharding::Gradients;
        let copies_bytes = if leave_together { bytes(&chain.message_copy_bytes) } else { 0.0 };
        let grads_bytes = kept_bytes + copies_bytes;
        let updated_bytes = held(Sharding::Optimizer).bytes(bytes(&chain.trainable_bytes), bytes(&own.bytes));
        let (whole_params_bytes, whole_grads_bytes) = self.whole_bytes(run, at, sharding);
        let optimizer_bytes = updated_bytes * self.problem.settings.optimizer_bytes_per_param_byte;
        StageMemory {
            params_bytes: params_bytes + whole_params_bytes,
            grads_bytes: grads_bytes + whole_grads_bytes,
            optimizer_bytes: if saver.offload { 0.0 } else { optimizer_bytes },
            workspace_bytes,
            comm_bytes: self.comm_bytes(run, at),
            framework_bytes: at.framework_bytes,
            microbatch_bytes: self.kept_bytes(run, at),
            whole_params_bytes,
            whole_grads_bytes,
        }
    }

    /// Parameters and gradients that are whole for a while although Replicas divide them.
    fn whole_bytes(&self, run: &Range<usize>, at: &At<'_>, sharding: Sharding) -> (f64, f64) {
        let Range { start: first, end } = *run;
        let own = &self.chain.own;
        let message_bytes = own.message_bytes.at(first, end);
        // A sum that is on its way arrives in memory of its own.
        let summed_bytes = |bytes: f64| {
            message_bytes.min(WHOLE_SPANS * bytes) + message_bytes.min(bytes) / f64::from(at.place.replicas)
        };
        match sharding {
            Sharding::None | Sharding::Optimizer => (0.0, 0.0),
            Sharding::Gradients => {
                let bucket_bytes = full_bytes(message_bytes as u64, at.bucket_bytes(sharding)) as f64
                    + own.largest_message.at(first, end);
                (0.0, summed_bytes(bucket_bytes))
            }
            Sharding::KeptParams | Sharding::Params => {
                let spans_bytes = WHOLE_SPANS * own.largest_gathered.at(first, end);
                let most_bytes = if sharding == Sharding::Params { spans_bytes } else { f64::INFINITY };
                let params_bytes = own.gathered_bytes.at(first, end).min(most_bytes);
                (params_bytes, summed_bytes(own.largest_summed.at(first, end)))
            }
        }
    }

    /// No run with this one in it needs less for parameters, gradients and optimizer state.
    pub(crate) fn least_model_bytes(&self, run: &Range<usize>, at: &At<'_>, saver: Saver) -> f64 {
        let sharding = at.place.divides(saver.sharding);
        let held = |level: Sharding| Held { replicas: if sharding >= level { at.place.replicas } else { 1 } };
        let bytes = |sums: &IntervalSums| sums.at(run.start, run.end);
        let trainable_bytes = bytes(&self.chain.trainable_bytes);
        let grad_bytes = bytes(&self.chain.grad_bytes[self.sizes.by_count]);
        let factor = if saver.offload { 0.0 } else { self.problem.settings.optimizer_bytes_per_param_byte };
        // Parameters that other Blocks use too are divided as soon as the run has these.
        held(Sharding::KeptParams).bytes(bytes(&self.chain.state_bytes), trainable_bytes)
            + held(Sharding::Gradients).bytes(grad_bytes, grad_bytes)
            + held(Sharding::Optimizer).bytes(trainable_bytes, trainable_bytes) * factor
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
        let messages_bytes = chain.traffic.in_bytes.at(first, end, rows) + GRADS_ON_THE_WAY * grads_bytes;
        messages_bytes + outputs_bytes + self.arriving_outputs_bytes(run) + self.copied_outputs_bytes()
    }

    /// What a replayed step gives is copied: the next replay writes to where it was computed.
    fn copied_outputs_bytes(&self) -> f64 {
        if self.problem.settings.replays { self.outputs_of_rank_bytes(0..self.chain.len()) } else { 0.0 }
    }

    /// Of the outputs that other Stages make, the rows that a rank's own batch has: they come while it computes.
    fn arriving_outputs_bytes(&self, run: &Range<usize>) -> f64 {
        let all_bytes = self.outputs_of_rank_bytes(0..self.chain.len());
        (all_bytes - self.outputs_of_rank_bytes(run.clone())).max(0.0)
    }

    /// Of the outputs that a run makes, the rows that a rank's own batch has.
    fn outputs_of_rank_bytes(&self, run: Range<usize>) -> f64 {
        let settings = self.problem.settings;
        if settings.gather_inputs { self.chain.output_bytes.at(run.start, run.end, settings.rank_rows()) } else { 0.0 }
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
