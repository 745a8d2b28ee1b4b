//! The Schedules that have a name: each is the order in which a Stage computes.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::compute::Compute;

/// How forward and backward of the microbatches are ordered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum ScheduleKind {
    /// All forwards, then all backwards (Huang et al., GPipe, 2019).
    #[serde(rename = "fill_drain")]
    FillDrain,
    /// Forward and backward in turn after a short warm-up (Narayanan et al., PipeDream, 2019), with
    /// one set of weights: a Stage holds at most as many microbatches as it is Stages from the end.
    #[serde(rename = "1f1b")]
    OneForwardOneBackward,
}

/// As people write it.
impl fmt::Display for ScheduleKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::FillDrain => "fill-drain",
            Self::OneForwardOneBackward => "1F1B",
        })
    }
}

impl ScheduleKind {
    /// Microbatches that a Stage holds at most, `from_end` Stages from the end, itself included: a closed form of
    /// [`Order::in_flight`](super::Order::in_flight), for the search.
    pub fn in_flight(self, from_end: u64, microbatches: u64) -> u64 {
        match self {
            Self::FillDrain => microbatches,
            Self::OneForwardOneBackward => microbatches.min(from_end),
        }
    }

    /// The computations of a Stage that is alone on its ranks for microbatches `0..microbatches`; `depth` is the number of
    /// Stages on the longest way from it to one that feeds no other, both included. Backwards run by increasing microbatch under both schedules, so that
    /// gradients are summed in the same order.
    pub fn order(self, depth: u32, microbatches: u32) -> impl Iterator<Item = Compute> {
        let warm_up = match self {
            Self::FillDrain => microbatches,
            Self::OneForwardOneBackward => microbatches.min(depth.saturating_sub(1)),
        };
        let steady = (warm_up..microbatches)
            .zip(0..)
            .flat_map(|(forward, backward)| [Compute::Forward(forward), Compute::Backward(backward)]);
        (0..warm_up)
            .map(Compute::Forward)
            .chain(steady)
            .chain((microbatches - warm_up..microbatches).map(Compute::Backward))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::Order;

    fn draw(kind: ScheduleKind, stages: u32, microbatches: u32) -> String {
        (1..=stages).rev().map(|depth| format!("{}\n", kind.order(depth, microbatches).collect::<Order>())).collect()
    }

    #[test]
    fn one_forward_one_backward() {
        assert_eq!(
            draw(ScheduleKind::OneForwardOneBackward, 3, 4),
            "\
F0 F1 F2 B0 F3 B1 B2 B3
F0 F1 B0 F2 B1 F3 B2 B3
F0 B0 F1 B1 F2 B2 F3 B3
"
        );
    }

    #[test]
    fn fewer_microbatches_than_stages() {
        assert_eq!(
            draw(ScheduleKind::OneForwardOneBackward, 4, 2),
            "\
F0 F1 B0 B1
F0 F1 B0 B1
F0 F1 B0 B1
F0 B0 F1 B1
"
        );
    }

    #[test]
    fn fill_drain() {
        assert_eq!(draw(ScheduleKind::FillDrain, 2, 3), "F0 F1 F2 B0 B1 B2\nF0 F1 F2 B0 B1 B2\n");
    }

    #[test]
    fn no_microbatch_no_computation() {
        assert_eq!(draw(ScheduleKind::OneForwardOneBackward, 2, 0), "\n\n");
    }
}
