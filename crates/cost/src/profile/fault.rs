//! How a Profile can contradict itself.

use thiserror::Error;

use super::update::MeasuredUpdate;
use crate::cluster::Link;

/// How a Profile contradicts itself.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum ProfileFault {
    /// A Block has no point.
    #[error("block {block} has no points")]
    NoPoints {
        /// The Block's hash.
        block: String,
    },
    /// Row counts are zero or do not increase.
    #[error("block {block} has a point for {rows} rows after one for {before}; row counts must increase from 1")]
    Rows {
        /// The Block's hash.
        block: String,
        /// The row count before it, or 0.
        before: u64,
        /// The row count.
        rows: u64,
    },
    /// A time is negative, infinite or not a number.
    #[error("block {block} has, for {rows} rows, the time {us} us")]
    Time {
        /// The Block's hash.
        block: String,
        /// The row count.
        rows: u64,
        /// The time.
        us: f64,
    },
    /// More rows fit than fewer.
    #[error("block {block} fits in memory with {rows} rows, but not with fewer")]
    FitsAgain {
        /// The Block's hash.
        block: String,
        /// The row count.
        rows: u64,
    },
    /// Figures of what could not be measured.
    #[error("block {block} does not fit in memory with {rows} rows, but has times or bytes for them")]
    FiguresWithoutRun {
        /// The Block's hash.
        block: String,
        /// The row count.
        rows: u64,
    },
    /// More than all.
    #[error("compiled spans keep at most {0}% of what they would keep; this must be from 0 to 100")]
    MemoryBudget(u8),
    /// A time or an amount of parameters that no optimizer has.
    #[error("the end of a step takes {} us for {} bytes of parameters; both must be positive numbers", .0.update_us, .0.params_bytes)]
    Update(MeasuredUpdate),
    /// A slowdown that speeds up, or stops everything.
    #[error("{name} prolongs computations by a share of {share}; this must be 0 or a positive number")]
    Slowdown {
        /// Which one.
        name: &'static str,
        /// What it adds.
        share: f64,
    },
    /// A latency or bandwidth that no link has.
    #[error("level {level} has a link of {} us and {} bytes/s; both must be positive numbers", link.latency_us, link.bytes_per_s)]
    Link {
        /// Name of the level.
        level: String,
        /// The link.
        link: Link,
    },
}
