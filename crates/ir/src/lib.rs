//! The Graph of a captured model: Ops, Values, Params, Buffers.

mod analysis;
mod batch_free;
mod dtype;
mod entity;
mod error;
mod follow;
mod graph;
mod hash;
mod json;
mod once;
mod only_users;
mod ops;
mod parse;
mod paths;
mod problem;
mod row_state;
mod rows;
mod run;
pub mod sealed;
mod storages;
mod tail;
#[cfg(feature = "testing")]
pub mod testing;
mod text;
mod verify;

pub use analysis::{Analysis, CutRefusal, GroupReason, OpGroup, allowed_cuts, cuts};
pub use batch_free::{batch_free_ops, main_ops};
pub use dtype::DType;
pub use entity::{Arena, Entity};
pub use error::GraphError;
pub use graph::{
    Arg, Buffer, BufferId, ConstId, Constant, Dim, Graph, Op, OpId, OpPlace, Param, ParamId, SCHEMA, Source, Value,
    ValueDef, ValueId,
};
pub use hash::{Signature, block_hash, signature, text_hash};
pub use only_users::only_users;
pub use paths::{is_index, repeated_module, unit_path};
pub use problem::{GraphPlace, GraphProblem, VerifyError, VerifyErrors};
pub use row_state::{Join, Mixing, RowDim, RowState};
pub use rows::{Rows, row_dims};
pub use run::OpRun;
pub use storages::Storages;
pub use tail::{Divided, Joined, Tail};
