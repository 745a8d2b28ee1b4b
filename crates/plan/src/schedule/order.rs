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

/// What a Stage holds at a time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Microbatches between their forward and the end of their backward.
    pub microbatches: u64,
    /// Those of them between the two parts of their backward.
    pub weights: u64,
}

/// Why a text is no order.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error(
    "{0:?} is no computation; write F3 for the forward and B3 for the backward of microbatch 3, or I3 and W3 for the two \
     parts of that backward"
)]
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

    /// True when some Stage's backwards come in two parts.
    pub fn splits_backward(&self) -> bool {
        match self {
            Self::Named(_) => false,
            Self::Explicit(orders) => orders.iter().any(Order::splits_backward),
        }
    }
}

/// As people write it.
impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Named(kind) => kind.fmt(f),
            Self::Explicit(_) if self.splits_backward() => f.write_str("backwards in two parts, in listed order"),
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
    /// Most microbatches between their forward and the end of their backward at a time.
    pub fn in_flight(&self) -> u64 {
        self.held().map(|held| held.microbatches).max().unwrap_or(0)
    }

    /// What is held during each computation.
    pub fn held(&self) -> impl Iterator<Item = Held> {
        let (mut held, mut ended) = (Held::default(), Held::default());
        self.0.iter().map(move |compute| {
            held.microbatches = held.microbatches.saturating_sub(ended.microbatches);
            held.weights = held.weights.saturating_sub(ended.weights);
            held.microbatches += u64::from(matches!(compute, Compute::Forward(_)));
            held.weights += u64::from(matches!(compute, Compute::BackwardInput(_)));
            ended = Held {
                microbatches: u64::from(compute.ends_microbatch()),
                weights: u64::from(matches!(compute, Compute::BackwardWeight(_))),
            };
            held
        })
    }

    /// True when every forward comes before the first backward.
    pub fn has_forwards_first(&self) -> bool {
        self.0.is_sorted_by_key(|compute| !matches!(compute, Compute::Forward(_)))
    }

    /// True when a backward comes in two parts.
    pub fn splits_backward(&self) -> bool {
        self.0.iter().any(|compute| matches!(compute, Compute::BackwardInput(_)))
    }

    /// What keeps this from being the order of a Stage with so many microbatches, if anything does.
    pub fn fault(&self, microbatches: u32) -> Option<&'static str> {
        let mut seen = Seen::default();
        if let Some(fault) = self.0.iter().find_map(|&compute| seen.fault(compute)) {
            return Some(fault);
        }
        let all = |found: &BTreeSet<u32>| found.iter().copied().eq(0..microbatches);
        if all(&seen.forwards) && all(&seen.backwards) && all(&seen.ends) {
            None
        } else {
            Some("lacks a computation, or has one of a microbatch that the plan does not have")
        }
    }
}

/// The microbatches of the computations so far.
#[derive(Default)]
struct Seen {
    forwards: BTreeSet<u32>,
    backwards: BTreeSet<u32>,
    ends: BTreeSet<u32>,
}

impl Seen {
    /// What is wrong with a computation that comes next.
    fn fault(&mut self, compute: Compute) -> Option<&'static str> {
        let mb = compute.microbatch();
        match compute {
            Compute::Forward(_) => (!self.forwards.insert(mb)).then_some(TWICE),
            _ if !self.forwards.contains(&mb) => Some("has a backward before its forward"),
            Compute::Backward(_) => follow(&mut self.backwards, mb).or_else(|| follow(&mut self.ends, mb)),
            Compute::BackwardInput(_) => follow(&mut self.backwards, mb),
            Compute::BackwardWeight(_) if !self.backwards.contains(&mb) => {
                Some("has the second part of a backward before the first")
            }
            Compute::BackwardWeight(_) => follow(&mut self.ends, mb),
        }
    }
}

const TWICE: &str = "has a computation twice";

/// What is wrong with a microbatch behind others.
fn follow(known: &mut BTreeSet<u32>, mb: u32) -> Option<&'static str> {
    match known.last() {
        Some(last) if *last > mb && !known.contains(&mb) => {
            Some("has backwards out of order; gradients are summed by increasing microbatch")
        }
        _ => (!known.insert(mb)).then_some(TWICE),
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
                (Some("I"), Some(mb)) => Ok(Compute::BackwardInput(mb)),
                (Some("W"), Some(mb)) => Ok(Compute::BackwardWeight(mb)),
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
        let error = "F0 X0".parse::<Order>().expect_err("no computation");
        assert_eq!(
            error.to_string(),
            r#""X0" is no computation; write F3 for the forward and B3 for the backward of microbatch 3, or I3 and W3 for the two parts of that backward"#
        );
        let faults = ["F0 B0", "F0 B0 F1 B1 B1", "F0 F1 B1 B0", "B0 F0 F1 B1", "F0 F1 F2 B0 B1 B2"];
        let faults = faults.map(|text| text.parse::<Order>().expect("an order").fault(2).map(|fault| &fault[..11]));
        assert_eq!(faults, ["lacks a com", "has a compu", "has backwar", "has a backw", "lacks a com"].map(Some));
    }

    #[test]
    fn a_backward_may_come_in_two_parts() {
        let order: Order = "F0 F1 I0 F2 I1 W0 B2 W1".parse().expect("an order");
        assert_eq!(order.to_string(), "F0 F1 I0 F2 I1 W0 B2 W1");
        let most_waiting = order.held().map(|held| held.weights).max();
        assert_eq!((order.in_flight(), most_waiting), (3, Some(2)));
        assert_eq!(order.held().nth(5), Some(Held { microbatches: 3, weights: 2 }));
        assert_eq!(order.fault(3), Some("has backwards out of order; gradients are summed by increasing microbatch"));
        let fault = |text: &str| text.parse::<Order>().expect("an order").fault(2);
        assert_eq!(fault("F0 F1 I0 I1 W0 W1"), None);
        assert_eq!(fault("F0 F1 I0 B1 W0"), fault("F0 F1 I0 I1 W1 W0"));
        assert_eq!(fault("F0 F1 W0 I0 B1"), Some("has the second part of a backward before the first"));
        assert_eq!([fault("F0 F1 B0 W0 B1"), fault("F0 F1 I0 B0 B1"), fault("F0 F1 I0 W0 W0 B1")], [Some(TWICE); 3]);
        assert_eq!(fault("F0 F1 I0 I1 W1").map(|fault| &fault[..5]), Some("lacks"));
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
