//! In which order a Stage computes.

mod compute;
mod named;
mod order;

pub use compute::{Call, Compute};
pub use named::ScheduleKind;
pub use order::{Order, OrderError, Schedule, depths};
