//! A Schedule, by name or as lists of computations, expanded to what ranks compute.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::crew::Crew;
use super::named::ScheduleKind;
use super::order::Order;
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
    fn depth_is_the_longest_way_to_an_end() {
        assert_eq!(depths(4, [(0, 1), (1, 2), (2, 3)]), [4, 3, 2, 1]);
        assert_eq!(depths(4, [(0, 3), (1, 2)]), [2, 2, 1, 1]);
        assert_eq!(depths(4, [(0, 1), (0, 3), (1, 3)]), [3, 2, 1, 1]);
    }
}
