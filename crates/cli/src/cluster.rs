//! Clusters as the command line names them.

use std::path::Path;

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use rannc_cost::{Cluster, CostError, Level, MOST_DEVICES, Node, Preset, presets};

use crate::kinds::{Kind, unreadable};

/// Names that are less alike are not taken for each other.
const ALIKE: f64 = 0.8;

/// The cluster in a file, or of a short form such as `H200x8` (one node) or `H200x8x2` (two).
pub(crate) fn cluster(text: &str) -> Result<Cluster> {
    let path = Path::new(text);
    if !path.exists() && path.extension().is_none_or(|extension| extension != "toml") {
        let (name, devices, nodes) = short_form(text)?;
        return Ok(Cluster::preset(name, nodes, devices)?);
    }
    Cluster::read(path).map_err(|error| match error {
        CostError::Read { .. } => anyhow!(error),
        error => unreadable(path, Kind::Cluster, || anyhow!("{text}: {error}")),
    })
}

/// The first `devices` devices of the cluster, or as many more as it takes on further nodes like its last one.
pub(crate) fn resized(cluster: &Cluster, devices: u32) -> Result<Cluster> {
    ensure!(devices > 0, "a cluster needs at least one device");
    ensure!(devices <= MOST_DEVICES, "--devices may be at most {MOST_DEVICES}, not {devices}");
    let mut nodes: Vec<Node> = Vec::new();
    let last = *cluster.nodes.last().context("a checked cluster has nodes")?;
    let mut missing = devices;
    for node in cluster.nodes.iter().copied().chain(std::iter::repeat(last)) {
        let taken = node.devices.min(missing);
        nodes.push(Node { devices: taken, ..node });
        missing -= taken;
        if missing == 0 {
            break;
        }
    }
    let count = u32::try_from(nodes.len())?;
    let levels = levels(cluster, count, &cluster.kinds[last.kind].name)?;
    let resized = Cluster { nodes, levels, ..cluster.clone() };
    resized.check()?;
    Ok(resized)
}

/// The levels that join `nodes` nodes. Where there was one node, those of its preset join more.
fn levels(cluster: &Cluster, nodes: u32, device: &str) -> Result<Vec<Level>> {
    let mut levels = cluster.levels.clone();
    if levels.len() == 1 && nodes > 1 {
        known(device).map_err(|error| anyhow!("nothing tells how several nodes of the cluster are joined: {error}"))?;
        levels.extend(Cluster::preset(device, nodes, 1)?.levels.into_iter().skip(1));
    }
    let enough = levels.iter().position(|level| level.nodes >= nodes).unwrap_or(levels.len() - 1);
    levels.truncate(enough + 1);
    levels[enough].nodes = nodes;
    Ok(levels)
}

/// The preset with this name, or what there is instead.
pub(crate) fn known(name: &str) -> Result<&'static Preset> {
    Preset::find(name).ok_or_else(|| {
        let names: Vec<&str> = presets().iter().map(|preset| preset.name).collect();
        let meant = alike(name).map(|meant| format!(" (did you mean {meant}?)")).unwrap_or_default();
        anyhow!(
            "there is no preset {name}{meant}; there are {}; describe other devices in a cluster file",
            names.join(", ")
        )
    })
}

/// The name of the preset that is most like this one.
fn alike(name: &str) -> Option<&'static str> {
    let name = name.to_lowercase();
    let likeness = |preset: &Preset| strsim::jaro_winkler(&name, &preset.name.to_lowercase());
    let nearest = presets().iter().max_by(|left, right| likeness(left).total_cmp(&likeness(right)))?;
    (likeness(nearest) >= ALIKE).then_some(nearest.name)
}

/// Name of a preset, devices of a node, nodes.
fn short_form(text: &str) -> Result<(&str, u32, u32)> {
    if let Some(preset) = presets().iter().find(|preset| preset.name.eq_ignore_ascii_case(text)) {
        let name = preset.name;
        bail!("{text} needs its number of devices: {name}x8 is one node of 8, {name}x8x2 two");
    }
    let Some((rest, last)) = counted(text) else {
        let meant = alike(text).map(|name| format!("; did you mean {name}x8?")).unwrap_or_default();
        bail!(
            "{text} is neither a file nor a preset with its number of devices, such as H200x8 (one node) or H200x8x2 \
             (two){meant}"
        );
    };
    // In rtx4090x8 the first number belongs to the name.
    if let Some((name, devices)) = counted(rest)
        && Preset::find(name).is_some()
    {
        return Ok((name, devices, last));
    }
    known(rest).map(|_| (rest, last, 1))
}

fn counted(text: &str) -> Option<(&str, u32)> {
    let (name, count) = text.rsplit_once(['x', 'X'])?;
    Some((name, count.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_forms_count_devices_and_nodes() {
        for (text, expected) in [
            ("H200x8", ("H200", 8, 1)),
            ("H200x8x2", ("H200", 8, 2)),
            ("A100-80Gx4x16", ("A100-80G", 4, 16)),
            ("RTX 4090x2", ("RTX 4090", 2, 1)),
            ("rtx4090x8", ("rtx4090", 8, 1)),
            ("rtx4090x8x3", ("rtx4090", 8, 3)),
            ("cpux4", ("cpu", 4, 1)),
            ("H200X8", ("H200", 8, 1)),
        ] {
            assert_eq!(short_form(text).expect(text), expected);
        }
        for text in ["H200", "H200x", "x8", "H2000y8", "H201x8", "H200x-1", "H200x99999999999"] {
            assert!(short_form(text).is_err(), "{text}");
        }
    }

    /// Devices of each node, and nodes that each level joins.
    fn shape(cluster: &Cluster) -> (Vec<u32>, Vec<u32>) {
        let devices = cluster.nodes.iter().map(|node| node.devices);
        (devices.collect(), cluster.levels.iter().map(|level| level.nodes).collect())
    }

    #[test]
    fn clusters_shrink_and_grow_by_nodes() {
        let two_nodes = Cluster::preset("H200", 2, 4).expect("8 devices");
        let resized_shape = |devices| shape(&resized(&two_nodes, devices).expect("possible"));
        assert_eq!(resized_shape(8), (vec![4, 4], vec![1, 2]));
        assert_eq!(resized_shape(3), (vec![3], vec![1]));
        assert_eq!(resized_shape(4), (vec![4], vec![1]));
        assert_eq!(resized_shape(6), (vec![4, 2], vec![1, 2]));
        assert_eq!(resized_shape(14), (vec![4, 4, 4, 2], vec![1, 4]));
        let one_node = Cluster::preset("H200", 1, 4).expect("4 devices");
        assert_eq!(resized(&one_node, 12).expect("possible").levels, Cluster::preset("H200", 3, 4).expect("12").levels);
        assert!(resized(&two_nodes, 0).is_err());
        let refused = resized(&two_nodes, 4_000_000_000).expect_err("too many").to_string();
        assert_eq!(refused, "--devices may be at most 1000000, not 4000000000");
    }

    #[test]
    fn levels_between_shrink_with_the_nodes() {
        let mut cluster = Cluster::preset("H200", 6, 2).expect("12 devices");
        let rack = Level { nodes: 3, ..cluster.levels[1].clone() };
        cluster.levels.insert(1, rack);
        cluster.check().expect("nested");
        assert_eq!(shape(&resized(&cluster, 4).expect("possible")).1, [1, 2]);
        assert_eq!(shape(&resized(&cluster, 6).expect("possible")).1, [1, 3]);
        assert_eq!(shape(&resized(&cluster, 10).expect("possible")).1, [1, 3, 5]);
        assert_eq!(shape(&resized(&cluster, 20).expect("possible")).1, [1, 3, 10]);
    }
}
