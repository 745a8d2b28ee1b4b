//! The search: main ops are glued to Atoms, Atoms merge to Blocks, and a dynamic program cuts the
//! chain of Blocks into Stages, gives them Replicas and chooses the microbatches.
//!
//! | module | holds |
//! |---|---|
//! | `settings`, `error` | what is asked, and why it cannot be had |
//! | `atoms`, `blocks` | the pieces of the chain |
//! | `extract`, `chain`, `interval` | what any run of Blocks costs, by prefix sums |
//! | `price` | the objective: time and memory of a Stage and of a step |
//! | `table`, `relax`, `stages` | the dynamic program |
//! | `fit` | what is short when nothing fits |
//! | `assemble`, `modules` | the Plan |

mod assemble;
mod atoms;
mod blocks;
mod chain;
mod error;
#[cfg(test)]
mod exact;
mod extract;
mod fit;
mod interval;
mod modules;
mod price;
mod relax;
mod settings;
mod stages;
mod table;

pub use assemble::plan;
pub use blocks::{Block, Blocks};
pub use error::{Advice, SearchError};
pub use settings::Settings;
