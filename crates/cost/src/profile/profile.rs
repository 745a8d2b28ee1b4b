//! Measured costs of Blocks, of the end of a step, and of links.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::block::BlockProfile;
use super::fault::ProfileFault;
use super::update::MeasuredUpdate;
use crate::cluster::MeasuredLevel;

/// Version of the profile file that this crate writes and reads.
pub const PROFILE_SCHEMA: u32 = 2;

/// What was measured of one Graph on one kind of device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// [`PROFILE_SCHEMA`].
    pub schema: u32,
    /// Hash of the Graph.
    pub graph_hash: String,
    /// Name of the device, as torch reports it.
    pub device: String,
    /// Switches that choose how products of a type are computed, e.g. `products: tf32`; autocast is in the Blocks.
    pub precision: String,
    /// Versions of everything that has an influence on speed, by name.
    pub versions: BTreeMap<String, String>,
    /// The Blocks by their hash.
    pub blocks: BTreeMap<String, BlockProfile>,
    /// Hashes of the Spans that were measured as they are although Spans are compiled: their code takes longer.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub eager_spans: BTreeSet<String>,
    /// How much of what compiled Spans would keep from forward to backward those that were measured keep at most, in
    /// percent, as torch's `activation_memory_budget` counts it; `None`: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_budget_percent: Option<u8>,
    /// The end of a step, if it was measured.
    pub update: Option<MeasuredUpdate>,
    /// [`crate::Device::collective_slowdown`], if it was measured.
    pub collective_slowdown: Option<f64>,
    /// [`crate::Device::message_slowdown`], if it was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message_slowdown: Option<f64>,
    /// The links, from those inside a node outwards.
    pub levels: Vec<MeasuredLevel>,
    /// SHA-256, in hex, of the compact JSON of this Profile with an empty checksum.
    pub checksum: String,
}

impl Profile {
    /// A Profile without measurements; [`Profile::seal`] it when they are in.
    pub fn new(graph_hash: &str, device: &str, precision: &str) -> Self {
        Self {
            schema: PROFILE_SCHEMA,
            graph_hash: graph_hash.to_owned(),
            device: device.to_owned(),
            precision: precision.to_owned(),
            versions: BTreeMap::new(),
            blocks: BTreeMap::new(),
            eager_spans: BTreeSet::new(),
            memory_budget_percent: None,
            update: None,
            collective_slowdown: None,
            message_slowdown: None,
            levels: Vec::new(),
            checksum: String::new(),
        }
    }

    /// What was measured of the Block with this hash.
    pub fn block(&self, hash: &str) -> Option<&BlockProfile> {
        self.blocks.get(hash)
    }

    pub(super) fn check(&self) -> Result<(), ProfileFault> {
        self.blocks.iter().try_for_each(|(hash, block)| block.check(hash))?;
        if let Some(percent) = self.memory_budget_percent.filter(|percent| *percent > 100) {
            return Err(ProfileFault::MemoryBudget(percent));
        }
        if let Some(update) = self.update.filter(|update| !update.is_positive()) {
            return Err(ProfileFault::Update(update));
        }
        let slowdowns =
            [("collective_slowdown", self.collective_slowdown), ("message_slowdown", self.message_slowdown)];
        for (name, share) in slowdowns {
            if let Some(share) = share.filter(|share| !(0.0..f64::INFINITY).contains(share)) {
                return Err(ProfileFault::Slowdown { name, share });
            }
        }
        for MeasuredLevel { name, send, collective } in &self.levels {
            let positive = |value: f64| value.is_finite() && value > 0.0;
            for link in [send, collective] {
                if !positive(link.latency_us) || !positive(link.bytes_per_s) {
                    return Err(ProfileFault::Link { level: name.clone(), link: *link });
                }
            }
        }
        Ok(())
    }
}
