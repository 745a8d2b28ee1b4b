//! The best division into Stages, and its lower bound.

mod relax;
mod shortage;
mod solve;
mod stages;
mod table;

pub(crate) use relax::{Relaxation, with_best_sends};
pub(crate) use shortage::{fits, shortage};
pub(crate) use solve::{Case, Solution, Solved, Solver};
pub(crate) use stages::FoundStage;
pub(crate) use table::Entry;
