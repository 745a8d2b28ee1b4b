//! Clusters as the command line names them.

use std::path::Path;

use anyhow::{Result, anyhow};
use rannc_cost::{Cluster, CostError, Preset, presets};

/// The cluster in a file, or of a short form such as `H200x8` (one node) or `H200x8x2` (two).
pub(crate) fn cluster(text: &str) -> Result<Cluster> {
    let path = Path::new(text);
    if !path.exists() && path.extension().is_none_or(|extension| extension != "toml") {
        let (name, devices, nodes) = short_form(text)?;
        return Ok(Cluster::preset(name, nodes, devices)?);
    }
    Cluster::read(path).map_err(|error| match error {
        CostError::Read { .. } => anyhow!(error),
        error => anyhow!("{text}: {error}"),
    })
}

/// The preset with this name, or what there is instead.
pub(crate) fn known(name: &str) -> Result<&'static Preset> {
    Preset::find(name).ok_or_else(|| {
        let names: Vec<&str> = presets().iter().map(|preset| preset.name).collect();
        anyhow!("there is no preset {name}, only {}; describe other devices in a cluster file", names.join(", "))
    })
}

/// Name of a preset, devices of a node, nodes.
fn short_form(text: &str) -> Result<(&str, u32, u32)> {
    let Some((rest, last)) = counted(text) else {
        return Err(anyhow!(
            "{text} is neither a file nor a preset with its number of devices, such as H200x8 or H200x8x2"
        ));
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
    let (name, count) = text.rsplit_once('x')?;
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
        ] {
            assert_eq!(short_form(text).expect(text), expected);
        }
        for text in ["H200", "H200x", "x8", "H2000y8", "H201x8", "H200x-1", "H200x99999999999"] {
            assert!(short_form(text).is_err(), "{text}");
        }
    }
}
