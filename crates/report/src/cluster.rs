//! Clusters and presets as tables.

use rannc_cost::{Cluster, Device, Level, Link, Preset, format_bytes, format_us};
use serde::Serialize;

use crate::Report;
use crate::format::{counted, decimal};
use crate::table::table;

/// A cluster to show. Its JSON is all that is known of it, in the units that the names of the fields end with.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(transparent)]
pub struct ClusterTables<'a> {
    /// The cluster, a checked one.
    pub cluster: &'a Cluster,
}

impl Report for ClusterTables<'_> {
    fn text(&self) -> String {
        let Cluster { name, kinds, nodes, levels } = self.cluster;
        let devices = counted(u64::from(self.cluster.devices()), "device", "devices");
        let node_count = counted(nodes.len() as u64, "node", "nodes");
        let groups = nodes.chunk_by(|left, right| left == right);
        let groups = groups.map(|run| format!("{} x {} {}", run.len(), run[0].devices, kinds[run[0].kind].name));
        let groups = groups.collect::<Vec<_>>().join(", ");
        let device_rows = kinds.iter().map(|device| device_row(&device.name, device)).collect();
        format!(
            "Cluster {name}: {devices} on {node_count}\nNodes: {groups}\n\nDevices\n{}\nLinks\n{}",
            table(&DEVICE_HEADER, device_rows, 1..8),
            table(&LEVEL_HEADER, levels.iter().map(level_row).collect(), 1..6),
        )
    }
}

const DEVICE_HEADER: [&str; 8] =
    ["Device", "Memory", "Bandwidth", "FP64 FLOP/s", "FP32 FLOP/s", "TF32 FLOP/s", "Half FLOP/s", "To host"];

fn device_row(name: &str, device: &Device) -> Vec<String> {
    let rates = device.flops_per_s;
    let mut row = vec![name.to_owned(), format_bytes(device.memory_bytes), bandwidth(device.memory_bytes_per_s)];
    row.extend([rates.fp64, rates.fp32, rates.tf32, rates.half].map(decimal));
    row.push(bandwidth(device.host_bytes_per_s));
    row
}

const LEVEL_HEADER: [&str; 6] =
    ["Level", "Nodes", "Latency", "Bandwidth", "Collective latency", "Collective bandwidth"];

fn level_row(level: &Level) -> Vec<String> {
    let Level { name, nodes, send, collective } = level;
    let mut row = vec![name.clone(), nodes.to_string()];
    for Link { latency_us, bytes_per_s } in [send, collective] {
        row.extend([format_us(*latency_us), bandwidth(*bytes_per_s)]);
    }
    row
}

fn bandwidth(bytes_per_s: f64) -> String {
    format!("{}B/s", decimal(bytes_per_s))
}

/// The devices that need no description.
#[derive(Clone, Debug, Serialize)]
#[serde(transparent)]
pub struct PresetList {
    presets: Vec<PresetEntry>,
}

#[derive(Clone, Debug, Serialize)]
struct PresetEntry {
    name: &'static str,
    device: Device,
}

impl PresetList {
    /// A list of these presets.
    pub fn new(presets: &[Preset]) -> Self {
        let entries = presets.iter().map(|preset| PresetEntry { name: preset.name, device: preset.device() });
        Self { presets: entries.collect() }
    }
}

impl Report for PresetList {
    fn text(&self) -> String {
        let rows = self.presets.iter().map(|preset| device_row(preset.name, &preset.device)).collect();
        table(&DEVICE_HEADER, rows, 1..8)
    }
}
