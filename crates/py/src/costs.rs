//! Cluster and Profile for Python.

use std::collections::BTreeMap;
use std::path::PathBuf;

use pyo3::prelude::*;
use rannc_cost::{PROFILE_SCHEMA, RankDevice};

use crate::errors::{ErrorClass, OrRaise};

/// Devices and the links between them.
#[pyclass(frozen, module = "pyrannc._native")]
pub struct Cluster(pub rannc_cost::Cluster);

#[pymethods]
impl Cluster {
    /// Nodes of equal devices, as torch or a preset calls them ("cpu": the host's processor).
    #[staticmethod]
    fn preset(device_name: &str, nodes: u32, devices_per_node: u32) -> PyResult<Self> {
        rannc_cost::Cluster::preset(device_name, nodes, devices_per_node).or_raise(ErrorClass::CLUSTER).map(Self)
    }

    /// The cluster of a job: for each rank the name of its device, its memory in bytes, whether float32 products use
    /// TF32, and its host.
    #[staticmethod]
    fn of_ranks(ranks: Vec<(String, u64, bool, String)>) -> PyResult<Self> {
        let ranks: Vec<RankDevice> = ranks
            .into_iter()
            .map(|(name, memory_bytes, tf32, host)| RankDevice { name, memory_bytes, tf32, host })
            .collect();
        rannc_cost::Cluster::of_ranks(&ranks).or_raise(ErrorClass::CLUSTER).map(Self)
    }

    /// Reads the text of a cluster file.
    #[staticmethod]
    fn from_toml(text: &str) -> PyResult<Self> {
        rannc_cost::Cluster::from_toml(text).or_raise(ErrorClass::CLUSTER).map(Self)
    }

    /// Reads a cluster file.
    #[staticmethod]
    fn read(path: PathBuf) -> PyResult<Self> {
        rannc_cost::Cluster::read(&path).or_raise(ErrorClass::CLUSTER).map(Self)
    }

    /// The text of a cluster file.
    fn to_toml(&self) -> String {
        self.0.to_toml()
    }

    /// Number of devices.
    #[getter]
    fn devices(&self) -> u32 {
        self.0.devices()
    }

    /// Names of the levels of links, from those inside a node outwards.
    #[getter]
    fn level_names(&self) -> Vec<String> {
        self.0.levels.iter().map(|level| level.name.clone()).collect()
    }

    /// The same cluster with the links that were measured.
    fn with_links(&self, profile: &Profile) -> Self {
        Self(self.0.clone().with_links(&profile.0.levels))
    }
}

/// What was measured of a Graph's Blocks on one kind of device, and of the links.
#[pyclass(frozen, module = "pyrannc._native")]
pub struct Profile(pub rannc_cost::Profile);

#[pymethods]
impl Profile {
    /// Checks what was measured: a profile file's content without schema and checksum.
    #[staticmethod]
    fn seal(text: &str) -> PyResult<Self> {
        let mut content: serde_json::Value = serde_json::from_str(text).or_raise(ErrorClass::PROFILE)?;
        if let Some(fields) = content.as_object_mut() {
            fields.insert("schema".to_owned(), PROFILE_SCHEMA.into());
            fields.insert("checksum".to_owned(), "".into());
        }
        let profile: rannc_cost::Profile = serde_json::from_value(content).or_raise(ErrorClass::PROFILE)?;
        profile.seal().or_raise(ErrorClass::PROFILE).map(Self)
    }

    /// Reads a profile file's content.
    #[staticmethod]
    fn from_json(text: &str) -> PyResult<Self> {
        rannc_cost::Profile::from_json(text).or_raise(ErrorClass::PROFILE).map(Self)
    }

    /// Reads a profile file.
    #[staticmethod]
    fn read(path: PathBuf) -> PyResult<Self> {
        rannc_cost::Profile::read(&path).or_raise(ErrorClass::PROFILE).map(Self)
    }

    /// The profile file's content.
    fn to_json(&self) -> String {
        self.0.to_json()
    }

    /// Hash of the Graph.
    #[getter]
    fn graph_hash(&self) -> &str {
        &self.0.graph_hash
    }

    /// Name of the device, as torch has it.
    #[getter]
    fn device(&self) -> &str {
        &self.0.device
    }

    /// The precision that was in force.
    #[getter]
    fn precision(&self) -> &str {
        &self.0.precision
    }

    /// Versions of the software that computed.
    #[getter]
    fn versions(&self) -> BTreeMap<String, String> {
        self.0.versions.clone()
    }

    /// Hashes of the Blocks that were measured.
    #[getter]
    fn block_hashes(&self) -> Vec<String> {
        self.0.blocks.keys().cloned().collect()
    }
}
