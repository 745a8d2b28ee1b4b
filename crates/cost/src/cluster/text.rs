//! A cluster as the text of a cluster file.

use std::fmt::Write as _;

use super::cluster::{Cluster, Level, Node};
use super::device::Device;
use crate::units::GIGA;

impl Cluster {
    /// The text of a cluster file with every figure. Reading it gives the same cluster, if its figures
    /// have, in the units of the file, at most 15 digits.
    pub fn to_toml(&self) -> String {
        let mut text = format!("name = {}\n", quoted(&self.name));
        for (place, device) in self.kinds.iter().enumerate() {
            write_device(&mut text, place, device);
        }
        for nodes in self.nodes.chunk_by(|a, b| a == b) {
            let Node { kind, devices } = nodes[0];
            line(
                &mut text,
                format_args!("\n[[node]]\ndevice = \"kind{kind}\"\ndevices = {devices}\ncount = {}", nodes.len()),
            );
        }
        for Level { name, nodes, send, collective } in &self.levels {
            line(&mut text, format_args!("\n[[level]]\nname = {}\nnodes = {nodes}", quoted(name)));
            line(&mut text, format_args!("latency_us = {}", figure(send.latency_us)));
            line(&mut text, format_args!("gb_per_s = {}", figure(send.bytes_per_s / GIGA)));
            line(&mut text, format_args!("collective_latency_us = {}", figure(collective.latency_us)));
            line(&mut text, format_args!("collective_gb_per_s = {}", figure(collective.bytes_per_s / GIGA)));
        }
        text
    }
}

fn write_device(text: &mut String, place: usize, device: &Device) {
    line(text, format_args!("\n[device.kind{place}]\nname = {}", quoted(&device.name)));
    line(text, format_args!("host = {}\ntf32 = {}", device.host, device.tf32));
    for (field, value) in device.figures() {
        line(text, format_args!("{field} = {}", figure(value)));
    }
    for (field, curve) in device.efficiency.curves() {
        let points: Vec<String> =
            curve.points().iter().map(|&(work, share)| format!("[{}, {}]", figure(work), figure(share))).collect();
        line(text, format_args!("{field} = [{}]", points.join(", ")));
    }
}

fn line(text: &mut String, line: std::fmt::Arguments<'_>) {
    writeln!(text, "{line}").expect("a String takes any text");
}

fn quoted(text: &str) -> toml::Value {
    toml::Value::String(text.to_owned())
}

/// As many digits as survive the change of units and back.
fn figure(value: f64) -> String {
    let rounded: f64 = format!("{value:.14e}").parse().unwrap_or(value);
    if (1e-3..1e6).contains(&rounded) { rounded.to_string() } else { format!("{rounded:e}") }
}
