//! Clusters as the command line names them.

use anyhow::{Result, anyhow};
use rannc_cost::Cluster;

/// The cluster in a file, or of a short form such as `H200x8` (one node) or `H200x8x2` (two).
pub(crate) fn cluster(text: &str) -> Result<Cluster> {
    let (name, devices, nodes) = short_form(text).ok_or_else(|| anyhow!("no"))?;
    Ok(Cluster::preset(name, nodes, devices)?)
}

/// Name, devices of a node, nodes.
fn short_form(text: &str) -> Option<(&str, u32, u32)> {
    let (rest, last) = counted(text)?;
    match counted(rest) {
        Some((name, devices)) => Some((name, devices, last)),
        None => Some((rest, last, 1)),
    }
}

fn counted(text: &str) -> Option<(&str, u32)> {
    let (name, count) = text.rsplit_once('x')?;
    Some((name, count.parse().ok()?))
}
