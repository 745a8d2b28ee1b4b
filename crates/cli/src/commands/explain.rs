//! `rannc explain`.

use anyhow::Result;
use rannc_report::{Explanation, Question};
use rannc_search::{PlanCosts, Settings};

use crate::args::{ExplainArgs, ModelArgs};
use crate::context::Context;
use crate::files::Model;
use crate::printer::Printer;
use crate::search::{in_words, settings};

pub(crate) fn run(args: ExplainArgs, context: &Context) -> Result<Printer> {
    let ExplainArgs { model: ModelArgs { graph, profile }, cluster, search, batch, memory_gb, runners_up, format } =
        args;
    let model = Model::read(&graph, &cluster, &profile)?;
    let settings = Settings { runners_up, gains: true, ..settings(&search, &model.cluster, batch, memory_gb) };
    let progress = context.progress.spinner("searching");
    let Model { graph, cluster, profiles } = &model;
    let outcome = rannc_search::plan(graph, cluster, profiles, &settings).map_err(in_words)?;
    let unlimited_step_us = unlimited_step_us(&model, &settings);
    let undivided =
        PlanCosts::new(graph, cluster, profiles, &settings, &outcome.plan).map_err(in_words)?.undivided()?;
    drop(progress);
    let question = Question { graph, cluster, settings: &settings };
    let mut printer = Printer::new(format, context);
    printer.report(&Explanation::new(question, outcome, unlimited_step_us, undivided)?);
    Ok(printer)
}

/// Step of the best plan on devices with far more memory.
fn unlimited_step_us(model: &Model, settings: &Settings) -> Option<f64> {
    let cluster = model.cluster.clone().with_ample_memory();
    let settings = Settings { memory_limit_bytes: None, runners_up: 0, gains: false, ..settings.clone() };
    let outcome = rannc_search::plan(&model.graph, &cluster, &model.profiles, &settings).ok()?;
    Some(outcome.plan.predicted.step_us)
}
