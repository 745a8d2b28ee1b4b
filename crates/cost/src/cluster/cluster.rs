//! The devices, and the links inside a node and between nodes.

use serde::{Deserialize, Serialize};

use super::device::Device;

/// Nodes of equal devices, in the order of their ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Node {
    /// Place of its kind of device in [`Cluster::kinds`].
    pub kind: usize,
    /// Number of devices.
    pub devices: u32,
}

/// A way between two devices.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// Time of an empty message; of one step, where a collective takes several.
    pub latency_us: f64,
    /// Sustained bandwidth of one device in one direction.
    pub bytes_per_s: f64,
}

/// How devices of one group of nodes reach each other.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Level {
    /// Name of the network, e.g. NVLink.
    pub name: String,
    /// Consecutive nodes of a group that it joins: 1 at the first level, all at the last.
    pub nodes: u32,
    /// Of messages from one device to one other.
    pub send: Link,
    /// Of collectives.
    pub collective: Link,
}

/// Devices of several kinds on nodes, joined by levels of links. Ranks are counted through the
/// devices of the first node, the second, and so on.
///
/// Methods take a cluster that [`Cluster::check`] accepts, and ranks below [`Cluster::devices`].
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Cluster {
    /// Name for people.
    pub name: String,
    /// The kinds of device.
    pub kinds: Vec<Device>,
    /// The nodes in the order of their ranks.
    pub nodes: Vec<Node>,
    /// From the links inside a node to those that reach all nodes.
    pub levels: Vec<Level>,
    /// The node of each rank, where a launcher dealt the ranks out otherwise; empty where they count through the nodes.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub dealt: Vec<u32>,
}

impl Level {
    /// A level as slow as either, by messages and by collectives, with the name of the one with slower collectives.
    pub(super) fn slower(self, other: Self) -> Self {
        let slower = |own: Link, other: Link| if other.bytes_per_s < own.bytes_per_s { other } else { own };
        let (send, collective) = (slower(self.send, other.send), slower(self.collective, other.collective));
        let named = if collective == self.collective { self } else { other };
        Self { send, collective, ..named }
    }
}

/// The levels as slow as either.
pub(super) fn slower_levels(own: Vec<Level>, others: Vec<Level>) -> Vec<Level> {
    own.into_iter().zip(others).map(|(own, other)| own.slower(other)).collect()
}

/// Where the members of a collective are, as far as its time depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RankGroup {
    /// Number of ranks.
    pub members: u32,
    /// Nodes that have a member.
    pub nodes: u32,
    /// Members on the node that has fewest, of those that have any.
    pub least_per_node: u32,
    /// The level that joins them all.
    pub level: usize,
}

impl Cluster {
    /// Number of devices.
    pub fn devices(&self) -> u32 {
        self.nodes.iter().fold(0, |sum, node| sum.saturating_add(node.devices))
    }

    /// The node of a rank.
    pub fn node_of(&self, rank: u32) -> u32 {
        let dealt = self.dealt.get(rank as usize).copied();
        dealt.unwrap_or_else(|| self.ends().take_while(|&end| end <= rank).count() as u32)
    }

    /// The node of each rank, for those who ask for many.
    pub fn node_table(&self) -> Vec<u32> {
        if !self.dealt.is_empty() {
            return self.dealt.clone();
        }
        let nodes = (0..).zip(&self.nodes);
        nodes.flat_map(|(number, node)| std::iter::repeat_n(number, node.devices as usize)).collect()
    }

    /// For each node one past its last rank.
    fn ends(&self) -> impl Iterator<Item = u32> {
        self.nodes.iter().scan(0_u32, |end, node| {
            *end = end.saturating_add(node.devices);
            Some(*end)
        })
    }

    /// The kind of a rank's device.
    pub fn kind_of(&self, rank: u32) -> usize {
        self.nodes[self.node_of(rank) as usize].kind
    }

    /// The device of a rank.
    pub fn device_of(&self, rank: u32) -> &Device {
        &self.kinds[self.kind_of(rank)]
    }

    /// The lowest level that joins two ranks.
    pub fn level_between(&self, a: u32, b: u32) -> usize {
        self.level_of_nodes(self.node_of(a), self.node_of(b))
    }

    /// The lowest level that joins two nodes.
    pub fn level_of_nodes(&self, a: u32, b: u32) -> usize {
        let joined = |level: &Level| a / level.nodes == b / level.nodes;
        self.levels.iter().position(joined).unwrap_or(self.levels.len() - 1)
    }

    /// Where these ranks are; each stands once, in any order.
    pub fn group(&self, ranks: &[u32]) -> RankGroup {
        let table = self.node_table();
        self.group_on(ranks.iter().map(|&rank| table[rank as usize]).collect())
    }

    /// What ranks on these nodes are together.
    pub fn group_on(&self, mut nodes: Vec<u32>) -> RankGroup {
        nodes.sort_unstable();
        let per_node = nodes.chunk_by(|a, b| a == b);
        let level = match (nodes.first(), nodes.last()) {
            (Some(&first), Some(&last)) => self.level_of_nodes(first, last),
            _ => 0,
        };
        RankGroup {
            members: nodes.len() as u32,
            nodes: per_node.clone().count() as u32,
            least_per_node: per_node.map(<[u32]>::len).min().unwrap_or(0) as u32,
            level,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn four_nodes() -> Cluster {
        let mut cluster = Cluster::preset("H200", 4, 2).expect("8 devices");
        cluster.nodes[1].devices = 3;
        let wide = cluster.levels[1].clone();
        cluster.levels[1].nodes = 2;
        cluster.levels.push(wide);
        cluster.check().expect("nested levels");
        cluster
    }

    #[test]
    fn ranks_count_through_the_nodes() {
        let cluster = four_nodes();
        assert_eq!(cluster.devices(), 9);
        let nodes: Vec<u32> = (0..9).map(|rank| cluster.node_of(rank)).collect();
        assert_eq!(nodes, [0, 0, 1, 1, 1, 2, 2, 3, 3]);
    }

    #[test]
    fn levels_follow_the_nodes() {
        let cluster = four_nodes();
        assert_eq!(cluster.level_between(0, 1), 0);
        assert_eq!(cluster.level_between(1, 2), 1);
        assert_eq!(cluster.level_between(4, 5), 2);
        assert_eq!(cluster.level_between(7, 6), 1);
    }

    #[test]
    fn groups_know_their_spread() {
        let cluster = four_nodes();
        let group = |ranks: &[u32]| {
            let RankGroup { members, nodes, least_per_node, level } = cluster.group(ranks);
            (members, nodes, least_per_node, level)
        };
        assert_eq!(group(&[2, 3, 4]), (3, 1, 3, 0));
        assert_eq!(group(&[0, 1, 2]), (3, 2, 1, 1));
        assert_eq!(group(&[7, 0, 8, 1]), (4, 2, 2, 2));
        assert_eq!(group(&[]), (0, 0, 0, 0));
    }
}
