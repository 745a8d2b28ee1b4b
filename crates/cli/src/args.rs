//! The arguments.

use std::path::PathBuf;

use clap::{Parser, Subcommand};

/// Plans and shows pipeline- and data-parallel training.
#[derive(Debug, Parser)]
#[command(name = "rannc", version, arg_required_else_help = true, after_help = "Example: rannc show plan.json")]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Shows a plan file: stages, ranks, predicted time and memory.
    #[command(after_help = "Example: rannc show plan.json --batch 256")]
    Show {
        /// A plan, as RaNNCModule.save_deployment or `rannc plan` writes it.
        plan: PathBuf,
        /// Show how a global batch of so many rows is divided.
        #[arg(long, value_name = "ROWS", value_parser = clap::value_parser!(u64).range(1..))]
        batch: Option<u64>,
        /// Print the checked plan as JSON.
        #[arg(long, conflicts_with = "batch")]
        json: bool,
    },
    /// Shows a graph file: sizes and ops.
    #[command(after_help = "Example: rannc graph bert.json --text | less")]
    Graph {
        /// A captured graph.
        graph: PathBuf,
        /// Print the graph op by op.
        #[arg(long)]
        text: bool,
    },
    /// Plans the training of a captured graph; needs no device.
    #[command(after_help = "Example: rannc plan bert.json --devices 8 --device 'NVIDIA H200' --batch 256 -o plan.json")]
    Plan(PlanArgs),
}

#[derive(Debug, clap::Args)]
pub(crate) struct PlanArgs {
    /// A captured graph.
    pub(crate) graph: PathBuf,
    /// Number of devices.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) devices: u32,
    /// Devices of one node.
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) devices_per_node: u32,
    /// What torch calls the device, e.g. "NVIDIA H200"; "cpu" for processor cores.
    #[arg(long, value_name = "NAME")]
    pub(crate) device: String,
    /// Rows of the global batch.
    #[arg(long, value_name = "ROWS", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) batch: u64,
    /// Memory that one device may use [default: all that it has].
    #[arg(long, value_name = "GIB")]
    pub(crate) memory_gb: Option<f64>,
    /// Bytes of optimizer state for each byte of a parameter (Adam 2, SGD 0).
    #[arg(long, value_name = "FACTOR", default_value_t = 2.0)]
    pub(crate) optimizer_factor: f64,
    /// Number of stages [default: free].
    #[arg(long, value_name = "N")]
    pub(crate) stages: Option<u32>,
    /// Number of microbatches [default: free].
    #[arg(long, value_name = "N")]
    pub(crate) microbatches: Option<u32>,
    /// The loss is computed outside the model.
    #[arg(long)]
    pub(crate) loss_outside: bool,
    /// Write the plan to this file.
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
}
