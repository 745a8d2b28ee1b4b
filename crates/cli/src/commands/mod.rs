//! What each command does: plain values in, text out.

mod cluster;
mod completion;
mod diff;
mod explain;
mod graph;
mod plan;
mod show;
mod simulate;
mod upgrade;
mod whatif;

use anyhow::Result;

use crate::args::{Args, Command};
use crate::context::Context;
use crate::printer::Printer;

/// Runs a command and returns what it prints.
pub(crate) fn execute(args: Args, context: &Context) -> Result<Printer> {
    let Args { command } = args;
    match command {
        Command::Plan(args) => plan::run(args, context),
        Command::Explain(args) => explain::run(args, context),
        Command::WhatIf(args) => whatif::run(args, context),
        Command::Simulate(args) => simulate::run(args, context),
        Command::Show(args) => show::run(args, context),
        Command::Upgrade(args) => upgrade::run(args, context),
        Command::Diff(args) => diff::run(args, context),
        Command::Cluster(args) => cluster::run(args, context),
        Command::Graph(args) => graph::run(args, context),
        Command::Completion(args) => completion::run(args, context),
    }
}
