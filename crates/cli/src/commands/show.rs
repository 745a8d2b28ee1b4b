//! `rannc show`.

use anyhow::Result;
use rannc_report::{Deployment, PlanTables};

use crate::args::ShowArgs;
use crate::context::Context;
use crate::files::read_plan;
use crate::printer::Printer;

pub(crate) fn run(args: ShowArgs, context: &Context) -> Result<Printer> {
    let ShowArgs { plan, batch, format } = args;
    let plan = read_plan(&plan)?;
    let mut printer = Printer::new(format, context);
    match batch {
        Some(rows) => printer.report(&Deployment::new(&plan, rows)),
        None => printer.report(&PlanTables { plan: &plan, limit_bytes: None, workload: None, in_order: true }),
    }
    Ok(printer)
}
