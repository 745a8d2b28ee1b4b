//! The search: a dynamic program cuts the chain of a Graph's Blocks into Stages, gives them Replicas and chooses
//! microbatches, Schedule and places.
//!
//! | module | holds |
//! |---|---|
//! | `settings`, `error`, `stop` | what is asked, why it cannot be had, when to stop |
//! | `chain` | what any run of Blocks costs, by sums |
//! | `price` | the objective: time and memory of a Stage at a place, time of a step in closed form |
//! | `solve` | the dynamic program, its lower bound, what is short when nothing fits |
//! | `answer` | Plans, what to say about them, and the time of a step told exactly |

mod answer;
mod chain;
mod error;
mod price;
mod settings;
mod solve;
mod stop;
#[cfg(test)]
mod tests;

pub use answer::{
    Gain, Outcome, PassedOver, PlanCosts, SearchReport, Undivided, check_plan, plan, plan_until, upgrade,
};
pub use chain::whole_spans;
pub use error::{Advice, SearchError, SettingNames, Shortage};
pub use rannc_cost::{Block, Blocks};
pub use settings::{Limits, Savers, Settings};
pub use stop::Stop;
