//! Where this rank is, written by the training thread and read by the watchdog's.

use std::io;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::replays::Replays;
use crate::calls::Calls;
use crate::wire::Beat;

/// What the rank does inside a call.
enum Doing {
    /// Nothing that has a name.
    Nothing,
    /// The Action with this index of the current program.
    Action(usize),
    /// A phase of the first call. A busy rank computes by itself for as long as it takes.
    Phase { name: String, busy: bool },
}

struct State {
    calls: Calls,
    names: Vec<String>,
    doing: Doing,
    progress: u64,
    torn: bool,
    failed_at: Option<String>,
    replays: Replays,
}

/// The current call, the names of a program's Actions, and the current one; in replays, where the GPU is.
pub struct Position(Mutex<State>);

impl Default for Position {
    /// Outside of any call, with an empty program.
    fn default() -> Self {
        Self(Mutex::new(State {
            calls: Calls::default(),
            names: Vec::new(),
            doing: Doing::Nothing,
            progress: 0,
            torn: false,
            failed_at: None,
            replays: Replays::default(),
        }))
    }
}

impl Position {
    /// A collective call begins; false inside of another one, which counts alone.
    pub fn begin(&self, name: &str, new_round: bool) -> bool {
        let mut state = self.state();
        let outermost = state.calls.begin(name, new_round);
        if outermost {
            state.doing = Doing::Nothing;
            state.progress += 1;
            state.torn = false;
            state.failed_at = None;
        }
        outermost
    }

    /// The outermost call ends; by an exception, where it stood is kept for [`Position::failed_at`].
    pub fn end(&self, failed: bool) {
        self.leave(failed);
        let mut state = self.state();
        state.calls.end(failed);
        state.torn = false;
    }

    /// Replaces the names of the Actions; the rank is at none until it enters one.
    pub fn set_program(&self, names: Vec<String>) {
        let mut state = self.state();
        state.doing = Doing::Nothing;
        state.names = names;
    }

    /// The Action at `index` begins.
    pub fn enter(&self, index: usize) {
        let mut state = self.state();
        state.doing = Doing::Action(index);
        state.progress += 1;
    }

    /// A phase of the first call begins.
    pub fn phase(&self, name: String, busy: bool) {
        let mut state = self.state();
        state.doing = Doing::Phase { name, busy };
        state.progress += 1;
    }

    /// The rank comes forward inside of what it does.
    pub fn advance(&self) {
        self.state().progress += 1;
    }

    /// The step or phase is over; by an exception, where it stood is kept for [`Position::failed_at`].
    pub fn leave(&self, failed: bool) {
        let mut state = self.state();
        if failed && state.failed_at.is_none() {
            state.failed_at = Some(state.beat().place());
        }
        state.doing = Doing::Nothing;
        state.progress += 1;
    }

    /// From now on the GPU writes to this file at which place of a replay it is: a native u32, 0 outside of any.
    pub fn follow(&self, path: &Path) -> io::Result<()> {
        self.state().replays.follow(path)
    }

    /// The places of a recording have these names, by their numbers from `first` (at least 1) on.
    pub fn recorded(&self, first: u32, names: Vec<String>) {
        self.state().replays.add(first, names);
    }

    /// The recording whose places begin with `first` is gone.
    pub fn forgotten(&self, first: u32) {
        self.state().replays.remove(first);
    }

    /// The current call's collective has failed, and its rank asks why.
    pub fn tear(&self) {
        self.state().torn = true;
    }

    /// Where the exception arose that has ended the last call, or else where the rank is.
    pub fn failed_at(&self) -> String {
        let mut state = self.state();
        state.failed_at.clone().unwrap_or_else(|| state.beat().place())
    }

    /// Shows the name of the current call.
    pub fn with_call(&self, see: impl FnOnce(Option<&str>)) {
        see(self.state().calls.current().map(|call| call.name.as_str()));
    }

    /// Everything that other ranks are told.
    pub fn beat(&self) -> Beat {
        self.state().beat()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn beat(&mut self) -> Beat {
        if self.replays.look() {
            self.progress += 1;
        }
        let device = self.replays.place().cloned();
        let (action, busy) = match &self.doing {
            Doing::Nothing => (None, false),
            Doing::Phase { name, busy } => (Some(name.clone()), *busy),
            Doing::Action(index) => {
                (Some(self.names.get(*index).cloned().unwrap_or_else(|| format!("action {index}"))), false)
            }
        };
        Beat { calls: self.calls.clone(), action, device, busy, torn: self.torn, progress: self.progress }
    }
}
