//! The Graph of a captured model: Ops, Values, Params, Buffers.

mod dtype;
mod entity;
mod graph;

pub use dtype::DType;
pub use entity::{Arena, Entity};
pub use graph::{
    Arg, Buffer, BufferId, ConstId, Constant, Dim, Graph, Op, OpId, Param, ParamId, SCHEMA, Source, Value, ValueDef,
    ValueId,
};
