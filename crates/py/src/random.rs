//! Random numbers for Python, as bytes that a tensor takes over.

use std::ops::Range;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyByteArray;
use rannc_random::{Place, Stream};

/// The numbers of one drawing Op in one call.
#[pyclass(frozen, module = "pyrannc._native")]
pub struct RandomStream(Stream);

#[pymethods]
impl RandomStream {
    #[new]
    fn new(key: u64, op: u32, salt: u32) -> Self {
        Self(Stream { key, op, salt })
    }

    /// A word of 32 bits for each element of a tensor of shape `[outer, lines, inner]`, of which `lines` gives the
    /// runs `(start, end)` in the global batch.
    fn words<'py>(
        &self,
        py: Python<'py>,
        outer: u64,
        inner: u64,
        lines: Vec<(u64, u64)>,
    ) -> PyResult<Bound<'py, PyByteArray>> {
        filled(py, outer, inner, lines, 4, |place, bytes| rannc_random::words(&self.0, place, bytes))
    }

    /// A byte for each element: 0 for a share of `threshold / 2^32` of them, else 1.
    fn keep<'py>(
        &self,
        py: Python<'py>,
        outer: u64,
        inner: u64,
        lines: Vec<(u64, u64)>,
        threshold: u64,
    ) -> PyResult<Bound<'py, PyByteArray>> {
        filled(py, outer, inner, lines, 1, |place, bytes| rannc_random::keep(&self.0, place, threshold, bytes))
    }
}

fn filled<'py>(
    py: Python<'py>,
    outer: u64,
    inner: u64,
    lines: Vec<(u64, u64)>,
    element_bytes: u64,
    fill: impl Fn(&Place, &mut [u8]) + Send + Sync,
) -> PyResult<Bound<'py, PyByteArray>> {
    let lines = lines.into_iter().map(|(start, end)| Range { start, end }).collect();
    let place = Place::new(outer, inner, lines).map_err(|error| PyValueError::new_err(error.to_string()))?;
    let bytes = place.len().checked_mul(element_bytes).and_then(|bytes| usize::try_from(bytes).ok());
    let bytes = bytes.ok_or_else(|| PyValueError::new_err("the tensor is larger than memory"))?;
    PyByteArray::new_with(py, bytes, |buffer| {
        py.detach(|| fill(&place, buffer));
        Ok(())
    })
}
