//! Plans for several clusters, numbers of devices, memory limits and batches, side by side.

use std::ops::Range;

use rannc_cost::{format_bytes, format_us};
use rannc_plan::{Plan, Schedule, Sharding, StagePlan};
use serde::Serialize;
use serde_json::Value;

use crate::Report;
use crate::figures::{StepFigures, Workload};
use crate::format::{decimal, each, percent, zero};
use crate::plan::idle_devices;
use crate::table::{Column, amount, table, text};

/// Most cuts that are told one by one.
const MOST_CUTS: usize = 4;

/// A table of cases.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WhatIf {
    /// The cases in the order in which they were asked for.
    pub cases: Vec<Case>,
}

/// One cluster, one number of devices, one memory limit, one batch.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Case {
    /// Name of the cluster.
    pub cluster: String,
    /// Number of devices.
    pub devices: u32,
    /// What a Plan may use of a device, before the margin.
    pub memory_limit_bytes: u64,
    /// Rows of the global batch.
    pub batch_rows: u64,
    /// The best Plan; missing when there is none.
    pub plan: Option<PlanShape>,
    /// What it costs, where devices have a price.
    #[serde(flatten)]
    pub price: Option<Price>,
    /// Memory that the best Plan is short of, when none fits.
    pub short_bytes: Option<u64>,
    /// Why there is no Plan.
    pub problem: Option<String>,
}

/// What training costs, in the money in which the price of devices was told.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Price {
    /// All devices for an hour.
    pub price_per_hour: f64,
    /// A million rows.
    pub price_per_million_rows: Option<f64>,
    /// A million tokens.
    pub price_per_million_tokens: Option<f64>,
}

impl Price {
    /// What a Plan for so many devices costs at this price of one for an hour.
    pub fn new(per_device_hour: f64, devices: u32, plan: Option<&PlanShape>) -> Self {
        let price_per_hour = per_device_hour * f64::from(devices);
        let per_million = |per_s: f64| price_per_hour / 3600.0 / per_s * 1e6;
        Self {
            price_per_hour,
            price_per_million_rows: plan.map(|plan| per_million(plan.figures.rows_per_s)),
            price_per_million_tokens: plan.and_then(|plan| plan.figures.tokens_per_s).map(per_million),
        }
    }
}

/// A Plan in short.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PlanShape {
    /// A step in figures.
    #[serde(flatten)]
    pub figures: StepFigures,
    /// Most memory on any device.
    pub peak_bytes: u64,
    /// Share of device time that is neither forward nor backward, 0 to 1.
    pub bubble: f64,
    /// Microbatches.
    pub microbatches: u32,
    /// Order of forward and backward.
    pub schedule: Schedule,
    /// Replicas of each Stage.
    pub replicas: Vec<usize>,
    /// Devices that get no rows.
    pub idle_devices: usize,
    /// Where Stages are cut apart: what is on either side.
    pub cuts: Vec<String>,
    /// Stages that compute anything again.
    pub recomputing: usize,
    /// What the Replicas of each Stage divide.
    pub sharding: Vec<Sharding>,
    /// Stages whose optimizer state is in host memory.
    pub offloading: usize,
}

impl PlanShape {
    /// The shape of a Plan.
    pub fn new(plan: &Plan, workload: Option<&Workload>) -> Self {
        let Plan { stages, predicted, .. } = plan;
        Self {
            figures: StepFigures::predicted(plan, workload),
            peak_bytes: stages.iter().map(|stage| stage.predicted.memory.total_bytes()).max().unwrap_or(0),
            bubble: predicted.bubble,
            microbatches: plan.microbatches,
            schedule: plan.schedule.clone(),
            replicas: stages.iter().map(|stage| stage.ranks.len()).collect(),
            idle_devices: idle_devices(plan),
            cuts: stages.windows(2).map(|pair| cut(&pair[0], &pair[1])).collect(),
            recomputing: stages.iter().filter(|stage| stage.recomputes()).count(),
            sharding: stages.iter().map(|stage| stage.sharding).collect(),
            offloading: stages.iter().filter(|stage| stage.offload).count(),
        }
    }

    /// What it does to save memory: `2 recompute, ZeRO 1, 1 offload`, by number of Stages; `ZeRO 1 + 3` where Stages divide
    /// differently; empty if nothing.
    fn saving(&self) -> String {
        let counted = |stages: usize, what: &str| (stages > 0).then(|| format!("{stages} {what}"));
        let all = [counted(self.recomputing, "recompute"), self.zero_text(), counted(self.offloading, "offload")];
        all.into_iter().flatten().collect::<Vec<_>>().join(", ")
    }

    fn zero_text(&self) -> Option<String> {
        let levels: Vec<String> = self.sharding.iter().map(|&sharding| zero(sharding)).collect();
        let first = levels.first()?;
        let text = if levels.iter().all(|level| level == first) { first.clone() } else { each(&levels) };
        self.sharding.iter().any(|&sharding| sharding > Sharding::None).then(|| format!("ZeRO {text}"))
    }

    /// The Schedule, if it tells anything: of one Stage or one microbatch all are alike.
    fn schedule_text(&self) -> String {
        if self.replicas.len() > 1 && self.microbatches > 1 { self.schedule.to_string() } else { String::new() }
    }

    /// All cuts, or how many there are.
    fn cuts_text(&self) -> String {
        if self.cuts.len() > MOST_CUTS { format!("{} cuts", self.cuts.len()) } else { self.cuts.join("; ") }
    }

    /// The columns of [`PlanShape::row`].
    pub(crate) const COLUMNS: [Column<'static>; 14] = [
        amount("Step"),
        amount("Samples/s"),
        amount("Tokens/s"),
        amount("MFU"),
        amount("Idle"),
        amount("Reduce"),
        amount("Optimizer"),
        amount("Peak memory"),
        amount("Stages"),
        text("Replicas"),
        amount("Microbatches"),
        text("Schedule"),
        text("Saving"),
        text("Cut"),
    ];

    /// Those columns that tell the time of a step in other words.
    pub(crate) const SPEEDS: Range<usize> = 1..4;

    pub(crate) fn row(&self) -> Vec<String> {
        let figures = &self.figures;
        vec![
            format_us(figures.step_us),
            decimal(figures.rows_per_s),
            figures.tokens_per_s.map(decimal).unwrap_or_default(),
            figures.mfu.map(percent).unwrap_or_default(),
            percent(figures.idle),
            percent(figures.reducing),
            percent(figures.updating),
            format_bytes(self.peak_bytes),
            self.replicas.len().to_string(),
            each(&self.replicas),
            self.microbatches.to_string(),
            self.schedule_text(),
            self.saving(),
            self.cuts_text(),
        ]
    }
}

/// What is on either side of a cut: `h.3 | h.4`, or `h.3 up to attn | from mlp` where a module is cut.
pub(crate) fn cut(before: &StagePlan, after: &StagePlan) -> String {
    let name = |name: Option<&String>| name.cloned().unwrap_or_default();
    let (before, after) = (name(before.modules.last()), name(after.modules.first()));
    let module = after.split(' ').next().unwrap_or_default();
    let is_same = before.split(' ').next() == Some(module);
    let rest = after[module.len()..].trim_start();
    if is_same && !rest.is_empty() { format!("{before} | {rest}") } else { format!("{before} | {after}") }
}

/// The columns that tell one case from another.
const KEYS: [Column<'_>; 4] =
    [text("Cluster").key(), amount("Devices").key(), amount("Memory").key(), amount("Batch").key()];
/// Behind those of the Plan.
const PRICES: [Column<'_>; 3] = [amount("Price/h"), amount("Price/M samples"), amount("Price/M tokens")];
/// When there is no Plan.
const PROBLEMS: [Column<'_>; 2] = [amount("Short of"), text("Problem")];

/// The columns of the CSV form, under their names in JSON.
const CSV: [&str; 29] = [
    "cluster",
    "devices",
    "memory_limit_bytes",
    "batch_rows",
    "step_us",
    "rows_per_s",
    "tokens_per_s",
    "mfu",
    "gap",
    "computing",
    "idle",
    "reducing",
    "updating",
    "bubble",
    "peak_bytes",
    "replicas",
    "idle_devices",
    "microbatches",
    "schedule",
    "cuts",
    "recomputing",
    "sharding",
    "offloading",
    "price_per_hour",
    "price_per_million_rows",
    "price_per_million_tokens",
    "short_bytes",
    "problem",
    "stages",
];

impl Case {
    /// `tells_cluster`: there are several.
    fn row(&self, tells_cluster: bool) -> Vec<String> {
        let cluster = if tells_cluster { self.cluster.clone() } else { String::new() };
        let mut row =
            vec![cluster, self.devices.to_string(), format_bytes(self.memory_limit_bytes), self.batch_rows.to_string()];
        row.extend(self.plan.as_ref().map_or_else(|| vec![String::new(); PlanShape::COLUMNS.len()], PlanShape::row));
        let money = |amount: f64| format!("{amount:.4}");
        let price = self.price.as_ref();
        row.push(price.map(|price| format!("{:.2}", price.price_per_hour)).unwrap_or_default());
        row.push(price.and_then(|price| price.price_per_million_rows).map(money).unwrap_or_default());
        row.push(price.and_then(|price| price.price_per_million_tokens).map(money).unwrap_or_default());
        row.push(self.short_bytes.map(format_bytes).unwrap_or_default());
        row.push(self.problem.clone().filter(|_| self.short_bytes.is_none()).unwrap_or_default());
        row
    }

    /// The cells of the CSV form.
    fn cells(&self) -> Vec<String> {
        let json = serde_json::to_value(self).expect("a case holds only strings, finite numbers and lists");
        let stages = self.plan.as_ref().map(|plan| Value::from(plan.replicas.len()));
        let found = |name: &&str| match *name {
            "stages" => stages.clone(),
            name => json.get(name).or_else(|| json.get("plan")?.get(name)).cloned(),
        };
        CSV.iter().map(|name| found(name).map(|value| cell(&value)).unwrap_or_default()).collect()
    }
}

/// A value as one cell; entries of lists are told apart by semicolons.
fn cell(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        Value::Array(entries) => entries.iter().map(cell).collect::<Vec<_>>().join("; "),
        other => other.to_string(),
    }
}

impl WhatIf {
    /// The cases as comma-separated values below a header.
    pub fn csv(&self) -> String {
        let mut writer = csv::Writer::from_writer(Vec::new());
        let rows = self.cases.iter().map(Case::cells);
        let header = CSV.map(str::to_owned).to_vec();
        for row in std::iter::once(header).chain(rows) {
            writer.write_record(row).expect("memory takes rows of equal length");
        }
        String::from_utf8(writer.into_inner().expect("memory can be flushed")).expect("all cells are text")
    }
}

impl Report for WhatIf {
    fn text(&self, width: usize) -> String {
        let tells_cluster = self.cases.iter().any(|case| case.cluster != self.cases[0].cluster);
        let columns: Vec<Column<'_>> = [KEYS.as_slice(), &PlanShape::COLUMNS, &PRICES, &PROBLEMS].concat();
        let rows: Vec<Vec<String>> = self.cases.iter().map(|case| case.row(tells_cluster)).collect();
        let mut shown = table(&columns, &rows, width);
        let without_work: usize =
            self.cases.iter().filter_map(|case| case.plan.as_ref()).map(|plan| plan.idle_devices).sum();
        if without_work > 0 {
            shown += "\nSome devices get no rows: the batch is too small for so many.\n";
        }
        shown
    }
}
