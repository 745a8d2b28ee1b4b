//! Ways to save memory that a Stage may use.

use std::ops::RangeInclusive;

use rannc_plan::Sharding;

use super::place::Place;
use crate::settings::Savers;

/// Most microbatches in flight for which Blocks to compute again are chosen one by one; Stages that hold
/// more compute all of them again.
const MAX_FITTED: u64 = 16;

/// What a Stage computes again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Again {
    Nothing,
    Everything,
    /// As many Blocks as it takes to hold so many microbatches.
    ToHold(u64),
}

/// A way to run a Stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Saver {
    pub(crate) again: Again,
    pub(crate) sharding: Sharding,
    pub(crate) offload: bool,
}

/// What Replicas may divide; nothing is first, as that is all that one Replica may.
fn levels(savers: &Savers) -> impl Iterator<Item = Sharding> + use<> {
    let asked = savers.least_sharding..=savers.sharding;
    Sharding::ALL.into_iter().filter(move |level| *level == Sharding::None || asked.contains(level))
}

impl Saver {
    /// Nothing is saved.
    pub(crate) const PLAIN: Self = Self { again: Again::Nothing, sharding: Sharding::None, offload: false };

    /// Ways of which one saves most memory.
    pub(crate) fn most(savers: &Savers) -> Vec<Self> {
        let again = if savers.recompute { Again::Everything } else { Again::Nothing };
        levels(savers).map(|sharding| Self { again, sharding, offload: savers.offload }).collect()
    }

    /// All ways that a runtime has when Stages hold these numbers of microbatches, the plain one first.
    pub(crate) fn all(savers: &Savers, held: &[u64]) -> Vec<Self> {
        let mut again = vec![Again::Nothing];
        if savers.recompute {
            again.push(Again::Everything);
            again.extend(held.iter().filter(|&&held| held <= MAX_FITTED).map(|&held| Again::ToHold(held)));
        }
        let offload: &[bool] = if savers.offload { &[false, true] } else { &[false] };
        let mut ways = Vec::new();
        for sharding in levels(savers) {
            for &offload in offload {
                ways.extend(again.iter().map(|&again| Self { again, sharding, offload }));
            }
        }
        ways
    }

    /// True when a Stage at this place may be run so: one Replica divides nothing, several what they are asked to.
    pub(crate) fn may_be_at(&self, place: &Place, savers: &Savers) -> bool {
        match self.sharding {
            Sharding::None => savers.least_sharding == Sharding::None || place.fewest() == 1,
            _ => place.replicas > 1,
        }
    }

    /// True when only what is computed again differs.
    pub(crate) fn is_again_of(&self, other: &Self) -> bool {
        (self.sharding, self.offload) == (other.sharding, other.offload)
    }

    /// True when a longer run never takes less time.
    pub(crate) fn is_monotone(&self) -> bool {
        !matches!(self.again, Again::ToHold(_))
    }

    /// True when a Stage that holds one of these numbers of microbatches may be run so.
    pub(crate) fn serves(&self, in_flight: &RangeInclusive<u64>) -> bool {
        match self.again {
            Again::ToHold(held) => in_flight.contains(&held),
            Again::Nothing | Again::Everything => true,
        }
    }
}
