//! Element types.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Element type of a tensor, named as in torch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[expect(missing_docs, reason = "the names are torch's own")]
pub enum DType {
    Float64,
    Float32,
    Float16,
    Bfloat16,
    #[serde(rename = "float8_e4m3fn")]
    Float8E4m3fn,
    #[serde(rename = "float8_e5m2")]
    Float8E5m2,
    Complex128,
    Complex64,
    Int64,
    Int32,
    Int16,
    Int8,
    Uint8,
    Bool,
}

impl DType {
    /// All types.
    pub const ALL: [Self; 14] = [
        Self::Float64,
        Self::Float32,
        Self::Float16,
        Self::Bfloat16,
        Self::Float8E4m3fn,
        Self::Float8E5m2,
        Self::Complex128,
        Self::Complex64,
        Self::Int64,
        Self::Int32,
        Self::Int16,
        Self::Int8,
        Self::Uint8,
        Self::Bool,
    ];

    /// Bytes of one element.
    pub const fn bytes(self) -> u64 {
        match self {
            Self::Complex128 => 16,
            Self::Float64 | Self::Complex64 | Self::Int64 => 8,
            Self::Float32 | Self::Int32 => 4,
            Self::Float16 | Self::Bfloat16 | Self::Int16 => 2,
            Self::Float8E4m3fn | Self::Float8E5m2 | Self::Int8 | Self::Uint8 | Self::Bool => 1,
        }
    }
    /// True for types that can carry a gradient.
    pub const fn is_differentiable(self) -> bool {
        !matches!(self, Self::Int64 | Self::Int32 | Self::Int16 | Self::Int8 | Self::Uint8 | Self::Bool)
    }
    /// Short name, as in the text form.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Float64 => "f64",
            Self::Float32 => "f32",
            Self::Float16 => "f16",
            Self::Bfloat16 => "bf16",
            Self::Float8E4m3fn => "f8e4m3fn",
            Self::Float8E5m2 => "f8e5m2",
            Self::Complex128 => "c128",
            Self::Complex64 => "c64",
            Self::Int64 => "i64",
            Self::Int32 => "i32",
            Self::Int16 => "i16",
            Self::Int8 => "i8",
            Self::Uint8 => "u8",
            Self::Bool => "bool",
        }
    }
    /// Its name in torch.
    pub const fn torch_name(self) -> &'static str {
        match self {
            Self::Float64 => "float64",
            Self::Float32 => "float32",
            Self::Float16 => "float16",
            Self::Bfloat16 => "bfloat16",
            Self::Float8E4m3fn => "float8_e4m3fn",
            Self::Float8E5m2 => "float8_e5m2",
            Self::Complex128 => "complex128",
            Self::Complex64 => "complex64",
            Self::Int64 => "int64",
            Self::Int32 => "int32",
            Self::Int16 => "int16",
            Self::Int8 => "int8",
            Self::Uint8 => "uint8",
            Self::Bool => "bool",
        }
    }
    /// The type with this short name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|dtype| dtype.name() == name)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
