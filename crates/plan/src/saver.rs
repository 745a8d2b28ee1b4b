//! What a Stage or a Block gives up to save memory.

use serde::{Deserialize, Serialize};

/// What of a Block's forward is computed again for the backward instead of being kept (Chen et al., Training Deep
/// Nets with Sublinear Memory Cost, 2016).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Recompute {
    /// Nothing.
    #[default]
    None,
    /// The Block by itself: what it takes in is kept.
    Block,
    /// All of its Stage together, so that only what the Stage receives is kept; then all its Blocks say so.
    Stage,
}

/// What the Replicas of a Stage divide among them instead of holding it whole (Rajbhandari et al., ZeRO,
/// 2020); each level includes those before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Sharding {
    /// Nothing.
    #[default]
    None,
    /// The optimizer's state (ZeRO 1).
    Optimizer,
    /// Gradients (ZeRO 2).
    Gradients,
    /// Parameters (ZeRO 3), which are gathered once and stay whole until a call or its backward ends.
    KeptParams,
    /// Parameters (ZeRO 3), which are gathered for each computation, and whole only around the Span that uses them.
    Params,
}

impl Sharding {
    /// All levels, increasing.
    pub const ALL: [Self; 5] = [Self::None, Self::Optimizer, Self::Gradients, Self::KeptParams, Self::Params];

    /// The number by which it is known; 0 for nothing.
    pub const fn zero_level(self) -> u8 {
        match self {
            Self::None => 0,
            Self::Optimizer => 1,
            Self::Gradients => 2,
            Self::KeptParams | Self::Params => 3,
        }
    }

    /// True where each Replica keeps a part of the parameters.
    pub const fn divides_params(self) -> bool {
        matches!(self, Self::KeptParams | Self::Params)
    }
}
