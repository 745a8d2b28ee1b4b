//! `rannc completion`.

use anyhow::Result;
use clap::CommandFactory as _;

use crate::args::{Args, CompletionArgs, FormatArgs};
use crate::context::Context;
use crate::printer::Printer;

pub(crate) fn run(args: CompletionArgs, context: &Context) -> Result<Printer> {
    let CompletionArgs { shell } = args;
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Args::command(), "rannc", &mut script);
    let mut printer = Printer::new(FormatArgs { json: false }, context);
    printer.text(&String::from_utf8(script)?);
    Ok(printer)
}
