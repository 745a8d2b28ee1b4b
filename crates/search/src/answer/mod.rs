//! From divisions to Plans, told exactly.

mod assemble;
mod count;
mod exact_time;
pub(crate) mod links;
mod outcome;
mod plan_costs;

pub use outcome::{Gain, Outcome, PassedOver, SearchReport, plan, plan_until};
pub use plan_costs::PlanCosts;
