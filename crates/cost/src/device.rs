//! One kind of device.

use serde::Serialize;

use crate::efficiency::Efficiency;

/// Peak speed of matrix products, in floating-point operations per second.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct FlopRates {
    /// float64.
    pub fp64: f64,
    /// float32 without TF32.
    pub fp32: f64,
    /// float32 by way of TF32.
    pub tf32: f64,
    /// float16 and bfloat16.
    pub half: f64,
}

/// One kind of device.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Device {
    /// Name, as torch reports it.
    pub name: String,
    /// True when ops run on the host's own processor.
    pub host: bool,
    /// Memory of the device.
    pub memory_bytes: u64,
    /// Peak speed of matrix products.
    pub flops_per_s: FlopRates,
    /// True when float32 matrix products use TF32. Convolutions of accelerators always do, as is
    /// PyTorch's default.
    pub tf32: bool,
    /// Peak memory bandwidth.
    pub memory_bytes_per_s: f64,
    /// Shortest time between the starts of two kernels.
    pub launch_us: f64,
    /// Time that the host needs to start one Action of a schedule.
    pub action_us: f64,
    /// Memory that the framework takes before any tensor.
    pub framework_bytes: u64,
    /// Bandwidth between the device and its host's memory, in one direction.
    pub host_bytes_per_s: f64,
    /// Shares of the peaks that ops reach.
    pub efficiency: Efficiency,
}

/// Time of an optimizer step: parameters and gradients are read, its state read and written, the
/// parameters written.
pub fn update_us(device: &Device, params_bytes: f64, optimizer_bytes: f64) -> f64 {
    let bytes = 3.0 * params_bytes + 2.0 * optimizer_bytes;
    device.efficiency.optimizer.at_peak(bytes) / device.memory_bytes_per_s * 1e6
}
