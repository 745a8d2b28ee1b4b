//! Which Replicas of which Stages a rank has.

use serde::{Deserialize, Serialize};

use super::RankProgram;

/// One Replica of one Stage on a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Seat {
    /// The Stage.
    pub stage: u32,
    /// Which of its Replicas.
    pub replica: u32,
}

impl RankProgram {
    /// The seat that an Action of the rank means: of the Stage that it names, or where it names none, the only one.
    pub fn seat(&self, named: Option<u32>) -> Option<Seat> {
        match (named, self.seats.as_slice()) {
            (None, &[only]) => Some(only),
            (Some(stage), [_, _, ..]) => self.seat_of(stage),
            _ => None,
        }
    }

    /// Its seat of a Stage.
    pub fn seat_of(&self, stage: u32) -> Option<Seat> {
        self.seats.iter().copied().find(|seat| seat.stage == stage)
    }

    /// True when its Actions name their Stages.
    pub fn has_several_seats(&self) -> bool {
        self.seats.len() > 1
    }
}
