//! Long work that Python's signals end.

use std::sync::Mutex;

use pyo3::prelude::*;
use rannc_cli::{Ended, until};

/// Works on another thread, without the GIL, and asks Python for signals meanwhile: Ctrl-C raises at once, and what is
/// left of the work ends by itself.
pub fn interruptible<T: Send + 'static>(py: Python<'_>, work: impl FnOnce() -> T + Send + 'static) -> PyResult<T> {
    let raised: Mutex<Option<PyErr>> = Mutex::new(None);
    let interrupted = || {
        let signal = Python::attach(|py| py.check_signals()).err();
        let is_raised = signal.is_some();
        *raised.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = signal;
        is_raised
    };
    match py.detach(|| until(&interrupted, work)) {
        Ended::Done(done) => Ok(done),
        Ended::Interrupted => {
            let signal = raised.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
            Err(signal.expect("only a signal interrupts"))
        }
    }
}
