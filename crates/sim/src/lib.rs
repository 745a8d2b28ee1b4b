//! The simulator: what happens when during one step of a Program, at given costs.
//!
//! The Program runs on [the machine](rannc_plan::run) at given prices:
//!
//! * What two Stages exchange for one microbatch moves at the same time and shares the links: a message
//!   takes as long as one with all that its sender sends to that Stage, or all that its receiver gets
//!   from there, whichever is more.
//! * Sums of gradients of a Stage's own Params cost what they add after the last backward; those of Params that several
//!   Stages hold follow it, and nothing hides them.
//! * Sums over ranks that several Stages have are not hidden either.
//! * A rank updates when its sums are done and all that it has sent has arrived.
//!
//! An exchange of rows with the ranks' own batches takes as long as the slowest message in it, with all that its sender
//! gives there, or all that its receiver takes.
//! A criterion outside the model takes no time.
//!
//! All times are sums and maxima of costs in an order that the Program fixes: no cost that grows makes
//! any event earlier.

mod clock;
mod costs;
mod error;
mod links;
mod simulate;
mod timeline;

pub use costs::Costs;
pub use error::SimError;
pub use simulate::simulate;
pub use timeline::{Event, RankTimeline, Timeline, What};
