//! What a search is asked for.

use rannc_cost::Cluster;
use rannc_plan::{ReduceDType, ScheduleKind, Sharding};
use serde::{Deserialize, Serialize};

use crate::error::SearchError;

/// The ways to save memory that the runtime has that will carry out a Plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Savers {
    /// Computing parts of a forward again for the backward.
    pub recompute: bool,
    /// The most that Replicas may divide among them.
    pub sharding: Sharding,
    /// The least that several Replicas of a Stage divide.
    pub least_sharding: Sharding,
    /// Keeping the optimizer's state in host memory.
    pub offload: bool,
}

impl Default for Savers {
    /// What this RaNNC's runtime can do.
    fn default() -> Self {
        Self { recompute: false, sharding: Sharding::None, least_sharding: Sharding::None, offload: false }
    }
}

/// Where a search stops with the best that it has found so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// Time for the whole search.
    pub time_ms: Option<u64>,
    /// Partial Plans to follow for each number of microbatches; the same answer on every machine.
    pub candidates: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { time_ms: None, candidates: 20_000_000 }
    }
}

/// What a Plan must fulfil.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Settings {
    /// Number of ranks.
    pub world_size: u32,
    /// True when a Plan may leave ranks out; otherwise all are used.
    pub may_idle: bool,
    /// Rows of the global batch.
    pub batch_rows: u64,
    /// True when the batch comes in equal parts from all ranks, each of which is divided over the
    /// microbatches; otherwise rank 0 has all rows.
    pub gather_inputs: bool,
    /// Memory that one device may use; the device's own when not given.
    pub memory_limit_bytes: Option<u64>,
    /// Share of the limit to leave free, 0 to 1.
    pub memory_margin: f64,
    /// Bytes of optimizer state for each byte of a trainable parameter.
    pub optimizer_bytes_per_param_byte: f64,
    /// Number of Stages, if it is not free.
    pub stages: Option<u32>,
    /// Most Stages.
    pub max_stages: Option<u32>,
    /// Replicas of each Stage, if they are not free; gives the number of Stages as well.
    pub replicas: Option<Vec<u32>>,
    /// Number of microbatches, if it is not free.
    pub microbatches: Option<u32>,
    /// Least microbatches.
    pub min_microbatches: u32,
    /// Most microbatches.
    pub max_microbatches: u32,
    /// Least rows of a microbatch.
    pub min_microbatch_rows: u64,
    /// True when the model returns its loss: forward and backward may be interleaved. Otherwise all
    /// forwards run before the first backward.
    pub loss_inside: bool,
    /// True when accelerators replay their work of a step, so that their hosts take no time to start it.
    pub replays: bool,
    /// True when the backward of a microbatch may come in two parts.
    pub split_backward: bool,
    /// Type in which gradients are summed over ranks.
    pub reduce_dtype: ReduceDType,
    /// What the runtime can do.
    #[serde(rename = "capabilities")]
    pub savers: Savers,
    /// When to stop early.
    pub limits: Limits,
    /// Threads to use; all processors when not given. The answer does not depend on it.
    pub threads: Option<usize>,
    /// Number of other good Plans to give beside the best.
    pub runners_up: usize,
    /// Also find out what each capability that the runtime lacks would gain.
    pub gains: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            world_size: 1,
            may_idle: false,
            batch_rows: 1,
            gather_inputs: true,
            memory_limit_bytes: None,
            memory_margin: 0.1,
            optimizer_bytes_per_param_byte: 2.0,
            stages: None,
            max_stages: None,
            replicas: None,
            microbatches: None,
            min_microbatches: 1,
            max_microbatches: 32,
            min_microbatch_rows: 1,
            loss_inside: true,
            replays: false,
            split_backward: false,
            reduce_dtype: ReduceDType::default(),
            savers: Savers::default(),
            limits: Limits::default(),
            threads: None,
            runners_up: 0,
            gains: false,
        }
    }
}

fn invalid(field: &'static str, problem: impl Into<String>) -> SearchError {
    SearchError::Settings { field, problem: problem.into() }
}

impl Settings {
    /// Finds settings that contradict each other or the cluster.
    pub fn check(&self, cluster: &Cluster) -> Result<(), SearchError> {
        if self.world_size == 0 || self.world_size > cluster.devices() {
            let problem =
                format!("must be from 1 to the cluster's {} devices, not {}", cluster.devices(), self.world_size);
            return Err(invalid("world_size", problem));
        }
        if self.batch_rows == 0 {
            return Err(invalid("batch_rows", "must be at least 1"));
        }
        if !(0.0..1.0).contains(&self.memory_margin) {
            return Err(invalid(
                "memory_margin",
                format!("must be at least 0 and below 1, not {}", self.memory_margin),
            ));
        }
        let factor = self.optimizer_bytes_per_param_byte;
        if !factor.is_finite() || factor < 0.0 {
            return Err(invalid("optimizer_bytes_per_param_byte", format!("must not be negative, and is {factor}")));
        }
        if self.memory_limit_bytes == Some(0) {
            return Err(invalid("memory_limit_bytes", "must not be 0; leave it out for the device's own memory"));
        }
        if self.savers.least_sharding > self.savers.sharding {
            return Err(invalid("capabilities", "must not have a least_sharding above sharding"));
        }
        self.check_stages()?;
        self.microbatch_candidates().map(|_| ())
    }

    fn check_stages(&self) -> Result<(), SearchError> {
        if let Some(stages) = self.stages.filter(|&stages| stages == 0 || stages > self.world_size) {
            return Err(invalid("stages", format!("must be from 1 to {} ranks, not {stages}", self.world_size)));
        }
        if self.max_stages == Some(0) {
            return Err(invalid("max_stages", "must be at least 1"));
        }
        let Some(replicas) = &self.replicas else { return Ok(()) };
        let sum: u64 = replicas.iter().map(|&count| u64::from(count)).sum();
        if replicas.contains(&0) || sum != u64::from(self.world_size) {
            let problem = format!("must be positive and add up to {} ranks; {replicas:?} does not", self.world_size);
            return Err(invalid("replicas", problem));
        }
        match self.stages {
            Some(stages) if stages as usize != replicas.len() => {
                Err(invalid("replicas", format!("has {} entries, but stages is {stages}", replicas.len())))
            }
            _ => Ok(()),
        }
    }

    /// The number of Stages, if it is not free.
    pub(crate) fn forced_stages(&self) -> Option<usize> {
        let by_replicas = self.replicas.as_ref().map(Vec::len);
        by_replicas.or(self.stages.map(|stages| stages as usize))
    }

    /// Numbers of microbatches to try, increasing: powers of two, divisors of a rank's rows, and the limits.
    pub(crate) fn microbatch_candidates(&self) -> Result<Vec<u64>, SearchError> {
        if let Some(microbatches) = self.microbatches {
            let microbatches = u64::from(microbatches);
            if microbatches == 0 || microbatches > self.batch_rows {
                let problem = format!("must be from 1 to the batch's {} rows, not {microbatches}", self.batch_rows);
                return Err(invalid("microbatches", problem));
            }
            return Ok(vec![microbatches]);
        }
        let most = u64::from(self.max_microbatches).min(self.batch_rows / self.min_microbatch_rows.max(1));
        let most = most.min(self.most_rank_rows()).max(1);
        let least = u64::from(self.min_microbatches).max(1);
        if least > most {
            let problem = format!(
                "is {least}, but {} rows on {} ranks allow only {most} (max_microbatches {}, min_microbatch_rows {})",
                self.batch_rows, self.world_size, self.max_microbatches, self.min_microbatch_rows
            );
            return Err(invalid("min_microbatches", problem));
        }
        let worth_trying = |&count: &u64| {
            count == least || count == most || count.is_power_of_two() || self.most_rank_rows().is_multiple_of(count)
        };
        Ok((least..=most).filter(worth_trying).collect())
    }

    /// Rows of the batch for each rank.
    pub(crate) fn rank_rows(&self) -> u64 {
        self.batch_rows.div_ceil(u64::from(self.world_size))
    }

    /// Rows that come from the rank with most of them: no more microbatches can have rows.
    pub(crate) fn most_rank_rows(&self) -> u64 {
        if self.gather_inputs { self.rank_rows() } else { self.batch_rows }
    }

    /// Memory that a Plan may use on a device that has `memory_bytes`.
    pub fn usable_bytes(&self, memory_bytes: u64) -> f64 {
        let limit_bytes = self.memory_limit_bytes.map_or(memory_bytes, |limit| limit.min(memory_bytes));
        limit_bytes as f64 * (1.0 - self.memory_margin)
    }

    /// Schedules to try.
    pub(crate) fn schedules(&self) -> Vec<ScheduleKind> {
        if self.loss_inside {
            vec![ScheduleKind::OneForwardOneBackward, ScheduleKind::FillDrain]
        } else {
            vec![ScheduleKind::FillDrain]
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(change: impl FnOnce(&mut Settings)) -> String {
        let mut settings = Settings { world_size: 4, batch_rows: 12, ..Settings::default() };
        change(&mut settings);
        let cluster = Cluster::preset("cpu", 1, 8).expect("8 devices");
        settings.check(&cluster).expect_err("must be refused").to_string()
    }

    #[test]
    fn contradictions_are_named() {
        assert!(refused(|s| s.world_size = 9).starts_with("world_size must be from 1 to the cluster's 8 devices"));
        assert!(refused(|s| s.stages = Some(5)).starts_with("stages must be from 1 to 4 ranks"));
        assert!(refused(|s| s.replicas = Some(vec![2, 1])).contains("add up to 4 ranks"));
        assert!(refused(|s| s.microbatches = Some(13)).contains("12 rows"));
        assert!(refused(|s| s.memory_margin = 1.0).starts_with("memory_margin"));
        let few_rows = refused(|s| (s.min_microbatches, s.min_microbatch_rows) = (4, 4));
        assert!(few_rows.contains("allow only 3"), "{few_rows}");
        let lengths = refused(|s| (s.stages, s.replicas) = (Some(3), Some(vec![2, 2])));
        assert_eq!(lengths, "replicas has 2 entries, but stages is 3");
    }

    #[test]
    fn candidates_are_powers_divisors_and_limits() {
        let settings = Settings { batch_rows: 24, max_microbatches: 15, ..Settings::default() };
        assert_eq!(settings.microbatch_candidates().expect("valid"), [1, 2, 3, 4, 6, 8, 12, 15]);
    }

    #[test]
    fn microbatches_take_a_part_of_every_rank() {
        let gathered = Settings { world_size: 4, batch_rows: 21, ..Settings::default() };
        assert_eq!(gathered.microbatch_candidates().expect("valid"), [1, 2, 3, 4, 6]);
    }

    #[test]
    fn unknown_fields_are_refused() {
        assert!(serde_json::from_str::<Settings>(r#"{"world_size": 2}"#).is_ok());
        assert!(serde_json::from_str::<Settings>(r#"{"word_size": 2}"#).is_err());
    }
}
