//! Plans as tables.

use std::collections::BTreeSet;

use rannc_cost::{format_bytes, format_us};
use rannc_plan::{Crew, Interval, Order, Plan, Schedule, StagePlan, StagePrediction, split_even};

use serde::Serialize;

use crate::Report;
use crate::figures::{StepFigures, Workload};
use crate::format::{counted, each, paragraph, repeats, runs, savers};
use crate::table::{amount, table, text};

/// `Plan of Bert: 2 stages on 8 ranks (1 + 7 replicas), 256 rows in 4 microbatches, 1F1B`.
pub(crate) fn title(plan: &Plan, batch_rows: u64, width: usize) -> String {
    let replicas: Vec<usize> = plan.stages.iter().map(|stage| stage.ranks.len()).collect();
    let (divided, order) = if let [_] = replicas[..] {
        (String::new(), String::new())
    } else {
        (format!(" ({} replicas)", each(&replicas)), format!(", {}", plan.schedule))
    };
    let text = format!(
        "Plan of {}: {} on {}{divided}, {} in {}{order}",
        plan.graph_name,
        counted(plan.stages.len() as u64, "stage", "stages"),
        counted(u64::from(plan.world_size), "rank", "ranks"),
        counted(batch_rows, "row", "rows"),
        counted(u64::from(plan.microbatches), "microbatch", "microbatches"),
    );
    paragraph(&text, width)
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
fn stage_table(plan: &Plan, width: usize) -> String {
    let columns = [
        text("Stage"),
        text("Modules"),
        amount("Ranks"),
        amount("Rows"),
        amount("Forward").begins(),
        amount("Backward"),
        amount("Transfer"),
        amount("Reduce"),
        amount("Optimizer"),
        text("Saving"),
    ];
    let deployment = Deployment::new(plan, plan.batch_rows);
    let rows = plan.stages.iter().zip(&deployment.stages).enumerate().map(|(number, (stage, deployed))| {
        let StagePrediction { forward_us, backward_us, transfer_us, reduce_us, update_us, .. } = stage.predicted;
        let mut row = deployed.row(number);
        row.extend([forward_us, backward_us, transfer_us, reduce_us, update_us].map(format_us));
        row.push(savers(stage));
        row
    });
    table(&columns, &rows.collect::<Vec<_>>(), width)
}

fn memory_table(plan: &Plan, limit_bytes: Option<u64>, width: usize) -> String {
    let columns = [
        text("Stage"),
        amount("Parameters"),
        amount("Gradients"),
        amount("Optimizer"),
        amount("Activations"),
        amount("Temporary"),
        amount("Transfers"),
        amount("Framework"),
        amount("Total"),
        amount("Limit"),
    ];
    let rows = plan.crews().into_iter().map(|crew| {
        let memory = plan.memory_of(&crew);
        let mut row = vec![each_stage(&crew)];
        row.extend(memory.uses().map(|(_, bytes)| format_bytes(bytes)));
        row.push(format_bytes(memory.total_bytes()));
        row.extend(limit_bytes.map(format_bytes));
        row
    });
    table(&columns, &rows.collect::<Vec<_>>(), width)
}

/// What a Plan is, and what is predicted for a step.
pub(crate) fn summary(plan: &Plan, workload: Option<&Workload>, width: usize) -> String {
    let figures = StepFigures::predicted(plan, workload);
    let rank = figures.rank().map(|rank| format!("; {rank}")).unwrap_or_default();
    format!(
        "{}{}{}{}{}{}{}",
        title(plan, plan.batch_rows, width),
        precision(plan, width),
        eager_spans(plan, width),
        memory_budget(plan, width),
        paragraph(&format!("Predicted: {}{rank}", figures.speed()), width),
        figures.devices(width),
        Deployment::new(plan, plan.batch_rows).remarks(width),
    )
}

/// In which types the model computes, if the Plan tells.
fn precision(plan: &Plan, width: usize) -> String {
    if plan.precision.is_empty() { String::new() } else { paragraph(&format!("Precision: {}", plan.precision), width) }
}

/// What is not compiled, if the Plan tells.
fn eager_spans(plan: &Plan, width: usize) -> String {
    match plan.eager_spans.len() {
        0 => String::new(),
        count => {
            let kinds = counted(count as u64, "kind of span", "kinds of spans");
            paragraph(&format!("Not compiled: {kinds}, which were measured to be no slower as they are"), width)
        }
    }
}

/// What compiled Spans keep, if the Plan limits it.
fn memory_budget(plan: &Plan, width: usize) -> String {
    plan.memory_budget_percent.map_or_else(String::new, |percent| {
        let text =
            format!("Compiled: spans compute some of what backwards need again, within a memory budget of {percent}%");
        paragraph(&text, width)
    })
}

/// A Plan to show with its predictions: times of one microbatch on the largest Replica of each Stage, memory of one
/// device, and the limit if it is given. Its JSON is that of the plan file.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(transparent)]
pub struct PlanTables<'a> {
    /// The Plan.
    pub plan: &'a Plan,
    /// What a device may use, if it is known.
    #[serde(skip)]
    pub limit_bytes: Option<u64>,
    /// What a batch asks for, if the model is known.
    #[serde(skip)]
    pub workload: Option<Workload>,
    /// True when the order of a Schedule with a name is told as well.
    #[serde(skip)]
    pub in_order: bool,
}

impl Report for PlanTables<'_> {
    fn text(&self, width: usize) -> String {
        let Self { plan, limit_bytes, workload, in_order } = self;
        let told = *in_order || matches!(plan.schedule, Schedule::Explicit(_));
        let orders = if told { plan.orders() } else { None };
        format!(
            "{}\nTime of a microbatch; reduce and optimizer once a step\n{}\nMemory of a device\n{}{}",
            summary(plan, workload.as_ref(), width),
            stage_table(plan, width),
            memory_table(plan, *limit_bytes, width),
            orders.map(|orders| order_of_crews(&plan.crews(), &orders, width)).unwrap_or_default(),
        )
    }
}

/// `0`, or `0, 2`.
fn each_stage(crew: &Crew) -> String {
    crew.stages.iter().map(u32::to_string).collect::<Vec<_>>().join(", ")
}

/// What each Stage computes in which order, or where ranks have several, each of these ranks.
fn order_of_crews(crews: &[Crew], orders: &[Order], width: usize) -> String {
    let line = |(crew, order): (&Crew, &Order)| {
        let kind = if crew.is_shared() { "Stages" } else { "Stage" };
        paragraph(&format!("{kind} {}: {order}", each_stage(crew)), width) + "\n"
    };
    let lines: String = crews.iter().zip(orders).map(line).collect();
    let whose = if crews.iter().any(Crew::is_shared) { "of each rank, by its stages" } else { "of each stage" };
    format!("\nOrder {whose}\n{}", lines.trim_end())
}

/// How a Plan divides a batch that comes in equal parts from all ranks.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Deployment<'a> {
    #[serde(skip)]
    plan: &'a Plan,
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
        vec![number.to_string(), modules.join(", "), runs(ranks), repeats(replica_rows)]
    }

    /// The ranks of Replicas that get no rows of any microbatch.
    fn idle_ranks(&self) -> Vec<u32> {
        let without = self.ranks.iter().zip(&self.replica_rows).filter(|&(_, &rows)| rows == 0);
        without.map(|(&rank, _)| rank).collect()
    }
}

/// Devices that get no rows of any microbatch.
pub(crate) fn idle_devices(plan: &Plan) -> usize {
    let deployed = Deployment::new(plan, plan.batch_rows);
    let replicas = deployed.stages.iter().flat_map(|stage| stage.ranks.iter().zip(&stage.replica_rows));
    let busy: BTreeSet<u32> = replicas.filter(|&(_, &rows)| rows > 0).map(|(&rank, _)| rank).collect();
    plan.world_size as usize - busy.len()
}

impl<'a> Deployment<'a> {
    /// The rows that each Stage of `plan` gets of a batch of `batch_rows` rows.
    pub fn new(plan: &'a Plan, batch_rows: u64) -> Self {
        let stages = plan.stages.iter().map(|stage| DeploymentStage {
            modules: stage.modules.clone(),
            ranks: stage.ranks.clone(),
            replica_rows: replica_rows(plan, batch_rows, stage),
        });
        Self { plan, batch_rows, microbatch_rows: microbatch_rows(plan, batch_rows), stages: stages.collect() }
    }

    /// Tells which devices the batch leaves without work.
    fn remarks(&self, width: usize) -> String {
        let most = self.microbatch_rows.iter().max().copied().unwrap_or(0);
        let remarks = self.stages.iter().enumerate().map(|(number, stage)| match stage.idle_ranks().as_slice() {
            [] => String::new(),
            ranks => {
                let text = format!(
                    "Without work: {} of the {} replicas of stage {number} ({} {}), because no microbatch has more than {}",
                    ranks.len(),
                    stage.ranks.len(),
                    if ranks.len() == 1 { "rank" } else { "ranks" },
                    runs(ranks),
                    counted(most, "row", "rows"),
                );
                paragraph(&text, width)
            }
        });
        remarks.collect()
    }
}

impl Report for Deployment<'_> {
    fn text(&self, width: usize) -> String {
        let columns = [text("Stage"), text("Modules"), amount("Ranks"), amount("Rows")];
        let rows = self.stages.iter().enumerate().map(|(number, stage)| stage.row(number));
        format!(
            "{}{}{}\n{}",
            title(self.plan, self.batch_rows, width),
            paragraph(&format!("Rows of the microbatches: {}", repeats(&self.microbatch_rows)), width),
            self.remarks(width),
            table(&columns, &rows.collect::<Vec<_>>(), width)
        )
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
        Plan { schedule: ScheduleKind::OneForwardOneBackward.into(), ..plan }
    }

    #[test]
    fn a_deployment_shows_rows() {
        let text = Deployment::new(&sample(), 25).text(100);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "Plan of Mlp: 2 stages on 3 ranks (2 + 1 replicas), 25 rows in 4 microbatches, 1F1B");
        assert_eq!(lines[1], "Rows of the microbatches: 7, 3 x 6");
        assert!(lines[3].contains("Stage") && lines[3].contains("Rows"), "{text}");
        assert!(lines[5].contains("0-1") && lines[5].contains("4, 3"), "{text}");
        assert!(lines[6].ends_with(" 7"), "{text}");
    }

    #[test]
    fn what_is_not_compiled_is_told() {
        let plan = Plan { eager_spans: vec!["s1".to_owned(), "s2".to_owned()], ..sample() };
        let told = "Not compiled: 2 kinds of spans, which were measured to be no slower as they are\n";
        assert!(summary(&plan, None, 120).contains(told));
        assert!(!summary(&sample(), None, 120).contains("Not compiled"));
    }

    #[test]
    fn a_budget_of_compiled_spans_is_told() {
        let plan = Plan { memory_budget_percent: Some(80), ..sample() };
        let told = "Compiled: spans compute some of what backwards need again, within a memory budget of 80%\n";
        assert!(summary(&plan, None, 120).contains(told));
        assert!(!summary(&sample(), None, 120).contains("Compiled"));
    }

    #[test]
    fn replicas_without_rows_are_told() {
        let plan = sample();
        assert!(!Deployment::new(&plan, 8).text(80).contains("Without work"));
        let text = Deployment::new(&plan, 1).text(200);
        let remark =
            "Without work: 1 of the 2 replicas of stage 0 (rank 1), because no microbatch has more than 1 row\n";
        assert!(text.contains(remark), "{text}");
        assert_eq!(idle_devices(&Plan { batch_rows: 1, ..plan }), 1);
    }

    #[test]
    fn the_tables_hold_every_stage_and_the_limit() {
        let plan = sample();
        let tables = PlanTables { plan: &plan, limit_bytes: Some(1 << 30), workload: None, in_order: false };
        let text = tables.text(120);
        assert!(text.contains("Time of a microbatch") && text.contains("Memory of a device"));
        assert_eq!(text.matches("1.00 GiB").count(), 2, "{text}");
        assert!(!PlanTables { limit_bytes: None, ..tables }.text(120).contains("Limit"));
        assert!(!text.contains("Order"), "{text}");
    }

    /// A name and a list are shown alike.
    #[test]
    fn the_order_of_a_named_schedule_is_that_of_its_list() {
        let named = sample();
        let listed = Plan { schedule: Schedule::Explicit(named.orders().expect("it tells edges")), ..named.clone() };
        let order_of = |plan: &Plan, in_order: bool| {
            let text = PlanTables { plan, limit_bytes: None, workload: None, in_order }.text(120);
            text.split_once("Order of each stage\n").map(|(_, order)| order.to_owned())
        };
        assert_eq!(
            order_of(&named, true).as_deref(),
            Some("Stage 0: F0 F1 B0 F2 B1 F3 B2 B3\n\nStage 1: F0 B0 F1 B1 F2 B2 F3 B3")
        );
        assert_eq!(order_of(&listed, true), order_of(&named, true));
        assert_eq!(order_of(&listed, false), order_of(&named, true));
        let stages = named.stages.iter().map(|stage| StagePlan { feeds: None, ..stage.clone() }).collect();
        assert_eq!(order_of(&Plan { stages, ..named }, true), None);
    }
}
