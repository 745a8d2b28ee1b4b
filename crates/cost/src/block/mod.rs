//! The pieces of a Graph that are measured and that Stages are cut between.

mod atoms;
mod blocks;
mod divide;
mod names;
mod paths;

pub use blocks::{Block, Blocks};
pub use names::ModuleNames;
