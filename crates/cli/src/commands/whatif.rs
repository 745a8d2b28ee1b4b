//! `rannc whatif`.

use anyhow::Result;
use rannc_report::{Case, PlanShape, WhatIf};
use rannc_search::SearchError;

use crate::args::{Gib, ModelArgs, SearchArgs, WhatIfArgs};
use crate::cluster::resized;
use crate::files::Model;
use crate::printer::Printer;
use crate::progress::Progress;
use crate::search::{in_words, settings};

pub(crate) fn run(args: WhatIfArgs) -> Result<Printer> {
    let WhatIfArgs { model: ModelArgs { graph, cluster, profile }, search, batch, devices, memory_gb, format } = args;
    let model = Model::read(&graph, &cluster, &profile)?;
    let devices = if devices.is_empty() { vec![model.cluster.devices()] } else { devices };
    let limits = if memory_gb.is_empty() { vec![None] } else { memory_gb.into_iter().map(Some).collect() };
    let progress = Progress::bar("searching", devices.len() * limits.len() * batch.len());
    let mut cases = Vec::new();
    for &devices in &devices {
        let model = Model { cluster: resized(&model.cluster, devices)?, ..model.clone() };
        for &limit in &limits {
            for &batch_rows in &batch {
                cases.push(case(&model, &search, batch_rows, limit));
                progress.advance();
            }
        }
    }
    drop(progress);
    let mut printer = Printer::new(format);
    printer.report(&WhatIf { cases });
    Ok(printer)
}

fn case(model: &Model, search: &SearchArgs, batch_rows: u64, limit: Option<Gib>) -> Case {
    let Model { graph, cluster, profiles } = model;
    let settings = settings(search, cluster, batch_rows, limit);
    let mut case = Case {
        devices: cluster.devices(),
        memory_limit_bytes: model.limit_bytes(settings.memory_limit_bytes),
        batch_rows,
        plan: None,
        short_bytes: None,
        problem: None,
    };
    match rannc_search::plan(graph, cluster, profiles, &settings) {
        Ok(outcome) => case.plan = Some(PlanShape::new(&outcome.plan)),
        Err(error) => {
            if let SearchError::DoesNotFit(shortage) = &error {
                case.short_bytes = Some(shortage.short_bytes);
            }
            case.problem = Some(in_words(error).to_string());
        }
    }
    case
}
