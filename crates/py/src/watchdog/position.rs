//! Where this rank is in its program, written by the training thread and read by the watchdog's.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use super::wire::Beat;

/// The index that stands for "outside a step".
const IDLE: usize = usize::MAX;

/// The names of a program's Actions and the current one.
pub struct Position {
    names: Mutex<Vec<String>>,
    index: AtomicUsize,
    progress: AtomicU64,
}

impl Position {
    /// Outside a step, with an empty program.
    pub fn new() -> Self {
        Self { names: Mutex::default(), index: AtomicUsize::new(IDLE), progress: AtomicU64::new(0) }
    }

    /// Replaces the names; the rank is outside a step until it enters an Action.
    pub fn set_program(&self, names: Vec<String>) {
        self.index.store(IDLE, Ordering::Release);
        *self.names.lock().unwrap_or_else(PoisonError::into_inner) = names;
    }

    /// The Action at `index` begins. Costs two uncontended atomic writes.
    pub fn enter(&self, index: usize) {
        self.index.store(index, Ordering::Release);
        self.progress.fetch_add(1, Ordering::Release);
    }

    /// The step is over.
    pub fn leave(&self) {
        self.enter(IDLE);
    }

    /// The current Action and the progress so far.
    pub fn beat(&self) -> Beat {
        let progress = self.progress.load(Ordering::Acquire);
        let index = self.index.load(Ordering::Acquire);
        let names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
        let name = || names.get(index).cloned().unwrap_or_else(|| format!("action {index}"));
        Beat { action: (index != IDLE).then(name), progress }
    }
}
