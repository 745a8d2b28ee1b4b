//! The cluster file: a small TOML that people write by hand.
//!
//! ```toml
//! name = "two DGX H100"
//!
//! [device.h100]
//! preset = "H100"         # gives every figure; single ones may be replaced
//! memory_gib = 79
//!
//! [[node]]
//! device = "h100"
//! devices = 8
//! count = 2
//!
//! [[level]]               # without levels those of the preset serve
//! name = "NVLink"
//! nodes = 1
//! latency_us = 12
//! gb_per_s = 330
//!
//! [[level]]
//! name = "InfiniBand"
//! latency_us = 25
//! gb_per_s = 40
//! collective_gb_per_s = 45
//! ```

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use toml::Spanned;

use super::check::MOST_DEVICES;
use super::cluster::{Cluster, Level, Link, Node, slower_levels};
use super::device::{COLLECTIVE_SLOWDOWN, Device, FlopRates};
use super::efficiency::{Curve, Efficiency};
use super::preset::{Preset, presets};
use super::tables::{DeviceTable, Figure, File, LevelTable, NodeTable};
use crate::error::{ClusterFault, CostError, Part};
use crate::units::{GIB, GIGA, TERA};

impl Cluster {
    /// Reads the text of a cluster file and checks it.
    pub fn from_toml(text: &str) -> Result<Self, CostError> {
        let file: File = toml::from_str(text).map_err(CostError::Form)?;
        let mut reader = Reader { text, places: BTreeMap::new() };
        let cluster = reader.cluster(file)?;
        cluster.fault().map_err(|fault| reader.placed(fault))?;
        Ok(cluster)
    }

    /// Reads a cluster file.
    pub fn read(path: &Path) -> Result<Self, CostError> {
        let text = fs::read_to_string(path).map_err(|source| CostError::Read { path: path.to_owned(), source })?;
        Self::from_toml(&text)
    }
}

/// Remembers where in the text each figure stands.
struct Reader<'t> {
    text: &'t str,
    /// Offsets; those of a whole part under no field.
    places: BTreeMap<(Part, &'static str), usize>,
}

impl Reader<'_> {
    fn cluster(&mut self, file: File) -> Result<Cluster, CostError> {
        let mut tables: Vec<(String, Spanned<DeviceTable>)> = file.device.into_iter().collect();
        tables.sort_by_key(|(_, table)| table.span().start);
        let keys: Vec<String> = tables.iter().map(|(key, _)| key.clone()).collect();
        let mut known = Vec::new();
        let mut kinds = Vec::new();
        for (place, (key, table)) in tables.into_iter().enumerate() {
            self.places.insert((Part::Device(place), ""), table.span().start);
            let table = table.into_inner();
            let preset = table.preset.as_ref().map(|name| self.preset(name)).transpose()?;
            known.push(preset);
            let device = self.device(Part::Device(place), key, table, preset);
            kinds.push(device.map_err(|fault| self.placed(fault))?);
        }
        let nodes = self.nodes(file.node, &keys)?;
        let levels = if file.level.is_empty() {
            self.known_levels(&known, nodes.len() as u32)?
        } else {
            self.levels(file.level, nodes.len() as u32)
        };
        Ok(Cluster { name: file.name, kinds, nodes, levels, dealt: Vec::new() })
    }

    fn preset(&self, name: &Spanned<String>) -> Result<&'static Preset, CostError> {
        Preset::find(name.get_ref()).ok_or_else(|| {
            let names: Vec<&str> = presets().iter().map(|preset| preset.name).collect();
            self.unknown("preset", name, &names)
        })
    }

    fn device(
        &mut self,
        part: Part,
        key: String,
        table: DeviceTable,
        preset: Option<&Preset>,
    ) -> Result<Device, ClusterFault> {
        let base = preset.map(Preset::device);
        let mut figure = |field: &'static str, given: Figure, unit: f64, known: fn(&Device) -> f64| {
            if let Some(given) = given {
                self.places.insert((part, field), given.span().start);
                return Ok(given.into_inner() * unit);
            }
            base.as_ref().map(known).ok_or_else(|| {
                let what =
                    format!("device {key} has no {field}: give it, or a preset to start from ({})", known_names());
                ClusterFault { part, field, what }
            })
        };
        let bytes = |field, gib| bytes(part, field, gib, &key);
        let mut device = Device {
            memory_bytes: bytes(
                "memory_gib",
                figure("memory_gib", table.memory_gib, 1.0, |base| gib(base.memory_bytes))?,
            )?,
            flops_per_s: FlopRates {
                fp64: figure("fp64_tflops", table.fp64_tflops, TERA, |base| base.flops_per_s.fp64)?,
                fp32: figure("fp32_tflops", table.fp32_tflops, TERA, |base| base.flops_per_s.fp32)?,
                tf32: figure("tf32_tflops", table.tf32_tflops, TERA, |base| base.flops_per_s.tf32)?,
                half: figure("half_tflops", table.half_tflops, TERA, |base| base.flops_per_s.half)?,
            },
            memory_bytes_per_s: figure("memory_gb_per_s", table.memory_gb_per_s, GIGA, |base| base.memory_bytes_per_s)?,
            launch_us: figure("launch_us", table.launch_us, 1.0, |base| base.launch_us)?,
            action_us: figure("action_us", table.action_us, 1.0, |base| base.action_us)?,
            framework_bytes: bytes(
                "framework_gib",
                figure("framework_gib", table.framework_gib, 1.0, |base| gib(base.framework_bytes))?,
            )?,
            host_bytes_per_s: figure("host_gb_per_s", table.host_gb_per_s, GIGA, |base| base.host_bytes_per_s)?,
            collective_slowdown: match table.collective_slowdown {
                None if base.is_none() => COLLECTIVE_SLOWDOWN,
                given => figure("collective_slowdown", given, 1.0, |base| base.collective_slowdown)?,
            },
            message_slowdown: match table.message_slowdown {
                None if base.is_none() => 0.0,
                given => figure("message_slowdown", given, 1.0, |base| base.message_slowdown)?,
            },
            host: table.host.unwrap_or(base.as_ref().is_some_and(|base| base.host)),
            tf32: table.tf32.unwrap_or(base.as_ref().is_some_and(|base| base.tf32)),
            name: table.name.or(base.as_ref().map(|base| base.name.clone())).unwrap_or(key),
            efficiency: Efficiency::default(),
        };
        device.efficiency = Efficiency::built_in(&device);
        for ((field, curve), points) in device.efficiency.curves_mut().into_iter().zip(table.efficiency.points()) {
            if let Some(points) = points {
                self.places.insert((part, field), points.span().start);
                *curve = Curve::new(points.into_inner());
            }
        }
        Ok(device)
    }

    fn nodes(&mut self, tables: Vec<Spanned<NodeTable>>, keys: &[String]) -> Result<Vec<Node>, CostError> {
        let mut nodes = Vec::new();
        for table in tables {
            let NodeTable { device, devices, count } = table.into_inner();
            let Some(kind) = keys.iter().position(|key| key == device.get_ref()) else {
                let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
                return Err(self.unknown("device", &device, &keys));
            };
            let part = Part::Node(nodes.len());
            let place = count.as_ref().map_or(devices.span(), Spanned::span);
            self.places.extend([((part, ""), place.start), ((part, "devices"), devices.span().start)]);
            let count = count.map_or(1, Spanned::into_inner);
            if count == 0 {
                let what = "count of a node must be at least 1; leave out nodes that there are not".to_owned();
                return Err(self.placed(ClusterFault { part, field: "count", what }));
            }
            let room = (MOST_DEVICES as usize + 1).saturating_sub(nodes.len());
            let node = Node { kind, devices: devices.into_inner() };
            nodes.extend(std::iter::repeat_n(node, room.min(count as usize)));
        }
        Ok(nodes)
    }

    fn levels(&mut self, tables: Vec<Spanned<LevelTable>>, all_nodes: u32) -> Vec<Level> {
        let mut levels = Vec::new();
        for (place, table) in tables.into_iter().enumerate() {
            let part = Part::Level(place);
            self.places.insert((part, ""), table.span().start);
            let table = table.into_inner();
            let mut figure = |field: &'static str, given: Spanned<f64>| {
                self.places.insert((part, field), given.span().start);
                given.into_inner()
            };
            let latency_us = figure("latency_us", table.latency_us);
            let gb_per_s = figure("gb_per_s", table.gb_per_s);
            let step_us = table.collective_latency_us.map(|given| figure("collective_latency_us", given));
            let collective_gb_per_s = table.collective_gb_per_s.map(|given| figure("collective_gb_per_s", given));
            if let Some(nodes) = &table.nodes {
                self.places.insert((part, "nodes"), nodes.span().start);
            }
            levels.push(Level {
                name: table.name,
                nodes: table.nodes.map_or(all_nodes, Spanned::into_inner),
                send: Link { latency_us, bytes_per_s: gb_per_s * GIGA },
                collective: Link {
                    latency_us: step_us.unwrap_or(latency_us),
                    bytes_per_s: collective_gb_per_s.unwrap_or(gb_per_s) * GIGA,
                },
            });
        }
        levels
    }

    /// The slowest of what the presets have at each level.
    fn known_levels(&self, known: &[Option<&Preset>], nodes: u32) -> Result<Vec<Level>, CostError> {
        let mut slowest: Vec<Level> = Vec::new();
        for (place, preset) in known.iter().enumerate() {
            let Some(preset) = preset else {
                let what = "no preset tells how the devices are joined: add [[level]] sections".to_owned();
                return Err(self.placed(ClusterFault { part: Part::Device(place), field: "level", what }));
            };
            let levels = preset.levels(nodes);
            slowest = if slowest.is_empty() { levels } else { slower_levels(slowest, levels) };
        }
        Ok(slowest)
    }

    /// An unknown name, with the most similar of those that there are.
    fn unknown(&self, what: &str, name: &Spanned<String>, names: &[&str]) -> CostError {
        let nearest = names.iter().min_by_key(|known| distance(known, name.get_ref()));
        let hint = nearest.map_or_else(
            || format!("add a section [{what}.{}]", name.get_ref()),
            |nearest| format!("did you mean {nearest}? There are {}", names.join(", ")),
        );
        let what = format!("there is no {what} {:?}: {hint}", name.get_ref());
        let fault = ClusterFault { part: Part::Cluster, field: "device", what };
        CostError::Line { line: self.line(name.span().start), fault }
    }

    fn placed(&self, fault: ClusterFault) -> CostError {
        let exact = self.places.get(&(fault.part, fault.field));
        let part = || self.places.range(..=(fault.part, "")).next_back().map(|(_, offset)| offset);
        match exact.or_else(part) {
            Some(&offset) => CostError::Line { line: self.line(offset), fault },
            None => CostError::Fault(fault),
        }
    }

    fn line(&self, offset: usize) -> usize {
        self.text.bytes().take(offset).filter(|&byte| byte == b'\n').count() + 1
    }
}

fn known_names() -> String {
    let names: Vec<&str> = presets().iter().map(|preset| preset.name).collect();
    names.join(", ")
}

fn gib(bytes: u64) -> f64 {
    bytes as f64 / GIB
}

fn bytes(part: Part, field: &'static str, gib: f64, key: &str) -> Result<u64, ClusterFault> {
    const MOST_GIB: f64 = 1e9;
    if (0.0..=MOST_GIB).contains(&gib) {
        return Ok((gib * GIB).round() as u64);
    }
    let what = format!("{field} of device {key} must be a number from 0 to {MOST_GIB}, not {gib}");
    Err(ClusterFault { part, field, what })
}

/// Letters to add, drop or change to make one name of the other, upper and lower case alike.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.to_lowercase().chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, letter) in a.to_lowercase().chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, other) in b.iter().enumerate() {
            let change = diagonal + usize::from(letter != *other);
            diagonal = row[j + 1];
            row[j + 1] = change.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}
