//! The cluster that a running job has.

use serde::{Deserialize, Serialize};

use super::cluster::{Cluster, Level, Link, Node};
use super::device::Device;
use crate::error::CostError;

/// What one rank of a job says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
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
    /// Consecutive ranks with equal devices on one host are a node.
    pub fn of_ranks(ranks: &[RankDevice]) -> Result<Self, CostError> {
        let runs: Vec<&[RankDevice]> = ranks.chunk_by(|left, right| left == right).collect();
        let count = runs.len() as u32;
        let mut cluster = Self { name: "this machine".to_owned(), kinds: vec![], nodes: vec![], levels: vec![] };
        for run in runs {
            let RankDevice { name, memory_bytes, tf32, .. } = &run[0];
            let Self { mut kinds, levels, .. } = Self::preset(name, count, 1)?;
            let known = kinds.remove(0);
            let device = Device { memory_bytes: *memory_bytes, tf32: *tf32, ..known };
            let kind = cluster.kinds.iter().position(|kind| *kind == device).unwrap_or_else(|| {
                cluster.kinds.push(device);
                slowest(&mut cluster.levels, levels);
                cluster.kinds.len() - 1
            });
            cluster.nodes.push(Node { kind, devices: run.len() as u32 });
        }
        cluster.check()?;
        Ok(cluster)
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

/// Keeps, of each level, the slower of two.
fn slowest(known: &mut Vec<Level>, levels: Vec<Level>) {
    if known.is_empty() {
        *known = levels;
        return;
    }
    for (slow, level) in known.iter_mut().zip(levels) {
        if level.collective.bytes_per_s < slow.collective.bytes_per_s {
            *slow = level;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
