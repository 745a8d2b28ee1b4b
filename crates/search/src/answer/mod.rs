//! From divisions to Plans, told exactly.

mod assemble;
mod batch_exchanges;
mod count;
mod exact_time;
pub(crate) mod links;
mod list_schedule;
mod outcome;
mod plan_costs;
mod precision;
mod simplest;
mod simulated_step;
mod tied;
mod two_parts;
mod upgrade;
mod whole_piece;

pub use outcome::{Gain, Outcome, SearchReport, plan, plan_until};
pub use plan_costs::{PlanCosts, Undivided, check_plan};
#[cfg(test)]
pub(crate) use simplest::HOST_US;
pub use simplest::PassedOver;
pub use upgrade::upgrade;
