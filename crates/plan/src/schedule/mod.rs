//! In which order computations run: Schedules by name or as lists.

mod compute;
mod crew;
mod expand;
mod named;
mod order;
mod shared;

pub use compute::{Call, Compute, Seated, WINDOW};
pub use crew::Crew;
pub use expand::{Schedule, depths};
pub use named::ScheduleKind;
pub use order::{Held, Order, OrderError};
