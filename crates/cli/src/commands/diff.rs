//! `rannc diff`.

use anyhow::Result;
use rannc_report::PlanDiff;

use crate::args::DiffArgs;
use crate::context::Context;
use crate::files::read_plan;
use crate::printer::Printer;

pub(crate) fn run(args: DiffArgs, context: &Context) -> Result<Printer> {
    let DiffArgs { left, right, format } = args;
    let mut printer = Printer::new(format, context);
    printer.report(&PlanDiff::new(&read_plan(&left)?, &read_plan(&right)?));
    Ok(printer)
}
