//! The pieces of a Graph that are measured and that Stages are cut between.

mod atoms;
mod blocks;
mod divide;
mod names;

pub use blocks::{Block, Blocks};
pub use divide::nominal_us;
pub use names::ModuleNames;
