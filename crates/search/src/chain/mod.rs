//! The chain of Blocks: what any run of it costs, composed from sums.

mod chain;
mod extract;
mod interval;
mod measured;
mod spec;
mod sums;
mod traffic;

pub(crate) use chain::{Chain, Times};
pub(crate) use extract::extract;
pub(crate) use measured::Measured;
pub(crate) use spec::{Affine, BlockSpec, ChainSpec, CloneSpec, CrossingSpec, KeptSpec, StateSpec};
