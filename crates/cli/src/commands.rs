//! What each command does: plain values in, text out.

use std::fs;
use std::path::Path;

use anyhow::{Result, anyhow, ensure};
use rannc_cost::Cluster;
use rannc_ir::Graph;
use rannc_plan::Plan;
use rannc_search::Settings;

use crate::args::{Args, Command, PlanArgs};

/// Runs a command and returns what it prints.
pub(crate) fn execute(args: Args) -> Result<String> {
    let Args { command } = args;
    match command {
        Command::Show { plan, batch, json } => show(&plan, batch, json),
        Command::Graph { graph, text } => show_graph(&graph, text),
        Command::Plan(args) => plan(args),
    }
}

fn show(path: &Path, batch_rows: Option<u64>, json: bool) -> Result<String> {
    let plan = Plan::read(path)?;
    Ok(match batch_rows {
        _ if json => plan.to_json(),
        Some(rows) => rannc_report::deployment(&plan, rows),
        None => rannc_report::plan_tables(&plan, None),
    })
}

fn show_graph(path: &Path, text: bool) -> Result<String> {
    let graph = read_graph(path)?;
    Ok(if text { graph.to_text() } else { rannc_report::graph_summary(&graph) })
}

fn read_graph(path: &Path) -> Result<Graph> {
    let text = fs::read_to_string(path).map_err(|error| anyhow!("cannot read {}: {error}", path.display()))?;
    Graph::from_json(&text).map_err(|error| anyhow!("{}: {error}", path.display()))
}

fn plan(args: PlanArgs) -> Result<String> {
    let PlanArgs {
        graph,
        devices,
        devices_per_node,
        device,
        batch,
        memory_gb,
        optimizer_factor,
        stages,
        microbatches,
        loss_outside,
        output,
    } = args;
    let graph = read_graph(&graph)?;
    let devices_per_node = devices_per_node.min(devices);
    let cluster = Cluster::preset(&device, devices.div_ceil(devices_per_node), devices_per_node)?;
    let memory_limit_bytes = memory_gb.map(gib_to_bytes).transpose()?;
    let settings = Settings {
        world_size: devices,
        batch_rows: batch,
        memory_limit_bytes,
        optimizer_bytes_per_param_byte: optimizer_factor,
        stages,
        microbatches,
        loss_inside: !loss_outside,
        ..Settings::default()
    };
    let plan = rannc_search::plan(&graph, &cluster, &settings)?;
    let limit_bytes = memory_limit_bytes.unwrap_or(cluster.kinds[0].memory_bytes);
    let tables = rannc_report::plan_tables(&plan, Some(limit_bytes));
    let Some(output) = output else { return Ok(tables) };
    plan.write(&output)?;
    Ok(format!("{tables}\nWritten to {}\n", output.display()))
}

fn gib_to_bytes(gib: f64) -> Result<u64> {
    ensure!(gib.is_finite() && gib > 0.0, "--memory-gb must be a positive number, not {gib}");
    Ok((gib * (1_u64 << 30) as f64) as u64)
}
