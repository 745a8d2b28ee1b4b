//! Random numbers that depend on nothing but a key and the place of an element in the global batch.
//!
//! A counter-based generator has no state: a number is a function of its counter. So the same elements get the same
//! numbers however a batch is divided, and in whatever order its parts are computed.

mod fill;
mod philox;
mod place;

pub use fill::{keep, words};
pub use philox::{Stream, philox4x32};
pub use place::{Place, PlaceError};
