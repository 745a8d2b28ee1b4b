//! A simulated step as a table.

use rannc_cost::{format_bytes, format_us};
use rannc_plan::Plan;
use rannc_sim::{RankTimeline, Timeline};
use serde::Serialize;

use crate::Report;
use crate::figures::{Shares, StepFigures, Workload};
use crate::format::{paragraph, percent, runs};
use crate::plan::title;
use crate::table::{amount, table, text};

/// Times that differ by no more than this share of the step, and memory by this share of itself, are alike.
const NEAR: f64 = 0.01;

/// One simulated step of a Plan.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Simulation {
    #[serde(skip)]
    plan: Plan,
    #[serde(skip)]
    batch_rows: u64,
    /// The step.
    #[serde(flatten)]
    pub figures: StepFigures,
    /// What the Plan predicts for it.
    pub predicted_us: f64,
    /// Share of device time that is neither forward nor backward, 0 to 1.
    pub bubble: f64,
    /// Most memory on any rank.
    pub peak_bytes: u64,
    /// The ranks; the five times of each sum to the step.
    pub ranks: Vec<SimulatedRank>,
}

/// One rank of a [`Simulation`].
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SimulatedRank {
    /// The rank.
    pub rank: u32,
    /// Its Stage, or the first of several.
    pub stage: u32,
    /// The others of several.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub more_stages: Vec<u32>,
    /// Forward and backward.
    pub busy_us: f64,
    /// Exposed communication: idle while a message that it waits for is under way.
    pub waiting_us: f64,
    /// Gradient reduction.
    pub reduce_us: f64,
    /// The optimizer.
    pub update_us: f64,
    /// All other idle time.
    pub bubble_us: f64,
    /// Most memory.
    pub peak_bytes: u64,
}

impl SimulatedRank {
    fn new(rank: &RankTimeline) -> Self {
        let &RankTimeline { rank, ref seats, busy_us, waiting_us, reduce_us, update_us, bubble_us, peak_bytes, .. } =
            rank;
        let mut stages = seats.iter().map(|seat| seat.stage);
        let (stage, more_stages) = (stages.next().unwrap_or(0), stages.collect());
        Self { rank, stage, more_stages, busy_us, waiting_us, reduce_us, update_us, bubble_us, peak_bytes }
    }

    fn times_us(&self) -> [f64; 5] {
        [self.busy_us, self.waiting_us, self.reduce_us, self.update_us, self.bubble_us]
    }

    /// True when a person need not tell the two apart.
    fn resembles(&self, other: &Self, step_us: f64) -> bool {
        let times = self.times_us().into_iter().zip(other.times_us());
        let near = |left: f64, right: f64, whole: f64| (left - right).abs() <= NEAR * whole;
        let peak_bytes = self.peak_bytes as f64;
        (self.stage, &self.more_stages) == (other.stage, &other.more_stages)
            && times.into_iter().all(|(own_us, other_us)| near(own_us, other_us, step_us))
            && near(peak_bytes, other.peak_bytes as f64, peak_bytes)
    }

    /// Its Stages: `0`, or `0, 2`.
    pub(crate) fn stages(&self) -> String {
        std::iter::once(&self.stage).chain(&self.more_stages).map(u32::to_string).collect::<Vec<_>>().join(", ")
    }

    /// All that is shown but the rank itself.
    fn row(&self, step_us: f64) -> Vec<String> {
        let times_us = [self.busy_us, self.waiting_us, self.bubble_us, self.reduce_us, self.update_us];
        let mut row: Vec<String> = times_us.map(format_us).into();
        row.insert(1, percent(if step_us > 0.0 { self.busy_us / step_us } else { 0.0 }));
        row.push(format_bytes(self.peak_bytes));
        row
    }
}

impl Simulation {
    /// Sums up `timeline`, a step of `plan` with a batch of `batch_rows` rows that asks for `workload`.
    pub fn new(plan: &Plan, batch_rows: u64, workload: &Workload, timeline: &Timeline) -> Self {
        let device_us = timeline.step_us * timeline.ranks.len() as f64;
        let share = |us: fn(&RankTimeline) -> f64| {
            if device_us > 0.0 { timeline.ranks.iter().map(us).sum::<f64>() / device_us } else { 0.0 }
        };
        let shares = Shares {
            not_computing: timeline.bubble(),
            reducing: share(|rank| rank.reduce_us),
            updating: share(|rank| rank.update_us),
        };
        Self {
            plan: plan.clone(),
            batch_rows,
            figures: StepFigures::new(timeline.step_us, batch_rows, Some(workload), shares),
            predicted_us: plan.predicted.step_us,
            bubble: timeline.bubble(),
            peak_bytes: timeline.ranks.iter().map(|rank| rank.peak_bytes).max().unwrap_or(0),
            ranks: timeline.ranks.iter().map(SimulatedRank::new).collect(),
        }
    }

    /// The first of the ranks that resemble each other, and all of them, by Stage.
    pub(crate) fn groups(&self) -> Vec<(&SimulatedRank, Vec<u32>)> {
        let mut groups: Vec<(&SimulatedRank, Vec<u32>)> = Vec::new();
        for rank in &self.ranks {
            match groups.iter_mut().find(|(first, _)| first.resembles(rank, self.figures.step_us)) {
                Some((_, ranks)) => ranks.push(rank.rank),
                None => groups.push((rank, vec![rank.rank])),
            }
        }
        groups.sort_by_key(|(first, _)| (first.stage, first.more_stages.clone(), first.rank));
        groups
    }

    /// Stage, ranks, and the figures of the first of them; ranks that resemble each other stand in one row.
    fn rows(&self) -> Vec<Vec<String>> {
        let row = |first: &SimulatedRank, ranks: &[u32]| {
            [first.stages(), runs(ranks)].into_iter().chain(first.row(self.figures.step_us)).collect()
        };
        self.groups().into_iter().map(|(first, ranks)| row(first, &ranks)).collect()
    }
}

impl Report for Simulation {
    fn text(&self, width: usize) -> String {
        let columns = [
            text("Stage"),
            amount("Ranks"),
            amount("Computing"),
            amount("of step"),
            amount("Waiting"),
            amount("Bubble"),
            amount("Reduce"),
            amount("Optimizer"),
            amount("Peak memory"),
        ];
        let step = format!(
            "Simulated: {}; at most {} on a device; the plan predicts {}",
            self.figures.speed(),
            format_bytes(self.peak_bytes),
            format_us(self.predicted_us),
        );
        format!(
            "{}{}{}\n{}",
            title(&self.plan, self.batch_rows, width),
            paragraph(&step, width),
            self.figures.devices(width),
            table(&columns, &self.rows(), width),
        )
    }
}
