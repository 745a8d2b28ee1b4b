//! The arguments.

use std::path::PathBuf;

use clap::{Parser, Subcommand, ValueEnum, value_parser};
use clap_complete::Shell;

const START: &str = "\
Start: capture a model, plan it, look at the plan. Only the first needs torch, none needs a device.
  python -m pyrannc capture train:example -o bert.json
  rannc plan bert.json --cluster H200x8 --batch 256 -o plan.json
  rannc show plan.json

`python -m pyrannc calibrate -o cluster.toml` measures the devices and links of this machine (needs torch).
Each command shows an example: rannc plan --help";

/// Plans, explains and simulates pipeline- and data-parallel training.
#[derive(Debug, Parser)]
#[command(name = "rannc", bin_name = "rannc", version, arg_required_else_help = true, after_help = START)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Finds the fastest plan of a captured graph on a cluster.
    #[command(after_help = "\
Example: rannc plan bert.json --cluster H200x8 --batch 256 -o plan.json

A training script uses the plan with RaNNCModule(..., load_deployment=\"plan.json\"). Several clusters are compared:
  rannc plan bert.json --cluster H200x8 --cluster H100x16 --batch 256")]
    Plan(PlanArgs),
    /// Explains the fastest plan: what binds, what the cuts cost, which plans come next.
    #[command(after_help = "\
Example: rannc explain bert.json --cluster H200x8 --batch 256 --memory-gb 40

It searches like `rannc plan`, and also finds the runners-up with what each of them loses, and what it would gain to
recompute activations, to divide parameters over replicas (ZeRO), or to keep optimizer state in host memory.")]
    Explain(ExplainArgs),
    /// Plans for several numbers of devices, memory limits and batches, and shows a table.
    #[command(
        name = "whatif",
        after_help = "\
Example: rannc whatif bert.json --cluster H200x8 --devices 1,2,4,8,16 --memory-gb 40,80 --batch 128,256

More devices than a cluster has stand on further nodes like its last one. For a spreadsheet, with prices:
  rannc whatif bert.json --cluster H200x8 --batch 256 --price-per-device-hour 3.5 --csv > cases.csv"
    )]
    WhatIf(WhatIfArgs),
    /// Simulates one step of a plan, message by message.
    #[command(after_help = "\
Example: rannc simulate plan.json bert.json --cluster H200x8 --trace step.json

Open the trace in ui.perfetto.dev or chrome://tracing; --timeline draws the step as text. Waiting is time in which a rank waits for a message under way,
bubble is all other idle time. Ranks that differ by less than 1% share a row.")]
    Simulate(SimulateArgs),
    /// Shows a plan file: stages, ranks, predicted time and memory.
    #[command(after_help = "Example: rannc show plan.json --batch 256")]
    Show(ShowArgs),
    /// Makes a plan file of this version of one of the version before.
    #[command(after_help = "\
Example: rannc upgrade old-plan.json bert.json -o plan.json

Stages, ranks and predictions stay; what the old file lacks comes from the graph.")]
    Upgrade(UpgradeArgs),
    /// Shows what differs between two plan files.
    #[command(after_help = "\
Example: rannc diff plan-40gb.json plan-80gb.json

The stages are compared by the ops that they run; * marks those that run elsewhere or otherwise.")]
    Diff(DiffArgs),
    /// Prints and checks a cluster, or lists the presets.
    #[command(after_help = "\
Example: rannc cluster --preset H200 --nodes 2 --devices 8 > cluster.toml

Edit the file and check it with `rannc cluster cluster.toml`. Without arguments the presets are listed.")]
    Cluster(ClusterArgs),
    /// Shows a graph file: sizes and ops.
    #[command(after_help = "Example: rannc graph bert.json --text | less")]
    Graph(GraphArgs),
    /// Prints a script that lets a shell complete arguments.
    #[command(after_help = "\
Example: rannc completion bash > ~/.local/share/bash-completion/completions/rannc

Shells that are open already read it when they are started again.")]
    Completion(CompletionArgs),
}

#[derive(Debug, clap::Args)]
pub(crate) struct PlanArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// A cluster file, or a preset with its number of devices: H200x8 is one node of 8, H200x8x2 two. Several, each
    /// behind its own --cluster, stand side by side.
    #[arg(long, required = true)]
    pub(crate) cluster: Vec<String>,
    /// Rows of the global batch.
    #[arg(long, value_name = "ROWS", value_parser = rows, allow_negative_numbers = true)]
    pub(crate) batch: u64,
    /// Memory that a plan may use of a device [default: all that it has].
    #[arg(long, value_name = "GIB", value_parser = gib, allow_negative_numbers = true)]
    pub(crate) memory_gb: Option<Gib>,
    #[command(flatten)]
    pub(crate) search: SearchArgs,
    /// Write the plan to this file.
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) format: FormatArgs,
}

#[derive(Debug, clap::Args)]
pub(crate) struct ExplainArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// A cluster file, or a preset with its number of devices: H200x8 is one node of 8, H200x8x2 two.
    #[arg(long)]
    pub(crate) cluster: String,
    /// Rows of the global batch.
    #[arg(long, value_name = "ROWS", value_parser = rows, allow_negative_numbers = true)]
    pub(crate) batch: u64,
    /// Memory that a plan may use of a device [default: all that it has].
    #[arg(long, value_name = "GIB", value_parser = gib, allow_negative_numbers = true)]
    pub(crate) memory_gb: Option<Gib>,
    #[command(flatten)]
    pub(crate) search: SearchArgs,
    /// Most other plans to show.
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub(crate) runners_up: usize,
    #[command(flatten)]
    pub(crate) format: FormatArgs,
}

#[derive(Debug, clap::Args)]
pub(crate) struct WhatIfArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// A cluster file, or a preset with its number of devices: H200x8 is one node of 8, H200x8x2 two. Several, each
    /// behind its own --cluster, stand side by side.
    #[arg(long, required = true)]
    pub(crate) cluster: Vec<String>,
    /// Rows of the global batch; several with commas between.
    #[arg(long, value_name = "ROWS", value_delimiter = ',', required = true, value_parser = rows, allow_negative_numbers = true)]
    pub(crate) batch: Vec<u64>,
    /// Numbers of devices [default: all of the cluster].
    #[arg(long, value_name = "N", value_delimiter = ',', value_parser = value_parser!(u32).range(1..), allow_negative_numbers = true)]
    pub(crate) devices: Vec<u32>,
    /// Amounts of memory that a plan may use of a device [default: all that it has].
    #[arg(long, value_name = "GIB", value_delimiter = ',', value_parser = gib, allow_negative_numbers = true)]
    pub(crate) memory_gb: Vec<Gib>,
    /// Also tell what training costs at this price of a device; one, or one for each --cluster with commas between.
    #[arg(long, value_name = "PRICE", value_delimiter = ',', value_parser = price, allow_negative_numbers = true)]
    pub(crate) price_per_device_hour: Vec<f64>,
    #[command(flatten)]
    pub(crate) search: SearchArgs,
    /// Print comma-separated values, under the names of the JSON keys.
    #[arg(long, conflicts_with = "json")]
    pub(crate) csv: bool,
    #[command(flatten)]
    pub(crate) format: FormatArgs,
}

#[derive(Debug, clap::Args)]
pub(crate) struct SimulateArgs {
    /// A plan.
    pub(crate) plan: PathBuf,
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// A cluster file, or a preset with its number of devices: H200x8 is one node of 8, H200x8x2 two.
    #[arg(long)]
    pub(crate) cluster: String,
    /// Rows of the global batch [default: those of the plan].
    #[arg(long, value_name = "ROWS", value_parser = rows, allow_negative_numbers = true)]
    pub(crate) batch: Option<u64>,
    /// Bytes of optimizer state for each byte of a parameter (Adam 2, SGD 0).
    #[arg(long, value_name = "FACTOR", default_value_t = 2.0)]
    pub(crate) optimizer_factor: f64,
    /// Draw what every rank does over time.
    #[arg(long, conflicts_with = "json")]
    pub(crate) timeline: bool,
    /// Write a trace of the step to this file.
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) format: FormatArgs,
}

/// What is planned, and for which devices.
#[derive(Debug, clap::Args)]
pub(crate) struct ModelArgs {
    /// A captured graph.
    pub(crate) graph: PathBuf,
    /// What was measured of the graph on a kind of device; may be given for several kinds.
    #[arg(long, value_name = "FILE")]
    pub(crate) profile: Vec<PathBuf>,
}

/// How to search.
#[derive(Debug, clap::Args)]
pub(crate) struct SearchArgs {
    /// Share of the memory to leave free, 0 to 1.
    #[arg(long, value_name = "SHARE", default_value_t = 0.1)]
    pub(crate) memory_margin: f64,
    /// Bytes of optimizer state for each byte of a parameter (Adam 2, SGD 0).
    #[arg(long, value_name = "FACTOR", default_value_t = 2.0)]
    pub(crate) optimizer_factor: f64,
    /// Number of stages [default: free].
    #[arg(long, value_name = "N")]
    pub(crate) stages: Option<u32>,
    /// Most stages [default: any number].
    #[arg(long, value_name = "N", conflicts_with = "stages")]
    pub(crate) max_stages: Option<u32>,
    /// Number of microbatches [default: free].
    #[arg(long, value_name = "N")]
    pub(crate) microbatches: Option<u32>,
    /// Most microbatches.
    #[arg(long, value_name = "N", default_value_t = 32, conflicts_with = "microbatches")]
    pub(crate) max_microbatches: u32,
    /// The loss is computed outside the model: all forwards run before the first backward.
    #[arg(long)]
    pub(crate) loss_outside: bool,
    /// Let backwards come in two parts, of which the second, with the gradients of parameters, fills idle time.
    #[arg(long)]
    pub(crate) split_backward: bool,
    /// What the replicas of a stage divide: nothing, what is best, or the optimizer's state (1), also gradients (2), also
    /// parameters (3), on every stage with several replicas.
    #[arg(long, value_name = "LEVEL", value_enum, default_value_t = ZeroArg::Off)]
    pub(crate) zero: ZeroArg,
    /// Plan as if the runtime could save memory in these ways; it refuses such a plan until it can.
    #[arg(long, value_name = "WHAT", value_delimiter = ',', value_enum)]
    pub(crate) assume: Vec<SaverArg>,
    /// Take the best plan that is found in this time [default: no limit].
    #[arg(long, value_name = "SECONDS", value_parser = seconds, allow_negative_numbers = true)]
    pub(crate) time_limit: Option<f64>,
    /// Threads; the plan does not depend on them [default: all processors].
    #[arg(long, value_name = "N")]
    pub(crate) threads: Option<usize>,
}

/// What replicas divide.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum ZeroArg {
    Off,
    Auto,
    #[value(name = "1")]
    Optimizer,
    #[value(name = "2")]
    Gradients,
    #[value(name = "3")]
    Params,
}

/// Computing activations again for the backward; keeping optimizer state in host memory.
// Variants without help of their own: a list of them fits on one line.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum SaverArg {
    Recompute,
    Offload,
}

#[derive(Debug, clap::Args)]
pub(crate) struct ShowArgs {
    /// A plan, as RaNNCModule.save_deployment or `rannc plan` writes it.
    pub(crate) plan: PathBuf,
    /// Show how a global batch of so many rows is divided.
    #[arg(long, value_name = "ROWS", value_parser = rows, allow_negative_numbers = true)]
    pub(crate) batch: Option<u64>,
    #[command(flatten)]
    pub(crate) format: FormatArgs,
}

#[derive(Debug, clap::Args)]
pub(crate) struct UpgradeArgs {
    /// A plan of the version before.
    pub(crate) plan: PathBuf,
    /// The captured graph that it was made for.
    pub(crate) graph: PathBuf,
    /// Write the plan to this file.
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) format: FormatArgs,
}

#[derive(Debug, clap::Args)]
pub(crate) struct DiffArgs {
    /// A plan.
    pub(crate) left: PathBuf,
    /// Another plan.
    pub(crate) right: PathBuf,
    #[command(flatten)]
    pub(crate) format: FormatArgs,
}

#[derive(Debug, clap::Args)]
pub(crate) struct ClusterArgs {
    /// A cluster file, or a preset with its number of devices, such as H200x8x2.
    pub(crate) cluster: Option<String>,
    /// Print a cluster of this kind of device, to start from.
    #[arg(long, value_name = "NAME", conflicts_with = "cluster")]
    pub(crate) preset: Option<String>,
    /// Nodes of the preset.
    #[arg(long, value_name = "N", default_value_t = 1, requires = "preset")]
    pub(crate) nodes: u32,
    /// Devices of each node of the preset.
    #[arg(long, value_name = "N", default_value_t = 8, requires = "preset")]
    pub(crate) devices: u32,
    #[command(flatten)]
    pub(crate) format: FormatArgs,
}

#[derive(Debug, clap::Args)]
pub(crate) struct GraphArgs {
    /// A captured graph.
    pub(crate) graph: PathBuf,
    /// Print the graph op by op.
    #[arg(long, conflicts_with = "json")]
    pub(crate) text: bool,
    #[command(flatten)]
    pub(crate) format: FormatArgs,
}

#[derive(Debug, clap::Args)]
pub(crate) struct CompletionArgs {
    /// The shell.
    pub(crate) shell: Shell,
}

/// How to print.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(crate) struct FormatArgs {
    /// Print JSON; docs/json.md lists the keys.
    #[arg(long)]
    pub(crate) json: bool,
}

/// An amount of memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gib(pub(crate) f64);

impl Gib {
    pub(crate) fn bytes(self) -> u64 {
        (self.0 * (1_u64 << 30) as f64) as u64
    }
}

fn rows(text: &str) -> Result<u64, String> {
    text.parse().ok().filter(|&rows| rows > 0).ok_or_else(|| "a batch has a positive whole number of rows".to_owned())
}

fn gib(text: &str) -> Result<Gib, String> {
    positive(text, "GiB").map(Gib)
}

fn seconds(text: &str) -> Result<f64, String> {
    positive(text, "seconds")
}

fn price(text: &str) -> Result<f64, String> {
    positive(text, "units of money")
}

fn positive(text: &str, unit: &str) -> Result<f64, String> {
    let amount = text.parse().ok().filter(|&amount: &f64| amount > 0.0 && amount.is_finite());
    amount.ok_or_else(|| format!("it must be a positive number of {unit}"))
}
