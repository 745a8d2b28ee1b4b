//! In which order a Stage computes.

mod compute;
mod named;

pub use compute::{Call, Compute};
pub use named::ScheduleKind;
