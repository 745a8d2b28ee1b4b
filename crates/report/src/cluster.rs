//! Clusters and presets as tables.

use rannc_cost::{Cluster, Device, Level, Link, Preset, format_bytes, format_us};
use serde::Serialize;

use crate::Report;
use crate::format::{counted, decimal, paragraph};
use crate::table::{Column, amount, table, text};

/// A cluster to show. Its JSON is all that is known of it, in the units that the names of the fields end with.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(transparent)]
pub struct ClusterTables<'a> {
    /// The cluster, a checked one.
    pub cluster: &'a Cluster,
}

impl Report for ClusterTables<'_> {
    fn text(&self, width: usize) -> String {
        let Cluster { name, kinds, nodes, levels, .. } = self.cluster;
        let devices = counted(u64::from(self.cluster.devices()), "device", "devices");
        let node_count = counted(nodes.len() as u64, "node", "nodes");
        let groups = nodes.chunk_by(|left, right| left == right);
        let groups = groups.map(|run| format!("{} x {} {}", run.len(), run[0].devices, kinds[run[0].kind].name));
        let groups = groups.collect::<Vec<_>>().join(", ");
        let device_rows: Vec<_> = kinds.iter().map(|device| device_row(&device.name, device)).collect();
        let level_rows: Vec<_> = levels.iter().map(level_row).collect();
        format!(
            "{}{}\nDevices\n{}\nLinks\n{}",
            paragraph(&format!("Cluster {name}: {devices} on {node_count}"), width),
            paragraph(&format!("Nodes: {groups}"), width),
            table(&DEVICE_COLUMNS, &device_rows, width),
            table(&LEVEL_COLUMNS, &level_rows, width),
        )
    }
}

const DEVICE_COLUMNS: [Column<'_>; 8] = [
    text("Device"),
    amount("Memory"),
    amount("Bandwidth"),
    amount("FP64 FLOP/s"),
    amount("FP32 FLOP/s"),
    amount("TF32 FLOP/s"),
    amount("Half FLOP/s"),
    amount("To host"),
];

fn device_row(name: &str, device: &Device) -> Vec<String> {
    let rates = device.flops_per_s;
    let mut row = vec![name.to_owned(), format_bytes(device.memory_bytes), bandwidth(device.memory_bytes_per_s)];
    row.extend([rates.fp64, rates.fp32, rates.tf32, rates.half].map(decimal));
    row.push(bandwidth(device.host_bytes_per_s));
    row
}

const LEVEL_COLUMNS: [Column<'_>; 6] = [
    text("Level"),
    amount("Nodes"),
    amount("Latency"),
    amount("Bandwidth"),
    amount("Collective latency"),
    amount("Collective bandwidth"),
];

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
    fn text(&self, width: usize) -> String {
        let rows: Vec<_> = self.presets.iter().map(|preset| device_row(preset.name, &preset.device)).collect();
        table(&DEVICE_COLUMNS, &rows, width)
    }
}
