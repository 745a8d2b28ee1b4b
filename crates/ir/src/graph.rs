//! The Graph: a captured training computation.
//!
//! Ops stand in topological order and use Values; a Value is defined by an input, a parameter, a
//! buffer, a constant or an Op. Batch-size arithmetic has no Ops: wherever the model computed with
//! the batch size, an argument holds a [`Dim`] instead.

use std::fmt;

use indexmap::IndexMap;
use serde::{Deserialize, Serialize};

use crate::dtype::DType;
use crate::entity::{Arena, entity};
use crate::row_state::Mixing;

/// Version of the JSON form that this crate writes and reads.
pub const SCHEMA: u32 = 1;

entity!(
    /// An Op, numbered in execution order.
    OpId,
    "op"
);
entity!(
    /// A tensor.
    ValueId,
    "v"
);
entity!(
    /// A trainable or frozen parameter.
    ParamId,
    "p"
);
entity!(
    /// A buffer of a module.
    BufferId,
    "b"
);
entity!(
    /// A tensor constant found while tracing.
    ConstId,
    "c"
);

/// An extent, or an integer argument: `per_row * batch + fixed`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Dim {
    /// Factor of the batch size.
    pub per_row: i64,
    /// Part that does not depend on the batch size.
    pub fixed: i64,
}

impl Dim {
    /// A size that does not depend on the batch.
    pub const fn fixed(fixed: i64) -> Self {
        Self { per_row: 0, fixed }
    }
    /// `per_row` times the batch size.
    pub const fn rows(per_row: i64) -> Self {
        Self { per_row, fixed: 0 }
    }
    /// The extent for a batch of `rows` rows.
    pub const fn at(self, rows: i64) -> i64 {
        self.per_row * rows + self.fixed
    }
}

/// One argument of an [`Op`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Arg {
    /// `None` in Python.
    None,
    /// A tensor.
    Value(ValueId),
    /// An integer computed from the batch size.
    Dim(Dim),
    /// A boolean.
    Bool(bool),
    /// An integer.
    Int(i64),
    /// A float, as Python's `repr` writes it (`inf`, `-inf` and `nan` included).
    Float(String),
    /// A string.
    Str(String),
    /// `torch.dtype`, `torch.device`, `torch.layout`, `torch.memory_format`, as `str` writes it.
    Torch(String),
    /// A list or tuple.
    List(Vec<Arg>),
}

impl Arg {
    /// Calls `visit` for every Value in the argument, in order.
    pub fn for_each_value(&self, visit: &mut impl FnMut(ValueId)) {
        match self {
            Self::Value(value) => visit(*value),
            Self::List(items) => items.iter().for_each(|item| item.for_each_value(visit)),
            _ => {}
        }
    }

    /// Puts `new(value)` in the place of every Value in the argument.
    pub fn map_values(&mut self, new: &mut impl FnMut(ValueId) -> ValueId) {
        match self {
            Self::Value(value) => *value = new(*value),
            Self::List(items) => items.iter_mut().for_each(|item| item.map_values(new)),
            _ => {}
        }
    }
}

/// Where a Value comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ValueDef {
    /// The tensor leaf of the call's arguments with this index.
    Input(u32),
    /// A parameter.
    Param(ParamId),
    /// A buffer, as it is when the step begins.
    Buffer(BufferId),
    /// A constant.
    Constant(ConstId),
    /// The result of an Op; `result` is the place in the Op's returned tuple, 0 for a single tensor.
    Op {
        /// The Op.
        op: OpId,
        /// Place in the returned tuple.
        result: u32,
    },
}

/// A tensor of the Graph.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Value {
    /// Name in the traced graph, unique.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Extents.
    pub shape: Vec<Dim>,
    /// Where it comes from.
    pub def: ValueDef,
    /// True when a gradient may flow into it. Never false for a Value that needs one.
    pub requires_grad: bool,
    /// The earlier Value whose storage it shares, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub alias_of: Option<ValueId>,
}

/// A place in the user's source.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Source {
    /// File path.
    pub file: String,
    /// Line, from 1.
    pub line: u32,
}

/// Where in the model an Op comes from, for messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpPlace {
    /// The Op.
    pub op: OpId,
    /// What it calls.
    pub target: String,
    /// Dotted path of the sub-module that called it; empty for the model itself.
    pub module: String,
    /// Where the model called it, if known.
    pub source: Option<Source>,
}

impl fmt::Display for OpPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.op, self.target)?;
        if !self.module.is_empty() {
            write!(f, " in {}", self.module)?;
        }
        match &self.source {
            Some(source) => write!(f, " at {}:{}", source.file, source.line),
            None => Ok(()),
        }
    }
}

/// One operation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Op {
    /// Qualified name, e.g. `aten.linear.default`.
    pub target: String,
    /// Positional arguments.
    pub args: Vec<Arg>,
    /// Keyword arguments.
    #[serde(default, skip_serializing_if = "IndexMap::is_empty")]
    pub kwargs: IndexMap<String, Arg>,
    /// Tensors that it returns, by increasing place in the returned tuple.
    pub results: Vec<ValueId>,
    /// Arguments that it changes in place.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mutates: Vec<ValueId>,
    /// False inside `torch.no_grad()`.
    pub grad_enabled: bool,
    /// True when it draws random numbers.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub random: bool,
    /// True for a call whose inside was not captured (a leaf module, a custom autograd function).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub opaque: bool,
    /// True for a call of the user's code that was tried: changed rows of its operands changed no other rows of its results.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub row_wise: bool,
    /// Ops of one region (an autocast block, a vmap level) must stay together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub region: Option<u32>,
    /// Ops of one row group treat each row by itself together, though not each of them: experts sort tokens, and put
    /// them back. They must stay together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub row_group: Option<u32>,
    /// Dotted path of the sub-module that called it; empty for the model itself.
    pub module: String,
    /// Where the model called it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<Source>,
}

impl Op {
    /// The Values that it reads, in argument order, repeats included.
    pub fn operands(&self) -> Vec<ValueId> {
        let mut operands = Vec::new();
        for arg in self.args.iter().chain(self.kwargs.values()) {
            arg.for_each_value(&mut |value| operands.push(value));
        }
        operands
    }
}

/// A parameter. A tied parameter appears once, with all its names.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Param {
    /// First name in `named_parameters`.
    pub name: String,
    /// Further names of the same tensor.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub aliases: Vec<String>,
    /// The Value through which Ops read it.
    pub value: ValueId,
}

/// A buffer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Buffer {
    /// First name in `named_buffers`.
    pub name: String,
    /// Further names of the same tensor.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub aliases: Vec<String>,
    /// The Value through which Ops read it.
    pub value: ValueId,
    /// The Value to store back when the forward assigned a new tensor to the buffer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub update: Option<ValueId>,
}

/// A tensor constant.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Constant {
    /// Name in the traced graph.
    pub name: String,
    /// The Value through which Ops read it.
    pub value: ValueId,
    /// Little-endian contiguous bytes, in base64.
    pub data: String,
}

/// The captured computation of one call of a model. Every Param, Buffer, Constant and input has
/// exactly one Value.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Graph {
    /// [`SCHEMA`].
    pub schema: u32,
    /// Qualified name of the model's class.
    pub name: String,
    /// True when the model was in training mode.
    pub training: bool,
    /// Batch size of the sample inputs.
    pub sample_rows: u64,
    /// What its Ops that mix rows work on; captured Graphs leave it to who divides them.
    #[serde(default, skip_serializing_if = "Mixing::is_default")]
    pub mixing: Mixing,
    /// All tensors.
    pub values: Arena<ValueId, Value>,
    /// All operations in execution order.
    pub ops: Arena<OpId, Op>,
    /// Parameters in `named_parameters` order.
    pub params: Arena<ParamId, Param>,
    /// Buffers in `named_buffers` order.
    pub buffers: Arena<BufferId, Buffer>,
    /// Constants.
    pub constants: Arena<ConstId, Constant>,
    /// Tensor leaves of the call's arguments, in flattening order.
    pub inputs: Vec<ValueId>,
    /// Tensor leaves of the result, in flattening order.
    pub outputs: Vec<ValueId>,
}

impl Graph {
    /// Where `op` comes from.
    pub fn place(&self, op: OpId) -> OpPlace {
        let Op { target, module, source, .. } = &self.ops[op];
        OpPlace { op, target: target.clone(), module: module.clone(), source: source.clone() }
    }
}
