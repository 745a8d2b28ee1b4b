//! `rannc simulate`.

use std::fs;

use anyhow::{Result, anyhow, ensure};
use rannc_ir::{Graph, OpRun};
use rannc_plan::{Batch, Buckets, Call, Interval, Partition, Plan, Program, Trained, split_even};
use rannc_report::{Simulation, TracedStep, Workload, chrome_trace, draw};
use rannc_search::{PlanCosts, Settings, check_plan};

use crate::args::{ModelArgs, SimulateArgs};
use crate::context::Context;
use crate::files::{Model, read_plan};
use crate::printer::Printer;
use crate::search::in_words;

pub(crate) fn run(args: SimulateArgs, context: &Context) -> Result<Printer> {
    let SimulateArgs {
        plan,
        model: ModelArgs { graph, profile },
        cluster,
        batch,
        optimizer_factor,
        timeline: draws,
        trace,
        format,
    } = args;
    let plan_path = plan;
    let plan = read_plan(&plan_path)?;
    let model = Model::read(&graph, &cluster, &profile)?;
    let Model { graph, cluster, profiles } = &model;
    check_plan(&plan, graph).map_err(|error| anyhow!("{}: {error}", plan_path.display()))?;
    let devices = cluster.devices();
    ensure!(plan.world_size <= devices, "the plan is for {} ranks, the cluster has {devices} devices", plan.world_size);
    let batch_rows = batch.unwrap_or(plan.batch_rows);
    let settings = Settings {
        world_size: plan.world_size,
        batch_rows,
        optimizer_bytes_per_param_byte: optimizer_factor,
        ..Settings::default()
    };
    let costs = PlanCosts::new(graph, cluster, profiles, &settings, &plan).map_err(in_words)?;
    let ops: Vec<OpRun> = plan.stages.iter().map(|stage| stage.ops).collect();
    let program = program(graph, &plan, &Partition::new(graph, &ops)?, batch_rows, costs.call())?;
    let timeline = rannc_sim::simulate(&program, &costs)?;
    let mut printer = Printer::new(format, context);
    let workload = Workload::new(graph, cluster, plan.world_size, batch_rows);
    let simulation = Simulation::new(&plan, batch_rows, &workload, &timeline);
    printer.report(&simulation);
    if draws {
        printer.text(&format!("\n{}", draw(&timeline, &simulation, context.width)));
    }
    if let Some(trace) = trace {
        let modules: Vec<String> = plan.stages.iter().map(|stage| stage.modules.join(", ")).collect();
        let limit_bytes = model.limit_bytes(None);
        let step = TracedStep { program: &program, costs: &costs, timeline: &timeline, modules: &modules, limit_bytes };
        fs::write(&trace, chrome_trace(step))
            .map_err(|error| anyhow!("cannot write the trace {}: {error}", trace.display()))?;
        printer.note(&format!("Trace written to {}; open it in ui.perfetto.dev or chrome://tracing", trace.display()));
    }
    Ok(printer)
}

/// What all ranks do with a batch that comes in equal parts from all of them.
fn program(graph: &Graph, plan: &Plan, partition: &Partition, batch_rows: u64, call: Call) -> Result<Program> {
    let rows_per_rank = split_even(batch_rows, plan.world_size as usize).into_iter().map(Interval::rows).collect();
    let placement = plan.placement();
    let buckets = Buckets::of(graph, partition, &placement, &Trained::captured(graph));
    Ok(rannc_plan::build(&placement, partition, &buckets, &Batch { rows_per_rank, gather_inputs: true }, call)?)
}
