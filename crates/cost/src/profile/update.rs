//! The measured end of a step.

use serde::{Deserialize, Serialize};

/// What a step does with every gradient besides computing and summing it, measured; most of it is the optimizer.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MeasuredUpdate {
    /// Trainable parameters.
    pub params_bytes: u64,
    /// Time for them.
    pub update_us: f64,
}

impl MeasuredUpdate {
    /// Time for each byte of trainable parameters.
    pub fn us_per_byte(&self) -> f64 {
        self.update_us / self.params_bytes as f64
    }

    pub(super) fn is_positive(&self) -> bool {
        self.params_bytes > 0 && self.update_us.is_finite() && self.update_us > 0.0
    }
}
