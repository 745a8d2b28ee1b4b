//! What a step takes of a Plan whose ranks have several Stages: its Program is simulated, for formulas and exact times know
//! one Stage a rank.

use std::error::Error;

use rannc_ir::{Graph, OpRun};
use rannc_plan::{Batch, Buckets, Call, Interval, Partition, Plan, StepPrediction, Trained, build, check, split_even};
use rannc_sim::{Costs, simulate};

use crate::error::SearchError;

/// The step of a Plan of the graph, where all ranks bring equally many rows.
pub(super) fn simulated_step(
    plan: &Plan,
    graph: &Graph,
    costs: &dyn Costs,
    call: Call,
) -> Result<StepPrediction, SearchError> {
    let no_step = |error: &dyn Error| SearchError::NoStep(error.to_string());
    let ops: Vec<OpRun> = plan.stages.iter().map(|stage| stage.ops).collect();
    let partition = Partition::new(graph, &ops).map_err(|error| no_step(&error))?;
    let placement = plan.placement();
    let buckets = Buckets::of(graph, &partition, &placement, &Trained::captured(graph));
    let rows_per_rank = split_even(plan.batch_rows, plan.world_size as usize).into_iter().map(Interval::rows).collect();
    let batch = Batch { rows_per_rank, gather_inputs: true };
    let program = build(&placement, &partition, &buckets, &batch, call).map_err(|error| no_step(&error))?;
    check(&program, &partition, &buckets.gradients).map_err(|error| no_step(&error))?;
    let timeline = simulate(&program, costs).map_err(|error| no_step(&error))?;
    Ok(StepPrediction { step_us: timeline.step_us, bubble: timeline.bubble(), lower_bound_us: 0.0 })
}
