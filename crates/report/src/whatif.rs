//! Plans for several numbers of devices, memory limits and batches, side by side.

use rannc_cost::{format_bytes, format_us};
use rannc_plan::{Plan, Recompute, ScheduleKind, Sharding};
use serde::Serialize;

use crate::Report;
use crate::format::{decimal, percent, repeats, sharding};
use crate::table::table;

/// Most Stages whose Replicas are listed one by one.
const MOST_LISTED: usize = 6;

/// A table of cases.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WhatIf {
    /// The cases in the order in which they were asked for.
    pub cases: Vec<Case>,
}

/// One number of devices, one memory limit, one batch.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Case {
    /// Number of devices.
    pub devices: u32,
    /// What a Plan may use of a device, before the margin.
    pub memory_limit_bytes: u64,
    /// Rows of the global batch.
    pub batch_rows: u64,
    /// The best Plan; missing when there is none.
    pub plan: Option<PlanShape>,
    /// Memory that the best Plan is short of, when none fits.
    pub short_bytes: Option<u64>,
    /// Why there is no Plan.
    pub problem: Option<String>,
}

/// A Plan in short.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PlanShape {
    /// Time of a step.
    pub step_us: f64,
    /// Rows a second.
    pub rows_per_s: f64,
    /// Most memory on any device.
    pub peak_bytes: u64,
    /// Share of device time that is neither forward nor backward, 0 to 1.
    pub bubble: f64,
    /// Microbatches.
    pub microbatches: u32,
    /// Order of forward and backward.
    pub schedule: ScheduleKind,
    /// Replicas of each Stage.
    pub replicas: Vec<usize>,
    /// Stages that compute anything again.
    pub recomputing: usize,
    /// Most that Replicas of a Stage divide.
    pub sharding: Sharding,
    /// Stages whose optimizer state is in host memory.
    pub offloading: usize,
}

impl PlanShape {
    /// The shape of a Plan.
    pub fn new(plan: &Plan) -> Self {
        let Plan { stages, predicted, .. } = plan;
        Self {
            step_us: predicted.step_us,
            rows_per_s: plan.batch_rows as f64 / predicted.step_us * 1e6,
            peak_bytes: stages.iter().map(|stage| stage.predicted.memory.total_bytes()).max().unwrap_or(0),
            bubble: predicted.bubble,
            microbatches: plan.microbatches,
            schedule: plan.schedule,
            replicas: stages.iter().map(|stage| stage.ranks.len()).collect(),
            recomputing: stages.iter().filter(|stage| stage.recompute != Recompute::None).count(),
            sharding: stages.iter().map(|stage| stage.sharding).max().unwrap_or_default(),
            offloading: stages.iter().filter(|stage| stage.offload).count(),
        }
    }

    /// What it does to save memory: `2 recompute, ZeRO 1, 1 offload`, by number of Stages; empty if nothing.
    fn saving(&self) -> String {
        let counted = |stages: usize, what: &str| (stages > 0).then(|| format!("{stages} {what}"));
        let all = [
            counted(self.recomputing, "recompute"),
            sharding(self.sharding).map(str::to_owned),
            counted(self.offloading, "offload"),
        ];
        all.into_iter().flatten().collect::<Vec<_>>().join(", ")
    }

    /// Replicas of each Stage: `1 + 1 + 2`; of many Stages with equal neighbours counted: `12 x 1, 2 x 4`.
    fn replicas_text(&self) -> String {
        if self.replicas.len() > MOST_LISTED {
            return repeats(&self.replicas.iter().map(|&replicas| replicas as u64).collect::<Vec<_>>());
        }
        self.replicas.iter().map(ToString::to_string).collect::<Vec<_>>().join(" + ")
    }

    /// Stages, Replicas, microbatches, savings.
    pub(crate) fn row(&self) -> Vec<String> {
        vec![self.replicas.len().to_string(), self.replicas_text(), self.microbatches.to_string(), self.saving()]
    }
}

impl Case {
    fn row(&self) -> Vec<String> {
        let mut row =
            vec![self.devices.to_string(), format_bytes(self.memory_limit_bytes), self.batch_rows.to_string()];
        let Some(plan) = &self.plan else {
            let short = self.short_bytes.map(|bytes| format!("short of {}", format_bytes(bytes)));
            row.push(short.or_else(|| self.problem.clone()).unwrap_or_default());
            return row;
        };
        row.extend([
            "yes".to_owned(),
            format_us(plan.step_us),
            decimal(plan.rows_per_s),
            format_bytes(plan.peak_bytes),
            percent(plan.bubble),
        ]);
        row.extend(plan.row());
        row
    }
}

impl Report for WhatIf {
    fn text(&self) -> String {
        let header = [
            "Devices",
            "Memory",
            "Batch",
            "Fits",
            "Step",
            "Rows/s",
            "Peak memory",
            "Idle",
            "Stages",
            "Replicas",
            "Microbatches",
            "Saving",
        ];
        table(&header, self.cases.iter().map(Case::row).collect(), 0..11)
    }
}
