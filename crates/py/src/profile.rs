//! Profile for Python.

use std::collections::BTreeMap;
use std::path::PathBuf;

use pyo3::prelude::*;
use rannc_cost::PROFILE_SCHEMA;

use crate::errors::{ErrorClass, OrRaise, OrRaiseAs};

/// What was measured of a Graph's Blocks on one kind of device, and of the links.
#[pyclass(frozen, module = "pyrannc._native")]
pub struct Profile(pub rannc_cost::Profile);

#[pymethods]
impl Profile {
    /// Checks what was measured: a profile file's content without schema and checksum.
    #[staticmethod]
    fn seal(text: &str) -> PyResult<Self> {
        let mut content: serde_json::Value = serde_json::from_str(text).or_raise_as(ErrorClass::PROFILE)?;
        if let Some(fields) = content.as_object_mut() {
            fields.insert("schema".to_owned(), PROFILE_SCHEMA.into());
            fields.insert("checksum".to_owned(), "".into());
        }
        let profile: rannc_cost::Profile = serde_json::from_value(content).or_raise_as(ErrorClass::PROFILE)?;
        profile.seal().or_raise().map(Self)
    }

    /// Reads a profile file's content.
    #[staticmethod]
    fn from_json(text: &str) -> PyResult<Self> {
        rannc_cost::Profile::from_json(text).or_raise().map(Self)
    }

    /// Reads a profile file.
    #[staticmethod]
    fn read(path: PathBuf) -> PyResult<Self> {
        rannc_cost::Profile::read(&path).or_raise().map(Self)
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
