//! How a call comes, and what a Stage computes for it.

use std::fmt;

use serde::{Deserialize, Serialize};

/// How a call of the model comes. It says which computations a Program has and in how many lists they stand; their
/// order is the Schedule's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Call {
    /// Forwards only.
    Forward,
    /// The loss is inside the model: forwards and backwards in one list.
    Whole,
    /// The criterion is outside: forwards in one list, then, when asked for, backwards in a second one.
    Halves,
}

impl Call {
    /// True when there are backwards.
    pub const fn trains(self) -> bool {
        match self {
            Self::Forward => false,
            Self::Whole | Self::Halves => true,
        }
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Forward => "forward",
            Self::Whole => "whole",
            Self::Halves => "halves",
        })
    }
}

/// How many microbatches a Stage may be ahead of those that take what it makes before it has to wait for them, where it does:
/// as many messages of one channel may be under way.
pub const WINDOW: usize = 2;

/// One computation of a Stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compute {
    /// Forward of a microbatch.
    Forward(u32),
    /// Backward of a microbatch.
    Backward(u32),
    /// Of a backward in two parts the first: the gradients of what came in, which other Stages wait for.
    BackwardInput(u32),
    /// The second, which nobody waits for: the gradients of Params (Qi et al., Zero Bubble Pipeline Parallelism, 2023).
    BackwardWeight(u32),
}

/// `F3` is the forward and `B3` the backward of microbatch 3, `I3` and `W3` are its two parts.
impl fmt::Display for Compute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Forward(mb) => write!(f, "F{mb}"),
            Self::Backward(mb) => write!(f, "B{mb}"),
            Self::BackwardInput(mb) => write!(f, "I{mb}"),
            Self::BackwardWeight(mb) => write!(f, "W{mb}"),
        }
    }
}

impl Compute {
    /// Its microbatch.
    pub const fn microbatch(self) -> u32 {
        match self {
            Self::Forward(mb) | Self::Backward(mb) | Self::BackwardInput(mb) | Self::BackwardWeight(mb) => mb,
        }
    }
    /// The same computation of another microbatch.
    pub fn map_microbatch(self, map: impl FnOnce(u32) -> u32) -> Self {
        match self {
            Self::Forward(mb) => Self::Forward(map(mb)),
            Self::Backward(mb) => Self::Backward(map(mb)),
            Self::BackwardInput(mb) => Self::BackwardInput(map(mb)),
            Self::BackwardWeight(mb) => Self::BackwardWeight(map(mb)),
        }
    }
    /// True for the last of a microbatch that trains: behind it nothing of the microbatch is kept, and nothing adds to its
    /// gradients.
    pub const fn ends_microbatch(self) -> bool {
        matches!(self, Self::Backward(_) | Self::BackwardWeight(_))
    }
}

/// A computation of a rank: in which of its seats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seated {
    /// What.
    pub compute: Compute,
    /// Of which Stage, where the rank has several.
    pub stage: Option<u32>,
}

/// `F3` where the rank has one Stage, and `F3@1` in Stage 1 where it has several.
impl fmt::Display for Seated {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { compute, stage } = self;
        match stage {
            Some(stage) => write!(f, "{compute}@{stage}"),
            None => compute.fmt(f),
        }
    }
}

/// Of a rank with one Stage.
impl From<Compute> for Seated {
    fn from(compute: Compute) -> Self {
        Self { compute, stage: None }
    }
}

/// Ties an enum whose JSON has computations beside other things, each with its microbatch and Stage, to [`Seated`].
#[macro_export]
macro_rules! with_computations {
    ($what:ty) => {
        impl From<$crate::Seated> for $what {
            fn from($crate::Seated { compute, stage }: $crate::Seated) -> Self {
                match compute {
                    $crate::Compute::Forward(mb) => Self::Forward { mb, stage },
                    $crate::Compute::Backward(mb) => Self::Backward { mb, stage },
                    $crate::Compute::BackwardInput(mb) => Self::BackwardInput { mb, stage },
                    $crate::Compute::BackwardWeight(mb) => Self::BackwardWeight { mb, stage },
                }
            }
        }

        impl $what {
            /// The computation that it is, if it is one.
            pub const fn computed(&self) -> Option<$crate::Seated> {
                let (compute, stage) = match *self {
                    Self::Forward { mb, stage } => ($crate::Compute::Forward(mb), stage),
                    Self::Backward { mb, stage } => ($crate::Compute::Backward(mb), stage),
                    Self::BackwardInput { mb, stage } => ($crate::Compute::BackwardInput(mb), stage),
                    Self::BackwardWeight { mb, stage } => ($crate::Compute::BackwardWeight(mb), stage),
                    _ => return None,
                };
                Some($crate::Seated { compute, stage })
            }
        }
    };
}
