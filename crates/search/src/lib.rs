//! The search: main ops are glued to Atoms, Atoms merge to Blocks, and a dynamic program cuts the
//! chain of Blocks into Stages, gives them Replicas and chooses microbatches, Schedule and places.
//!
//! | module | holds |
//! |---|---|
//! | `settings`, `error`, `stop` | what is asked, why it cannot be had, when to stop |
//! | `model`, `extract`, `chain`, `interval`, `measured` | what any run of Blocks costs, by prefix sums |
//! | `variant`, `recompute` | ways to save memory |
//! | `place` | orders of ranks, and the links of a Stage |
//! | `price`, `step` | the objective: time and memory of a Stage, time of a step in closed form |
//! | `links`, `path` | the time of a step told exactly: what moves between Stages, the longest path |
//! | `table`, `relax`, `stages` | the dynamic program for one number of microbatches |
//! | `solve`, `bound` | the best over all, and how far from the optimum it may be |
//! | `fit` | what is short when nothing fits |
//! | `outcome`, `assemble`, `count` | Plans, and what to say about them |
//! | `costs` | the costs of a given Plan, for the simulator |

mod assemble;
mod chain;
mod costs;
mod count;
mod error;
#[cfg(test)]
mod exact;
mod extract;
mod fit;
mod interval;
mod links;
mod measured;
mod model;
mod outcome;
mod path;
mod place;
mod price;
mod recompute;
mod relax;
mod settings;
mod solve;
mod stages;
mod step;
mod stop;
mod table;
mod variant;

pub use costs::PlanCosts;
pub use error::{Advice, SearchError};
pub use outcome::{Gain, Outcome, SearchReport, plan};
pub use rannc_cost::{Block, Blocks};
pub use settings::{Capabilities, Limits, Settings};
pub use stop::Stop;
