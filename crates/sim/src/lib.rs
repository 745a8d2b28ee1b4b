//! The simulator: what happens when during one step of a Program, at given costs.
//!
//! It follows the runtime:
//!
//! * A rank computes one thing at a time, in the order of its Program. A forward or backward first waits
//!   for the messages of its microbatch.
//! * A message moves once the sender has computed it, the receiver has begun to receive, and the message
//!   before it on its channel has arrived. Channels do not wait for each other.
//! * What two Stages exchange for one microbatch moves at the same time and shares the links: a message
//!   takes as long as one with all that its sender sends to that Stage, or all that its receiver gets
//!   from there, whichever is more.
//! * A gradient waits, and its sender with it, until of the earlier ones on its channel fewer than
//!   [`GRAD_WINDOW`](rannc_plan::GRAD_WINDOW) are under way. Without training this holds for Values.
//! * The ranks of a Stage reduce together, as soon as the last of them has come to that point. A rank
//!   updates when its reduction is done and all that it has sent has arrived.
//!
//! Inputs, outputs, and a criterion outside the model take no time.
//!
//! All times are sums and maxima of costs in an order that the Program fixes: no cost that grows makes
//! any event earlier.

mod costs;
mod error;
mod links;
mod machine;
mod script;
mod timeline;

pub use costs::Costs;
pub use error::SimError;
pub use machine::simulate;
pub use timeline::{Event, RankTimeline, Timeline, What};
