//! What a Plan promises of the memory of a step.

use std::collections::HashMap;

use rannc_ir::{DType, Graph, ParamId, ValueDef, ValueId, batch_free_ops};

use crate::partition::{Partition, computed_types};
use crate::plan::{Plan, StagePlan};
use crate::predicted::{MemoryPrediction, WholePrediction};
use crate::program::{Bucket, Program, RankProgram};
use crate::schedule::{Order, Schedule};

/// Each amount of a Plan is cut off to whole bytes; there are fewer of them.
const CUT_OFF: u64 = 64;

/// What a Plan promises of the memory of a step; by default nothing.
#[derive(Clone, Debug, Default)]
pub struct Promises {
    batch_rows: u64,
    microbatches: u64,
    schedule: Option<Schedule>,
    /// By Stage.
    ranks: Vec<Vec<u32>>,
    /// Stages, each with one that uses what it makes.
    feeds: Vec<(usize, usize)>,
    stages: Vec<StagePromise>,
    values: HashMap<ValueId, Size>,
    /// What Replicas send each other of a Param.
    params: HashMap<ParamId, u64>,
}

/// Of a rank of a Stage.
#[derive(Clone, Debug)]
struct StagePromise {
    replicas: u64,
    /// Rows of each size of microbatch on the largest Replica; none where all are equal.
    sizes: Vec<u64>,
    /// Activations, and what comes in for one microbatch; nothing where the Plan expects nothing.
    expected: Option<(MemoryPrediction, u64)>,
    whole: WholePrediction,
}

/// Of activations and messages, in the microbatches that the Plan was made for.
#[derive(Clone, Copy, Debug)]
pub(super) struct HeldPromise {
    /// True when it may hold all microbatches at a time.
    pub holds_all: bool,
    /// All microbatches that are held at a time, and messages.
    pub bytes: u64,
    /// One microbatch between its forward and its backward.
    pub kept_bytes: u64,
}

/// The size of a Value, by the number of rows.
#[derive(Clone, Debug)]
struct Size {
    element_bytes: u64,
    extents: Vec<(i64, i64)>,
}

impl Size {
    fn of(graph: &Graph, value: ValueId) -> Self {
        let found = &graph.values[value];
        let extents = found.shape.iter().map(|dim| (dim.per_row, dim.fixed)).collect();
        Self { element_bytes: found.dtype.bytes(), extents }
    }

    /// True when it has a certain size for each row.
    fn grows(&self) -> bool {
        self.extents.iter().filter(|(per_row, _)| *per_row != 0).count() == 1
    }

    fn at(&self, rows: u64) -> u64 {
        let extent = |&(per_row, fixed): &(i64, i64)| {
            let rows = i64::try_from(rows).unwrap_or(i64::MAX);
            u64::try_from(per_row.saturating_mul(rows).saturating_add(fixed)).unwrap_or(0)
        };
        self.extents.iter().map(extent).fold(self.element_bytes, u64::saturating_mul)
    }
}

impl Promises {
    /// What a Plan promises of the Graph that it was made for, divided as it says.
    pub fn new(plan: &Plan, graph: &Graph, partition: &Partition) -> Self {
        let stage = |stage: &StagePlan| {
            let memory = stage.predicted.memory;
            StagePromise {
                replicas: stage.ranks.len() as u64,
                sizes: stage.predicted.sizes.iter().map(|size| size.rows).collect(),
                expected: (memory.total_bytes() > 0).then_some((memory, stage.predicted.in_bytes)),
                whole: stage.predicted.whole,
            }
        };
        // A Plan leaves out outputs that no part of the batch decides, such as a table repeated for each row.
        let batch_free = batch_free_ops(graph);
        let is_planned =
            |value: &ValueId| !matches!(graph.values[*value].def, ValueDef::Op { op, .. } if batch_free[op]);
        let of_outputs = partition.stages.iter().flat_map(|part| part.outputs.iter().copied()).filter(is_planned);
        let moved = partition.crossings.iter().map(|crossing| crossing.value).chain(of_outputs);
        Self {
            batch_rows: plan.batch_rows,
            microbatches: u64::from(plan.microbatches),
            schedule: Some(plan.schedule.clone()),
            ranks: plan.placement().ranks,
            feeds: partition.edges().collect(),
            stages: plan.stages.iter().map(stage).collect(),
            values: moved.map(|value| (value, Size::of(graph, value))).collect(),
            params: gathered_bytes(graph),
        }
    }

    /// True when they are of as many Stages.
    pub(super) fn are_of(&self, partition: &Partition) -> bool {
        self.stages.len() == partition.stages.len()
    }

    fn stage(&self, stage: u32) -> &StagePromise {
        &self.stages[stage as usize]
    }

    /// What is whole for a while on a rank, for all its Stages.
    pub(super) fn whole(&self, own: &RankProgram) -> WholePrediction {
        own.seats.iter().map(|seat| self.stage(seat.stage).whole).fold(WholePrediction::default(), |sum, one| {
            WholePrediction {
                params_bytes: sum.params_bytes.saturating_add(one.params_bytes),
                grads_bytes: sum.grads_bytes.saturating_add(one.grads_bytes),
            }
        })
    }

    /// By Stage, what a rank holds for it of activations and messages in the microbatches that have rows.
    pub(super) fn held(&self, program: &Program) -> Vec<Option<HeldPromise>> {
        let microbatches = program.microbatches.iter().filter(|&&rows| rows > 0).count();
        let count = u32::try_from(microbatches).unwrap_or(u32::MAX);
        let schedule = self.schedule.iter();
        let orders = schedule.flat_map(|schedule| schedule.stage_orders(&self.ranks, &self.feeds, count));
        let of_stage = |(stage, order): (&StagePromise, Order)| {
            let (memory, in_bytes) = stage.expected.filter(|_| stage.knows_sizes(program))?;
            HeldPromise::new(memory, in_bytes, order.in_flight().max(1), microbatches as u64)
        };
        self.stages.iter().zip(orders).map(of_stage).collect()
    }

    /// True when a Program's microbatches are those that the Plan was made for: rows that do not divide go to the first
    /// ranks, and of each rank to the first microbatches.
    pub(super) fn is_planned(&self, program: &Program) -> bool {
        let ranks = if program.gather_inputs { program.ranks.len() as u64 } else { 1 };
        let part = |all: u64, parts: u64, place: u64| all / parts + u64::from(place < all % parts);
        let of_rank = |rank: u64, mb: u64| part(part(self.batch_rows, ranks, rank), self.microbatches, mb);
        let planned = (0..self.microbatches).map(|mb| (0..ranks).map(|rank| of_rank(rank, mb)).sum::<u64>());
        planned.eq(program.microbatches.iter().copied())
    }

    /// The size of rows of a Value that goes from Stage to Stage.
    pub(super) fn value_bytes(&self, value: ValueId, rows: u64) -> u64 {
        self.values.get(&value).map_or(0, |size| size.at(rows))
    }

    /// The size of what is gathered of a bucket, but for what evens out its parts.
    pub(super) fn gathered_bytes(&self, bucket: &Bucket) -> u64 {
        bucket.params.iter().filter_map(|param| self.params.get(param)).sum()
    }

    /// The size of a Stage's outputs of the whole batch on its largest Replica.
    pub(super) fn outputs_bytes(&self, program: &Program, partition: &Partition, stage: u32) -> u64 {
        let outputs = partition.stages[stage as usize].outputs.iter();
        let sizes: Vec<&Size> =
            outputs.filter_map(|value| self.values.get(value)).filter(|size| size.grows()).collect();
        let rows = self.stage(stage).rows(program);
        rows.flat_map(|rows| sizes.iter().map(move |size| size.at(rows))).fold(0, u64::saturating_add)
    }
}

impl StagePromise {
    /// Rows of each microbatch that has any on the largest Replica.
    fn rows(&self, program: &Program) -> impl Iterator<Item = u64> {
        let with_rows = program.microbatches.iter().filter(|&&rows| rows > 0);
        with_rows.map(|rows| rows.div_ceil(self.replicas.max(1)))
    }

    /// True when the Plan knows microbatches of these sizes on the Stage.
    fn knows_sizes(&self, program: &Program) -> bool {
        let mut sizes: Vec<u64> = self.rows(program).collect();
        sizes.dedup();
        if self.sizes.is_empty() { sizes.len() == 1 } else { sizes == self.sizes }
    }
}

impl HeldPromise {
    /// Of a Stage that holds so many of its microbatches at a time; nothing where that is not what the Plan expects.
    fn new(memory: MemoryPrediction, in_bytes: u64, held: u64, microbatches: u64) -> Option<Self> {
        // A microbatch has what was received for it; figures with less are those of another order.
        let fits = memory.activations_bytes / held >= in_bytes;
        fits.then(|| Self {
            holds_all: held >= microbatches,
            bytes: memory.activations_bytes.saturating_add(memory.comm_bytes).saturating_add(CUT_OFF + held),
            kept_bytes: memory.activations_bytes.div_ceil(held),
        })
    }
}

/// What Replicas send each other of each Param where each has a part of it.
fn gathered_bytes(graph: &Graph) -> HashMap<ParamId, u64> {
    let bytes = |(id, dtype): (ParamId, DType)| {
        let value = graph.params[id].value;
        (id, Size::of(graph, value).at(0) / graph.values[value].dtype.bytes() * dtype.bytes())
    };
    computed_types(graph).into_iter().map(bytes).collect()
}
