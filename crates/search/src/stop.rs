//! When a search ends.

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
}

/// What a search may still spend.
#[derive(Clone, Debug)]
pub(crate) struct Budget {
    candidates: u64,
    next_look: u64,
    until: Option<Instant>,
    stop: Stop,
}

impl Budget {
    pub(crate) fn new(limits: &Limits, begun: Instant) -> Self {
        let until = limits.time_ms.map(|ms| begun + Duration::from_millis(ms));
        let stop = if until.is_some_and(|until| Instant::now() >= until) { Stop::Time } else { Stop::Complete };
        Self { candidates: limits.candidates, next_look: limits.candidates, until, stop }
    }

    /// Counts partial Plans.
    pub(crate) fn spend(&mut self, candidates: usize) {
        self.candidates = self.candidates.saturating_sub(candidates as u64);
        if self.candidates == 0 {
            self.stop = Stop::Candidates;
        } else if self.candidates <= self.next_look {
            self.next_look = self.candidates.saturating_sub(LOOKS);
            if self.until.is_some_and(|until| Instant::now() >= until) {
                self.stop = Stop::Time;
            }
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
