//! What a Plan is expected to take: time and memory.

use serde::{Deserialize, Serialize};

/// Expected cost of a Stage, per microbatch on its largest Replica.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StagePrediction {
    /// Forward of one microbatch.
    pub forward_us: f64,
    /// Backward of one microbatch, recomputation included.
    pub backward_us: f64,
    /// Transfers from and to the neighbouring Stages for one microbatch, gradients included.
    pub transfer_us: f64,
    /// Gradient reduction that the backward does not hide, once a step.
    pub reduce_us: f64,
    /// The optimizer, once a step.
    pub update_us: f64,
    /// Received from earlier Stages for one microbatch.
    pub in_bytes: u64,
    /// Sent to later Stages for one microbatch.
    pub out_bytes: u64,
    /// Peak memory of a step.
    pub memory: MemoryPrediction,
    /// What of it is there for a while only, where Replicas divide gradients or parameters.
    #[serde(default, skip_serializing_if = "WholePrediction::is_nothing")]
    pub whole: WholePrediction,
    /// Each size of microbatch that there is, the largest first; none where all are equal.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sizes: Vec<PassPrediction>,
}

/// Expected cost of one microbatch on the largest Replica of a Stage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PassPrediction {
    /// Its rows there.
    pub rows: u64,
    /// Its forward.
    pub forward_us: f64,
    /// Its backward, recomputation included.
    pub backward_us: f64,
}

/// Expected peak memory of one device, by use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemoryPrediction {
    /// Parameters and buffers.
    pub params_bytes: u64,
    /// Gradients.
    pub grads_bytes: u64,
    /// Optimizer state.
    pub optimizer_bytes: u64,
    /// Saved for backward, over all microbatches in flight.
    pub activations_bytes: u64,
    /// Temporary.
    pub workspace_bytes: u64,
    /// Communication buffers.
    pub comm_bytes: u64,
    /// The framework's own.
    pub framework_bytes: u64,
}

/// What is whole at a time although Replicas divide it; the memory counts it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WholePrediction {
    /// Parameters: those of a Span that computes, and of the next one.
    pub params_bytes: u64,
    /// Gradients: those that come, and those whose sum is on its way.
    pub grads_bytes: u64,
}

impl WholePrediction {
    fn is_nothing(&self) -> bool {
        *self == Self::default()
    }
}

impl MemoryPrediction {
    /// Each use with its name, in the order of the fields.
    pub const fn uses(&self) -> [(&'static str, u64); 7] {
        [
            ("parameters", self.params_bytes),
            ("gradients", self.grads_bytes),
            ("optimizer state", self.optimizer_bytes),
            ("activations", self.activations_bytes),
            ("temporary tensors", self.workspace_bytes),
            ("transfers", self.comm_bytes),
            ("the framework", self.framework_bytes),
        ]
    }

    /// Of two Stages on one device: temporary tensors are there while one of them computes, and the framework is there once.
    #[must_use]
    pub fn beside(self, other: Self) -> Self {
        Self {
            params_bytes: self.params_bytes.saturating_add(other.params_bytes),
            grads_bytes: self.grads_bytes.saturating_add(other.grads_bytes),
            optimizer_bytes: self.optimizer_bytes.saturating_add(other.optimizer_bytes),
            activations_bytes: self.activations_bytes.saturating_add(other.activations_bytes),
            workspace_bytes: self.workspace_bytes.max(other.workspace_bytes),
            comm_bytes: self.comm_bytes.saturating_add(other.comm_bytes),
            framework_bytes: self.framework_bytes.max(other.framework_bytes),
        }
    }

    /// The sum; of impossible amounts the largest number.
    pub fn total_bytes(&self) -> u64 {
        self.uses().into_iter().fold(0, |sum, (_, bytes)| sum.saturating_add(bytes))
    }
}

/// Expected time of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepPrediction {
    /// The whole step.
    pub step_us: f64,
    /// Share of device time spent waiting, 0 to 1.
    pub bubble: f64,
    /// No Plan takes less under the same model.
    pub lower_bound_us: f64,
}
