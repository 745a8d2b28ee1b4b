//! `rannc completion`.

use anyhow::Result;
use clap::{Arg, Command, CommandFactory as _, ValueHint};

use crate::args::{Args, CompletionArgs, FormatArgs};
use crate::context::Context;
use crate::printer::Printer;

pub(crate) fn run(args: CompletionArgs, context: &Context) -> Result<Printer> {
    let CompletionArgs { shell } = args;
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Args::command().subcommands(commands_of_python()), "rannc", &mut script);
    let mut printer = Printer::new(FormatArgs { json: false }, context);
    printer.text(&String::from_utf8(script)?);
    Ok(printer)
}

/// The commands that `pyrannc` adds to these.
fn commands_of_python() -> [Command; 2] {
    let output = || Arg::new("output").short('o').long("output").value_hint(ValueHint::FilePath);
    let capture = Command::new("capture")
        .about("Captures one call of a model as a graph file")
        .arg(Arg::new("function").value_hint(ValueHint::FilePath))
        .arg(output())
        .arg(Arg::new("rows").long("rows"))
        .arg(Arg::new("device").long("device").value_parser(["cuda", "cpu"]))
        .arg(Arg::new("autocast").long("autocast").value_parser(["float16", "bfloat16"]))
        .arg(Arg::new("row-wise").long("row-wise"))
        .arg(Arg::new("returns").long("returns"));
    let calibrate = Command::new("calibrate").about("Measures this machine as a cluster file").arg(output());
    [capture, calibrate]
}
