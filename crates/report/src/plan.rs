//! Plans as tables.

use rannc_cost::{format_bytes, format_us};
use rannc_plan::{Interval, Plan, StagePlan, StagePrediction, split_even};

use serde::Serialize;

use crate::Report;
use crate::format::{counted, percent, repeats, runs, savers};
use crate::table::table;

pub(crate) fn title(plan: &Plan, batch_rows: u64) -> String {
    format!(
        "Plan of {}: {} on {}, {} in {}, {}\n",
        plan.graph_name,
        counted(plan.stages.len() as u64, "stage", "stages"),
        counted(u64::from(plan.world_size), "rank", "ranks"),
        counted(batch_rows, "row", "rows"),
        counted(u64::from(plan.microbatches), "microbatch", "microbatches"),
        plan.schedule,
    )
}

/// Rows of each microbatch, if all ranks bring equally many.
pub(crate) fn microbatch_rows(plan: &Plan, batch_rows: u64) -> Vec<u64> {
    let mut rows = vec![0; plan.microbatches as usize];
    for rank_rows in split_even(batch_rows, plan.world_size as usize) {
        for (sum, part) in rows.iter_mut().zip(split_even(rank_rows.rows(), plan.microbatches as usize)) {
            *sum += part.rows();
        }
    }
    rows.retain(|&rows| rows > 0);
    rows
}

/// Rows of each Replica in the largest microbatch.
fn replica_rows(plan: &Plan, batch_rows: u64, stage: &StagePlan) -> Vec<u64> {
    let largest = microbatch_rows(plan, batch_rows).into_iter().max().unwrap_or(0);
    split_even(largest, stage.ranks.len()).into_iter().map(Interval::rows).collect()
}

/// Times and, if a Stage saves memory, how.
fn stage_table(plan: &Plan) -> String {
    let header = [
        "Stage", "Modules", "Replicas", "Ranks", "Rows", "Forward", "Backward", "Transfer", "Reduce", "Update",
        "Saving",
    ];
    let deployment = Deployment::new(plan, plan.batch_rows);
    let rows = plan.stages.iter().zip(&deployment.stages).enumerate().map(|(number, (stage, deployed))| {
        let StagePrediction { forward_us, backward_us, transfer_us, reduce_us, update_us, .. } = stage.predicted;
        let mut row = deployed.row(number);
        row.extend([forward_us, backward_us, transfer_us, reduce_us, update_us].map(format_us));
        row.push(savers(stage));
        row
    });
    table(&header, rows.collect(), 2..10)
}

fn memory_table(plan: &Plan, limit_bytes: Option<u64>) -> String {
    let mut header = vec![
        "Stage",
        "Parameters",
        "Gradients",
        "Optimizer",
        "Activations",
        "Temporary",
        "Transfers",
        "Framework",
        "Total",
    ];
    header.extend(limit_bytes.map(|_| "Limit"));
    let rows = plan.stages.iter().enumerate().map(|(number, stage)| {
        let memory = &stage.predicted.memory;
        let mut row = vec![number.to_string()];
        row.extend(memory.uses().map(|(_, bytes)| format_bytes(bytes)));
        row.push(format_bytes(memory.total_bytes()));
        row.extend(limit_bytes.map(format_bytes));
        row
    });
    table(&header, rows.collect(), 1..10)
}

/// What a Plan is, and what is predicted for a step.
pub(crate) fn summary(plan: &Plan) -> String {
    let predicted = &plan.predicted;
    format!(
        "{}Predicted: {} a step, devices idle {} of it; no plan takes less than {}\n",
        title(plan, plan.batch_rows),
        format_us(predicted.step_us),
        percent(predicted.bubble),
        format_us(predicted.lower_bound_us),
    )
}

/// A Plan with its predictions: times of one microbatch on the largest Replica of each Stage (the
/// reduction and the update: of a step), memory of one device, and the limit if it is given.
pub fn plan_tables(plan: &Plan, limit_bytes: Option<u64>) -> String {
    format!(
        "{}\nTime of a microbatch\n{}\nMemory of a device\n{}",
        summary(plan),
        stage_table(plan),
        memory_table(plan, limit_bytes),
    )
}

/// A Plan to show with its predictions. Its JSON is that of the plan file.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(transparent)]
pub struct PlanTables<'a> {
    /// The Plan.
    pub plan: &'a Plan,
    /// What a device may use, if it is known.
    #[serde(skip)]
    pub limit_bytes: Option<u64>,
}

impl Report for PlanTables<'_> {
    fn text(&self) -> String {
        plan_tables(self.plan, self.limit_bytes)
    }
}

/// How a Plan divides a batch that comes in equal parts from all ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Deployment {
    #[serde(skip)]
    title: String,
    /// Rows of the batch.
    pub batch_rows: u64,
    /// Rows of each microbatch that has any.
    pub microbatch_rows: Vec<u64>,
    /// The Stages.
    pub stages: Vec<DeploymentStage>,
}

/// One Stage of a [`Deployment`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DeploymentStage {
    /// Short summary of the modules that it runs.
    pub modules: Vec<String>,
    /// The rank of each Replica.
    pub ranks: Vec<u32>,
    /// Rows of each Replica in the largest microbatch.
    pub replica_rows: Vec<u64>,
}

impl DeploymentStage {
    fn row(&self, number: usize) -> Vec<String> {
        let Self { modules, ranks, replica_rows } = self;
        vec![number.to_string(), modules.join("\n"), ranks.len().to_string(), runs(ranks), repeats(replica_rows)]
    }
}

impl Deployment {
    /// The rows that each Stage of `plan` gets of a batch of `batch_rows` rows.
    pub fn new(plan: &Plan, batch_rows: u64) -> Self {
        let stages = plan.stages.iter().map(|stage| DeploymentStage {
            modules: stage.modules.clone(),
            ranks: stage.ranks.clone(),
            replica_rows: replica_rows(plan, batch_rows, stage),
        });
        Self {
            title: title(plan, batch_rows),
            batch_rows,
            microbatch_rows: microbatch_rows(plan, batch_rows),
            stages: stages.collect(),
        }
    }
}

impl Report for Deployment {
    fn text(&self) -> String {
        let header = ["Stage", "Modules", "Replicas", "Ranks", "Rows"];
        let rows = self.stages.iter().enumerate().map(|(number, stage)| stage.row(number));
        let microbatches = repeats(&self.microbatch_rows);
        format!("{}Rows of the microbatches: {microbatches}\n{}", self.title, table(&header, rows.collect(), 2..5))
    }
}

#[cfg(test)]
mod tests {
    use rannc_cost::Cluster;
    use rannc_ir::testing::mlp;
    use rannc_plan::ScheduleKind;
    use rannc_search::{Settings, plan};

    use super::*;

    fn sample() -> Plan {
        let cluster = Cluster::preset("cpu", 1, 3).expect("3 devices");
        let settings = Settings {
            world_size: 3,
            batch_rows: 24,
            replicas: Some(vec![2, 1]),
            microbatches: Some(4),
            ..Settings::default()
        };
        let plan = plan(&mlp(6, 64), &cluster, &[], &settings).expect("fits").plan;
        Plan { schedule: ScheduleKind::OneForwardOneBackward, ..plan }
    }

    #[test]
    fn a_deployment_shows_rows() {
        let text = Deployment::new(&sample(), 25).text();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "Plan of Mlp: 2 stages on 3 ranks, 25 rows in 4 microbatches, 1F1B");
        assert_eq!(lines[1], "Rows of the microbatches: 7, 3 x 6");
        assert!(lines[3].contains("Stage") && lines[3].contains("Rows"), "{text}");
        assert!(lines[5].contains("0-1") && lines[5].contains("4, 3"), "{text}");
        assert!(lines[6].contains(" 7 "), "{text}");
    }

    #[test]
    fn the_tables_hold_every_stage_and_the_limit() {
        let text = plan_tables(&sample(), Some(1 << 30));
        assert!(text.contains("Time of a microbatch") && text.contains("Memory of a device"));
        assert_eq!(text.matches("1.00 GiB").count(), 2, "{text}");
        assert!(!plan_tables(&sample(), None).contains("Limit"));
    }
}
