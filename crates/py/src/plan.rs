//! Plan and Partition for Python.

use std::error::Error;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;

use pyo3::prelude::*;
use rannc_cli::{Kind, Terminal};
use rannc_ir::Analysis;
use rannc_plan::{PartitionError, Promises, Recompute};
use rannc_report::{PlanTables, Report as _};
use rannc_search::{Blocks, PlanCosts, SearchError, SearchReport, SettingNames, Settings, Stop, check_plan};

use crate::cluster::Cluster;
use crate::errors::{ErrorClass, OrRaise, OrRaiseAs, Raised, read_file};
use crate::graph::Graph;
use crate::interrupt::interruptible;
use crate::profile::Profile;

/// A Plan.
#[pyclass(frozen, module = "pyrannc._native")]
pub struct Plan(pub rannc_plan::Plan);

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
        Self::search_with_remark(py, graph, cluster, profiles, settings_json).map(|(plan, _)| plan)
    }

    /// Like `search`, with a remark on what else there is or may be, or an empty one.
    #[staticmethod]
    fn search_with_remark(
        py: Python<'_>,
        graph: &Graph,
        cluster: &Cluster,
        profiles: Vec<PyRef<'_, Profile>>,
        settings_json: &str,
    ) -> PyResult<(Self, String)> {
        let outcome = outcome(py, graph, cluster, &profiles, settings_json)?;
        let SearchReport { passed_over, stop, .. } = &outcome.report;
        let cut_short = (*stop == Stop::Time).then(|| CUT_SHORT.to_owned());
        let remarks: Vec<String> = passed_over.iter().map(ToString::to_string).chain(cut_short).collect();
        Ok((Self(outcome.plan), remarks.join("; ")))
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
        let report = serde_json::to_string(&outcome.report).or_raise_as(ErrorClass::PLAN)?;
        Ok(([vec![outcome.plan], outcome.runners_up].concat().into_iter().map(Self).collect(), report))
    }

    /// Checks the content of a plan file that was written by hand, and computes its checksum.
    #[staticmethod]
    fn seal(text: &str) -> PyResult<Self> {
        let plan: rannc_plan::Plan = serde_json::from_str(text).or_raise_as(ErrorClass::PLAN_FILE)?;
        plan.seal().or_raise().map(Self)
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
            let costs = PlanCosts::new(&graph.0, &cluster.0, &profiles, &settings, &self.0).or_raise()?;
            costs.predicted().or_raise().map(Self)
        })
    }

    /// Reads a plan file's content.
    #[staticmethod]
    fn from_json(text: &str) -> PyResult<Self> {
        rannc_plan::Plan::from_json(text).or_raise().map(Self)
    }

    /// Reads a plan file.
    #[staticmethod]
    fn read(path: PathBuf) -> PyResult<Self> {
        read_file(&path, Kind::Plan, rannc_plan::Plan::read).map(Self)
    }

    /// Writes a plan file.
    fn write(&self, path: PathBuf) -> PyResult<()> {
        self.0.write(&path).or_raise()
    }

    /// The plan file's content.
    fn to_json(&self) -> String {
        self.0.to_json()
    }

    /// Raises when the Plan is of another Graph, for another number of ranks, or cannot be run yet.
    fn check(&self, graph: &Graph, world_size: u32) -> PyResult<()> {
        self.0.check_runnable().or_raise()?;
        self.0.check_world(world_size).or_raise()?;
        check_plan(&self.0, &graph.0).or_raise()
    }

    /// Tables of the Stages with predicted times and memory, as wide as the terminal; `limit_bytes` is what a device
    /// may use.
    #[pyo3(signature = (limit_bytes=None))]
    fn tables(&self, limit_bytes: Option<u64>) -> String {
        let tables = PlanTables { plan: &self.0, limit_bytes, workload: None, in_order: false };
        tables.text(Terminal::of_stdout().width())
    }

    /// The Stages, their ranks, and the rows that each of them gets of a batch of `batch_rows` rows.
    fn deployment(&self, batch_rows: u64) -> String {
        rannc_report::Deployment::new(&self.0, batch_rows).text(Terminal::of_stdout().width())
    }

    /// Divides the Graph that the Plan was made for.
    fn partition(&self, py: Python<'_>, graph: &Graph) -> PyResult<Partition> {
        py.detach(|| {
            let partition = self.0.partition(&graph.0).or_raise()?;
            let promises = Promises::new(&self.0, &graph.0, &partition);
            Ok(Partition(partition, promises))
        })
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
    let (graph, cluster) = (graph.0.clone(), cluster.0.clone());
    let search = move |left: &AtomicBool| rannc_search::plan_until(&graph, &cluster, &profiles, &settings, left);
    interruptible(py, search)?.map_err(no_plan)
}

/// What is told of a search that had too little time.
const CUT_SHORT: &str = "the search met its limit of time (search_timeout_s): there may be a faster plan";

/// What the advice of a search is about, as items of the configuration.
const ITEMS: SettingNames =
    SettingNames { memory_limit: "mem_limit_gb", max_microbatches: "max_pipeline", zero: "enable_zero" };

fn no_plan(error: SearchError) -> PyErr {
    let class = error.class();
    let worded: Box<dyn Error> = match error {
        SearchError::DoesNotFit(shortage) => shortage.in_words(&ITEMS).into(),
        SearchError::Stopped => format!("{error} (search_timeout_s)").into(),
        error => error.into(),
    };
    class.exception(&*worded)
}

/// What the core needs beside a Graph and a Cluster.
fn given(profiles: &[PyRef<'_, Profile>], settings_json: &str) -> PyResult<(Vec<rannc_cost::Profile>, Settings)> {
    let settings = serde_json::from_str(settings_json).or_raise_as(ErrorClass::PLAN)?;
    Ok((profiles.iter().map(|profile| profile.0.clone()).collect(), settings))
}

/// A Graph divided over Stages, and what its Plan promises of it: of another Graph than that of the Plan nothing.
#[pyclass(frozen, module = "pyrannc._native")]
pub struct Partition(pub rannc_plan::Partition, pub Promises);

#[pymethods]
impl Partition {
    /// Divides a second Graph of the same model like this one divides `own`; every Stage holds what `everywhere` names.
    #[allow(clippy::needless_pass_by_value)] // extracted from Python
    fn follow(&self, py: Python<'_>, own: &Graph, other: &Graph, everywhere: Vec<String>) -> PyResult<Self> {
        py.detach(|| {
            let blocks = Blocks::new(&other.0, &Analysis::new(&other.0)).blocks;
            let blocks: Vec<_> = blocks.iter().map(|block| (block.ops, Recompute::None)).collect();
            let divided =
                self.0.follow(&own.0, &other.0, &everywhere).or_raise()?.with_spans(&other.0, &blocks).or_raise()?;
            divided.verify(&other.0).map_err(PartitionError::from).or_raise()?;
            Ok(Self(divided, Promises::default()))
        })
    }

    /// The JSON form.
    fn to_json(&self) -> PyResult<String> {
        serde_json::to_string(&self.0).or_raise_as(ErrorClass::PLAN)
    }
}
