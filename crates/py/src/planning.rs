//! Graph, Plan, Partition and Program for Python. Large data crosses as JSON.

use std::path::PathBuf;

use pyo3::prelude::*;
use rannc_cost::{ComputeCost, OpWork, Operation};
use rannc_ir::{Analysis, Entity, OpId};
use rannc_plan::{Batch, Mode, StageOps};
use rannc_report::Report as _;
use rannc_search::{PlanCosts, Settings};

use crate::costs::{Cluster, Profile};
use crate::errors::{ErrorClass, OrRaise};

/// A verified Graph.
#[pyclass(frozen, module = "pyrannc._native")]
pub struct Graph(rannc_ir::Graph);

#[pymethods]
impl Graph {
    /// Reads and verifies the JSON form.
    #[staticmethod]
    fn from_json(py: Python<'_>, text: &str) -> PyResult<Self> {
        py.detach(|| rannc_ir::Graph::from_json(text)).or_raise(ErrorClass::CAPTURE).map(Self)
    }

    /// Hash of everything but source lines; equal on all ranks.
    fn hash(&self, py: Python<'_>) -> String {
        py.detach(|| self.0.hash())
    }

    /// The text form.
    fn to_text(&self, py: Python<'_>) -> String {
        py.detach(|| self.0.to_text())
    }

    /// The Blocks that a search for `world_size` of the cluster's devices and a batch of so many rows cuts between.
    fn blocks(&self, py: Python<'_>, cluster: &Cluster, world_size: u32, batch_rows: u64) -> PyResult<Blocks> {
        py.detach(|| Blocks::new(&self.0, &cluster.0, world_size, batch_rows))
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

/// The pieces of a Graph between which a search cuts.
#[pyclass(frozen, module = "pyrannc._native")]
pub struct Blocks {
    ops: Vec<Vec<OpId>>,
    hashes: Vec<String>,
    times_us: Vec<f64>,
    partition: rannc_plan::Partition,
}

impl Blocks {
    fn new(graph: &rannc_ir::Graph, cluster: &rannc_cost::Cluster, world_size: u32, batch_rows: u64) -> PyResult<Self> {
        let analysis = Analysis::new(graph);
        let device = &cluster.kinds[0];
        let rows = batch_rows.div_ceil(u64::from(world_size.max(1)));
        let found = rannc_search::Blocks::new(graph, &analysis, device, world_size, rows);
        let stages: Vec<StageOps> = found.blocks.iter().map(|block| block.ops).collect();
        let cost = |&op: &OpId| OpWork::new(&Operation::new(graph, op)).at(device, rows);
        let us = |block: &rannc_search::Block| block.own_ops.iter().map(cost).sum::<ComputeCost>().us();
        let hash = |block: &rannc_search::Block| found.hashes[block.kind as usize].clone();
        Ok(Self {
            hashes: found.blocks.iter().map(hash).collect(),
            times_us: found.blocks.iter().map(us).collect(),
            partition: rannc_plan::Partition::new(graph, &stages).or_raise(ErrorClass::PLAN)?,
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

    /// Estimated time of each Block, forward and backward, when all ranks share the batch.
    #[getter]
    fn times_us(&self) -> Vec<f64> {
        self.times_us.clone()
    }

    /// The Graph divided as if each Block were a Stage.
    #[getter]
    fn partition(&self) -> Partition {
        Partition(self.partition.clone())
    }

    /// The Ops that a Block computes for itself, without the batch-free ones that are cloned for other Blocks too.
    fn ops(&self, place: usize) -> PyResult<Vec<usize>> {
        let Some(ops) = self.ops.get(place) else {
            return Err(pyo3::exceptions::PyIndexError::new_err(format!("there is no block {place}")));
        };
        Ok(ops.iter().map(|op| op.index()).collect())
    }
}

/// A Plan.
#[pyclass(frozen, module = "pyrannc._native")]
pub struct Plan(rannc_plan::Plan);

#[pymethods]
impl Plan {
    /// Searches the best Plan for a Graph on a cluster. `settings_json` is rannc-search's Settings; Blocks that no
    /// Profile of their device knows are estimated.
    #[staticmethod]
    fn search(
        py: Python<'_>,
        graph: &Graph,
        cluster: &Cluster,
        profiles: Vec<PyRef<'_, Profile>>,
        settings_json: &str,
    ) -> PyResult<Self> {
        outcome(py, graph, cluster, &profiles, settings_json).map(|outcome| Self(outcome.plan))
    }

    /// Like `search`, with the runners-up that the settings ask for behind the best Plan, and the search's report as
    /// JSON.
    #[staticmethod]
    fn search_several(
        py: Python<'_>,
        graph: &Graph,
        cluster: &Cluster,
        profiles: Vec<PyRef<'_, Profile>>,
        settings_json: &str,
    ) -> PyResult<(Vec<Self>, String)> {
        let outcome = outcome(py, graph, cluster, &profiles, settings_json)?;
        let report = serde_json::to_string(&outcome.report).or_raise(ErrorClass::PLAN)?;
        Ok(([vec![outcome.plan], outcome.runners_up].concat().into_iter().map(Self).collect(), report))
    }

    /// Checks the content of a plan file that was written by hand, and computes its checksum.
    #[staticmethod]
    fn seal(text: &str) -> PyResult<Self> {
        let plan: rannc_plan::Plan = serde_json::from_str(text).or_raise(ErrorClass::PLAN_FILE)?;
        plan.seal().or_raise(ErrorClass::PLAN_FILE).map(Self)
    }

    /// The same Plan with what it takes on a cluster; `settings_json` is rannc-search's Settings.
    fn predicted(
        &self,
        py: Python<'_>,
        graph: &Graph,
        cluster: &Cluster,
        profiles: Vec<PyRef<'_, Profile>>,
        settings_json: &str,
    ) -> PyResult<Self> {
        let (profiles, settings) = given(&profiles, settings_json)?;
        py.detach(|| {
            let costs =
                PlanCosts::new(&graph.0, &cluster.0, &profiles, &settings, &self.0).or_raise(ErrorClass::PLAN)?;
            costs.predicted().or_raise(ErrorClass::PLAN_FILE).map(Self)
        })
    }

    /// Reads a plan file's content.
    #[staticmethod]
    fn from_json(text: &str) -> PyResult<Self> {
        rannc_plan::Plan::from_json(text).or_raise(ErrorClass::PLAN_FILE).map(Self)
    }

    /// Reads a plan file.
    #[staticmethod]
    fn read(path: PathBuf) -> PyResult<Self> {
        rannc_plan::Plan::read(&path).or_raise(ErrorClass::PLAN_FILE).map(Self)
    }

    /// Writes a plan file.
    fn write(&self, path: PathBuf) -> PyResult<()> {
        self.0.write(&path).or_raise(ErrorClass::PLAN_FILE)
    }

    /// The plan file's content.
    fn to_json(&self) -> String {
        self.0.to_json()
    }

    /// Raises when the Plan is of another Graph, for another number of ranks, or cannot be run yet.
    fn check(&self, graph: &Graph, world_size: u32) -> PyResult<()> {
        self.0.check_runnable().or_raise(ErrorClass::PLAN_FILE)?;
        self.0.check_world(world_size).or_raise(ErrorClass::PLAN_FILE)?;
        self.0.check_graph(&graph.0).or_raise(ErrorClass::PLAN_FILE)
    }

    /// Its Schedule: "1f1b" or "fill_drain".
    fn schedule(&self) -> String {
        self.0.schedule.to_string()
    }

    /// Tables of the Stages with predicted times and memory; `limit_bytes` is what a device may use.
    #[pyo3(signature = (limit_bytes=None))]
    fn tables(&self, limit_bytes: Option<u64>) -> String {
        rannc_report::plan_tables(&self.0, limit_bytes)
    }

    /// The Stages, their ranks, and the rows that each of them gets of a batch of `batch_rows` rows.
    fn deployment(&self, batch_rows: u64) -> String {
        rannc_report::Deployment::new(&self.0, batch_rows).text()
    }

    /// Divides the Graph that the Plan was made for.
    fn partition(&self, py: Python<'_>, graph: &Graph) -> PyResult<Partition> {
        let ops: Vec<_> = self.0.stages.iter().map(|stage| stage.ops).collect();
        py.detach(|| rannc_plan::Partition::new(&graph.0, &ops)).or_raise(ErrorClass::PLAN).map(Partition)
    }

    /// Directed rank pairs between which any batch may send.
    fn channels(&self, partition: &Partition) -> Vec<(u32, u32)> {
        rannc_plan::plan_channels(&self.0.placement(), &partition.0)
    }
}

fn outcome(
    py: Python<'_>,
    graph: &Graph,
    cluster: &Cluster,
    profiles: &[PyRef<'_, Profile>],
    settings_json: &str,
) -> PyResult<rannc_search::Outcome> {
    let (profiles, settings) = given(profiles, settings_json)?;
    py.detach(|| rannc_search::plan(&graph.0, &cluster.0, &profiles, &settings)).or_raise(ErrorClass::PLAN)
}

/// What the core needs beside a Graph and a Cluster.
fn given(profiles: &[PyRef<'_, Profile>], settings_json: &str) -> PyResult<(Vec<rannc_cost::Profile>, Settings)> {
    let settings = serde_json::from_str(settings_json).or_raise(ErrorClass::PLAN)?;
    Ok((profiles.iter().map(|profile| profile.0.clone()).collect(), settings))
}

/// A Graph divided over Stages.
#[pyclass(frozen, module = "pyrannc._native")]
pub struct Partition(rannc_plan::Partition);

#[pymethods]
impl Partition {
    /// Divides a second Graph of the same model like this one divides `own`.
    fn follow(&self, py: Python<'_>, own: &Graph, other: &Graph) -> PyResult<Self> {
        py.detach(|| self.0.follow(&own.0, &other.0)).or_raise(ErrorClass::PLAN).map(Self)
    }

    /// The JSON form.
    fn to_json(&self) -> PyResult<String> {
        serde_json::to_string(&self.0).or_raise(ErrorClass::PLAN)
    }
}

/// What all ranks do for one batch, proven to end.
#[pyclass(frozen, module = "pyrannc._native")]
pub struct Program {
    program: rannc_plan::Program,
}

#[pymethods]
impl Program {
    /// Makes the Program of a batch and checks it. `mode` is "train_1f1b", "train_fill_drain" or "forward".
    #[staticmethod]
    fn build(
        py: Python<'_>,
        plan: &Plan,
        partition: &Partition,
        rows_per_rank: Vec<u64>,
        gather_inputs: bool,
        mode: &str,
    ) -> PyResult<Self> {
        let mode: Mode = serde_json::from_value(mode.into()).or_raise(ErrorClass::PLAN)?;
        py.detach(|| {
            let batch = Batch { rows_per_rank, gather_inputs };
            let program =
                rannc_plan::build(&plan.0.placement(), &partition.0, &batch, mode).or_raise(ErrorClass::PLAN)?;
            rannc_plan::check(&program, &partition.0).or_raise(ErrorClass::PLAN)?;
            Ok(Self { program })
        })
    }

    /// One rank's part as JSON.
    fn rank_view(&self, rank: u32) -> PyResult<String> {
        let Some(view) = self.program.rank_view(rank) else {
            return Err(pyo3::exceptions::PyIndexError::new_err(format!("the program has no rank {rank}")));
        };
        serde_json::to_string(&view).or_raise(ErrorClass::PLAN)
    }

    /// The computations of all ranks, drawn over time.
    fn grid(&self) -> PyResult<String> {
        rannc_plan::grid(&self.program).or_raise(ErrorClass::PLAN)
    }
}
