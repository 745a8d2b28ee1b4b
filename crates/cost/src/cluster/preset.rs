//! Clusters of known devices: the figures of their data sheets.

use std::sync::LazyLock;

use super::check::MOST_DEVICES;
use super::cluster::{Cluster, Level, Link, Node};
use super::device::{COLLECTIVE_SLOWDOWN, Device, FlopRates};
use super::efficiency::Efficiency;
use crate::error::CostError;
use crate::units::{GIGA, TERA};

const GIB: u64 = 1 << 30;

/// Memory of a GPU that CUDA and communicators take besides tensors, where nothing else is known.
pub const FRAMEWORK_BYTES: u64 = 3 * GIB / 2;

/// A known kind of device, in the units of data sheets.
#[derive(Clone, Copy, Debug)]
pub struct Preset {
    /// Short name, e.g. A100-80G.
    pub name: &'static str,
    /// Words that are in torch's name of the device, in upper case.
    words: &'static [&'static str],
    memory_gib: u64,
    fp64_tflops: f64,
    fp32_tflops: f64,
    tf32_tflops: f64,
    half_tflops: f64,
    memory_gb_per_s: f64,
    /// To its host.
    host_gb_per_s: f64,
    inside: Network,
    between: Network,
}

/// Links of one level: what one device sends, and what it moves in collectives.
#[derive(Clone, Copy, Debug)]
struct Network {
    name: &'static str,
    send_us: f64,
    send_gb_per_s: f64,
    step_us: f64,
    collective_gb_per_s: f64,
}

const fn network(name: &'static str, [send_us, send_gb_per_s]: [f64; 2], collective: [f64; 2]) -> Network {
    let [step_us, collective_gb_per_s] = collective;
    Network { name, send_us, send_gb_per_s, step_us, collective_gb_per_s }
}

const fn nvlink(gb_per_s: f64) -> Network {
    network("NVLink", [60.0, gb_per_s], [14.0, gb_per_s])
}

const fn infiniband(gb_per_s: f64) -> Network {
    network("InfiniBand", [70.0, gb_per_s], [25.0, gb_per_s])
}

const PCIE: Network = network("PCIe", [60.0, 10.0], [20.0, 8.0]);
const LOOPBACK: Network = network("loopback", [100.0, 1.5], [100.0, 1.5]);
const ETHERNET: Network = network("Ethernet", [150.0, 1.0], [150.0, 1.0]);

const H100: Preset = Preset {
    name: "H100",
    words: &["H100"],
    memory_gib: 79,
    fp64_tflops: 67.0,
    fp32_tflops: 67.0,
    tf32_tflops: 494.0,
    half_tflops: 989.0,
    memory_gb_per_s: 3350.0,
    host_gb_per_s: 17.0,
    inside: nvlink(400.0),
    between: infiniband(45.0),
};

const A100_40G: Preset = Preset {
    name: "A100-40G",
    words: &["A100"],
    memory_gib: 39,
    fp64_tflops: 19.5,
    fp32_tflops: 19.5,
    tf32_tflops: 156.0,
    half_tflops: 312.0,
    memory_gb_per_s: 1555.0,
    host_gb_per_s: 15.0,
    inside: nvlink(250.0),
    between: infiniband(22.0),
};

/// An accelerator that no preset knows.
const AVERAGE: Preset = Preset {
    name: "accelerator",
    words: &[],
    memory_gib: 16,
    fp64_tflops: 0.5,
    fp32_tflops: 14.0,
    tf32_tflops: 14.0,
    half_tflops: 80.0,
    memory_gb_per_s: 500.0,
    host_gb_per_s: 10.0,
    inside: PCIE,
    between: ETHERNET,
};

/// One core of an ordinary server, whose processes talk over the loopback interface.
const HOST: Preset = Preset {
    name: "cpu",
    words: &["CPU"],
    memory_gib: 8,
    fp64_tflops: 0.02,
    fp32_tflops: 0.04,
    tf32_tflops: 0.04,
    half_tflops: 0.013,
    memory_gb_per_s: 10.0,
    host_gb_per_s: 10.0,
    inside: LOOPBACK,
    between: ETHERNET,
};

/// Of several that fit a name the first counts.
const PRESETS: [Preset; 8] = [
    Preset {
        name: "V100-32G",
        words: &["V100"],
        memory_gib: 32,
        fp64_tflops: 7.8,
        fp32_tflops: 15.7,
        tf32_tflops: 15.7,
        half_tflops: 125.0,
        memory_gb_per_s: 900.0,
        host_gb_per_s: 11.0,
        inside: nvlink(120.0),
        between: infiniband(11.0),
    },
    Preset { name: "A100-80G", words: &["A100", "80"], memory_gib: 79, memory_gb_per_s: 2039.0, ..A100_40G },
    A100_40G,
    Preset { name: "H200", words: &["H200"], memory_gib: 140, memory_gb_per_s: 4800.0, ..H100 },
    H100,
    Preset {
        name: "B200",
        words: &["B200"],
        memory_gib: 178,
        fp64_tflops: 37.0,
        fp32_tflops: 75.0,
        tf32_tflops: 1100.0,
        half_tflops: 2250.0,
        memory_gb_per_s: 7700.0,
        host_gb_per_s: 50.0,
        inside: nvlink(750.0),
        between: infiniband(45.0),
    },
    Preset {
        name: "RTX 4090",
        words: &["RTX", "4090"],
        memory_gib: 24,
        fp64_tflops: 1.29,
        fp32_tflops: 82.6,
        tf32_tflops: 82.6,
        half_tflops: 165.2,
        memory_gb_per_s: 1008.0,
        host_gb_per_s: 22.0,
        inside: PCIE,
        between: ETHERNET,
    },
    HOST,
];

/// The known kinds of device.
pub fn presets() -> &'static [Preset] {
    &PRESETS
}

impl Device {
    /// What times of Ops are compared by where no device is given: their shares differ little between accelerators.
    pub(crate) fn nominal() -> &'static Self {
        static NOMINAL: LazyLock<Device> = LazyLock::new(|| AVERAGE.device());
        &NOMINAL
    }
}

impl Preset {
    /// The preset of a device, by its short name or by torch's.
    pub fn find(device_name: &str) -> Option<&'static Self> {
        let name = device_name.to_ascii_uppercase();
        PRESETS.iter().find(|preset| preset.words.iter().all(|word| name.contains(word)))
    }

    /// The device.
    pub fn device(&self) -> Device {
        let host = self.name == HOST.name;
        let device = Device {
            name: self.name.to_owned(),
            host,
            memory_bytes: self.memory_gib * GIB,
            flops_per_s: FlopRates {
                fp64: self.fp64_tflops * TERA,
                fp32: self.fp32_tflops * TERA,
                tf32: self.tf32_tflops * TERA,
                half: self.half_tflops * TERA,
            },
            tf32: false,
            memory_bytes_per_s: self.memory_gb_per_s * GIGA,
            launch_us: if host { 5.0 } else { 6.5 },
            action_us: if host { 100.0 } else { 50.0 },
            // A memory limit for the host is meant for tensors alone.
            framework_bytes: if host { 0 } else { FRAMEWORK_BYTES },
            host_bytes_per_s: self.host_gb_per_s * GIGA,
            collective_slowdown: COLLECTIVE_SLOWDOWN,
            message_slowdown: 0.0,
            efficiency: Efficiency::default(),
        };
        Device { efficiency: Efficiency::built_in(&device), ..device }
    }

    /// The levels that join `nodes` nodes of this device.
    pub(crate) fn levels(&self, nodes: u32) -> Vec<Level> {
        let level = |network: Network, nodes: u32| Level {
            name: network.name.to_owned(),
            nodes,
            send: Link { latency_us: network.send_us, bytes_per_s: network.send_gb_per_s * GIGA },
            collective: Link { latency_us: network.step_us, bytes_per_s: network.collective_gb_per_s * GIGA },
        };
        let between = (nodes > 1).then(|| level(self.between, nodes));
        std::iter::once(level(self.inside, 1)).chain(between).collect()
    }
}

impl Cluster {
    /// A cluster of the device that torch or a preset calls `device_name` (for the host's processor:
    /// "cpu"). An unknown name gives an average accelerator.
    pub fn preset(device_name: &str, nodes: u32, devices_per_node: u32) -> Result<Self, CostError> {
        let preset = Preset::find(device_name).unwrap_or(&AVERAGE);
        let cluster = Self {
            name: format!("{nodes} x {devices_per_node} {device_name}"),
            kinds: vec![Device { name: device_name.to_owned(), ..preset.device() }],
            nodes: vec![Node { kind: 0, devices: devices_per_node }; nodes.min(MOST_DEVICES + 1) as usize],
            levels: preset.levels(nodes),
            dealt: Vec::new(),
        };
        cluster.check()?;
        Ok(cluster)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn presets_are_found_by_torch_names() {
        for (name, short, memory_gib) in [
            ("NVIDIA H200", "H200", 140),
            ("NVIDIA H100 80GB HBM3", "H100", 79),
            ("NVIDIA A100-SXM4-40GB", "A100-40G", 39),
            ("NVIDIA A100-SXM4-80GB", "A100-80G", 79),
            ("Tesla V100-SXM2-32GB", "V100-32G", 32),
            ("NVIDIA B200", "B200", 178),
            ("NVIDIA GeForce RTX 4090", "RTX 4090", 24),
            ("cpu", "cpu", 8),
        ] {
            assert_eq!(Preset::find(name).expect("known").name, short);
            let cluster = Cluster::preset(name, 1, 8).expect("8 devices");
            assert_eq!(cluster.kinds[0].memory_bytes, memory_gib * GIB, "{name}");
            assert_eq!(cluster.kinds[0].name, name);
        }
        let unknown = Cluster::preset("Some Future GPU", 1, 8).expect("8 devices");
        assert_eq!(unknown.kinds[0].memory_bytes, 16 * GIB);
    }

    #[test]
    fn presets_are_found_by_their_own_names() {
        for preset in presets() {
            assert_eq!(Preset::find(preset.name).expect("known").name, preset.name);
        }
    }
}
