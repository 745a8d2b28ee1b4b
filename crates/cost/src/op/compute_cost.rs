//! Times of computations, on the device and on its host.

use std::iter::Sum;
use std::ops::{Add, Sub};

/// Time of an op, or of several: what the device computes, and what its host needs to start that. A host that
/// computes itself does one after the other, and has no times of its own.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ComputeCost {
    /// Time of the forward.
    pub forward_us: f64,
    /// Time of the backward.
    pub backward_us: f64,
    /// Time of the host for the forward.
    pub forward_host_us: f64,
    /// Time of the host for the backward.
    pub backward_host_us: f64,
}

impl ComputeCost {
    /// Forward and backward together, by the slower of device and host.
    pub fn us(&self) -> f64 {
        (self.forward_us + self.backward_us).max(self.forward_host_us + self.backward_host_us)
    }
}

impl Add for ComputeCost {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            forward_us: self.forward_us + other.forward_us,
            backward_us: self.backward_us + other.backward_us,
            forward_host_us: self.forward_host_us + other.forward_host_us,
            backward_host_us: self.backward_host_us + other.backward_host_us,
        }
    }
}

impl Sub for ComputeCost {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        Self {
            forward_us: self.forward_us - other.forward_us,
            backward_us: self.backward_us - other.backward_us,
            forward_host_us: self.forward_host_us - other.forward_host_us,
            backward_host_us: self.backward_host_us - other.backward_host_us,
        }
    }
}

impl Sum for ComputeCost {
    fn sum<I: Iterator<Item = Self>>(costs: I) -> Self {
        costs.fold(Self::default(), Add::add)
    }
}
