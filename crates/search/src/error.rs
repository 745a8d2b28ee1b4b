//! Why there is no Plan.

use std::fmt;

use rannc_cost::{counted, format_bytes};
use rannc_plan::{PlanFileError, Sharding};
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
    #[error(
        "graph {graph} has nothing to plan: nothing that it returns or changes is computed from an input; let the \
             model's forward return what is computed from its arguments"
    )]
    Empty {
        /// Name of the graph.
        graph: String,
    },
    /// More Stages are asked for than the model can be cut into.
    #[error("{}", too_few_blocks(*wanted, *possible, whole.as_deref()))]
    TooFewBlocks {
        /// Stages asked for.
        wanted: usize,
        /// Pieces that can stand alone.
        possible: usize,
        /// The largest piece that may not be cut, and why, in words.
        whole: Option<String>,
    },
    /// Every Plan needs more memory than there is.
    #[error("{0}")]
    DoesNotFit(Shortage),
    /// A limit ended the search before it found a Plan; there may be one.
    #[error("the search met its limit before it found a plan that fits; allow it more time or candidates")]
    Stopped,
    /// It was told to end.
    #[error("the search was told to end")]
    Told,
    /// The threads for the search cannot be started.
    #[error("the threads of the search cannot be started: {0}")]
    Threads(#[from] rayon::ThreadPoolBuildError),
    /// A given Plan has ranks with several Stages, and no step.
    #[error("the plan's ranks have several stages, and what a step takes then cannot be told: {0}")]
    NoStep(String),
    /// The Plan contradicts itself.
    #[error(transparent)]
    Plan(#[from] PlanFileError),
}

fn too_few_blocks(wanted: usize, possible: usize, whole: Option<&str>) -> String {
    let [wanted, pieces] = [(wanted, "stage", "stages"), (possible, "piece", "pieces")]
        .map(|(count, one, many)| counted(count as u64, one, many));
    let stages = counted(possible as u64, "stage", "stages");
    let whole = whole.map_or_else(String::new, |whole| format!(": {whole}"));
    format!(
        "{wanted} were asked for, but what depends on the input can be cut into {pieces} at most{whole}. Ask for \
         {stages} at most"
    )
}

/// What is short in the Plan that comes closest.
#[derive(Clone, Debug)]
pub struct Shortage {
    /// The heaviest Block of the Stage that is short: its modules and first op.
    pub block: String,
    /// What is missing.
    pub short_bytes: u64,
    /// What the Stage needs.
    pub needed_bytes: u64,
    /// The limit without its margin.
    pub usable_bytes: u64,
    /// Stages of the Plan.
    pub stages: usize,
    /// Its microbatches.
    pub microbatches: u64,
    /// The largest use of memory.
    pub largest: &'static str,
    /// What would help.
    pub advice: Advice,
    /// Set when the Block ran out of memory while it was measured: rows that were too many.
    pub measured_rows: Option<u32>,
    /// The least that Replicas would have to divide for the model to fit.
    pub divided: Option<Sharding>,
    /// What the runtime cannot do yet, and with which the model would fit.
    pub would_fit: Vec<&'static str>,
}

/// What those who ask for a Plan call the settings that may help.
#[derive(Clone, Copy, Debug)]
pub struct SettingNames {
    /// [`crate::Settings::memory_limit_bytes`].
    pub memory_limit: &'static str,
    /// [`crate::Settings::max_microbatches`].
    pub max_microbatches: &'static str,
    /// What says how much Replicas divide: [`crate::Savers::sharding`].
    pub zero: &'static str,
}

const OWN_NAMES: SettingNames =
    SettingNames { memory_limit: "memory_limit_bytes", max_microbatches: "max_microbatches", zero: "sharding" };

impl Shortage {
    /// In words for those who call the settings so.
    pub fn in_words(&self, names: &SettingNames) -> String {
        let &Self { ref block, stages, microbatches, largest, advice, .. } = self;
        let [short, needed, usable] = [self.short_bytes, self.needed_bytes, self.usable_bytes].map(format_bytes);
        let stages = counted(stages as u64, "stage", "stages");
        let microbatches = counted(microbatches, "microbatch", "microbatches");
        let divided = self.divided.map_or_else(String::new, |level| {
            format!(
                ", or set {} to {}, with which it would fit: replicas divide {}",
                names.zero,
                level.zero_level(),
                divided(level)
            )
        });
        let advice = format!("{}{divided}", advice.in_words(names));
        let would_fit = match &self.would_fit[..] {
            [] => String::new(),
            some => format!(" (it would fit with {}, which this RaNNC cannot run yet)", some.join(", or with ")),
        };
        if let Some(rows) = self.measured_rows {
            return format!(
                "the model does not fit into memory: in the best of all plans ({stages}, {microbatches}) a device has \
                 {} of a microbatch, but {block} runs out of memory with so many, as was measured: it needs at least \
                 {needed} of {usable} usable memory; {advice}{would_fit}",
                counted(u64::from(rows), "row", "rows")
            );
        }
        format!(
            "the model does not fit into memory: the best of all plans ({stages}, {microbatches}) is short of {short} \
             on the device that holds {block}: it needs {needed} of {usable} usable memory, most of it for {largest}; \
             {advice}{would_fit}"
        )
    }
}

impl fmt::Display for Shortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.in_words(&OWN_NAMES))
    }
}

fn divided(level: Sharding) -> &'static str {
    match level {
        Sharding::None => "nothing",
        Sharding::Optimizer => "the optimizer's state",
        Sharding::Gradients => "gradients and the optimizer's state",
        Sharding::KeptParams | Sharding::Params => "parameters, gradients and the optimizer's state",
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

impl Advice {
    /// In words for those who call the settings so.
    pub fn in_words(self, names: &SettingNames) -> String {
        let SettingNames { memory_limit, max_microbatches, .. } = names;
        match self {
            Self::MoreDevices => {
                format!("use more devices, raise {memory_limit}, or use an optimizer with less state")
            }
            Self::LargerDevice => format!(
                "this piece cannot be cut: raise {memory_limit}, use devices with more memory, or an optimizer with \
                 less state"
            ),
            Self::MoreMicrobatches => {
                format!("raise {max_microbatches} for more and smaller microbatches, or raise {memory_limit}")
            }
            Self::SmallerBatch => {
                format!("use a smaller batch or shorter sequences, more devices, or raise {memory_limit}")
            }
            Self::HigherLimit => format!("raise {memory_limit}: the framework alone takes most of it"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advice_names_settings_as_they_are_called() {
        let items =
            SettingNames { memory_limit: "mem_limit_gb", max_microbatches: "max_pipeline", zero: "enable_zero" };
        for (advice, words) in [
            (Advice::MoreDevices, "use more devices, raise mem_limit_gb, or use an optimizer with less state"),
            (
                Advice::LargerDevice,
                "this piece cannot be cut: raise mem_limit_gb, use devices with more memory, or an optimizer with less state",
            ),
            (Advice::MoreMicrobatches, "raise max_pipeline for more and smaller microbatches, or raise mem_limit_gb"),
            (Advice::SmallerBatch, "use a smaller batch or shorter sequences, more devices, or raise mem_limit_gb"),
            (Advice::HigherLimit, "raise mem_limit_gb: the framework alone takes most of it"),
        ] {
            assert_eq!(advice.in_words(&items), words);
        }
    }

    #[test]
    fn a_shortage_is_told_whole() {
        let mut shortage = Shortage {
            block: "layers.1".to_owned(),
            short_bytes: 3 << 20,
            needed_bytes: 8 << 20,
            usable_bytes: 5 << 20,
            stages: 3,
            microbatches: 6,
            largest: "the framework",
            advice: Advice::HigherLimit,
            measured_rows: None,
            divided: None,
            would_fit: vec!["recomputation", "optimizer state in host memory"],
        };
        let words = "the model does not fit into memory: the best of all plans (3 stages, 6 microbatches) is short of \
                     3.00 MiB on the device that holds layers.1: it needs 8.00 MiB of 5.00 MiB usable memory, \
                     most of it for the framework; raise --memory-gb: the framework alone takes most of it";
        let would_fit = " (it would fit with recomputation, or with optimizer state in host memory, which this RaNNC \
                         cannot run yet)";
        let arguments =
            SettingNames { memory_limit: "--memory-gb", max_microbatches: "--max-microbatches", zero: "--zero" };
        assert_eq!(shortage.in_words(&arguments), format!("{words}{would_fit}"));
        shortage.would_fit.clear();
        assert_eq!(shortage.in_words(&arguments), words);
        shortage.divided = Some(Sharding::Params);
        let divided = ", or set --zero to 3, with which it would fit: replicas divide parameters, gradients and the \
                       optimizer's state";
        assert_eq!(shortage.in_words(&arguments), format!("{words}{divided}"));
        shortage.divided = None;
        let own = SearchError::DoesNotFit(shortage).to_string();
        assert!(own.ends_with("raise memory_limit_bytes: the framework alone takes most of it"), "{own}");
    }
}
