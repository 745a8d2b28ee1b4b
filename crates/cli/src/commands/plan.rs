//! `rannc plan`.

use anyhow::{Result, ensure};
use rannc_report::{PlanTables, WhatIf, Workload};

use crate::args::{ModelArgs, PlanArgs};
use crate::commands::whatif::case;
use crate::context::Context;
use crate::files::Model;
use crate::printer::Printer;
use crate::search::{in_words, settings};

pub(crate) fn run(args: PlanArgs, context: &Context) -> Result<Printer> {
    let PlanArgs { model: ModelArgs { graph, profile }, cluster, search, batch, memory_gb, output, format } = args;
    let models = Model::read_several(&graph, &cluster, &profile)?;
    let mut printer = Printer::new(format, context);
    let [model] = models.as_slice() else {
        ensure!(output.is_none(), "several clusters give several plans: write one of them with one --cluster");
        let progress = context.progress.bar("searching", models.len());
        let cases = models.iter().map(|model| {
            let case = case(model, &search, batch, memory_gb, None);
            progress.advance();
            case
        });
        let cases = cases.collect();
        drop(progress);
        printer.report(&WhatIf { cases });
        return Ok(printer);
    };
    let Model { graph, cluster, profiles } = model;
    let settings = settings(&search, cluster, batch, memory_gb);
    let progress = context.progress.spinner("searching");
    let outcome = rannc_search::plan(graph, cluster, profiles, &settings).map_err(in_words)?;
    drop(progress);
    printer.report(&PlanTables {
        plan: &outcome.plan,
        limit_bytes: Some(model.limit_bytes(settings.memory_limit_bytes)),
        workload: Some(Workload::new(graph, cluster, outcome.plan.world_size, batch)),
        in_order: false,
    });
    if let Some(passed_over) = &outcome.report.passed_over {
        printer.note(&passed_over.to_string());
    }
    if let Some(output) = output {
        outcome.plan.write(&output)?;
        printer.note(&format!("Written to {}", output.display()));
    }
    Ok(printer)
}
