//! `rannc plan`.

use anyhow::Result;
use rannc_report::PlanTables;

use crate::args::{ModelArgs, PlanArgs};
use crate::files::Model;
use crate::printer::Printer;
use crate::progress::Progress;
use crate::search::{in_words, settings};

pub(crate) fn run(args: PlanArgs) -> Result<Printer> {
    let PlanArgs { model: ModelArgs { graph, cluster, profile }, search, batch, memory_gb, output, format } = args;
    let model = Model::read(&graph, &cluster, &profile)?;
    let Model { graph, cluster, profiles } = &model;
    let settings = settings(&search, cluster, batch, memory_gb);
    let progress = Progress::spinner("searching");
    let outcome = rannc_search::plan(graph, cluster, profiles, &settings).map_err(in_words)?;
    drop(progress);
    let mut printer = Printer::new(format);
    printer
        .report(&PlanTables { plan: &outcome.plan, limit_bytes: Some(model.limit_bytes(settings.memory_limit_bytes)) });
    if let Some(output) = output {
        outcome.plan.write(&output)?;
        printer.note(&format!("Written to {}", output.display()));
    }
    Ok(printer)
}
