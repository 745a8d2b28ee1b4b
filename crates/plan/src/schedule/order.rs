//! A Schedule, by name or as lists of computations, and its text: `F0 F1 B0 B1` for each Stage.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::compute::Compute;
use super::named::ScheduleKind;

/// In which order the Stages compute. In JSON it is a name, or a list with the text of each Stage's order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Schedule {
    /// As the name says.
    Named(ScheduleKind),
    /// By Stage.
    Explicit(Vec<Order>),
}

/// The computations of a Stage, one after another.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Order(pub Vec<Compute>);

/// Why a text is no order.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{0:?} is no computation; write F3 for the forward and B3 for the backward of microbatch 3")]
pub struct OrderError(String);

impl Schedule {
    /// What a Stage computes with so many microbatches. `depth` is the number of Stages on the longest way from it to a
    /// Stage that feeds no other, both included.
    pub fn order(&self, stage: usize, depth: u32, microbatches: u32) -> Order {
        match self {
            Self::Named(kind) => Order(kind.order(depth, microbatches).collect()),
            Self::Explicit(orders) => {
                let all = orders.get(stage).into_iter().flat_map(|order| &order.0).copied();
                Order(all.filter(|compute| compute.microbatch() < microbatches).collect())
            }
        }
    }
}

/// As people write it.
impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Named(kind) => kind.fmt(f),
            Self::Explicit(_) => f.write_str("in listed order"),
        }
    }
}

impl From<ScheduleKind> for Schedule {
    fn from(kind: ScheduleKind) -> Self {
        Self::Named(kind)
    }
}

impl Order {
    /// Most microbatches between their forward and their backward at a time.
    pub fn in_flight(&self) -> u64 {
        let held = self.0.iter().scan(0_u64, |held, compute| {
            *held = match compute {
                Compute::Forward(_) => *held + 1,
                Compute::Backward(_) => held.saturating_sub(1),
            };
            Some(*held)
        });
        held.max().unwrap_or(0)
    }

    /// What keeps this from being the order of a Stage with so many microbatches, if anything does.
    pub fn fault(&self, microbatches: u32) -> Option<&'static str> {
        let (mut forwards, mut backwards) = (BTreeSet::new(), BTreeSet::new());
        for &compute in &self.0 {
            let mb = compute.microbatch();
            let fresh = match compute {
                Compute::Forward(_) => forwards.insert(mb),
                Compute::Backward(_) if !forwards.contains(&mb) => return Some("has a backward before its forward"),
                Compute::Backward(_) if backwards.last().is_some_and(|last| *last > mb) => {
                    return Some("has backwards out of order; gradients are summed by increasing microbatch");
                }
                Compute::Backward(_) => backwards.insert(mb),
            };
            if !fresh {
                return Some("has a computation twice");
            }
        }
        let all = |found: &BTreeSet<u32>| found.iter().copied().eq(0..microbatches);
        if all(&forwards) && all(&backwards) {
            None
        } else {
            Some("lacks a computation, or has one of a microbatch that the plan does not have")
        }
    }
}

/// `F0 F1 B0 B1`.
impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().enumerate().try_for_each(|(place, compute)| {
            let gap = if place == 0 { "" } else { " " };
            write!(f, "{gap}{compute}")
        })
    }
}

impl FromStr for Order {
    type Err = OrderError;

    fn from_str(text: &str) -> Result<Self, OrderError> {
        let compute = |word: &str| {
            let mb = word.get(1..).and_then(|number| number.parse().ok());
            match (word.get(..1), mb) {
                (Some("F"), Some(mb)) => Ok(Compute::Forward(mb)),
                (Some("B"), Some(mb)) => Ok(Compute::Backward(mb)),
                _ => Err(OrderError(word.to_owned())),
            }
        };
        text.split_whitespace().map(compute).collect::<Result<_, _>>().map(Self)
    }
}

impl TryFrom<String> for Order {
    type Error = OrderError;

    fn try_from(text: String) -> Result<Self, OrderError> {
        text.parse()
    }
}

impl From<Order> for String {
    fn from(order: Order) -> Self {
        order.to_string()
    }
}

/// By Stage, the number of Stages on the longest way from it to one that feeds no other, both included; `feeds` are pairs
/// of Stages, the first before the second.
pub fn depths(stages: usize, feeds: impl IntoIterator<Item = (usize, usize)>) -> Vec<u32> {
    let mut feeds: Vec<(usize, usize)> = feeds.into_iter().collect();
    feeds.sort_unstable();
    let mut depths = vec![1; stages];
    for (from, to) in feeds.into_iter().rev() {
        depths[from] = depths[from].max(depths[to] + 1);
    }
    depths
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_is_its_text() {
        let order: Order = "F0 F1 B0  F2 B1 B2".parse().expect("an order");
        assert_eq!(order.to_string(), "F0 F1 B0 F2 B1 B2");
        assert_eq!((order.in_flight(), order.fault(3)), (2, None));
        let error = "F0 W0".parse::<Order>().expect_err("no computation");
        assert_eq!(
            error.to_string(),
            r#""W0" is no computation; write F3 for the forward and B3 for the backward of microbatch 3"#
        );
        let faults = ["F0 B0", "F0 B0 F1 B1 B1", "F0 F1 B1 B0", "B0 F0 F1 B1", "F0 F1 F2 B0 B1 B2"];
        let faults = faults.map(|text| text.parse::<Order>().expect("an order").fault(2).map(|fault| &fault[..11]));
        assert_eq!(faults, ["lacks a com", "has a compu", "has backwar", "has a backw", "lacks a com"].map(Some));
    }

    #[test]
    fn a_schedule_is_a_name_or_lists() {
        let json = r#"["F0 F1 B0 B1","F0 B0 F1 B1"]"#;
        let explicit: Schedule = serde_json::from_str(json).expect("a schedule");
        assert_eq!(serde_json::to_string(&explicit).expect("plain data"), json);
        let named = Schedule::Named(ScheduleKind::OneForwardOneBackward);
        assert_eq!(serde_json::to_string(&named).expect("plain data"), r#""1f1b""#);
        for stage in 0..2 {
            let depth = 2 - u32::try_from(stage).expect("small");
            assert_eq!(explicit.order(stage, depth, 2), named.order(stage, depth, 2));
            assert_eq!(explicit.order(stage, depth, 1).to_string(), "F0 B0");
        }
    }

    #[test]
    fn the_closed_form_counts_what_an_order_holds() {
        for kind in [ScheduleKind::FillDrain, ScheduleKind::OneForwardOneBackward] {
            for (depth, microbatches) in (1..6).flat_map(|depth| (1..8).map(move |microbatches| (depth, microbatches)))
            {
                let order = Schedule::Named(kind).order(0, depth, microbatches);
                assert_eq!(order.in_flight(), kind.in_flight(u64::from(depth), u64::from(microbatches)), "{order}");
                assert_eq!(order.fault(microbatches), None);
            }
        }
    }

    #[test]
    fn depth_is_the_longest_way_to_an_end() {
        assert_eq!(depths(4, [(0, 1), (1, 2), (2, 3)]), [4, 3, 2, 1]);
        assert_eq!(depths(4, [(0, 3), (1, 2)]), [2, 2, 1, 1]);
        assert_eq!(depths(4, [(0, 1), (0, 3), (1, 3)]), [3, 2, 1, 1]);
    }
}
