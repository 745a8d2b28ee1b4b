//! The Graph of a captured model: Ops, Values, Params, Buffers.

mod analysis;
mod dtype;
mod entity;
mod graph;
mod rows;
#[cfg(feature = "testing")]
pub mod testing;

pub use analysis::{Analysis, CutRefusal, Group, GroupReason, Storages, allowed_cuts, batch_free_ops, cuts, main_ops};
pub use dtype::DType;
pub use entity::{Arena, Entity};
pub use graph::{
    Arg, Buffer, BufferId, ConstId, Constant, Dim, Graph, Op, OpId, OpPlace, Param, ParamId, SCHEMA, Source, Value,
    ValueDef, ValueId,
};
pub use rows::{RowDim, row_dims};
