//! Which clusters there can be.

use super::cluster::{Cluster, Level, Link};
use super::device::{Device, MAY_BE_ZERO};
use crate::error::{ClusterFault, CostError, Part};
use crate::units::GIGA;

/// More than any cluster has.
pub const MOST_DEVICES: u32 = 1_000_000;

impl Cluster {
    /// Finds descriptions that no cluster can have.
    pub fn check(&self) -> Result<(), CostError> {
        Ok(self.fault()?)
    }

    /// The first fault.
    pub(crate) fn fault(&self) -> Result<(), ClusterFault> {
        self.node_faults()?;
        for (place, device) in self.kinds.iter().enumerate() {
            device_faults(Part::Device(place), device)?;
        }
        self.level_faults()
    }

    fn node_faults(&self) -> Result<(), ClusterFault> {
        let mut devices = 0_u32;
        for (place, node) in self.nodes.iter().enumerate() {
            let part = Part::Node(place);
            if node.devices == 0 {
                return Err(fault(part, "devices", format!("node {place} needs at least one device")));
            }
            if node.kind >= self.kinds.len() {
                let what =
                    format!("node {place} has devices of kind {}, but there are {}", node.kind, self.kinds.len());
                return Err(fault(part, "device", what));
            }
            devices = devices.saturating_add(node.devices);
            if devices > MOST_DEVICES {
                let what = format!("the cluster has more than {MOST_DEVICES} devices; correct `count` or `devices`");
                return Err(fault(part, "devices", what));
            }
        }
        if devices == 0 {
            return Err(fault(Part::Cluster, "node", "the cluster needs at least one node with one device".to_owned()));
        }
        Ok(())
    }

    fn level_faults(&self) -> Result<(), ClusterFault> {
        let mut inner = 1;
        for (place, level) in self.levels.iter().enumerate() {
            let part = Part::Level(place);
            for (link, fields) in [
                (&level.send, ["latency_us", "gb_per_s"]),
                (&level.collective, ["collective_latency_us", "collective_gb_per_s"]),
            ] {
                let &Link { latency_us, bytes_per_s } = link;
                for (field, value) in fields.into_iter().zip([latency_us, bytes_per_s / GIGA]) {
                    positive(part, field, value, &format!("level {}", level.name))?;
                }
            }
            self.nesting(part, level, inner)?;
            inner = level.nodes;
        }
        if self.levels.is_empty() {
            return Err(fault(Part::Cluster, "level", "the cluster needs at least one level of links".to_owned()));
        }
        Ok(())
    }

    /// Groups of a level consist of whole groups of the one before, the last is all nodes.
    fn nesting(&self, part: Part, level: &Level, inner: u32) -> Result<(), ClusterFault> {
        let (name, nodes, all) = (&level.name, level.nodes, self.nodes.len() as u32);
        let first = part == Part::Level(0);
        let last = part == Part::Level(self.levels.len() - 1);
        let what = if first && nodes != 1 {
            format!("level {name} is the first and joins the devices of one node: its `nodes` must be 1, not {nodes}")
        } else if last && nodes != all {
            format!("level {name} is the last and must join all {all} nodes, not {nodes}: leave its `nodes` out")
        } else if nodes == 0 || nodes > all || (!last && !nodes.is_multiple_of(inner)) || nodes < inner {
            format!(
                "level {name} joins {nodes} nodes, which must be a multiple of the {inner} of the level before and \
                     at most {all}"
            )
        } else {
            return Ok(());
        };
        Err(fault(part, "nodes", what))
    }
}

fn device_faults(part: Part, device: &Device) -> Result<(), ClusterFault> {
    let of = format!("device {}", device.name);
    for (field, value) in device.figures() {
        if value != 0.0 || !MAY_BE_ZERO.contains(&field) {
            positive(part, field, value, &of)?;
        }
    }
    if device.framework_bytes >= device.memory_bytes {
        let what = format!("framework_gib of {of} leaves nothing of its memory_gib; correct one of them");
        return Err(fault(part, "framework_gib", what));
    }
    match device.efficiency.fault() {
        Some((field, what)) => Err(fault(part, field, format!("{field} of {of} {what}"))),
        None => Ok(()),
    }
}

fn positive(part: Part, field: &'static str, value: f64, of: &str) -> Result<(), ClusterFault> {
    if value.is_finite() && value > 0.0 {
        return Ok(());
    }
    Err(fault(part, field, format!("{field} of {of} must be a positive number, not {value}")))
}

fn fault(part: Part, field: &'static str, what: String) -> ClusterFault {
    ClusterFault { part, field, what }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(change: impl Fn(&mut Cluster)) -> String {
        let mut cluster = Cluster::preset("H100", 4, 8).expect("32 devices");
        change(&mut cluster);
        cluster.check().expect_err("must be refused").to_string()
    }

    #[test]
    fn impossible_figures_are_named() {
        for (message, expected) in [
            (refused(|c| c.nodes.clear()), "needs at least one node"),
            (refused(|c| c.nodes[2].devices = 0), "node 2 needs at least one device"),
            (refused(|c| c.nodes[1].kind = 7), "node 1 has devices of kind 7, but there are 1"),
            (refused(|c| c.nodes[0].devices = u32::MAX), "more than 1000000 devices"),
            (refused(|c| c.kinds[0].memory_bytes = 0), "memory_gib of device H100 must be a positive number, not 0"),
            (refused(|c| c.kinds[0].framework_bytes = u64::MAX), "framework_gib of device H100 leaves nothing"),
            (refused(|c| c.kinds[0].flops_per_s.half = f64::NAN), "half_tflops of device H100"),
            (
                refused(|c| c.levels[1].send.bytes_per_s = -2e9),
                "gb_per_s of level InfiniBand must be a positive number, not -2",
            ),
            (refused(|c| c.levels[0].nodes = 2), "level NVLink is the first"),
            (refused(|c| c.levels[1].nodes = 3), "level InfiniBand is the last and must join all 4 nodes, not 3"),
            (refused(|c| c.levels.clear()), "at least one level"),
        ] {
            assert!(message.contains(expected), "{message}");
        }
    }

    #[test]
    fn levels_must_nest() {
        let with_middle = |nodes: &[u32]| {
            refused(|cluster| {
                let last = cluster.levels.pop().expect("two levels");
                cluster.levels.extend(nodes.iter().map(|&nodes| Level { nodes, ..last.clone() }));
                cluster.levels.push(last);
            })
        };
        for nodes in [&[0][..], &[5], &[2, 3]] {
            assert!(with_middle(nodes).contains("must be a multiple of"), "{nodes:?}");
        }
    }
}
