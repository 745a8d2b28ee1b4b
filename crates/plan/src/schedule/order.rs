//! The order of a rank's computations, and its text: `F0 F1 B0 B1`.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::compute::{Compute, Seated};
use super::crew::Crew;

/// The computations of a rank, one after another.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Order(pub Vec<Seated>);

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
     parts of that backward; where a rank has several stages, F3@1 for stage 1"
)]
pub struct OrderError(String);

impl Order {
    /// The computations, whatever their Stages.
    pub fn computes(&self) -> impl Iterator<Item = Compute> {
        self.0.iter().map(|seated| seated.compute)
    }

    /// Those of one Stage, as if its ranks had no other.
    pub fn of_stage(&self, stage: u32) -> Self {
        let own = self.0.iter().filter(|seated| seated.stage.is_none_or(|other| other == stage));
        own.map(|seated| seated.compute).collect()
    }

    /// Those of the first microbatches.
    pub(super) fn up_to(&self, microbatches: u32) -> Self {
        Self(self.0.iter().copied().filter(|seated| seated.compute.microbatch() < microbatches).collect())
    }

    /// Most microbatches between their forward and the end of their backward at a time.
    pub fn in_flight(&self) -> u64 {
        self.held().map(|held| held.microbatches).max().unwrap_or(0)
    }

    /// What is held during each computation.
    pub fn held(&self) -> impl Iterator<Item = Held> {
        let (mut held, mut ended) = (Held::default(), Held::default());
        self.computes().map(move |compute| {
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
        self.computes().is_sorted_by_key(|compute| !matches!(compute, Compute::Forward(_)))
    }

    /// True when a backward comes in two parts.
    pub fn splits_backward(&self) -> bool {
        self.computes().any(|compute| matches!(compute, Compute::BackwardInput(_)))
    }

    /// What keeps this from being the order of a crew with so many microbatches, if anything does.
    pub fn fault(&self, crew: &Crew, microbatches: u32) -> Option<&'static str> {
        let is_own = |seated: &Seated| match seated.stage {
            Some(stage) => crew.is_shared() && crew.stages.contains(&stage),
            None => !crew.is_shared(),
        };
        if !self.0.iter().all(is_own) {
            return Some(if crew.is_shared() { UNNAMED } else { NAMED });
        }
        crew.stages.iter().find_map(|&stage| self.of_stage(stage).fault_of_stage(microbatches))
    }

    /// The same of an order of one Stage.
    pub fn fault_of_stage(&self, microbatches: u32) -> Option<&'static str> {
        let mut seen = Seen::default();
        if let Some(fault) = self.computes().find_map(|compute| seen.fault(compute)) {
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

const NAMED: &str = "names a stage, but its ranks have no other; write F3, not F3@1";
const UNNAMED: &str = "must name one of its ranks' stages in each computation; write F3@1 for stage 1";
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

/// Of ranks with one Stage.
impl FromIterator<Compute> for Order {
    fn from_iter<T: IntoIterator<Item = Compute>>(computes: T) -> Self {
        Self(computes.into_iter().map(Seated::from).collect())
    }
}

/// `F0 F1 B0 B1`.
impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().enumerate().try_for_each(|(place, seated)| {
            let gap = if place == 0 { "" } else { " " };
            write!(f, "{gap}{seated}")
        })
    }
}

impl FromStr for Order {
    type Err = OrderError;

    fn from_str(text: &str) -> Result<Self, OrderError> {
        text.split_whitespace().map(seated).collect::<Result<_, _>>().map(Self)
    }
}

/// `F3` or `F3@1`.
fn seated(word: &str) -> Result<Seated, OrderError> {
    let wrong = || OrderError(word.to_owned());
    let (name, stage) = match word.split_once('@') {
        Some((name, stage)) => (name, Some(stage.parse().map_err(|_| wrong())?)),
        None => (word, None),
    };
    let mb = name.get(1..).and_then(|number| number.parse().ok()).ok_or_else(wrong)?;
    let compute = match name.get(..1) {
        Some("F") => Compute::Forward(mb),
        Some("B") => Compute::Backward(mb),
        Some("I") => Compute::BackwardInput(mb),
        Some("W") => Compute::BackwardWeight(mb),
        _ => return Err(wrong()),
    };
    Ok(Seated { compute, stage })
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::ScheduleKind;

    #[test]
    fn an_order_is_its_text() {
        let order: Order = "F0 F1 B0  F2 B1 B2".parse().expect("an order");
        assert_eq!(order.to_string(), "F0 F1 B0 F2 B1 B2");
        assert_eq!((order.in_flight(), order.fault_of_stage(3)), (2, None));
        let error = "F0 X0".parse::<Order>().expect_err("no computation");
        assert_eq!(
            error.to_string(),
            r#""X0" is no computation; write F3 for the forward and B3 for the backward of microbatch 3, or I3 and W3 for the two parts of that backward; where a rank has several stages, F3@1 for stage 1"#
        );
        let faults = ["F0 B0", "F0 B0 F1 B1 B1", "F0 F1 B1 B0", "B0 F0 F1 B1", "F0 F1 F2 B0 B1 B2"];
        let faults =
            faults.map(|text| text.parse::<Order>().expect("an order").fault_of_stage(2).map(|fault| &fault[..11]));
        assert_eq!(faults, ["lacks a com", "has a compu", "has backwar", "has a backw", "lacks a com"].map(Some));
    }

    #[test]
    fn a_backward_may_come_in_two_parts() {
        let order: Order = "F0 F1 I0 F2 I1 W0 B2 W1".parse().expect("an order");
        assert_eq!(order.to_string(), "F0 F1 I0 F2 I1 W0 B2 W1");
        let most_waiting = order.held().map(|held| held.weights).max();
        assert_eq!((order.in_flight(), most_waiting), (3, Some(2)));
        assert_eq!(order.held().nth(5), Some(Held { microbatches: 3, weights: 2 }));
        assert_eq!(
            order.fault_of_stage(3),
            Some("has backwards out of order; gradients are summed by increasing microbatch")
        );
        let fault = |text: &str| text.parse::<Order>().expect("an order").fault_of_stage(2);
        assert_eq!(fault("F0 F1 I0 I1 W0 W1"), None);
        assert_eq!(fault("F0 F1 I0 B1 W0"), fault("F0 F1 I0 I1 W1 W0"));
        assert_eq!(fault("F0 F1 W0 I0 B1"), Some("has the second part of a backward before the first"));
        assert_eq!([fault("F0 F1 B0 W0 B1"), fault("F0 F1 I0 B0 B1"), fault("F0 F1 I0 W0 W0 B1")], [Some(TWICE); 3]);
        assert_eq!(fault("F0 F1 I0 I1 W1").map(|fault| &fault[..5]), Some("lacks"));
    }

    /// Where a rank has several Stages, each computation names its own.
    #[test]
    fn an_order_of_several_stages_names_them() {
        let crew = &Crew::of_stages(&[vec![0], vec![1], vec![0]])[0];
        let fault = |text: &str| text.parse::<Order>().expect("an order").fault(crew, 1);
        let order: Order = "F0@0 F0@2 I0@2 B0@0 W0@2".parse().expect("an order");
        assert_eq!((order.to_string().as_str(), order.fault(crew, 1)), ("F0@0 F0@2 I0@2 B0@0 W0@2", None));
        assert_eq!(order.of_stage(2).to_string(), "F0 I0 W0");
        assert_eq!((order.in_flight(), order.of_stage(0).in_flight()), (2, 1));
        assert_eq!(fault("F0 B0"), Some(UNNAMED));
        assert_eq!(fault("F0@0 B0@0 F0@1 B0@1"), Some(UNNAMED));
        assert_eq!(fault("F0@0 B0@0 F0@2").map(|fault| &fault[..5]), Some("lacks"));
        let alone = &Crew::of_stages(&[vec![0]])[0];
        assert_eq!("F0@0 B0@0".parse::<Order>().expect("an order").fault(alone, 1), Some(NAMED));
        assert!(["F0@", "F0@x", "F@1", "@1"].iter().all(|text| text.parse::<Order>().is_err()));
    }

    #[test]
    fn the_closed_form_counts_what_an_order_holds() {
        for kind in [ScheduleKind::FillDrain, ScheduleKind::OneForwardOneBackward] {
            for (depth, microbatches) in (1..6).flat_map(|depth| (1..8).map(move |microbatches| (depth, microbatches)))
            {
                let order: Order = kind.order(depth, microbatches).collect();
                assert_eq!(order.in_flight(), kind.in_flight(u64::from(depth), u64::from(microbatches)), "{order}");
                assert_eq!(order.fault_of_stage(microbatches), None);
            }
        }
    }
}
