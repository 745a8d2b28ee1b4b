//! Measured costs of Blocks and links, and their file.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use rannc_ir::sealed::{self, SealError, Sealed};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::block_profile::BlockProfile;
use crate::cluster::Link;

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
    /// Precision in force, e.g. `float32`, `float32 with TF32`, `autocast bfloat16`.
    pub precision: String,
    /// Versions of everything that has an influence on speed, by name.
    pub versions: BTreeMap<String, String>,
    /// The Blocks by their hash.
    pub blocks: BTreeMap<String, BlockProfile>,
    /// The end of a step, if it was measured.
    pub update: Option<MeasuredUpdate>,
    /// [`crate::Device::collective_slowdown`], if it was measured.
    pub collective_slowdown: Option<f64>,
    /// The links, from those inside a node outwards.
    pub levels: Vec<MeasuredLevel>,
    /// SHA-256, in hex, of the compact JSON of this Profile with an empty checksum.
    pub checksum: String,
}

/// What a step does with every gradient besides computing and summing it, measured; most of it is the optimizer.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MeasuredUpdate {
    /// Trainable parameters.
    pub params_bytes: u64,
    /// Time for them.
    pub update_us: f64,
}

impl MeasuredUpdate {
    /// Time for each byte of trainable parameters.
    pub fn us_per_byte(&self) -> f64 {
        self.update_us / self.params_bytes as f64
    }

    fn is_positive(&self) -> bool {
        self.params_bytes > 0 && self.update_us.is_finite() && self.update_us > 0.0
    }
}

/// Measured links of one level of a cluster.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MeasuredLevel {
    /// Name of the level.
    pub name: String,
    /// Of messages from one device to one other.
    pub send: Link,
    /// Of collectives.
    pub collective: Link,
}

/// Why a profile file cannot be used.
#[derive(Debug, Error)]
pub enum ProfileError {
    /// The file cannot be read.
    #[error("cannot read the profile file {}: {source}; check that it exists on this machine and may be read", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file cannot be written.
    #[error("cannot write the profile file {}: {source}; check that its folder exists and has space", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The text is not JSON.
    #[error("the profile is not JSON ({0}); the file is cut short or is not a profile: measure again")]
    NotJson(#[source] serde_json::Error),
    /// The JSON is not a profile.
    #[error("the profile's JSON does not have the form of a profile ({0}); measure again")]
    Form(#[source] serde_json::Error),
    /// Another version of the file format.
    #[error(
        "the profile file has schema {found}, this RaNNC reads schema {PROFILE_SCHEMA}; measure again with this version"
    )]
    Schema {
        /// What the file says.
        found: String,
    },
    /// The content is not what was written.
    #[error(
        "the profile's checksum is {found}, its content gives {computed}; the file was damaged or edited: measure again"
    )]
    Checksum {
        /// What the file says.
        found: String,
        /// What the content gives.
        computed: String,
    },
    /// The figures contradict each other.
    #[error("the profile contradicts itself: {0}; measure again")]
    Inconsistent(#[from] ProfileFault),
}

/// How a Profile contradicts itself.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum ProfileFault {
    /// A Block has no point.
    #[error("block {block} has no points")]
    NoPoints {
        /// The Block's hash.
        block: String,
    },
    /// Row counts are zero or do not increase.
    #[error("block {block} has a point for {rows} rows after one for {before}; row counts must increase from 1")]
    Rows {
        /// The Block's hash.
        block: String,
        /// The row count before it, or 0.
        before: u64,
        /// The row count.
        rows: u64,
    },
    /// A time is negative, infinite or not a number.
    #[error("block {block} has, for {rows} rows, the time {us} us")]
    Time {
        /// The Block's hash.
        block: String,
        /// The row count.
        rows: u64,
        /// The time.
        us: f64,
    },
    /// More rows fit than fewer.
    #[error("block {block} fits in memory with {rows} rows, but not with fewer")]
    FitsAgain {
        /// The Block's hash.
        block: String,
        /// The row count.
        rows: u64,
    },
    /// Figures of what could not be measured.
    #[error("block {block} does not fit in memory with {rows} rows, but has times or bytes for them")]
    FiguresWithoutRun {
        /// The Block's hash.
        block: String,
        /// The row count.
        rows: u64,
    },
    /// A time or an amount of parameters that no optimizer has.
    #[error("the end of a step takes {} us for {} bytes of parameters; both must be positive numbers", .0.update_us, .0.params_bytes)]
    Update(MeasuredUpdate),
    /// A slowdown that speeds up, or stops everything.
    #[error("collectives prolong computations by {0} times their own time; this must be 0 or a positive number")]
    CollectiveSlowdown(f64),
    /// A latency or bandwidth that no link has.
    #[error("level {level} has a link of {} us and {} bytes/s; both must be positive numbers", link.latency_us, link.bytes_per_s)]
    Link {
        /// Name of the level.
        level: String,
        /// The link.
        link: Link,
    },
}

impl Sealed for Profile {
    const SCHEMA: u32 = PROFILE_SCHEMA;

    fn checksum(&mut self) -> &mut String {
        &mut self.checksum
    }
}

impl From<SealError> for ProfileError {
    fn from(error: SealError) -> Self {
        match error {
            SealError::NotJson(error) => Self::NotJson(error),
            SealError::Schema { found } => Self::Schema { found },
            SealError::Form(error) => Self::Form(error),
            SealError::Checksum { found, computed } => Self::Checksum { found, computed },
        }
    }
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
            update: None,
            collective_slowdown: None,
            levels: Vec::new(),
            checksum: String::new(),
        }
    }

    /// Checks that the figures agree with each other and computes the checksum.
    pub fn seal(self) -> Result<Self, ProfileError> {
        self.check()?;
        Ok(sealed::seal(self))
    }

    /// What was measured of the Block with this hash.
    pub fn block(&self, hash: &str) -> Option<&BlockProfile> {
        self.blocks.get(hash)
    }

    /// The file's text. The same Profile gives the same bytes.
    pub fn to_json(&self) -> String {
        sealed::to_json(self)
    }

    /// Reads a file's text and checks form, schema, checksum and figures.
    pub fn from_json(text: &str) -> Result<Self, ProfileError> {
        let profile: Self = sealed::from_json(text)?;
        profile.check()?;
        Ok(profile)
    }

    /// Reads a profile file.
    pub fn read(path: &Path) -> Result<Self, ProfileError> {
        let text = fs::read_to_string(path).map_err(|source| ProfileError::Read { path: path.to_owned(), source })?;
        Self::from_json(&text)
    }

    /// Writes a profile file.
    pub fn write(&self, path: &Path) -> Result<(), ProfileError> {
        sealed::write(path, &self.to_json()).map_err(|source| ProfileError::Write { path: path.to_owned(), source })
    }

    fn check(&self) -> Result<(), ProfileFault> {
        self.blocks.iter().try_for_each(|(hash, block)| block.check(hash))?;
        if let Some(update) = self.update.filter(|update| !update.is_positive()) {
            return Err(ProfileFault::Update(update));
        }
        if let Some(slowdown) = self.collective_slowdown.filter(|slowdown| !(0.0..f64::INFINITY).contains(slowdown)) {
            return Err(ProfileFault::CollectiveSlowdown(slowdown));
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
