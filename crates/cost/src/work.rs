//! The roofline: time of an op from its floating-point operations and the bytes it moves, at the shares
//! of a device's peaks that its kind reaches, and the time that the host needs to launch its kernels.
//!
//! Laws: times are never negative, and where no extent shrinks with the rows they do not fall with
//! the rows.

use std::iter::Sum;
use std::ops::{Add, Sub};

use rannc_ir::DType;

use crate::device::Device;
use crate::efficiency::{Curve, Products};
use crate::op::{Operation, is_convolution, is_lookup};
use crate::poly::Poly;
use crate::products::backward_flops;

/// A kernel of the backward is launched from C++, one of the forward from Python.
const BACKWARD_LAUNCH: f64 = 0.6;

/// Which shares of a device's peaks an op reaches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OpKind {
    /// Matrix products.
    #[default]
    Matrix,
    /// Convolutions.
    Convolution,
    /// Scaled dot-product attention.
    Attention,
    /// Normalisations, softmax and what is made of it.
    Normalisation,
    /// Everything else: it goes through its tensors once.
    Pointwise,
    /// Looking up rows of tables.
    Embedding,
}

impl OpKind {
    fn of(name: &str) -> Self {
        match name {
            "linear" | "matmul" | "mm" | "bmm" | "mv" | "dot" | "vdot" | "addmm" | "baddbmm" | "addbmm" | "addmv"
            | "einsum" | "lstm" | "gru" | "rnn_tanh" | "rnn_relu" => Self::Matrix,
            "scaled_dot_product_attention" => Self::Attention,
            "softmax" | "_softmax" | "log_softmax" | "_log_softmax" | "cross_entropy_loss" => Self::Normalisation,
            _ if is_convolution(name) => Self::Convolution,
            _ if is_lookup(name) => Self::Embedding,
            _ if name.ends_with("_norm") => Self::Normalisation,
            _ => Self::Pointwise,
        }
    }
}

/// Which numbers an op multiplies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FlopClass {
    /// float64 and complex128.
    Fp64,
    /// float32, and everything that has no speed of its own.
    #[default]
    Fp32,
    /// Two bytes and less.
    Half,
}

impl FlopClass {
    fn of(dtype: DType) -> Self {
        match dtype {
            DType::Float64 | DType::Complex128 => Self::Fp64,
            DType::Float16 | DType::Bfloat16 | DType::Float8E4m3fn | DType::Float8E5m2 => Self::Half,
            _ => Self::Fp32,
        }
    }
}

/// What one direction of an op does to a device.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    /// Floating-point operations of matrix products.
    pub flops: Poly,
    /// Bytes read and written.
    pub bytes: Poly,
    /// Kernels, which share the work.
    pub launches: f64,
}

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

/// What an op does to a device, as a function of the rows.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct OpWork {
    /// Its kind.
    pub kind: OpKind,
    /// Its numbers.
    pub class: FlopClass,
    /// Its forward.
    pub forward: Work,
    /// Its backward.
    pub backward: Work,
    /// Matrix products that share the floating-point operations of the backward.
    pub backward_products: u32,
    /// Bytes of the sums that come after the backward: of gradients of biases, and with the gradients
    /// that parameters already have.
    pub summed_bytes: Poly,
}

impl OpWork {
    /// Estimates an op.
    pub fn new(operation: &Operation<'_>) -> Self {
        let kind = OpKind::of(operation.name);
        if operation.is_view() {
            return Self { kind: OpKind::Pointwise, backward: operation.view_backward(), ..Self::default() };
        }
        let results = operation.op.results.first();
        let class = results.map_or(FlopClass::Fp32, |&result| FlopClass::of(operation.value(result).dtype));
        let flops = operation.flops(kind);
        let forward = Work { flops, bytes: operation.forward_bytes(), launches: 1.0 };
        if !operation.has_backward() {
            return Self { kind, class, forward, ..Self::default() };
        }
        let backward_products = operation.backward_products(kind);
        let (bytes, kernels) = operation.backward_traffic(kind, backward_products);
        let (summed_bytes, sums) = operation.summed(kind);
        let flops = flops * backward_flops(kind, backward_products);
        let backward = Work { flops, bytes, launches: kernels + sums };
        Self { kind, class, forward, backward, backward_products, summed_bytes }
    }

    /// The speed of its products if they reached the peak of `device`.
    pub fn peak_flops_per_s(&self, device: &Device) -> f64 {
        Speed::new(self.kind, self.class, device).flops_per_s
    }

    /// Its time on `device` for `rows` rows.
    pub fn at(&self, device: &Device, rows: u64) -> ComputeCost {
        let speed = Speed::new(self.kind, self.class, device);
        let products = f64::from(self.backward_products.max(1));
        let launch_us = |work: &Work| work.launches * device.launch_us;
        let summed_bytes = device.efficiency.pointwise.at_peak(self.summed_bytes.at(rows));
        let backward_us = speed.us(&self.backward, products, rows) + summed_bytes / device.memory_bytes_per_s * 1e6;
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
