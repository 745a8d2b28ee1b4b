//! What a step of a Plan comes to: speed, and what the devices' time goes to.

use rannc_cost::{Cluster, OpWork, Operation, base_name, format_us};
use rannc_ir::{DType, Dim, Graph, Op, ValueDef, ValueId};
use rannc_plan::Plan;
use serde::Serialize;

use crate::format::{decimal, paragraph, percent};

/// A Plan that may be above the optimum by less than this share is told to be optimal.
const OPTIMAL: f64 = 0.000_5;

/// What a batch asks for, whatever the Plan.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Workload {
    tokens_per_row: Option<u64>,
    /// Time of the products of all rows if every device computed them at its peak.
    ideal_us: f64,
}

impl Workload {
    /// What a batch of `batch_rows` rows asks of the first `devices` devices of a cluster.
    pub fn new(graph: &Graph, cluster: &Cluster, devices: u32, batch_rows: u64) -> Self {
        let mut counts = vec![0_u32; cluster.kinds.len()];
        (0..devices.min(cluster.devices())).for_each(|rank| counts[cluster.kind_of(rank)] += 1);
        let ideal_s = graph.ops.ids().map(|id| {
            let work = OpWork::new(&Operation::new(graph, id));
            let flops = work.forward.flops.at(batch_rows) + work.backward.flops.at(batch_rows);
            let kinds = cluster.kinds.iter().zip(&counts);
            let peak: f64 = kinds.map(|(device, &count)| f64::from(count) * work.peak_flops_per_s(device)).sum();
            if flops > 0.0 { flops / peak } else { 0.0 }
        });
        Self { tokens_per_row: tokens_per_row(graph), ideal_us: ideal_s.sum::<f64>() * 1e6 }
    }
}

/// The length of the sequences whose elements the model looks up in a table.
fn tokens_per_row(graph: &Graph) -> Option<u64> {
    let lookups = graph.ops.values().filter(|op| base_name(&op.target) == "embedding");
    lookups.flat_map(Op::operands).filter_map(|value| sequence_length(graph, value)).max()
}

fn sequence_length(graph: &Graph, mut value: ValueId) -> Option<u64> {
    while let Some(base) = graph.values[value].alias_of.filter(|&base| base < value) {
        value = base;
    }
    let value = &graph.values[value];
    let is_input = matches!(value.def, ValueDef::Input(_)) && matches!(value.dtype, DType::Int64 | DType::Int32);
    match value.shape.as_slice() {
        [rows, Dim { per_row: 0, fixed }] if is_input && *rows == Dim::rows(1) => u64::try_from(*fixed).ok(),
        _ => None,
    }
}

/// A step in figures. The four shares of the devices' time add up to 1.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct StepFigures {
    /// Time of a step.
    pub step_us: f64,
    /// Rows, or samples, a second.
    pub rows_per_s: f64,
    /// Tokens a second, where the model looks tokens up.
    pub tokens_per_s: Option<f64>,
    /// Model FLOPs utilisation: floating-point operations of forward and backward, without what is computed again,
    /// as a share of what the devices could do at their peak. Missing where the model is not known.
    pub mfu: Option<f64>,
    /// How far the Plan may be above the optimum, as a share of it. Missing where that is not known.
    pub gap: Option<f64>,
    /// Share of forward and backward.
    pub computing: f64,
    /// Share of waiting, for messages or for others.
    pub idle: f64,
    /// Share of the gradient reduction that the backward does not hide.
    pub reducing: f64,
    /// Share of the optimizer.
    pub updating: f64,
}

impl StepFigures {
    /// What the Plan predicts.
    pub fn predicted(plan: &Plan, workload: Option<&Workload>) -> Self {
        let predicted = &plan.predicted;
        let device_us = f64::from(plan.world_size) * predicted.step_us;
        let share = |us: fn(&rannc_plan::StagePrediction) -> f64| {
            let stages = plan.stages.iter().map(|stage| stage.ranks.len() as f64 * us(&stage.predicted));
            if device_us > 0.0 { stages.sum::<f64>() / device_us } else { 0.0 }
        };
        let bound_us = predicted.lower_bound_us;
        let gap = (bound_us > 0.0).then(|| (predicted.step_us / bound_us - 1.0).max(0.0));
        let shares = Shares {
            not_computing: predicted.bubble,
            reducing: share(|stage| stage.reduce_us),
            updating: share(|stage| stage.update_us),
        };
        Self { gap, ..Self::new(predicted.step_us, plan.batch_rows, workload, shares) }
    }

    pub(crate) fn new(step_us: f64, batch_rows: u64, workload: Option<&Workload>, shares: Shares) -> Self {
        let Shares { not_computing, reducing, updating } = shares;
        // Predictions of single Stages may add up to more than the step of all.
        let updating = updating.min(not_computing);
        let reducing = reducing.min(not_computing - updating);
        let rows_per_s = if step_us > 0.0 { batch_rows as f64 / step_us * 1e6 } else { 0.0 };
        let tokens_per_row = workload.and_then(|workload| workload.tokens_per_row);
        Self {
            step_us,
            rows_per_s,
            tokens_per_s: tokens_per_row.map(|tokens| tokens as f64 * rows_per_s),
            mfu: workload.filter(|_| step_us > 0.0).map(|workload| workload.ideal_us / step_us),
            gap: None,
            computing: 1.0 - not_computing,
            idle: not_computing - reducing - updating,
            reducing,
            updating,
        }
    }

    /// `31.36 ms a step, 8.2 k samples/s, 1.0 M tokens/s, MFU 41.2%`.
    pub(crate) fn speed(&self) -> String {
        let tokens = self.tokens_per_s.map(|tokens| format!("{} tokens/s", decimal(tokens)));
        let mfu = self.mfu.map(|mfu| format!("MFU {}", percent(mfu)));
        let samples = format!("{} samples/s", decimal(self.rows_per_s));
        let all = [Some(format!("{} a step", format_us(self.step_us))), Some(samples), tokens, mfu];
        all.into_iter().flatten().collect::<Vec<_>>().join(", ")
    }

    /// What the devices do, as a paragraph.
    pub(crate) fn devices(&self, width: usize) -> String {
        let text = format!(
            "Devices: {} computing, {} idle, {} reducing gradients, {} in the optimizer",
            percent(self.computing),
            percent(self.idle),
            percent(self.reducing),
            percent(self.updating)
        );
        paragraph(&text, width)
    }

    /// `optimal`, or how far it may be above the optimum.
    pub(crate) fn rank(&self) -> Option<String> {
        self.gap.map(|gap| {
            if gap < OPTIMAL { "optimal".to_owned() } else { format!("at most {} above the optimum", percent(gap)) }
        })
    }
}

/// Shares of the devices' time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shares {
    /// Everything but forward and backward.
    pub(crate) not_computing: f64,
    pub(crate) reducing: f64,
    pub(crate) updating: f64,
}
