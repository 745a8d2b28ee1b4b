//! `rannc upgrade`.

use std::fs;

use anyhow::{Result, anyhow};
use rannc_plan::Plan;
use rannc_report::PlanTables;
use rannc_search::upgrade;

use crate::args::UpgradeArgs;
use crate::context::Context;
use crate::files::read_graph;
use crate::kinds::{Kind, unreadable};
use crate::printer::Printer;

pub(crate) fn run(args: UpgradeArgs, context: &Context) -> Result<Printer> {
    let UpgradeArgs { plan: path, graph, output, format } = args;
    let text =
        fs::read_to_string(&path).map_err(|error| anyhow!("cannot read the plan file {}: {error}", path.display()))?;
    let mut printer = Printer::new(format, context);
    let plan = if let Ok(plan) = Plan::from_json(&text) {
        printer.note(&format!("{} is of this version", path.display()));
        plan
    } else {
        let graph = read_graph(&graph)?;
        upgrade(&text, &graph)
            .map_err(|error| unreadable(&path, Kind::Plan, || anyhow!("{}: {error}", path.display())))?
    };
    printer.report(&PlanTables { plan: &plan, limit_bytes: None, workload: None, in_order: false });
    if let Some(output) = output {
        plan.write(&output)?;
        printer.note(&format!("Written to {}", output.display()));
    }
    Ok(printer)
}
