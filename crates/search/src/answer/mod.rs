//! From divisions to Plans, told exactly.

mod assemble;
mod count;
mod exact_time;
mod links;
mod outcome;
mod plan_costs;

pub(crate) use links::{Link, Linker};

pub use outcome::{Gain, Outcome, SearchReport, plan};
pub use plan_costs::PlanCosts;
