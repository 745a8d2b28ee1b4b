//! In which order a Stage computes.

mod compute;
mod named;
mod order;

pub use compute::{Call, Compute};
pub use named::ScheduleKind;
pub use order::{Held, Order, OrderError, Schedule, depths};
