//! Devices and links, and the time of communication over them.

use serde::{Deserialize, Serialize};
use thiserror::Error;

const GIB: u64 = 1 << 30;

/// Why a cluster cannot be described.
#[derive(Debug, Error)]
pub enum CostError {
    /// A cluster without devices.
    #[error("a cluster needs at least one node and one device per node, not {nodes} x {devices_per_node}")]
    NoDevices {
        /// Nodes asked for.
        nodes: u32,
        /// Devices of each node.
        devices_per_node: u32,
    },
    /// A speed or latency that no device can have.
    #[error("{field} of the cluster must be a positive number, not {value}")]
    NotPositive {
        /// Name of the field.
        field: &'static str,
        /// What it holds.
        value: f64,
    },
}

/// Sustained speed of large matrix products, in floating-point operations per second.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FlopRates {
    /// float64.
    pub fp64: f64,
    /// float32 without TF32.
    pub fp32: f64,
    /// float16 and bfloat16.
    pub half: f64,
}

/// One kind of device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Device {
    /// Name, as torch reports it.
    pub name: String,
    /// True when ops run on the host's own processor.
    pub host: bool,
    /// Memory of the device.
    pub memory_bytes: u64,
    /// Speed of matrix products.
    pub flops_per_s: FlopRates,
    /// Sustained memory bandwidth.
    pub memory_bytes_per_s: f64,
    /// Shortest time between the starts of two kernels.
    pub launch_us: f64,
    /// Time that the host needs to start one Action of a schedule.
    pub action_us: f64,
    /// Memory that the framework takes before any tensor.
    pub framework_bytes: u64,
}

/// A way between two devices.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// Time of an empty message.
    pub latency_us: f64,
    /// Sustained bandwidth of one device in one direction.
    pub bytes_per_s: f64,
}

impl Link {
    /// Time to send `bytes` to one other device; nothing takes no time.
    pub fn send_us(&self, bytes: f64) -> f64 {
        if bytes <= 0.0 { 0.0 } else { self.latency_us + bytes / self.bytes_per_s * 1e6 }
    }

    /// Time to sum `bytes` over `replicas` devices: the volume of a ring, the latency of a tree.
    pub fn all_reduce_us(&self, replicas: u32, bytes: f64) -> f64 {
        if replicas < 2 || bytes <= 0.0 {
            return 0.0;
        }
        let count = f64::from(replicas);
        let volume_bytes = 2.0 * (count - 1.0) / count * bytes;
        2.0 * count.log2().ceil() * self.latency_us + volume_bytes / self.bytes_per_s * 1e6
    }
}

/// Devices of one kind on nodes of one size. Rank r is device `r % devices_per_node` of node
/// `r / devices_per_node`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cluster {
    /// The devices.
    pub device: Device,
    /// Number of nodes.
    pub nodes: u32,
    /// Devices of each node.
    pub devices_per_node: u32,
    /// Between devices of one node.
    pub inside: Link,
    /// Between devices of different nodes.
    pub between: Link,
}

impl Cluster {
    /// A cluster of the device that torch calls `device_name` (for the host's processor: "cpu"). An
    /// unknown name gives an average accelerator.
    pub fn preset(device_name: &str, nodes: u32, devices_per_node: u32) -> Result<Self, CostError> {
        let (device, inside, between) = preset(device_name);
        let cluster = Self { device, nodes, devices_per_node, inside, between };
        cluster.check()?;
        Ok(cluster)
    }

    /// Finds descriptions that no cluster can have.
    pub fn check(&self) -> Result<(), CostError> {
        let &Self { ref device, nodes, devices_per_node, inside, between } = self;
        if nodes == 0 || devices_per_node == 0 {
            return Err(CostError::NoDevices { nodes, devices_per_node });
        }
        let rates = device.flops_per_s;
        let positive = [
            ("device.flops_per_s.fp64", rates.fp64),
            ("device.flops_per_s.fp32", rates.fp32),
            ("device.flops_per_s.half", rates.half),
            ("device.memory_bytes_per_s", device.memory_bytes_per_s),
            ("device.launch_us", device.launch_us),
            ("device.action_us", device.action_us),
            ("inside.latency_us", inside.latency_us),
            ("inside.bytes_per_s", inside.bytes_per_s),
            ("between.latency_us", between.latency_us),
            ("between.bytes_per_s", between.bytes_per_s),
        ];
        match positive.into_iter().find(|(_, value)| !value.is_finite() || *value <= 0.0) {
            Some((field, value)) => Err(CostError::NotPositive { field, value }),
            None => Ok(()),
        }
    }

    /// Number of devices.
    pub fn devices(&self) -> u32 {
        self.nodes.saturating_mul(self.devices_per_node)
    }

    /// The slowest link among ranks `first..end`.
    pub fn link(&self, first: u32, end: u32) -> &Link {
        let last = end.saturating_sub(1).max(first);
        if first / self.devices_per_node == last / self.devices_per_node { &self.inside } else { &self.between }
    }
}

/// Time of an optimizer step: parameters and gradients are read, its state read and written, the
/// parameters written.
pub fn update_us(device: &Device, params_bytes: f64, optimizer_bytes: f64) -> f64 {
    (3.0 * params_bytes + 2.0 * optimizer_bytes) / device.memory_bytes_per_s * 1e6
}

/// Speeds of an accelerator, in the units of data sheets.
struct Sheet {
    memory_gib: u64,
    fp64_tflops: f64,
    fp32_tflops: f64,
    half_tflops: f64,
    memory_gb_per_s: f64,
    inside_gb_per_s: f64,
    between_gb_per_s: f64,
}

/// Sustained speeds: about three quarters of the data sheets' peaks.
fn sheet(device_name: &str) -> Sheet {
    let name = device_name.to_ascii_uppercase();
    let sheet =
        |memory_gib, [fp64_tflops, fp32_tflops, half_tflops]: [f64; 3], [memory, inside, between]: [f64; 3]| Sheet {
            memory_gib,
            fp64_tflops,
            fp32_tflops,
            half_tflops,
            memory_gb_per_s: memory,
            inside_gb_per_s: inside,
            between_gb_per_s: between,
        };
    if name.contains("H200") {
        sheet(140, [50.0, 50.0, 650.0], [3900.0, 330.0, 40.0])
    } else if name.contains("H100") {
        sheet(79, [50.0, 50.0, 620.0], [2700.0, 330.0, 40.0])
    } else if name.contains("A100") && name.contains("80") {
        sheet(79, [15.0, 16.0, 240.0], [1600.0, 220.0, 20.0])
    } else if name.contains("A100") {
        sheet(39, [15.0, 16.0, 240.0], [1250.0, 220.0, 20.0])
    } else if name.contains("V100") {
        sheet(32, [6.5, 13.0, 85.0], [750.0, 100.0, 10.0])
    } else {
        sheet(16, [0.5, 10.0, 60.0], [400.0, 10.0, 5.0])
    }
}

fn preset(device_name: &str) -> (Device, Link, Link) {
    if device_name.eq_ignore_ascii_case("cpu") {
        return host(device_name);
    }
    let Sheet { memory_gib, fp64_tflops, fp32_tflops, half_tflops, memory_gb_per_s, inside_gb_per_s, between_gb_per_s } =
        sheet(device_name);
    let device = Device {
        name: device_name.to_owned(),
        host: false,
        memory_bytes: memory_gib * GIB,
        flops_per_s: FlopRates { fp64: fp64_tflops * 1e12, fp32: fp32_tflops * 1e12, half: half_tflops * 1e12 },
        memory_bytes_per_s: memory_gb_per_s * 1e9,
        launch_us: 5.0,
        action_us: 50.0,
        framework_bytes: 3 * GIB / 2,
    };
    let inside = Link { latency_us: 15.0, bytes_per_s: inside_gb_per_s * 1e9 };
    let between = Link { latency_us: 25.0, bytes_per_s: between_gb_per_s * 1e9 };
    (device, inside, between)
}

/// One core of an ordinary server, whose processes talk over the loopback interface. A memory limit
/// for the host is meant for tensors alone, so the framework counts nothing.
fn host(device_name: &str) -> (Device, Link, Link) {
    let device = Device {
        name: device_name.to_owned(),
        host: true,
        memory_bytes: 8 * GIB,
        flops_per_s: FlopRates { fp64: 15e9, fp32: 30e9, half: 10e9 },
        memory_bytes_per_s: 10e9,
        launch_us: 5.0,
        action_us: 100.0,
        framework_bytes: 0,
    };
    let inside = Link { latency_us: 100.0, bytes_per_s: 1.5e9 };
    let between = Link { latency_us: 150.0, bytes_per_s: 1e9 };
    (device, inside, between)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn presets_are_found_by_torch_names() {
        for (name, memory_gib) in [
            ("NVIDIA H200", 140),
            ("NVIDIA H100 80GB HBM3", 79),
            ("NVIDIA A100-SXM4-40GB", 39),
            ("NVIDIA A100-SXM4-80GB", 79),
            ("Tesla V100-SXM2-32GB", 32),
            ("cpu", 8),
            ("Some Future GPU", 16),
        ] {
            let cluster = Cluster::preset(name, 1, 8).expect("8 devices");
            assert_eq!(cluster.device.memory_bytes, memory_gib * GIB, "{name}");
            assert_eq!(cluster.device.name, name);
        }
    }

    #[test]
    fn impossible_clusters_are_refused() {
        assert!(matches!(Cluster::preset("cpu", 0, 4), Err(CostError::NoDevices { .. })));
        let mut cluster = Cluster::preset("cpu", 1, 4).expect("4 devices");
        cluster.inside.bytes_per_s = 0.0;
        let error = cluster.check().expect_err("no bandwidth");
        assert_eq!(error.to_string(), "inside.bytes_per_s of the cluster must be a positive number, not 0");
    }

    #[test]
    fn json_keeps_everything_and_knows_its_fields() {
        let cluster = Cluster::preset("NVIDIA H200", 2, 8).expect("16 devices");
        let json = serde_json::to_string(&cluster).expect("plain data");
        assert_eq!(serde_json::from_str::<Cluster>(&json).expect("just written"), cluster);
        let typo = json.replace("latency_us", "latency");
        assert!(serde_json::from_str::<Cluster>(&typo).is_err());
    }

    #[test]
    fn links_follow_the_nodes() {
        let cluster = Cluster::preset("NVIDIA H200", 2, 4).expect("8 devices");
        assert_eq!(cluster.link(0, 4), &cluster.inside);
        assert_eq!(cluster.link(3, 5), &cluster.between);
        assert_eq!(cluster.link(5, 5), &cluster.inside);
    }

    #[test]
    fn collectives_follow_alpha_and_beta() {
        let link = Link { latency_us: 10.0, bytes_per_s: 1e9 };
        assert_eq!(link.send_us(0.0), 0.0);
        assert_eq!(link.send_us(1e6), 1010.0);
        assert_eq!(link.all_reduce_us(1, 1e6), 0.0);
        assert_eq!(link.all_reduce_us(4, 1e6), 40.0 + 1500.0);
    }
}
