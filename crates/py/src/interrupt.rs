//! Long work that Python's signals end.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use pyo3::prelude::*;
use rannc_cli::{Ended, until};

/// Works on another thread, without the GIL, and asks Python for signals meanwhile: Ctrl-C raises at once. The work is
/// given a flag that is set then, and ends soon by itself.
pub fn interruptible<T: Send + 'static>(
    py: Python<'_>,
    work: impl FnOnce(&AtomicBool) -> T + Send + 'static,
) -> PyResult<T> {
    let left = Arc::new(AtomicBool::new(false));
    let raised: Mutex<Option<PyErr>> = Mutex::new(None);
    let interrupted = || {
        let signal = Python::attach(|py| py.check_signals()).err();
        let is_raised = signal.is_some();
        *raised.lock().unwrap_or_else(PoisonError::into_inner) = signal;
        is_raised
    };
    let seen = Arc::clone(&left);
    match py.detach(|| until(&interrupted, move || work(&seen))) {
        Ended::Done(done) => Ok(done),
        Ended::Interrupted => {
            left.store(true, Ordering::Relaxed);
            let signal = raised.into_inner().unwrap_or_else(PoisonError::into_inner);
            Err(signal.expect("only a signal interrupts"))
        }
    }
}
