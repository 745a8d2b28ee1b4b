//! The chain of Blocks: what any run of it costs, composed from sums.

mod block_times;
mod chain;
mod conversions;
mod extract;
mod feeds;
mod interval;
mod largest;
mod measured;
mod own;
mod own_costs;
mod parts;
mod spans;
pub(crate) mod spec;
mod sums;
mod times;
mod traffic;

pub(crate) use chain::Chain;
pub(crate) use extract::extract;
pub(crate) use feeds::Feeds;
pub(crate) use interval::IntervalSums;
pub(crate) use measured::Measured;
pub(crate) use parts::PartTimes;
pub use spans::whole_spans;
pub(crate) use spec::{Affine, BatchSpec, ByCount, CrossingSpec, StateSpec};
pub(crate) use sums::BlockSums;
pub(crate) use times::Times;
pub(crate) use traffic::BatchTraffic;
