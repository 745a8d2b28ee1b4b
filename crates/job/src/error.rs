//! Why ranks do not find each other.

use std::io;

use crate::home::Home;

/// Why there is no watchdog or no exchange.
#[derive(Debug, thiserror::Error)]
pub enum JobError {
    /// The port cannot be opened.
    #[error("rank {rank}'s watchdog cannot listen on {home}")]
    Listen {
        /// This rank.
        rank: u32,
        /// Its host as the other ranks know it.
        home: Home,
        /// What the system says.
        source: io::Error,
    },
    /// The rank above cannot be reached.
    #[error("rank {rank}'s watchdog cannot reach rank {above} at {address}")]
    Connect {
        /// This rank.
        rank: u32,
        /// Which it calls.
        above: u32,
        /// That one's address.
        address: String,
        /// What the system says.
        source: io::Error,
    },
    /// Ranks that this one expects have not called it.
    #[error("rank {rank} has not reached rank {above} within {within_s} s (connect_timeout_s)")]
    Missing {
        /// The first of them.
        rank: u32,
        /// This rank.
        above: u32,
        /// How long it has waited.
        within_s: f64,
    },
    /// The system starts no more threads.
    #[error("the watchdog cannot start a thread")]
    Thread(#[source] io::Error),
    /// Not an address that [`crate::door::Door`] has made.
    #[error("\"{0}\" is not the address of a watchdog")]
    Address(String),
    /// The rank above has another idea of the job.
    #[error("rank {above}'s watchdog refused rank {rank}: {reason}")]
    Refused {
        /// This rank.
        rank: u32,
        /// Which it has called.
        above: u32,
        /// That one's words.
        reason: String,
    },
}
