//! Where Stages stand: the order in which they take ranks, and what the links make of it.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::{Range, RangeInclusive};

use indexmap::IndexSet;
use rannc_cost::{Cluster, RankGroup};

use crate::stop::Deadline;

/// With more nodes, they are dealt out all together or not at all.
const FEW_NODES: usize = 8;
/// Kinds of devices that a set of them can tell apart.
const MAX_KINDS: usize = 32;

/// An order of the ranks. Stages take consecutive positions, whole units of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RankOrder {
    ranks: Vec<u32>,
    /// First position of each unit, and the end of the last.
    units: Vec<u32>,
    /// Different places of runs of units.
    places: Vec<Place>,
    /// For each first unit and number of units less one, which of them it is.
    place_of: Vec<usize>,
}

/// What matters of the positions of a Stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Place {
    pub(crate) replicas: u32,
    /// For the reduction of gradients.
    pub(crate) group: RankGroup,
    /// Level of the links to the Stage before.
    pub(crate) in_level: usize,
    /// Level of the links to the Stage behind.
    pub(crate) out_level: usize,
    /// Bit k is set when some device is of kind k.
    pub(crate) kinds: u32,
}

impl RankOrder {
    /// The orders to try for the first `world_size` ranks of a cluster: along the nodes, where the Replicas of
    /// a Stage are close to each other; with several nodes dealt out in turn, where a Replica is close to
    /// those before and behind it; nodes of different kinds also sorted by kind, either way. Forced numbers
    /// of Replicas are the units; otherwise there are at most `max_units`. After the deadline only the first.
    pub(crate) fn all(
        cluster: &Cluster,
        world_size: u32,
        forced: Option<&[u32]>,
        max_units: u32,
        deadline: Deadline<'_>,
    ) -> Vec<Self> {
        let units = units(world_size, forced, max_units);
        let nodes: Vec<Vec<u32>> = nodes(cluster, world_size).into_values().collect();
        let kind = |node: &Vec<u32>| cluster.kind_of(node[0]);
        let mut node_orders = vec![nodes.clone()];
        if nodes.iter().any(|node| kind(node) != kind(&nodes[0])) {
            let mut sorted = nodes.clone();
            sorted.sort_by_key(kind);
            node_orders.push(sorted.clone());
            sorted.sort_by_key(|node| Reverse(kind(node)));
            node_orders.push(sorted);
        }
        let count = nodes.len();
        let tried = |&together: &usize| {
            count.is_multiple_of(together) && (together == 1 || together == count || count <= FEW_NODES)
        };
        let mut orders: IndexSet<Vec<u32>> = IndexSet::new();
        for nodes in node_orders {
            orders.extend((1..=count).filter(tried).map(|together| nodes.chunks(together).flat_map(dealt).collect()));
        }
        let tried = orders.into_iter().enumerate().take_while(|(place, _)| *place == 0 || !deadline.is_over());
        tried.map(|(_, ranks)| Self::new(cluster, ranks, units.clone())).collect()
    }

    /// The first of all orders.
    pub(crate) fn packed(cluster: &Cluster, world_size: u32, forced: Option<&[u32]>, max_units: u32) -> Self {
        let ranks = nodes(cluster, world_size).into_values().flatten().collect();
        Self::new(cluster, ranks, units(world_size, forced, max_units))
    }

    fn new(cluster: &Cluster, ranks: Vec<u32>, units: Vec<u32>) -> Self {
        let mut order = Self { ranks, units, places: Vec::new(), place_of: Vec::new() };
        let count = order.units();
        let nodes = cluster.node_table();
        let nodes: Vec<u32> = order.ranks.iter().map(|&rank| nodes[rank as usize]).collect();
        let mut places: IndexSet<Place> = IndexSet::new();
        order.place_of = vec![0; (count * count) as usize];
        for first in 0..count {
            for end in first + 1..=count {
                let place = find_place(cluster, &nodes, order.range(first, end));
                order.place_of[(first * count + end - first - 1) as usize] = places.insert_full(place).0;
            }
        }
        order.places = places.into_iter().collect();
        order
    }

    /// The order with places as good as any that so many devices of the first kind could have.
    pub(crate) fn with_ideal_places(&self, cluster: &Cluster) -> Self {
        let ideal = |place: &Place| Place::ideal(cluster, &(place.replicas..=place.replicas), 0);
        Self { places: self.places.iter().map(ideal).collect(), ..self.clone() }
    }

    /// The different places that runs of units have.
    pub(crate) fn places(&self) -> &[Place] {
        &self.places
    }

    /// Which of the different places a run of units has.
    pub(crate) fn place_index(&self, first: u32, count: u32) -> usize {
        self.place_of[(first * self.units() + count - 1) as usize]
    }

    /// What matters of a run of units.
    pub(crate) fn place(&self, first: u32, count: u32) -> &Place {
        &self.places[self.place_index(first, count)]
    }

    /// What matters of the positions of some run of units.
    pub(crate) fn place_at(&self, positions: &Range<u32>) -> &Place {
        let unit = |position: u32| index(self.units.partition_point(|&start| start < position));
        let first = unit(positions.start);
        self.place(first, unit(positions.end) - first)
    }

    /// Number of units.
    pub(crate) fn units(&self) -> u32 {
        index(self.units.len() - 1)
    }

    /// Number of positions.
    pub(crate) fn positions(&self) -> u32 {
        index(self.ranks.len())
    }

    /// The positions of units `first..end`.
    pub(crate) fn range(&self, first: u32, end: u32) -> Range<u32> {
        self.units[first as usize]..self.units[end as usize]
    }

    /// The ranks at these positions.
    pub(crate) fn ranks(&self, positions: Range<u32>) -> &[u32] {
        &self.ranks[positions.start as usize..positions.end as usize]
    }

    /// The ranks of Stages, one behind the other.
    pub(crate) fn of_stages(cluster: &Cluster, stages: &[Vec<u32>]) -> Self {
        let replicas: Vec<u32> = stages.iter().map(|ranks| index(ranks.len())).collect();
        Self::new(cluster, stages.concat(), forced_units(&replicas))
    }
}

/// The place of these positions, of which each has a node. The neighbours of a Stage are taken to be as large as it is.
fn find_place(cluster: &Cluster, nodes: &[u32], positions: Range<u32>) -> Place {
    let own = &nodes[positions.start as usize..positions.end as usize];
    let replicas = positions.len();
    let level = |before: usize| {
        let pairs = before.saturating_sub(replicas)..before;
        let levels = pairs.filter_map(|position| {
            let behind = nodes.get(position + replicas)?;
            Some(cluster.level_of_nodes(nodes[position], *behind))
        });
        levels.max().unwrap_or(0)
    };
    let kind = |&node: &u32| cluster.nodes[node as usize].kind.min(MAX_KINDS - 1);
    Place {
        replicas: index(replicas),
        group: cluster.group_on(own.to_vec()),
        in_level: level(positions.start as usize),
        out_level: level(positions.end as usize),
        kinds: own.iter().fold(0, |kinds, node| kinds | 1 << kind(node)),
    }
}

impl Place {
    /// A place as good as any that so many devices of a kind could have anywhere in the cluster: divided over the
    /// most of them, with the collectives of the fewest.
    pub(crate) fn ideal(cluster: &Cluster, replicas: &RangeInclusive<u32>, kind: usize) -> Self {
        let (&fewest, &most) = (replicas.start(), replicas.end());
        let largest = cluster.nodes.iter().map(|node| node.devices).max().unwrap_or(1);
        let nodes = fewest.div_ceil(largest);
        let level = cluster.levels.iter().position(|level| level.nodes >= nodes).unwrap_or(cluster.levels.len() - 1);
        // Of all trees that leave a node, those over two nodes have the fewest steps.
        let group =
            RankGroup { members: fewest, nodes: nodes.min(2), least_per_node: largest.min(most / nodes), level };
        Self { replicas: most, group, in_level: 0, out_level: 0, kinds: 1 << kind.min(MAX_KINDS - 1) }
    }

    /// Replicas: of an ideal place, the fewest.
    pub(crate) const fn fewest(&self) -> u32 {
        self.group.members
    }

    /// The kinds of its devices.
    pub(crate) fn kinds(&self) -> impl Iterator<Item = usize> {
        let mut left = self.kinds;
        std::iter::from_fn(move || {
            let kind = left.trailing_zeros() as usize;
            left &= left.checked_sub(1)?;
            Some(kind)
        })
    }
}

/// The ranks of each node.
fn nodes(cluster: &Cluster, world_size: u32) -> BTreeMap<u32, Vec<u32>> {
    let mut nodes: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for (rank, node) in (0..world_size).zip(cluster.node_table()) {
        nodes.entry(node).or_default().push(rank);
    }
    nodes
}

/// One rank of each node in turn.
fn dealt(nodes: &[Vec<u32>]) -> Vec<u32> {
    let longest = nodes.iter().map(Vec::len).max().unwrap_or(0);
    (0..longest).flat_map(|place| nodes.iter().filter_map(move |node| node.get(place).copied())).collect()
}

fn units(positions: u32, forced: Option<&[u32]>, max_units: u32) -> Vec<u32> {
    forced.map_or_else(|| even_units(positions, max_units), forced_units)
}

fn forced_units(replicas: &[u32]) -> Vec<u32> {
    let ends = replicas.iter().scan(0, |end, &replicas| {
        *end += replicas;
        Some(*end)
    });
    std::iter::once(0).chain(ends).collect()
}

/// Positions in units of about equal size.
fn even_units(positions: u32, max_units: u32) -> Vec<u32> {
    let count = positions.min(max_units);
    let start = |unit: u32| u64::from(unit) * u64::from(positions) / u64::from(count);
    (0..=count).map(|unit| u32::try_from(start(unit)).expect("at most the number of positions")).collect()
}

fn index(place: usize) -> u32 {
    u32::try_from(place).expect("fewer ranks than 2^32")
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;
    use crate::stop::Clock;

    #[test]
    fn nodes_are_kept_together_or_dealt_out() {
        let cluster = Cluster::preset("H200", 2, 4).expect("8 devices");
        let orders = RankOrder::all(&cluster, 8, None, 64, Deadline::never());
        let ranks: Vec<&[u32]> = orders.iter().map(|order| order.ranks(0..8)).collect();
        assert_eq!(ranks, [&[0, 1, 2, 3, 4, 5, 6, 7], &[0, 4, 1, 5, 2, 6, 3, 7]]);
        let together = orders[0].place(4, 4);
        assert_eq!((together.group.nodes, together.in_level, together.out_level), (1, 1, 0));
        let dealt = orders[1].place(2, 2);
        assert_eq!((dealt.group.nodes, dealt.in_level, dealt.out_level), (2, 0, 0));
    }

    #[test]
    fn after_the_deadline_one_order_is_enough() {
        let cluster = Cluster::preset("H200", 2, 4).expect("8 devices");
        let (told, all) = (AtomicBool::new(true), RankOrder::all(&cluster, 8, None, 64, Deadline::never()));
        let late = RankOrder::all(&cluster, 8, None, 64, Deadline::only_told(Clock::new(&told)));
        assert_eq!(late, all[..1]);
    }

    #[test]
    fn many_ranks_are_taken_in_units() {
        let cluster = Cluster::preset("H200", 20, 8).expect("160 devices");
        let order = &RankOrder::all(&cluster, 150, None, 64, Deadline::never())[0];
        assert_eq!((order.units(), order.positions()), (64, 150));
        assert_eq!(order.range(0, 64), 0..150);
        assert!((0..64).all(|unit| (2..=3).contains(&order.range(unit, unit + 1).len())));
    }
}
