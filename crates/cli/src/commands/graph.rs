//! `rannc graph`.

use anyhow::Result;
use rannc_report::GraphSummary;

use crate::args::GraphArgs;
use crate::context::Context;
use crate::files::read_graph;
use crate::printer::Printer;

pub(crate) fn run(args: GraphArgs, context: &Context) -> Result<Printer> {
    let GraphArgs { graph, text, format } = args;
    let graph = read_graph(&graph)?;
    let mut printer = Printer::new(format, context);
    if text {
        printer.text(&graph.to_text());
    } else {
        printer.report(&GraphSummary::new(&graph));
    }
    Ok(printer)
}
