//! When a search ends.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::settings::Limits;

/// Partial Plans between two looks at the clock.
const LOOKS: u64 = 1 << 16;

/// Why a search ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Stop {
    /// Every Plan was looked at or excluded.
    Complete,
    /// At the limit of partial Plans; the same on every machine.
    Candidates,
    /// At the limit of time.
    Time,
    /// It was told to; nothing is answered then.
    Told,
}

/// When a search began, and whether it has been told to end.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock<'a> {
    pub(crate) begun: Instant,
    told: &'a AtomicBool,
}

impl<'a> Clock<'a> {
    /// Starts now.
    pub(crate) fn new(told: &'a AtomicBool) -> Self {
        Self { begun: Instant::now(), told }
    }

    /// True when nobody waits for the answer any more.
    pub(crate) fn is_told(&self) -> bool {
        self.told.load(Ordering::Relaxed)
    }

    /// Why a search with this end must stop now.
    fn stop(&self, until: Option<Instant>) -> Stop {
        if self.is_told() {
            Stop::Told
        } else if until.is_some_and(|until| Instant::now() >= until) {
            Stop::Time
        } else {
            Stop::Complete
        }
    }
}

/// When the slow parts of a search must end, which follow no partial Plans.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deadline<'a> {
    clock: Clock<'a>,
    until: Option<Instant>,
}

impl<'a> Deadline<'a> {
    pub(crate) fn new(limits: &Limits, clock: Clock<'a>) -> Self {
        Self { clock, until: limits.time_ms.map(|ms| clock.begun + Duration::from_millis(ms)) }
    }

    /// Only when nobody waits for the answer any more.
    pub(crate) fn only_told(clock: Clock<'a>) -> Self {
        Self { clock, until: None }
    }

    /// None.
    #[cfg(test)]
    pub(crate) fn never() -> Deadline<'static> {
        static TOLD: AtomicBool = AtomicBool::new(false);
        Deadline::only_told(Clock::new(&TOLD))
    }

    /// True when it is time to end.
    pub(crate) fn is_over(&self) -> bool {
        self.stop() != Stop::Complete
    }

    /// Why.
    pub(crate) fn stop(&self) -> Stop {
        self.clock.stop(self.until)
    }
}

/// What a search may still spend.
#[derive(Clone, Debug)]
pub(crate) struct Budget<'a> {
    deadline: Deadline<'a>,
    candidates: u64,
    next_look: u64,
    stop: Stop,
}

impl<'a> Budget<'a> {
    pub(crate) fn new(limits: &Limits, clock: Clock<'a>) -> Self {
        let deadline = Deadline::new(limits, clock);
        Self { deadline, candidates: limits.candidates, next_look: limits.candidates, stop: deadline.stop() }
    }

    /// Counts partial Plans.
    pub(crate) fn spend(&mut self, candidates: usize) {
        self.candidates = self.candidates.saturating_sub(candidates as u64);
        if self.candidates == 0 {
            self.stop = Stop::Candidates;
        } else if self.candidates <= self.next_look {
            self.next_look = self.candidates.saturating_sub(LOOKS);
            self.stop = self.deadline.stop();
        }
    }

    /// True when it is time to stop.
    pub(crate) fn is_spent(&self) -> bool {
        self.stop != Stop::Complete
    }

    /// Why it stopped.
    pub(crate) fn stop(&self) -> Stop {
        self.stop
    }
}
