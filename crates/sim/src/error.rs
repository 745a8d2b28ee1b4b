//! Why a Program cannot be simulated.

use rannc_plan::CheckError;
use thiserror::Error;

/// Why a Program cannot be simulated.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum SimError {
    /// Its lists do not fit together, or its ranks wait for each other.
    #[error(transparent)]
    Program(#[from] CheckError),
    /// A cost is not a time.
    #[error("the cost model gives {what} {us} us; a time must be finite and not negative")]
    Cost {
        /// What it is the time of.
        what: String,
        /// The time.
        us: f64,
    },
}
