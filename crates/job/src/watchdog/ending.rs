//! The end of a rank because another one has ended: once for each process, with one line.

use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::{EXIT_STATUS, POLL, Watchdog};
use crate::wire::{Message, Stop};

/// How long rank 0 lives on after an order to stop, so that the order is delivered before its connections close.
const LINGER: Duration = Duration::from_millis(200);

/// How long a rank inside a call lives on after the end was decided: its collective may fail for the same cause, and then
/// the error comes out of the call.
pub const HAND_OUT: Duration = Duration::from_secs(1);

impl Watchdog {
    /// Ends the job: rank 0 tells all, another rank (it has lost rank 0) ends itself.
    pub(super) fn order(&self, stop: &Stop) {
        if self.is_over() || self.verdict.set(stop.clone()).is_err() {
            return;
        }
        if self.rank == 0 {
            self.broadcast(&Message::Stop(stop.clone()));
            thread::sleep(LINGER);
        }
        self.end(stop);
    }

    /// Rank 0's order has come.
    pub(super) fn obey(&self, stop: &Stop) {
        if !self.is_over() && self.verdict.set(stop.clone()).is_ok() {
            self.end(stop);
        }
    }

    /// Prints the cause and leaves the process, except on the rank that ends by its own exception.
    fn end(&self, stop: &Stop) {
        if stop.said_by == Some(self.rank) {
            return;
        }
        let beat = self.position.beat();
        let grace = Duration::from_millis(stop.grace_ms);
        let patience = if beat.calls.current().is_some() { grace.max(HAND_OUT) } else { grace };
        if wait_until(&self.handed_out, patience) {
            wait_until(&self.reported, self.limits.grace);
        }
        if self.is_over() {
            return;
        }
        (self.flush)();
        let said = self.handed_out.load(Ordering::Acquire) && self.reported.load(Ordering::Acquire);
        if !said {
            say(&format!("{}. Rank {} was {}. All ranks stop.", stop.cause, self.rank, beat.place()));
        }
        leave_process(EXIT_STATUS);
    }
}

/// True as soon as `flag` is set, false when it is not within `patience`.
fn wait_until(flag: &AtomicBool, patience: Duration) -> bool {
    let start = Instant::now();
    while !flag.load(Ordering::Acquire) && start.elapsed() < patience {
        thread::sleep(POLL.min(patience));
    }
    flag.load(Ordering::Acquire)
}

/// Writes one line to stderr.
pub fn say(text: &str) {
    // With nowhere left to say it, going on is still right.
    let _ = io::stderr().write_all(format!("RaNNC: {text}\n").as_bytes());
}

/// Leaves the process at once.
///
/// `std::process::exit` would run the exit handlers of libraries, and NCCL's wait for ranks that are gone.
#[allow(unsafe_code)] // the standard library has no safe equivalent
pub fn leave_process(status: i32) -> ! {
    // SAFETY: `_exit` takes any status, touches no memory of this process, and does not return.
    unsafe { libc::_exit(status) }
}
