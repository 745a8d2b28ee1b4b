//! This rank among the others, on the hosts and without tensors: the watchdogs that end a job together, and the exchange
//! of what the ranks must agree on at each call.
//!
//! - [`calls`] which collective calls a rank has made; [`wire`] what two watchdogs say to each other
//! - [`home`] and [`door`] how ranks find each other, [`reception`] who is let in
//! - [`watchdog`] a star around rank 0, which judges; [`exchange`] a tree, in which small texts are gathered

pub mod calls;
pub mod door;
pub mod error;
pub mod exchange;
pub mod home;
pub mod reception;
pub mod watchdog;
pub mod wire;

pub use error::JobError;
pub use exchange::{Exchange, ExchangeError, Gathered, Meeting};
pub use home::Home;
pub use watchdog::{EXIT_STATUS, Limits, Watchdog};
