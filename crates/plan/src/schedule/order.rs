//! A Schedule, by name or as lists of computations, and its text: `F0 F1 B0 B1` for each crew.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::compute::{Compute, Seated};
use super::crew::Crew;
use super::named::ScheduleKind;
use super::shared;

/// In which order ranks compute. In JSON it is a name, or a list with the text of each order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Schedule {
    /// As the name says.
    Named(ScheduleKind),
    /// By [`Crew`]: where every rank has one Stage, by Stage.
    Explicit(Vec<Order>),
}

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

impl Schedule {
    /// By crew of Stages that have these ranks, what it computes with so many microbatches. `feeds` are pairs of Stages, the
    /// first before the second, which uses what it makes.
    pub fn orders(&self, stage_ranks: &[Vec<u32>], feeds: &[(usize, usize)], microbatches: u32) -> Vec<Order> {
        match self {
            Self::Named(kind) => {
                let depths = depths(stage_ranks.len(), feeds.iter().copied());
                if Crew::of_stages(stage_ranks).iter().any(Crew::is_shared) {
                    return shared::orders(*kind, stage_ranks, feeds, &depths, microbatches);
                }
                depths.into_iter().map(|depth| kind.order(depth, microbatches).collect()).collect()
            }
            Self::Explicit(orders) => {
                let mut orders: Vec<Order> = orders.iter().map(|order| order.up_to(microbatches)).collect();
                orders.resize(Crew::of_stages(stage_ranks).len(), Order::default());
                orders
            }
        }
    }

    /// The same by Stage, without names. Of crews that compute it in different orders, that of the one that holds most.
    pub fn stage_orders(&self, stage_ranks: &[Vec<u32>], feeds: &[(usize, usize)], microbatches: u32) -> Vec<Order> {
        let (crews, orders) = (Crew::of_stages(stage_ranks), self.orders(stage_ranks, feeds, microbatches));
        let of_stage = |stage: u32| {
            let having = crews.iter().zip(&orders).filter(|(crew, _)| crew.stages.contains(&stage));
            let most_waiting = |order: &Order| order.held().map(|held| held.weights).max();
            let own = having.map(|(_, order)| order.of_stage(stage));
            own.max_by_key(|order| (order.in_flight(), most_waiting(order))).unwrap_or_default()
        };
        (0..).zip(stage_ranks).map(|(stage, _)| of_stage(stage)).collect()
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
    fn up_to(&self, microbatches: u32) -> Self {
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

    #[test]
    fn a_schedule_is_a_name_or_lists() {
        let json = r#"["F0 F1 B0 B1","F0 B0 F1 B1"]"#;
        let explicit: Schedule = serde_json::from_str(json).expect("a schedule");
        assert_eq!(serde_json::to_string(&explicit).expect("plain data"), json);
        let named = Schedule::Named(ScheduleKind::OneForwardOneBackward);
        assert_eq!(serde_json::to_string(&named).expect("plain data"), r#""1f1b""#);
        let orders = |schedule: &Schedule, microbatches| schedule.orders(&[vec![0], vec![1]], &[(0, 1)], microbatches);
        assert_eq!(orders(&explicit, 2), orders(&named, 2));
        assert!(orders(&explicit, 1).iter().all(|order| order.to_string() == "F0 B0"));
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

    /// List scheduling in ticks is 1F1B and fill-drain where every rank has one Stage.
    #[test]
    fn what_is_expanded_for_shared_ranks_is_known_where_none_is_shared() {
        let kinds = [ScheduleKind::FillDrain, ScheduleKind::OneForwardOneBackward];
        for (kind, (stages, microbatches)) in
            kinds.into_iter().flat_map(|kind| (1..6).flat_map(move |stages| (1..9).map(move |mb| (kind, (stages, mb)))))
        {
            let ranks: Vec<Vec<u32>> = (0..stages).map(|rank| vec![rank]).collect();
            let feeds: Vec<(usize, usize)> = (1..ranks.len()).map(|to| (to - 1, to)).collect();
            let depths: Vec<u32> = (1..=stages).rev().collect();
            let listed = shared::orders(kind, &ranks, &feeds, &depths, microbatches);
            assert_eq!(listed, Schedule::Named(kind).orders(&ranks, &feeds, microbatches), "{kind}");
        }
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

    #[test]
    fn depth_is_the_longest_way_to_an_end() {
        assert_eq!(depths(4, [(0, 1), (1, 2), (2, 3)]), [4, 3, 2, 1]);
        assert_eq!(depths(4, [(0, 3), (1, 2)]), [2, 2, 1, 1]);
        assert_eq!(depths(4, [(0, 1), (0, 3), (1, 3)]), [3, 2, 1, 1]);
    }
}
