//! Kinds of ops and of numbers: which speed of a device an op has.

use rannc_ir::DType;

use super::operation::{is_convolution, is_grouped_product, is_lookup};

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
    pub(super) fn of(name: &str) -> Self {
        match name {
            "linear" | "matmul" | "mm" | "bmm" | "mv" | "dot" | "vdot" | "addmm" | "baddbmm" | "addbmm" | "addmv"
            | "einsum" | "lstm" | "gru" | "rnn_tanh" | "rnn_relu" => Self::Matrix,
            "scaled_dot_product_attention" => Self::Attention,
            "softmax" | "_softmax" | "log_softmax" | "_log_softmax" | "cross_entropy_loss" => Self::Normalisation,
            _ if is_grouped_product(name) => Self::Matrix,
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
    pub(super) fn of(dtype: DType) -> Self {
        match dtype {
            DType::Float64 | DType::Complex128 => Self::Fp64,
            DType::Float16 | DType::Bfloat16 | DType::Float8E4m3fn | DType::Float8E5m2 => Self::Half,
            _ => Self::Fp32,
        }
    }
}
