//! Why there is no Plan.

use std::fmt;

use rannc_cost::format_bytes;
use rannc_plan::PlanFileError;
use thiserror::Error;

/// Why a search gives no Plan.
#[derive(Debug, Error)]
pub enum SearchError {
    /// A setting that cannot be fulfilled.
    #[error("{field} {problem}")]
    Settings {
        /// Name of the setting.
        field: &'static str,
        /// What is wrong with it.
        problem: String,
    },
    /// The cluster is impossible.
    #[error(transparent)]
    Cluster(#[from] rannc_cost::CostError),
    /// No op depends on the input.
    #[error("graph {graph} has nothing to plan: no op depends on an input")]
    Empty {
        /// Name of the graph.
        graph: String,
    },
    /// More Stages are asked for than the model can be cut into.
    #[error("{wanted} stages were asked for, but the model can be cut into {possible} pieces at most")]
    TooFewBlocks {
        /// Stages asked for.
        wanted: usize,
        /// Pieces that can stand alone.
        possible: usize,
    },
    /// Every Plan needs more memory than there is.
    #[error(
        "the model does not fit into memory: the best of all plans ({stages} stages, {microbatches} microbatches) is \
         short of {} on the device that holds {block}: it needs {} of {} usable memory, most of it for {largest}; {advice}{}",
        format_bytes(*.short_bytes), format_bytes(*.needed_bytes), format_bytes(*.usable_bytes),
        would_fit_text(.would_fit)
    )]
    DoesNotFit {
        /// The heaviest Block of the Stage that is short: its modules and first op.
        block: String,
        /// What is missing.
        short_bytes: u64,
        /// What the Stage needs.
        needed_bytes: u64,
        /// The limit without its margin.
        usable_bytes: u64,
        /// Stages of the Plan that comes closest.
        stages: usize,
        /// Microbatches of that Plan.
        microbatches: u64,
        /// The largest use of memory.
        largest: &'static str,
        /// What would help.
        advice: Advice,
        /// What the runtime cannot do yet, and with which the model would fit.
        would_fit: Vec<&'static str>,
    },
    /// A limit ended the search before it found a Plan; there may be one.
    #[error("the search met its limit before it found a plan that fits; allow it more time or candidates")]
    Stopped,
    /// The threads for the search cannot be started.
    #[error("the threads of the search cannot be started: {0}")]
    Threads(#[from] rayon::ThreadPoolBuildError),
    /// The Plan contradicts itself.
    #[error(transparent)]
    Plan(#[from] PlanFileError),
}

fn would_fit_text(would_fit: &[&'static str]) -> String {
    match would_fit {
        [] => String::new(),
        some => format!(" (it would fit with {}, which this RaNNC cannot run yet)", some.join(", or with ")),
    }
}

/// What would make a model fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Advice {
    /// Parameters, gradients and optimizer state are too large for the devices together.
    MoreDevices,
    /// One piece that cannot be cut is too large by its parameters.
    LargerDevice,
    /// A microbatch is too large, and may be smaller.
    MoreMicrobatches,
    /// One row is too large, or the microbatches are as small as allowed.
    SmallerBatch,
    /// The framework leaves no room.
    HigherLimit,
}

impl fmt::Display for Advice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::MoreDevices => "use more devices, raise mem_limit_gb, or use an optimizer with less state",
            Self::LargerDevice => {
                "this piece cannot be cut: raise mem_limit_gb, use devices with more memory, or an optimizer with less state"
            }
            Self::MoreMicrobatches => "raise max_pipeline for more and smaller microbatches, or raise mem_limit_gb",
            Self::SmallerBatch => "use a smaller batch or shorter sequences, more devices, or raise mem_limit_gb",
            Self::HigherLimit => "raise mem_limit_gb: the framework alone takes most of it",
        })
    }
}
