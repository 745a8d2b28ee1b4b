//! The collective calls that a rank has made, in order, and how two ranks' orders tell that one of them is wrong.
//!
//! Ranks may be at different calls and all be right: some calls end on one rank before another has begun them. What no two
//! correct ranks can have is two different calls at the same place. Places are counted anew in every round, so that a call
//! that failed on one rank alone, and was caught there, does not shift the places for the rest of the job.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

/// Calls that are remembered. A rank that is behind by more cannot be told from a wrong one.
const REMEMBERED: usize = 16;

/// Longer names are cut.
const MAX_NAME_CHARS: usize = 120;

/// Where a call stands in the order of a rank's calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Place {
    /// Counts the calls that begin only when all ranks have come: those of the model.
    pub round: u64,
    /// Counts the calls of the round.
    pub index: u32,
}

/// A collective call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Call {
    /// Where it stands.
    pub place: Place,
    /// As a script writes it, such as `model(...)`.
    pub name: String,
    /// It has ended by an exception.
    pub failed: bool,
}

/// The latest calls of one rank, the oldest first.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Calls {
    recent: VecDeque<Call>,
    inside: bool,
}

impl Calls {
    /// A call begins, unless the rank is inside one already.
    pub fn begin(&mut self, name: &str, new_round: bool) -> bool {
        if self.inside {
            return false;
        }
        let place = match self.last_place() {
            Some(last) if new_round => Place { round: last.round + 1, index: 0 },
            Some(last) => Place { round: last.round, index: last.index + 1 },
            None => Place { round: u64::from(new_round), index: 0 },
        };
        if self.recent.len() == REMEMBERED {
            self.recent.pop_front();
        }
        self.recent.push_back(Call { place, name: name.chars().take(MAX_NAME_CHARS).collect(), failed: false });
        self.inside = true;
        true
    }

    /// The call ends, by an exception or as it should.
    pub fn end(&mut self, failed: bool) {
        if let Some(call) = self.recent.back_mut().filter(|_| self.inside) {
            call.failed = failed;
        }
        self.inside = false;
    }

    /// True when the call at `place` has ended by an exception.
    pub fn has_failed_in(&self, place: Place) -> bool {
        self.recent.iter().any(|call| call.place == place && call.failed)
    }

    /// The call that the rank is inside of.
    pub fn current(&self) -> Option<&Call> {
        self.recent.back().filter(|_| self.inside)
    }

    /// Where the last call stands, ended or not.
    pub fn last_place(&self) -> Option<Place> {
        self.recent.back().map(|call| call.place)
    }

    /// True when the rank has begun the call at `place`, or a later one.
    pub fn has_come_to(&self, place: Place) -> bool {
        self.last_place() >= Some(place)
    }

    /// True when this rank has made another call where a rank that is not ahead of it is in `call`, or has left it out.
    pub fn contradict(&self, call: &Call) -> bool {
        let (Some(first), Some(last)) = (self.recent.front(), self.recent.back()) else { return false };
        // To have begun a round is to have ended the one before, which takes all ranks.
        let rounds_ahead = last.place.round.saturating_sub(call.place.round);
        let same = self.recent.iter().find(|own| own.place == call.place);
        let left_out = first.place < call.place && call.place < last.place;
        rounds_ahead > 1 || same.map_or(left_out, |own| own.name != call.name)
    }
}
