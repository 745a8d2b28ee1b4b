//! What differs between two Plans.

use rannc_cost::{format_bytes, format_us};
use rannc_ir::OpRun;
use rannc_plan::{Plan, StagePlan};
use serde::Serialize;

use crate::Report;
use crate::figures::StepFigures;
use crate::format::{percent, runs, savers, signed_percent};
use crate::table::{amount, table, text};

/// What differs between two Plans.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PlanDiff {
    /// True when both divide the same Graph.
    pub same_graph: bool,
    /// Figures that differ.
    pub changes: Vec<Change>,
    /// Where Stages of the two overlap, in order; empty when they divide different Graphs.
    pub segments: Vec<Segment>,
}

/// A figure that differs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Change {
    /// Which one.
    pub item: &'static str,
    #[serde(skip)]
    label: &'static str,
    /// In the left Plan.
    pub left: Amount,
    /// In the right Plan.
    pub right: Amount,
}

/// A figure; in JSON a plain number or text.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Amount {
    /// A name.
    Text(String),
    /// A number of things.
    Count(u64),
    /// Microseconds.
    Us(f64),
    /// Bytes.
    Bytes(u64),
    /// A share, 0 to 1.
    Share(f64),
}

impl Amount {
    fn text(&self) -> String {
        match self {
            Self::Text(text) => text.clone(),
            Self::Count(count) => count.to_string(),
            Self::Us(us) => format_us(*us),
            Self::Bytes(bytes) => format_bytes(*bytes),
            Self::Share(share) => percent(*share),
        }
    }

    /// The change to `right` as a share of this one, where both are amounts.
    fn change(&self, right: &Self) -> String {
        let (left, right) = match (self, right) {
            (Self::Us(left), Self::Us(right)) => (*left, *right),
            (Self::Bytes(left), Self::Bytes(right)) => (*left as f64, *right as f64),
            // Points of percentage would be read as percent.
            _ => return String::new(),
        };
        if left > 0.0 { signed_percent(right / left - 1.0) } else { String::new() }
    }
}

/// A run of main Ops that lies in one Stage of each Plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Segment {
    /// First main Op.
    pub first_op: u32,
    /// One past the last.
    pub end_op: u32,
    /// Its Stage in the left Plan.
    pub left_stage: usize,
    /// Its Stage in the right Plan.
    pub right_stage: usize,
    /// Short summary of the modules that it runs.
    pub modules: Vec<String>,
    /// True when it runs on the same ranks in the same way.
    pub same: bool,
    #[serde(skip)]
    left: String,
    #[serde(skip)]
    right: String,
}

impl PlanDiff {
    /// Compares two Plans.
    pub fn new(left: &Plan, right: &Plan) -> Self {
        let same_graph = left.graph_hash == right.graph_hash;
        let pairs = facts(left).into_iter().zip(facts(right));
        let changes = pairs.filter(|(left, right)| left != right).map(|(left, right)| {
            let (item, label, left) = left;
            Change { item, label, left, right: right.2 }
        });
        Self {
            same_graph,
            changes: changes.collect(),
            segments: if same_graph { segments(&left.stages, &right.stages) } else { Vec::new() },
        }
    }

    fn same_stages(&self) -> bool {
        self.segments.iter().all(|segment| segment.same && segment.left_stage == segment.right_stage)
    }
}

/// Name in JSON, in words, and what it is.
fn facts(plan: &Plan) -> Vec<(&'static str, &'static str, Amount)> {
    let count = |count: u32| Amount::Count(u64::from(count));
    let figures = StepFigures::predicted(plan, None);
    let peak_bytes = plan.crews().iter().map(|crew| plan.memory_of(crew).total_bytes()).max().unwrap_or(0);
    vec![
        ("graph_name", "Graph", Amount::Text(plan.graph_name.clone())),
        ("world_size", "Ranks", count(plan.world_size)),
        ("batch_rows", "Rows of the batch", Amount::Count(plan.batch_rows)),
        ("stages", "Stages", Amount::Count(plan.stages.len() as u64)),
        ("microbatches", "Microbatches", count(plan.microbatches)),
        ("schedule", "Schedule", Amount::Text(plan.schedule.to_string())),
        ("step_us", "Step", Amount::Us(plan.predicted.step_us)),
        ("computing", "Computing", Amount::Share(figures.computing)),
        ("idle", "Idle", Amount::Share(figures.idle)),
        ("reducing", "Reducing gradients", Amount::Share(figures.reducing)),
        ("updating", "Optimizer", Amount::Share(figures.updating)),
        ("peak_bytes", "Peak memory", Amount::Bytes(peak_bytes)),
    ]
}

/// Both lists of Stages hold the same main Ops, in order.
fn segments(left: &[StagePlan], right: &[StagePlan]) -> Vec<Segment> {
    let mut segments = Vec::new();
    let mut first_op = 0;
    let (mut left_stage, mut right_stage) = (0, 0);
    while let (Some(left), Some(right)) = (left.get(left_stage), right.get(right_stage)) {
        let end_op = left.ops.end.min(right.ops.end);
        segments.push(Segment {
            first_op,
            end_op,
            left_stage,
            right_stage,
            modules: modules(OpRun { first: first_op, end: end_op }, left, right),
            same: placement(left) == placement(right),
            left: describe(left_stage, left),
            right: describe(right_stage, right),
        });
        first_op = end_op;
        left_stage += usize::from(left.ops.end == end_op);
        right_stage += usize::from(right.ops.end == end_op);
    }
    segments
}

/// Those of the smaller Stage, which has all of these Ops and perhaps more.
fn modules(ops: OpRun, left: &StagePlan, right: &StagePlan) -> Vec<String> {
    let len = |stage: &StagePlan| stage.ops.end - stage.ops.first;
    let smaller = if len(left) <= len(right) { left } else { right };
    if smaller.ops == ops {
        return smaller.modules.clone();
    }
    smaller.modules.iter().map(|modules| format!("part of {modules}")).collect()
}

/// `1: ranks 4-7, recompute`.
fn describe(number: usize, stage: &StagePlan) -> String {
    format!("{number}: {}", placement(stage))
}

/// `ranks 4-7, recompute`.
fn placement(stage: &StagePlan) -> String {
    let ranks = match stage.ranks.as_slice() {
        [only] => format!("rank {only}"),
        ranks => format!("ranks {}", runs(ranks)),
    };
    let saving = savers(stage);
    let separator = if saving.is_empty() { "" } else { ", " };
    format!("{ranks}{separator}{saving}")
}

impl Report for PlanDiff {
    fn text(&self, width: usize) -> String {
        if self.changes.is_empty() && self.same_stages() {
            return "The plans are the same.\n".to_owned();
        }
        let changes = self.changes.iter().map(|Change { label, left, right, .. }| {
            vec![(*label).to_owned(), left.text(), right.text(), left.change(right)]
        });
        // What differs less than can be shown is not shown.
        let changes: Vec<Vec<String>> = changes.filter(|row| row[1] != row[2]).collect();
        let columns = [text("Figure"), amount("Left"), amount("Right"), amount("Change")];
        let shown = if changes.is_empty() { String::new() } else { table(&columns, &changes, width) };
        if !self.same_graph {
            return shown + "\nThe plans divide different graphs, so their stages cannot be compared.\n";
        }
        if self.same_stages() {
            return shown + "\nThe stages are the same.\n";
        }
        let segments = self.segments.iter().map(|segment| {
            let Segment { modules, same, left, right, .. } = segment;
            let mark = if *same { "" } else { "*" };
            vec![modules.join(", "), left.clone(), right.clone(), mark.to_owned()]
        });
        let columns = [text("Modules"), text("Left"), text("Right"), text("Differs")];
        shown + "\nStages\n" + &table(&columns, &segments.collect::<Vec<_>>(), width)
    }
}
