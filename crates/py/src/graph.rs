//! Graph and its Blocks for Python.

use pyo3::prelude::*;
use rannc_cost::nominal_us;
use rannc_ir::{Analysis, Entity, Mixing, OpId, OpRun};

use crate::errors::{ErrorClass, OrRaise, OrRaiseAs};

/// A verified Graph.
#[pyclass(frozen, module = "pyrannc._native")]
pub struct Graph(pub rannc_ir::Graph);

#[pymethods]
impl Graph {
    /// Reads and verifies the JSON form.
    #[staticmethod]
    fn from_json(py: Python<'_>, text: &str) -> PyResult<Self> {
        py.detach(|| rannc_ir::Graph::from_json(text)).or_raise().map(Self)
    }

    /// Hash of everything but source lines; equal on all ranks.
    fn hash(&self, py: Python<'_>) -> String {
        py.detach(|| self.0.hash())
    }

    /// The JSON form.
    fn to_json(&self, py: Python<'_>) -> String {
        py.detach(|| self.0.to_json())
    }

    /// Divides the Graph into what parts of the batch go through and what runs once a step; where rows are mixed, all
    /// rows of the `"batch"` come together, or each `"microbatch"` mixes its own.
    fn divide_tail(&self, py: Python<'_>, row_mixing: &str) -> PyResult<Divided> {
        let mixing = match row_mixing {
            "batch" => Mixing::Batch,
            "microbatch" => Mixing::Parts,
            other => return Err(pyo3::exceptions::PyValueError::new_err(format!("no way to mix rows: {other}"))),
        };
        py.detach(|| {
            let divided = self.0.divide_tail(mixing);
            divided.body.verify().map_err(rannc_ir::GraphError::from).or_raise()?;
            Ok(Divided(divided))
        })
    }

    /// The text form.
    fn to_text(&self, py: Python<'_>) -> String {
        py.detach(|| self.0.to_text())
    }

    /// The Blocks, which a search cuts between.
    fn blocks(&self, py: Python<'_>) -> PyResult<Blocks> {
        py.detach(|| Blocks::new(&self.0, |_, blocks| blocks))
    }

    /// The Spans, if all Blocks were one Stage, as Blocks: of those of one Block the hash is the Block's.
    fn spans(&self, py: Python<'_>) -> PyResult<Blocks> {
        py.detach(|| Blocks::new(&self.0, |analysis, blocks| rannc_search::whole_spans(&self.0, analysis, &blocks)))
    }

    /// For each Value the dimension that runs over the batch and its extent for one row, where that is proven.
    fn row_dims(&self, py: Python<'_>) -> Vec<Option<(u32, u64)>> {
        py.detach(|| {
            rannc_ir::row_dims(&self.0).values().map(|rows| rows.map(|rows| (rows.dim, rows.per_row))).collect()
        })
    }

    /// The text of each Op, to compare two Graphs Op by Op.
    fn op_texts(&self, py: Python<'_>) -> Vec<String> {
        py.detach(|| self.0.ops.ids().map(|op| self.0.op_text(op)).collect())
    }
}

/// A Graph divided into body and tail.
#[pyclass(frozen, module = "pyrannc._native")]
pub struct Divided(rannc_ir::Divided);

#[pymethods]
impl Divided {
    /// What parts of the batch go through.
    #[getter]
    fn body(&self) -> Graph {
        Graph(self.0.body.clone())
    }

    /// All the rest as JSON.
    fn to_json(&self) -> PyResult<String> {
        serde_json::to_string(&self.0).or_raise_as(ErrorClass::CAPTURE)
    }
}

/// The pieces of a Graph between which a search cuts.
#[pyclass(frozen, module = "pyrannc._native")]
pub struct Blocks {
    ops: Vec<Vec<OpId>>,
    hashes: Vec<String>,
    times_us: Vec<f64>,
    partition: rannc_plan::Partition,
}

impl Blocks {
    fn new(
        graph: &rannc_ir::Graph,
        of: impl FnOnce(&Analysis, rannc_search::Blocks) -> rannc_search::Blocks,
    ) -> PyResult<Self> {
        let analysis = Analysis::new(graph);
        let found = of(&analysis, rannc_search::Blocks::new(graph, &analysis));
        let stages: Vec<OpRun> = found.blocks.iter().map(|block| block.ops).collect();
        let mut partition = rannc_plan::Partition::new(graph, &stages).or_raise()?;
        for (part, block) in partition.stages.iter_mut().zip(&found.blocks) {
            part.spans = vec![part.function(graph, &analysis, block.own_ops.clone())];
        }
        let hash = |block: &rannc_search::Block| found.hashes[block.kind as usize].clone();
        Ok(Self {
            hashes: found.blocks.iter().map(hash).collect(),
            times_us: found.blocks.iter().map(|block| nominal_us(graph, &block.own_ops)).collect(),
            partition,
            ops: found.blocks.into_iter().map(|block| block.own_ops).collect(),
        })
    }
}

#[pymethods]
impl Blocks {
    /// The hash of each Block; Blocks that compute the same have the same.
    #[getter]
    fn hashes(&self) -> Vec<String> {
        self.hashes.clone()
    }

    /// Estimated time of each Block, forward and backward, on a usual device.
    #[getter]
    fn times_us(&self) -> Vec<f64> {
        self.times_us.clone()
    }

    /// The Graph divided as if each Block were a Stage, as JSON; the Span of each is what it computes for itself.
    fn partition_json(&self) -> PyResult<String> {
        serde_json::to_string(&self.partition).or_raise_as(ErrorClass::PLAN)
    }

    /// The Ops that a Block computes for itself, without the batch-free ones that are cloned for other Blocks too.
    fn ops(&self, place: usize) -> PyResult<Vec<usize>> {
        let Some(ops) = self.ops.get(place) else {
            return Err(pyo3::exceptions::PyIndexError::new_err(format!("there is no block {place}")));
        };
        Ok(ops.iter().map(|op| op.index()).collect())
    }
}
