//! The roofline: time of an op from its floating-point operations and the bytes it moves, at the shares
//! of a device's peaks that its kind reaches, and the time that the host needs to launch its kernels.
//!
//! Laws: times are never negative, and where no extent shrinks with the rows they do not fall with
//! the rows.

use super::compute_cost::ComputeCost;
use super::kind::{FlopClass, OpKind};
use super::work::{OpWork, Work};
use crate::cluster::{Curve, Device, Products};

/// A kernel of the backward is launched from C++, one of the forward from Python.
const BACKWARD_LAUNCH: f64 = 0.6;

/// The peaks of a device, and the shares of them that one kind of op reaches.
struct Speed<'d> {
    flops_per_s: f64,
    flops_share: Option<&'d Curve>,
    bytes_per_s: f64,
    bytes_share: &'d Curve,
}

impl<'d> Speed<'d> {
    fn new(kind: OpKind, class: FlopClass, device: &'d Device) -> Self {
        let (rates, efficiency) = (&device.flops_per_s, &device.efficiency);
        let products = |products: &'d Products| {
            // PyTorch's switch for TF32 is on for convolutions, and to be set for all other products.
            let tf32 = device.tf32 || (kind == OpKind::Convolution && !device.host);
            let (flops_per_s, share) = match class {
                FlopClass::Fp64 => (rates.fp64, &products.fp64),
                FlopClass::Fp32 if tf32 => (rates.tf32, &products.tf32),
                FlopClass::Fp32 => (rates.fp32, &products.fp32),
                FlopClass::Half => (rates.half, &products.half),
            };
            (flops_per_s, Some(share), &products.bytes)
        };
        let (flops_per_s, flops_share, bytes_share) = match kind {
            OpKind::Matrix => products(&efficiency.matrix),
            OpKind::Convolution => products(&efficiency.convolution),
            OpKind::Attention => products(&efficiency.attention),
            OpKind::Normalisation => (rates.fp32, None, &efficiency.normalisation),
            OpKind::Pointwise => (rates.fp32, None, &efficiency.pointwise),
            OpKind::Embedding => (rates.fp32, None, &efficiency.embedding),
        };
        Self { flops_per_s, flops_share, bytes_per_s: device.memory_bytes_per_s, bytes_share }
    }

    /// Time of the work, without that of launching it.
    fn us(&self, work: &Work, products: f64, rows: u64) -> f64 {
        let flops = work.flops.at(rows) / products;
        let compute = self.flops_share.map_or(0.0, |share| share.at_peak(flops) * products / self.flops_per_s);
        let memory = self.bytes_share.at_peak(work.bytes.at(rows)) / self.bytes_per_s;
        compute.max(memory) * 1e6
    }
}

impl OpWork {
    /// The speed of its products if they reached the peak of `device`.
    pub fn peak_flops_per_s(&self, device: &Device) -> f64 {
        Speed::new(self.kind, self.class, device).flops_per_s
    }

    /// Its time on `device` for `rows` rows.
    pub fn at(&self, device: &Device, rows: u64) -> ComputeCost {
        let speed = Speed::new(self.kind, self.class, device);
        let products = f64::from(self.backward_products.max(1));
        let launch_us = |work: &Work| work.launches * device.launch_us;
        let summed_us = device.pointwise_us(self.summed_bytes.at(rows));
        let backward_us = speed.us(&self.backward, products, rows) + summed_us;
        let forward_us = speed.us(&self.forward, 1.0, rows);
        let (forward_host_us, backward_host_us) =
            (launch_us(&self.forward), launch_us(&self.backward) * BACKWARD_LAUNCH);
        if device.host {
            return ComputeCost {
                forward_us: forward_us.max(forward_host_us),
                backward_us: backward_us.max(backward_host_us),
                ..ComputeCost::default()
            };
        }
        ComputeCost { forward_us, backward_us, forward_host_us, backward_host_us }
    }
}
