//! `rannc plan`.

use anyhow::Result;
use rannc_report::PlanTables;
use rannc_search::Settings;

use crate::args::{ModelArgs, PlanArgs, SearchArgs};
use crate::cluster::cluster;
use crate::files::read_graph;
use crate::printer::Printer;

pub(crate) fn run(args: PlanArgs) -> Result<Printer> {
    let PlanArgs { model, search, batch, memory_gb, output, format } = args;
    let ModelArgs { graph, cluster: cluster_text } = model;
    let SearchArgs { memory_margin, optimizer_factor, stages, microbatches, loss_outside } = search;
    let graph = read_graph(&graph)?;
    let cluster = cluster(&cluster_text)?;
    let settings = Settings {
        world_size: cluster.devices(),
        batch_rows: batch,
        memory_limit_bytes: memory_gb.map(|gib| gib.bytes()),
        memory_margin,
        optimizer_bytes_per_param_byte: optimizer_factor,
        stages,
        microbatches,
        loss_inside: !loss_outside,
        ..Settings::default()
    };
    let plan = rannc_search::plan(&graph, &cluster, &[], &settings)?.plan;
    let mut printer = Printer::new(format);
    let limit_bytes = settings.memory_limit_bytes.unwrap_or(cluster.kinds[0].memory_bytes);
    printer.report(&PlanTables { plan: &plan, limit_bytes: Some(limit_bytes) });
    if let Some(output) = output {
        plan.write(&output)?;
        printer.note(&format!("Written to {}", output.display()));
    }
    Ok(printer)
}
