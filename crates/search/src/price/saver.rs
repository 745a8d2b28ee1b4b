//! Ways to save memory that a Stage may use.

use rannc_plan::Sharding;

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

impl Saver {
    /// Nothing is saved.
    pub(crate) const PLAIN: Self = Self { again: Again::Nothing, sharding: Sharding::None, offload: false };

    /// The way that saves most memory.
    pub(crate) fn most(savers: &Savers) -> Self {
        let again = if savers.recompute { Again::Everything } else { Again::Nothing };
        Self { again, sharding: savers.sharding, offload: savers.offload }
    }

    /// All ways that a runtime has when Stages hold these numbers of microbatches, the plain one first.
    pub(crate) fn all(savers: &Savers, held: &[u64]) -> Vec<Self> {
        let mut again = vec![Again::Nothing];
        if savers.recompute {
            again.push(Again::Everything);
            again.extend(held.iter().filter(|&&held| held <= MAX_FITTED).map(|&held| Again::ToHold(held)));
        }
        let levels = [Sharding::None, Sharding::Optimizer, Sharding::Gradients, Sharding::Params];
        let levels = levels.into_iter().filter(|level| *level <= savers.sharding);
        let offload: &[bool] = if savers.offload { &[false, true] } else { &[false] };
        let mut savers = Vec::new();
        for sharding in levels {
            for &offload in offload {
                savers.extend(again.iter().map(|&again| Self { again, sharding, offload }));
            }
        }
        savers
    }

    /// True when only what is computed again differs.
    pub(crate) fn is_again_of(&self, other: &Self) -> bool {
        (self.sharding, self.offload) == (other.sharding, other.offload)
    }

    /// True when a longer run never takes less time.
    pub(crate) fn is_monotone(&self) -> bool {
        !matches!(self.again, Again::ToHold(_))
    }

    /// True when a Stage that holds `in_flight` microbatches may be run so.
    pub(crate) fn serves(&self, in_flight: u64) -> bool {
        match self.again {
            Again::ToHold(held) => held == in_flight,
            Again::Nothing | Again::Everything => true,
        }
    }
}
