//! The best division into Stages, and its lower bound.

mod depths;
mod ranks;
pub(crate) mod relax;
mod shortage;
mod solve;
mod stages;
pub(crate) mod table;

pub(crate) use relax::Grain;
pub(crate) use shortage::{Help, fits, shortage};
pub(crate) use solve::{SearchCase, Solution, Solved, Solver};
pub(crate) use stages::FoundStage;
pub(crate) use table::Entry;
