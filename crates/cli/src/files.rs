//! What commands read.

use std::fs;
use std::path::Path;

use anyhow::{Result, anyhow};
use rannc_ir::Graph;
use rannc_plan::{Plan, PlanFileError};

pub(crate) fn read_graph(path: &Path) -> Result<Graph> {
    let text =
        fs::read_to_string(path).map_err(|error| anyhow!("cannot read the graph file {}: {error}", path.display()))?;
    Graph::from_json(&text).map_err(|error| anyhow!("{}: {error}", path.display()))
}

pub(crate) fn read_plan(path: &Path) -> Result<Plan> {
    Plan::read(path).map_err(|error| match error {
        PlanFileError::Read { .. } => anyhow!(error),
        error => anyhow!("{}: {error}", path.display()),
    })
}
