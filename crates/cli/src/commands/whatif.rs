//! `rannc whatif`.

use anyhow::{Result, ensure};
use rannc_report::{Case, PlanShape, Price, WhatIf, Workload};
use rannc_search::SearchError;

use crate::args::{Gib, ModelArgs, SearchArgs, WhatIfArgs};
use crate::cluster::resized;
use crate::context::Context;
use crate::files::Model;
use crate::printer::Printer;
use crate::search::{in_words, settings};

pub(crate) fn run(args: WhatIfArgs, context: &Context) -> Result<Printer> {
    let WhatIfArgs {
        model: ModelArgs { graph, profile },
        cluster,
        search,
        batch,
        devices,
        memory_gb,
        price_per_device_hour: prices,
        csv,
        format,
    } = args;
    let models = Model::read_several(&graph, &cluster, &profile)?;
    ensure!(
        prices.len() <= 1 || prices.len() == models.len(),
        "--price-per-device-hour takes one price, or one for each of the {} clusters, not {}",
        models.len(),
        prices.len()
    );
    let limits = if memory_gb.is_empty() { vec![None] } else { memory_gb.into_iter().map(Some).collect() };
    let counts = |model: &Model| if devices.is_empty() { vec![model.cluster.devices()] } else { devices.clone() };
    let sizes = models.iter().map(|model| counts(model).len()).sum::<usize>();
    let progress = context.progress.bar("searching", sizes * limits.len() * batch.len());
    let mut cases = Vec::new();
    for (place, model) in models.iter().enumerate() {
        let price = prices.get(place).or(prices.first()).copied();
        for devices in counts(model) {
            let model = Model { cluster: resized(&model.cluster, devices)?, ..model.clone() };
            for &limit in &limits {
                for &batch_rows in &batch {
                    cases.push(case(&model, &search, batch_rows, limit, price));
                    progress.advance();
                }
            }
        }
    }
    drop(progress);
    let mut printer = Printer::new(format, context);
    let report = WhatIf { cases };
    if csv {
        printer.text(&report.csv());
    } else {
        printer.report(&report);
    }
    Ok(printer)
}

/// The best plan of a model, at a price of a device for an hour.
pub(crate) fn case(
    model: &Model,
    search: &SearchArgs,
    batch_rows: u64,
    limit: Option<Gib>,
    price: Option<f64>,
) -> Case {
    let Model { graph, cluster, profiles } = model;
    let settings = settings(search, cluster, batch_rows, limit);
    let mut case = Case {
        cluster: cluster.name.clone(),
        devices: cluster.devices(),
        memory_limit_bytes: model.limit_bytes(settings.memory_limit_bytes),
        batch_rows,
        plan: None,
        price: None,
        short_bytes: None,
        problem: None,
    };
    match rannc_search::plan(graph, cluster, profiles, &settings) {
        Ok(outcome) => {
            let workload = Workload::new(graph, cluster, outcome.plan.world_size, batch_rows);
            case.plan = Some(PlanShape::new(&outcome.plan, Some(&workload)));
        }
        Err(error) => {
            if let SearchError::DoesNotFit(shortage) = &error {
                case.short_bytes = Some(shortage.short_bytes);
            }
            case.problem = Some(in_words(error).to_string());
        }
    }
    case.price = price.map(|price| Price::new(price, case.devices, case.plan.as_ref()));
    case
}
