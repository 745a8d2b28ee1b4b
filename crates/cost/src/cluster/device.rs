//! One kind of device.

use serde::Serialize;

use super::efficiency::Efficiency;
use crate::units::{GIB, GIGA, TERA};

/// The figures that may be 0.
pub(crate) const MAY_BE_ZERO: [&str; 3] = ["framework_gib", "collective_slowdown", "message_slowdown"];

/// [`Device::collective_slowdown`] where nothing is known: about what it is on H200s.
pub(crate) const COLLECTIVE_SLOWDOWN: f64 = 0.5;

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
    /// By what share of its own time a collective prolongs computations that run beside it.
    pub collective_slowdown: f64,
    /// By what share of their own time computations take longer while a message of their Stage is under way.
    pub message_slowdown: f64,
    /// Shares of the peaks that ops reach.
    pub efficiency: Efficiency,
}

impl Device {
    /// Its figures in the units and under the names of a cluster file.
    pub(crate) fn figures(&self) -> [(&'static str, f64); 12] {
        let rates = self.flops_per_s;
        [
            ("memory_gib", self.memory_bytes as f64 / GIB),
            ("fp64_tflops", rates.fp64 / TERA),
            ("fp32_tflops", rates.fp32 / TERA),
            ("tf32_tflops", rates.tf32 / TERA),
            ("half_tflops", rates.half / TERA),
            ("memory_gb_per_s", self.memory_bytes_per_s / GIGA),
            ("launch_us", self.launch_us),
            ("action_us", self.action_us),
            ("framework_gib", self.framework_bytes as f64 / GIB),
            ("host_gb_per_s", self.host_bytes_per_s / GIGA),
            ("collective_slowdown", self.collective_slowdown),
            ("message_slowdown", self.message_slowdown),
        ]
    }

    /// Time of element-wise work that reads and writes so many bytes.
    pub fn pointwise_us(&self, bytes: f64) -> f64 {
        self.efficiency.pointwise.at_peak(bytes) / self.memory_bytes_per_s * 1e6
    }
}

/// Time of an optimizer step: parameters and gradients are read, its state read and written, the
/// parameters written.
pub fn update_us(device: &Device, params_bytes: f64, optimizer_bytes: f64) -> f64 {
    let bytes = 3.0 * params_bytes + 2.0 * optimizer_bytes;
    device.efficiency.optimizer.at_peak(bytes) / device.memory_bytes_per_s * 1e6
}
