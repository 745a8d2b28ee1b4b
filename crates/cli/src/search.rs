//! From arguments to settings of a search, and from its errors to words that name arguments.

use anyhow::{Error, anyhow};
use rannc_cost::Cluster;
use rannc_plan::Sharding;
use rannc_search::{Limits, Savers, SearchError, SettingNames, Settings};

use crate::args::{Gib, SaverArg, SearchArgs, ZeroArg};

/// Settings for all devices of the cluster.
pub(crate) fn settings(args: &SearchArgs, cluster: &Cluster, batch_rows: u64, memory: Option<Gib>) -> Settings {
    let &SearchArgs {
        memory_margin,
        optimizer_factor,
        stages,
        max_stages,
        microbatches,
        max_microbatches,
        loss_outside,
        split_backward,
        zero,
        ref assume,
        time_limit,
        threads,
    } = args;
    Settings {
        world_size: cluster.devices(),
        batch_rows,
        memory_limit_bytes: memory.map(Gib::bytes),
        memory_margin,
        optimizer_bytes_per_param_byte: optimizer_factor,
        stages,
        max_stages,
        microbatches,
        max_microbatches,
        loss_inside: !loss_outside,
        split_backward,
        savers: savers(zero, assume),
        limits: Limits { time_ms: time_limit.map(|seconds| (seconds * 1e3) as u64), ..Limits::default() },
        threads,
        ..Settings::default()
    }
}

/// What Replicas divide, what else the runtime can do, and what it is assumed to do.
fn savers(zero: ZeroArg, assumed: &[SaverArg]) -> Savers {
    let (least_sharding, sharding) = match zero {
        ZeroArg::Off => (Sharding::None, Sharding::None),
        ZeroArg::Auto => (Sharding::None, Sharding::Params),
        ZeroArg::Optimizer => (Sharding::Optimizer, Sharding::Optimizer),
        ZeroArg::Gradients => (Sharding::Gradients, Sharding::Gradients),
        ZeroArg::Params => (Sharding::KeptParams, Sharding::Params),
    };
    let mut savers = Savers { sharding, least_sharding, ..Savers::default() };
    for saver in assumed {
        match saver {
            SaverArg::Recompute => savers.recompute = true,
            SaverArg::Offload => savers.offload = true,
        }
    }
    savers
}

/// What the advice of a search is about, as arguments.
const ARGUMENTS: SettingNames =
    SettingNames { memory_limit: "--memory-gb", max_microbatches: "--max-microbatches", zero: "--zero" };

/// The error with the names of arguments in place of those of settings.
pub(crate) fn in_words(error: SearchError) -> Error {
    match &error {
        SearchError::Settings { field, problem } => anyhow!("{} {problem}", argument(field)),
        SearchError::DoesNotFit(shortage) => anyhow!(shortage.in_words(&ARGUMENTS)),
        error => anyhow!(error.to_string()),
    }
}

fn argument(field: &str) -> String {
    match field {
        "batch_rows" => "--batch".to_owned(),
        "memory_limit_bytes" => "--memory-gb".to_owned(),
        "optimizer_bytes_per_param_byte" => "--optimizer-factor".to_owned(),
        field => format!("--{}", field.replace('_', "-")),
    }
}
