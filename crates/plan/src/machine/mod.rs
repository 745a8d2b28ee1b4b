//! The machine of ranks, channels, windows and sums on which Programs run in thought: in ticks for the checker and the
//! drawn grid, at prices for the simulator and for the search's exact times.
//!
//! It follows the runtime:
//!
//! * A rank does one thing at a time, in the order of its Program, however many Stages it has. A Recv and the start of a sum
//!   never block. A computation waits for the messages of its microbatch and Stage that its rank has begun to receive. What
//!   another seat of the rank hands over is there, or the checker has refused the Program.
//! * A message moves once it is sent, its receiver has begun to receive, and the message before it on its channel has
//!   arrived. The n-th Send of a channel meets its n-th Recv. Channels do not wait for each other.
//! * A Send never blocks, except that gradients, and without training Values, wait while [`WINDOW`](crate::WINDOW) earlier messages
//!   of the same channel have not arrived.
//! * A sum runs once all its members are ready for it and the sum before it on each of them is done.
//! * Gathers are sums that follow each other alone; before a rank goes on to something else, it waits for all of them.
//! * Exchanges of rows with the ranks' own batches are sums that follow each other alone: all members of one have come to it
//!   before any has what it carries. A computation waits for that of its microbatch that its rank has come to.
//! * Before the first sum of another microbatch that is divided among its members, a rank waits for all its sums.
//! * At the end of a list of Actions a rank waits for all that it has sent and all its sums.

mod blocked;
mod clock;
mod grid;
mod machine;
mod memory;
mod script;
mod ticks;

pub use self::blocked::{Blocked, Deadlock, Halt, Stuck};
pub use self::clock::{Clock, Observer, Pause, Span, Ticks};
pub use self::grid::grid;
pub use self::machine::run;
pub use self::memory::Memory;
pub use self::script::{
    Channel, Collective, CollectiveKind, Joint, Lane, ProgramScript, Script, ScriptWriter, Slot, Task,
};
pub use self::ticks::in_flight;
pub(crate) use self::ticks::ticks;
