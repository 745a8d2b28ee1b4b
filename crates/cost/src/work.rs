//! The roofline: time of an op from its floating-point operations, the bytes it moves, and the
//! kernels it launches.
//!
//! Laws: times are never negative, and where no extent shrinks with the rows they do not fall with
//! the rows.

use rannc_ir::{Arg, DType, Dim, ValueId};

use crate::device::Device;
use crate::op::{Operation, tensor_bytes};
use crate::poly::Poly;

/// Which speed of a device an op runs at.
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

    fn flops_per_s(self, device: &Device) -> f64 {
        match self {
            Self::Fp64 => device.flops_per_s.fp64,
            Self::Fp32 => device.flops_per_s.fp32,
            Self::Half => device.flops_per_s.half,
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
    /// Kernels.
    pub launches: f64,
}

impl Work {
    fn us(&self, class: FlopClass, device: &Device, rows: u64) -> f64 {
        let compute_us = self.flops.at(rows) / class.flops_per_s(device) * 1e6;
        let memory_us = self.bytes.at(rows) / device.memory_bytes_per_s * 1e6;
        compute_us.max(memory_us).max(self.launches * device.launch_us)
    }
}

/// Time of an op.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct OpCost {
    /// Time of the forward.
    pub forward_us: f64,
    /// Time of the backward.
    pub backward_us: f64,
}

/// What an op does to a device, as a function of the rows.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct OpWork {
    /// Its forward.
    pub forward: Work,
    /// Its backward.
    pub backward: Work,
    /// Speed of its matrix products.
    pub class: FlopClass,
}

impl OpWork {
    /// Estimates an op.
    pub fn new(operation: &Operation<'_>) -> Self {
        if operation.is_view() {
            return Self { backward: operation.view_backward(), ..Self::default() };
        }
        let product = operation.product();
        let results = operation.op.results.first();
        let class = results.map_or(FlopClass::Fp32, |&result| FlopClass::of(operation.value(result).dtype));
        let forward = Work { flops: product.forward_flops, bytes: operation.forward_bytes(), launches: 1.0 };
        let mut backward = Work::default();
        if operation.has_backward() {
            backward.flops = product.backward_flops;
            backward.bytes = operation.backward_bytes();
            backward.launches = product.backward_launches;
        }
        Self { forward, backward, class }
    }

    /// Its time on `device` for `rows` rows.
    pub fn at(&self, device: &Device, rows: u64) -> OpCost {
        OpCost {
            forward_us: self.forward.us(self.class, device, rows),
            backward_us: self.backward.us(self.class, device, rows),
        }
    }
}

/// The matrix products of an op.
struct Product {
    forward_flops: Poly,
    backward_flops: Poly,
    backward_launches: f64,
}

impl Operation<'_> {
    fn product(&self) -> Product {
        let flops = match self.name {
            "linear" => self.contraction_flops(0),
            "matmul" | "mm" | "bmm" | "mv" | "dot" | "vdot" => self.contraction_flops(0),
            "addmm" | "baddbmm" | "addbmm" | "addmv" => self.contraction_flops(1),
            "einsum" => self.einsum_flops(),
            name if is_convolution(name) => self.convolution_flops(),
            "lstm" | "gru" | "rnn_tanh" | "rnn_relu" => self.recurrent_flops(),
            "scaled_dot_product_attention" => return self.attention(),
            _ => {
                return Product {
                    forward_flops: Poly::default(),
                    backward_flops: Poly::default(),
                    backward_launches: 1.0,
                };
            }
        };
        // Each factor that needs a gradient costs one more product of the same size.
        let factors = self.operands().into_iter().filter(|&value| self.value(value).shape.len() > 1);
        let gradients = (factors.filter(|&value| self.requires_grad(value)).count() as f64).min(2.0);
        Product { forward_flops: flops, backward_flops: flops * gradients, backward_launches: gradients + 1.0 }
    }

    /// `[.., m, k] x [k, n]`: every element of the result sums `k` products.
    fn contraction_flops(&self, position: usize) -> Poly {
        let depth = self.tensor(position).and_then(|left| self.value(left).shape.last().copied());
        self.result_elements() * Poly::extent(depth.unwrap_or(Dim::fixed(1))) * 2.0
    }

    fn convolution_flops(&self) -> Poly {
        let (Some(input), Some(weight)) = (self.tensor(0), self.tensor(1)) else { return Poly::default() };
        let transposed = self.name.contains("transpose") || self.is_set(6, "transposed");
        let positions = if transposed { Poly::elements(&self.value(input).shape) } else { self.result_elements() };
        let kernel = self.value(weight).shape.get(1..).map_or_else(Poly::default, Poly::elements);
        positions * kernel * 2.0
    }

    /// Every position of the sequence passes through every weight.
    fn recurrent_flops(&self) -> Poly {
        let Some(input) = self.tensor(0) else { return Poly::default() };
        let positions =
            self.value(input).shape.split_last().map_or_else(Poly::default, |(_, rest)| Poly::elements(rest));
        let weights = self.operands().into_iter().filter(|&value| self.is_state(self.root(value)));
        positions * weights.map(|weight| Poly::elements(&self.value(weight).shape)).sum::<Poly>() * 2.0
    }

    /// Every combination of the subscripts is one multiplication and one addition.
    fn einsum_flops(&self) -> Poly {
        let Some(Arg::Str(equation)) = self.op.args.first() else { return Poly::default() };
        let subscripts = equation.split("->").next().unwrap_or_default().split(',');
        let mut seen = Vec::new();
        let mut combinations = Poly::fixed(2.0);
        for (letters, operand) in subscripts.zip(self.op.operands()) {
            for (letter, &dim) in letters.chars().filter(|c| c.is_alphabetic()).zip(&self.value(operand).shape) {
                if !seen.contains(&letter) {
                    seen.push(letter);
                    combinations = combinations * Poly::extent(dim);
                }
            }
        }
        combinations
    }

    /// Scores and weighted values; the backward computes the scores again and four gradients.
    fn attention(&self) -> Product {
        let flops = self.attention_scores() * self.head_extent() * 4.0;
        Product { forward_flops: flops, backward_flops: flops * 2.5, backward_launches: 2.0 }
    }

    /// Elements of the matrix of attention scores.
    pub(crate) fn attention_scores(&self) -> Poly {
        let shape = |position| self.tensor(position).map(|value| self.value(value).shape.as_slice());
        match (shape(0).and_then(<[Dim]>::split_last), shape(1)) {
            (Some((_, queries)), Some([.., keys, _])) => Poly::elements(queries) * Poly::extent(*keys),
            _ => Poly::default(),
        }
    }

    fn head_extent(&self) -> Poly {
        let last = self.tensor(0).and_then(|query| self.value(query).shape.last().copied());
        Poly::extent(last.unwrap_or(Dim::fixed(1)))
    }

    /// Bytes that it reads and writes. Of a table only the looked-up rows are read.
    fn forward_bytes(&self) -> Poly {
        let table = if is_lookup(self.name) { self.tensor(0) } else { None };
        let read = |value: ValueId| {
            if Some(value) == table { self.result_bytes() } else { tensor_bytes(self.value(value)) }
        };
        self.result_bytes() + self.operands().into_iter().map(read).sum::<Poly>()
    }

    /// The gradient of the results and the operands are read, the operands' gradients are written.
    fn backward_bytes(&self) -> Poly {
        let written = self.operands().into_iter().filter(|&value| self.requires_grad(value));
        self.forward_bytes() + written.map(|value| tensor_bytes(self.value(value))).sum::<Poly>()
    }

    /// The gradient of a part is copied into zeros of the whole; other views cost nothing.
    fn view_backward(&self) -> Work {
        let whole = self.tensor(0).filter(|_| takes_part(self.name) && self.has_backward());
        whole.map_or_else(Work::default, |whole| Work {
            bytes: tensor_bytes(self.value(whole)) + self.result_bytes(),
            launches: 1.0,
            ..Work::default()
        })
    }
}

pub(crate) fn is_convolution(name: &str) -> bool {
    matches!(name, "conv1d" | "conv2d" | "conv3d" | "convolution" | "_convolution")
        || name.starts_with("conv_transpose")
}

pub(crate) fn is_lookup(name: &str) -> bool {
    matches!(name, "embedding" | "index_select" | "gather" | "index" | "take")
}

fn takes_part(name: &str) -> bool {
    matches!(name, "slice" | "select" | "narrow" | "split" | "split_with_sizes" | "chunk" | "unbind" | "diagonal")
}
