//! Plans as tables.

use rannc_cost::{format_bytes, format_us};
use rannc_plan::{Interval, MemoryPrediction, Plan, ScheduleKind, StagePlan, split_even};

use crate::table::{repeats, runs, table};

fn schedule(kind: ScheduleKind) -> &'static str {
    match kind {
        ScheduleKind::FillDrain => "fill-drain",
        ScheduleKind::OneForwardOneBackward => "1F1B",
    }
}

fn counted(count: u64, one: &str, many: &str) -> String {
    format!("{count} {}", if count == 1 { one } else { many })
}

fn title(plan: &Plan, batch_rows: u64) -> String {
    format!(
        "Plan of {}: {} on {}, {} in {}, {}\n",
        plan.graph_name,
        counted(plan.stages.len() as u64, "stage", "stages"),
        counted(u64::from(plan.world_size), "rank", "ranks"),
        counted(batch_rows, "row", "rows"),
        counted(u64::from(plan.microbatches), "microbatch", "microbatches"),
        schedule(plan.schedule),
    )
}

/// Rows of each microbatch, if all ranks bring equally many.
fn microbatch_rows(plan: &Plan, batch_rows: u64) -> Vec<u64> {
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
fn replica_rows(plan: &Plan, batch_rows: u64, stage: &StagePlan) -> String {
    let largest = microbatch_rows(plan, batch_rows).into_iter().max().unwrap_or(0);
    repeats(&split_even(largest, stage.ranks.len()).into_iter().map(Interval::rows).collect::<Vec<_>>())
}

fn stage_row(plan: &Plan, batch_rows: u64, number: usize) -> Vec<String> {
    let stage = &plan.stages[number];
    vec![
        number.to_string(),
        stage.modules.join("\n"),
        stage.ranks.len().to_string(),
        runs(&stage.ranks),
        replica_rows(plan, batch_rows, stage),
    ]
}

fn stage_table(plan: &Plan) -> String {
    let header = ["Stage", "Modules", "Replicas", "Ranks", "Rows", "Forward", "Backward", "Reduce", "Received", "Sent"];
    let rows = plan.stages.iter().enumerate().map(|(number, stage)| {
        let predicted = &stage.predicted;
        let mut row = stage_row(plan, plan.batch_rows, number);
        row.extend([predicted.forward_us, predicted.backward_us, predicted.reduce_us].map(format_us));
        row.extend([predicted.in_bytes, predicted.out_bytes].map(format_bytes));
        row
    });
    table(&header, rows.collect(), 2)
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
        let &MemoryPrediction {
            params_bytes,
            grads_bytes,
            optimizer_bytes,
            activations_bytes,
            workspace_bytes,
            comm_bytes,
            framework_bytes,
        } = memory;
        let mut row = vec![number.to_string()];
        row.extend([params_bytes, grads_bytes, optimizer_bytes, activations_bytes].map(format_bytes));
        row.extend([workspace_bytes, comm_bytes, framework_bytes, memory.total_bytes()].map(format_bytes));
        row.extend(limit_bytes.map(format_bytes));
        row
    });
    table(&header, rows.collect(), 1)
}

/// A Plan with its predictions: times of one microbatch on the largest Replica of each Stage (the
/// reduction: of a step), memory of one device, and the limit if it is given.
pub fn plan_tables(plan: &Plan, limit_bytes: Option<u64>) -> String {
    let predicted = &plan.predicted;
    format!(
        "{}Predicted: {} a step, devices idle {:.1}% of it; no plan takes less than {}\n\n\
         Time of a microbatch\n{}\nMemory of a device\n{}",
        title(plan, plan.batch_rows),
        format_us(predicted.step_us),
        100.0 * predicted.bubble,
        format_us(predicted.lower_bound_us),
        stage_table(plan),
        memory_table(plan, limit_bytes),
    )
}

/// The Stages of a Plan, their ranks, and the rows that each of them gets of a batch of `batch_rows`
/// rows, equally many from all ranks.
pub fn deployment(plan: &Plan, batch_rows: u64) -> String {
    let header = ["Stage", "Modules", "Replicas", "Ranks", "Rows"];
    let rows = (0..plan.stages.len()).map(|number| stage_row(plan, batch_rows, number));
    format!(
        "{}Rows of the microbatches: {}\n{}",
        title(plan, batch_rows),
        repeats(&microbatch_rows(plan, batch_rows)),
        table(&header, rows.collect(), 2),
    )
}

#[cfg(test)]
mod tests {
    use rannc_cost::Cluster;
    use rannc_ir::testing::mlp;
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
        plan(&mlp(6, 64), &cluster, &settings).expect("fits")
    }

    #[test]
    fn a_deployment_shows_rows() {
        let text = deployment(&sample(), 25);
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
