//! Cluster for Python.

use std::path::PathBuf;

use pyo3::prelude::*;
use rannc_cli::Kind;
use rannc_cost::RankDevice;

use crate::errors::{OrRaise, read_file};
use crate::profile::Profile;

/// Devices and the links between them.
#[pyclass(frozen, module = "pyrannc._native")]
pub struct Cluster(pub rannc_cost::Cluster);

#[pymethods]
impl Cluster {
    /// Nodes of equal devices, as torch or a preset calls them ("cpu": the host's processor).
    #[staticmethod]
    fn preset(device_name: &str, nodes: u32, devices_per_node: u32) -> PyResult<Self> {
        rannc_cost::Cluster::preset(device_name, nodes, devices_per_node).or_raise().map(Self)
    }

    /// The cluster of a job: for each rank the name of its device, its memory in bytes, whether float32 products use
    /// TF32, and its host.
    #[staticmethod]
    fn of_ranks(ranks: Vec<(String, u64, bool, String)>) -> PyResult<Self> {
        let ranks: Vec<RankDevice> = ranks
            .into_iter()
            .map(|(name, memory_bytes, tf32, host)| RankDevice { name, memory_bytes, tf32, host })
            .collect();
        rannc_cost::Cluster::of_ranks(&ranks).or_raise().map(Self)
    }

    /// Reads the text of a cluster file.
    #[staticmethod]
    fn from_toml(text: &str) -> PyResult<Self> {
        rannc_cost::Cluster::from_toml(text).or_raise().map(Self)
    }

    /// Reads a cluster file.
    #[staticmethod]
    fn read(path: PathBuf) -> PyResult<Self> {
        read_file(&path, Kind::Cluster, rannc_cost::Cluster::read).map(Self)
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

    /// The same cluster, whose devices have memory for anything.
    fn with_ample_memory(&self) -> Self {
        Self(self.0.clone().with_ample_memory())
    }

    /// The same cluster with the links that were measured.
    fn with_links(&self, profile: &Profile) -> Self {
        Self(self.0.clone().with_links(&profile.0.levels))
    }
}
