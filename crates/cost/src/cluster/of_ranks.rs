//! The cluster that a running job has.

use indexmap::IndexMap;
use serde::{Deserialize, Serialize};

use super::cluster::{Cluster, Link, Node, slower_levels};
use super::device::Device;
use crate::error::CostError;

/// What one rank of a job says of itself.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RankDevice {
    /// Name of its device, as torch reports it.
    pub name: String,
    /// Memory that it can have.
    pub memory_bytes: u64,
    /// True when its float32 matrix products use TF32.
    pub tf32: bool,
    /// Name of its host.
    pub host: String,
}

/// Measured links of one level of a cluster.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MeasuredLevel {
    /// Name of the level.
    pub name: String,
    /// Of messages from one device to one other.
    pub send: Link,
    /// Of collectives.
    pub collective: Link,
}

impl Cluster {
    /// The cluster of a job's ranks, in their order, with the presets' figures of their devices.
    /// Ranks with equal devices on one host are a node, in whatever order a launcher gave them out.
    pub fn of_ranks(ranks: &[RankDevice]) -> Result<Self, CostError> {
        let mut nodes: IndexMap<&RankDevice, u32> = IndexMap::new();
        let mut dealt = Vec::new();
        for rank in ranks {
            let entry = nodes.entry(rank);
            dealt.push(entry.index() as u32);
            *entry.or_default() += 1;
        }
        let count = nodes.len() as u32;
        let (kinds, levels) = (Vec::new(), Vec::new());
        let mut cluster = Self { name: "this machine".to_owned(), kinds, nodes: Vec::new(), levels, dealt: Vec::new() };
        for (RankDevice { name, memory_bytes, tf32, .. }, devices) in nodes {
            let Self { mut kinds, levels, .. } = Self::preset(name, count, 1)?;
            let known = kinds.remove(0);
            let device = Device { memory_bytes: *memory_bytes, tf32: *tf32, ..known };
            let kind = cluster.kinds.iter().position(|kind| *kind == device).unwrap_or_else(|| {
                cluster.kinds.push(device);
                let known = std::mem::take(&mut cluster.levels);
                cluster.levels = if known.is_empty() { levels } else { slower_levels(known, levels) };
                cluster.kinds.len() - 1
            });
            cluster.nodes.push(Node { kind, devices });
        }
        if !dealt.is_sorted() {
            cluster.dealt = dealt;
        }
        cluster.check()?;
        Ok(cluster)
    }

    /// The same cluster, whose devices have memory for anything.
    pub fn with_ample_memory(mut self) -> Self {
        const MORE: u64 = 1 << 10;
        for device in &mut self.kinds {
            device.memory_bytes = device.memory_bytes.saturating_mul(MORE);
        }
        self
    }

    /// The same cluster with measured links at the levels that have the names of measured ones.
    pub fn with_links(mut self, measured: &[MeasuredLevel]) -> Self {
        for level in &mut self.levels {
            if let Some(MeasuredLevel { send, collective, .. }) = measured.iter().find(|found| found.name == level.name)
            {
                (level.send, level.collective) = (*send, *collective);
            }
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::Level;

    fn rank(name: &str, host: &str) -> RankDevice {
        RankDevice { name: name.to_owned(), memory_bytes: 80 << 30, tf32: true, host: host.to_owned() }
    }

    #[test]
    fn ranks_on_one_host_are_a_node() {
        let ranks = [rank("NVIDIA H200", "a"), rank("NVIDIA H200", "a"), rank("Tesla V100-SXM2-32GB", "b")];
        let cluster = Cluster::of_ranks(&ranks).expect("three ranks");
        assert_eq!(cluster.nodes, [Node { kind: 0, devices: 2 }, Node { kind: 1, devices: 1 }]);
        assert_eq!(cluster.kinds[1].name, "Tesla V100-SXM2-32GB");
        assert!(cluster.kinds.iter().all(|kind| kind.tf32 && kind.memory_bytes == 80 << 30));
        let slower = Cluster::preset("V100-32G", 2, 1).expect("two devices");
        assert_eq!(cluster.levels, slower.levels);
    }

    #[test]
    fn ranks_that_hosts_take_in_turn_are_grouped_by_host() {
        let hosts = ["a", "b", "a", "b", "a"];
        let cluster = Cluster::of_ranks(&hosts.map(|host| rank("NVIDIA H200", host))).expect("five ranks");
        assert_eq!(cluster.nodes, [Node { kind: 0, devices: 3 }, Node { kind: 0, devices: 2 }]);
        assert_eq!([0, 1, 2, 3, 4].map(|rank| cluster.node_of(rank)), [0, 1, 0, 1, 0]);
        assert_eq!((cluster.level_between(0, 2), cluster.level_between(0, 1)), (0, 1));
        assert_eq!((cluster.group(&[0, 2, 4]).nodes, cluster.group(&[0, 1]).nodes), (1, 2));
        let in_order = Cluster::of_ranks(&["a", "a", "b"].map(|host| rank("NVIDIA H200", host))).expect("three ranks");
        assert!(in_order.dealt.is_empty());
    }

    #[test]
    fn the_slower_of_each_link_counts() {
        let [fast, slow] = [9e9, 1e9].map(|bytes_per_s| Link { latency_us: 1.0, bytes_per_s });
        let level = |name: &str, send, collective| Level { name: name.to_owned(), nodes: 1, send, collective };
        let (sends, sums) = (level("sends", fast, slow), level("sums", slow, fast));
        assert_eq!(sends.clone().slower(sums.clone()), level("sends", slow, slow));
        assert_eq!(sums.slower(sends), level("sends", slow, slow));
    }

    #[test]
    fn measured_links_replace_those_of_the_same_name() {
        let cluster = Cluster::preset("H200", 2, 2).expect("four devices");
        let link = Link { latency_us: 1.0, bytes_per_s: 2e9 };
        let name = cluster.levels[1].name.clone();
        let measured = cluster.clone().with_links(&[MeasuredLevel { name, send: link, collective: link }]);
        assert_eq!(measured.levels[0], cluster.levels[0]);
        assert_eq!((measured.levels[1].send, measured.levels[1].collective), (link, link));
    }

    #[test]
    fn a_job_has_ranks() {
        assert!(Cluster::of_ranks(&[]).is_err());
    }
}
