//! A machine that runs a Program in thought.
//!
//! A Recv never blocks. A computation waits for the messages of its microbatch that its rank has begun to
//! receive. A Send never blocks, except that gradients wait while [`GRAD_WINDOW`] earlier ones
//! of the same channel have not been received. The n-th Send of a channel meets its n-th Recv.

mod blocked;
mod grid;
mod ticks;

pub use self::blocked::{Blocked, Deadlock};
pub use self::grid::grid;
pub(crate) use self::ticks::ticks;

/// Gradient messages that may be under way between two ranks.
pub const GRAD_WINDOW: usize = 2;
