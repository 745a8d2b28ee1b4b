//! What each command does: plain values in, text out.

mod cluster;
mod diff;
mod explain;
mod graph;
mod plan;
mod show;
mod simulate;
mod whatif;

use anyhow::Result;

use crate::args::{Args, Command};
use crate::printer::Printer;

/// Runs a command and returns what it prints.
pub(crate) fn execute(args: Args) -> Result<Printer> {
    let Args { command } = args;
    match command {
        Command::Plan(args) => plan::run(args),
        Command::Explain(args) => explain::run(args),
        Command::WhatIf(args) => whatif::run(args),
        Command::Simulate(args) => simulate::run(args),
        Command::Show(args) => show::run(args),
        Command::Diff(args) => diff::run(args),
        Command::Cluster(args) => cluster::run(args),
        Command::Graph(args) => graph::run(args),
    }
}
