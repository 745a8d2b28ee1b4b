//! Work that need not be waited for.

use std::panic::resume_unwind;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::thread::Builder;
use std::time::Duration;

/// Between two looks at whether the work is to be left.
const LOOK: Duration = Duration::from_millis(50);
/// As much as the first thread of a process usually has.
const STACK_BYTES: usize = 8 << 20;

/// How work ended.
pub enum Ended<T> {
    /// With this.
    Done(T),
    /// It goes on by itself.
    Interrupted,
}

/// Works on another thread until that is done, or until `interrupted` says true on this one.
pub fn until<T: Send + 'static>(interrupted: &dyn Fn() -> bool, work: impl FnOnce() -> T + Send + 'static) -> Ended<T> {
    let (sender, receiver) = sync_channel(1);
    let worker = move || {
        // Nobody listens any more when the work has been left.
        let _ = sender.send(work());
    };
    let thread = Builder::new().stack_size(STACK_BYTES).spawn(worker).expect("the system can start a thread");
    loop {
        match receiver.recv_timeout(LOOK) {
            Ok(done) => return Ended::Done(done),
            Err(RecvTimeoutError::Timeout) if interrupted() => return Ended::Interrupted,
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => match thread.join() {
                Ok(()) => unreachable!("work that does not panic sends what it gives"),
                Err(panic) => resume_unwind(panic),
            },
        }
    }
}
