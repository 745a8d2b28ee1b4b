//! From a division to a Plan.

use std::ops::Range;

use rannc_cost::{Blocks, ModuleNames};
use rannc_ir::{Graph, OpRun};
use rannc_plan::{BlockPlan, Order, PLAN_SCHEMA, Plan, Recompute, Schedule, StagePlan, StepPrediction};

use super::links::Linker;
use super::precision::precision;
use crate::chain::{BatchSpec, CrossingSpec, StateSpec};
use crate::price::{Again, At, Beside, Priced, Pricing, RankOrder, Replicas, TimedStage};
use crate::solve::{FoundStage, Solution};

/// What a Plan is made from beside the division.
pub(crate) struct Assembly<'a> {
    pub(crate) graph: &'a Graph,
    pub(crate) graph_hash: &'a str,
    pub(crate) blocks: &'a Blocks,
    pub(crate) crossings: &'a [CrossingSpec],
    pub(crate) states: &'a [StateSpec],
    pub(crate) batch: &'a BatchSpec,
    pub(crate) names: &'a ModuleNames<'a>,
    pub(crate) order: &'a RankOrder,
    pub(crate) pricing: &'a Pricing<'a>,
    pub(crate) eager_spans: &'a [String],
    pub(crate) memory_budget_percent: Option<u8>,
}

impl Assembly<'_> {
    /// What Stages hold beside what the division was priced with, where they do not fit with it.
    pub(crate) fn too_full(&self, solution: &Solution, plan: &Plan) -> Beside {
        let usable = |found: &FoundStage| self.pricing.at(self.order.place_at(&found.positions)).usable_bytes;
        let repeated = self.linker(solution).repeated_grads_bytes();
        let stages = solution.found.stages.iter().zip(&plan.stages).zip(repeated);
        stages
            .filter(|((found, planned), _)| planned.predicted.memory.total_bytes() as f64 > usable(found))
            .map(|((found, _), bytes)| ((found.run.start, found.run.end), bytes))
            .collect()
    }

    /// The Plan of a division, by its own Schedule, not sealed.
    pub(crate) fn plan(&self, solution: &Solution, lower_bound_us: f64) -> Plan {
        self.plan_by(Schedule::Named(solution.case.schedule), solution, lower_bound_us)
    }

    /// The Plan of a division by another Schedule.
    pub(crate) fn plan_by(&self, schedule: Schedule, solution: &Solution, lower_bound_us: f64) -> Plan {
        let settings = self.pricing.problem.settings;
        let ranks = self.used_ranks(solution);
        let (mut stages, mut times) = (Vec::new(), Vec::new());
        let linker = self.linker(solution);
        let orders = linker.orders(&schedule).into_iter().zip(linker.feeds());
        for (stage, (order, feeds)) in solution.found.stages.iter().zip(orders) {
            let (stage, timed) = self.stage(stage, &order, feeds, &ranks);
            stages.push(stage);
            times.push(timed);
        }
        let StepPrediction { step_us, bubble, .. } = step_prediction(&linker, &schedule, &mut stages, &times);
        // Both are sums of the same times, in another order.
        let lower_bound_us = lower_bound_us.min(step_us);
        let microbatches = u32::try_from(solution.case.microbatches).unwrap_or(u32::MAX);
        Plan {
            schema: PLAN_SCHEMA,
            pyrannc: env!("CARGO_PKG_VERSION").to_owned(),
            graph_hash: self.graph_hash.to_owned(),
            graph_name: self.graph.name.clone(),
            precision: precision(self.graph, settings.reduce_dtype),
            world_size: u32::try_from(ranks.len()).unwrap_or(u32::MAX),
            batch_rows: settings.batch_rows,
            microbatches: settings.microbatches.unwrap_or(microbatches),
            schedule,
            stages,
            eager_spans: self.eager_spans.to_vec(),
            memory_budget_percent: self.memory_budget_percent,
            predicted: StepPrediction { step_us, bubble, lower_bound_us },
            checksum: String::new(),
        }
    }

    /// What moves between the Stages of a division.
    pub(super) fn linker<'s>(&'s self, solution: &'s Solution) -> Linker<'s> {
        let &Self { crossings, states, batch, order, pricing, .. } = self;
        Linker::new(crossings, states, batch, order, pricing, &solution.found.stages)
    }

    /// A Stage with all that it costs.
    pub(super) fn priced(&self, FoundStage { run, saver, .. }: &FoundStage, at: &At<'_>) -> Priced {
        let workspace_bytes = self.pricing.run_workspace_bytes(run.clone(), at);
        self.pricing.stage(run.clone(), at, *saver, workspace_bytes)
    }

    /// Of microbatches in flight, each by its size; where Blocks are chosen to compute again, all as the largest.
    fn activations_bytes(&self, stage: &FoundStage, at: &At<'_>, priced: &Priced, order: &Order) -> f64 {
        let pricing = self.pricing;
        let held = at.rows.map(|rows| {
            if rows == at.most_rows() || matches!(stage.saver.again, Again::ToHold(_)) {
                return priced.held_bytes();
            }
            let mut smaller = self.priced(stage, &pricing.at_own_rows(at.place, rows));
            if order.splits_backward() {
                smaller.waiting_bytes = pricing.chain.waiting_bytes(&stage.run, rows);
            }
            smaller.held_bytes()
        });
        pricing.step.activations_bytes(order, held)
    }

    /// The Replicas of a priced Stage.
    pub(super) fn timed(
        &self,
        FoundStage { run, positions, saver }: &FoundStage,
        priced: &Priced,
        splits_backward: bool,
    ) -> TimedStage {
        let (place, sharding) = (self.order.place_at(positions), saver.sharding);
        let replicas = Replicas { run: run.clone(), place, sharding, again: priced.again, splits_backward };
        self.pricing.timed(&replicas, priced.end)
    }

    /// The ranks of the cluster that the Plan uses, increasing; it counts them from 0.
    fn used_ranks(&self, solution: &Solution) -> Vec<u32> {
        let first = solution.found.stages.first().map_or(0, |stage| stage.positions.start);
        let mut ranks = self.order.ranks(first..self.order.positions()).to_vec();
        ranks.sort_unstable();
        ranks
    }

    fn stage(&self, stage: &FoundStage, order: &Order, feeds: Vec<u32>, used_ranks: &[u32]) -> (StagePlan, TimedStage) {
        let FoundStage { run, positions, saver } = stage;
        let pricing = self.pricing;
        let at = pricing.at(self.order.place_at(positions));
        let workspace_bytes = pricing.run_workspace_bytes(run.clone(), &at);
        let mut priced = self.priced(stage, &at);
        if order.splits_backward() {
            priced.waiting_bytes = pricing.chain.waiting_bytes(run, at.most_rows());
        }
        let timed = self.timed(stage, &priced, order.splits_backward());
        let activations_bytes = self.activations_bytes(stage, &at, &priced, order);
        let recompute = self.recompute(stage, &at, workspace_bytes);
        let ops = self.ops(run.start, run.end);
        let number = |rank: &u32| used_ranks.binary_search(rank).ok().and_then(|number| u32::try_from(number).ok());
        let planned = StagePlan {
            ops,
            modules: self.names.summary(ops.first, ops.end),
            ranks: self.order.ranks(positions.clone()).iter().filter_map(number).collect(),
            blocks: self.block_plans(run.clone(), &recompute),
            feeds: Some(feeds),
            sharding: saver.sharding,
            offload: saver.offload,
            bucket_bytes: Some(at.bucket_bytes(saver.sharding)),
            predicted: pricing.prediction(run, &priced, &timed, activations_bytes),
        };
        (planned, timed)
    }

    fn block_plans(&self, run: Range<usize>, recompute: &[Recompute]) -> Vec<BlockPlan> {
        let planned = self.blocks.blocks[run].iter().zip(recompute).map(|(block, &recompute)| BlockPlan {
            ops: block.ops,
            hash: self.blocks.hashes[block.kind as usize].clone(),
            recompute,
        });
        planned.collect()
    }

    fn ops(&self, first: usize, end: usize) -> OpRun {
        OpRun { first: self.blocks.blocks[first].ops.first, end: self.blocks.blocks[end - 1].ops.end }
    }

    /// What each Block of the Stage, which need `workspace_bytes`, computes again.
    fn recompute(&self, stage: &FoundStage, at: &At<'_>, workspace_bytes: f64) -> Vec<Recompute> {
        let FoundStage { run, saver, .. } = stage;
        let pricing = self.pricing;
        let in_flight = match saver.again {
            Again::Nothing => return vec![Recompute::None; run.len()],
            Again::Everything => return vec![Recompute::Stage; run.len()],
            Again::ToHold(in_flight) => in_flight,
        };
        let mut recompute = vec![Recompute::None; run.len()];
        let kept = pricing.memory(run, at, *saver, workspace_bytes);
        if let Some(choice) = pricing.savings(run, at, in_flight, &kept) {
            for (saving, count) in choice.savings.iter().zip(choice.cheapest().unwrap_or_default()) {
                let of_kind = run.clone().filter(|&block| pricing.chain.kind(block) == saving.kind);
                of_kind.take(count).for_each(|block| recompute[block - run.start] = Recompute::Block);
            }
        }
        recompute
    }
}

/// Adds what a Stage reduces with others to what it reduces, and to its transfers what depends on how many others it gets
/// gradients from.
pub(super) fn add_linked(linker: &Linker<'_>, stages: &mut [StagePlan]) {
    let tied = linker.tied_sums();
    for ((stage, planned), repeated_bytes) in stages.iter_mut().enumerate().zip(linker.repeated_grads_bytes()) {
        let shared = tied.iter().filter(|sum| sum.stages.contains(&stage));
        planned.predicted.reduce_us += shared.map(|sum| sum.us).sum::<f64>();
        planned.predicted.memory.comm_bytes += repeated_bytes as u64;
    }
}

/// What a step of these priced Stages takes, and the share of the devices' time in which they neither run forward nor
/// backward; that no Plan takes less is not known of it. To the Stages is added what they do with others.
pub(crate) fn step_prediction(
    linker: &Linker<'_>,
    schedule: &Schedule,
    stages: &mut [StagePlan],
    times: &[TimedStage],
) -> StepPrediction {
    let step = &linker.pricing.step;
    let moves = linker.moves();
    add_linked(linker, stages);
    let step_us = step.exact_us(schedule, times, &moves);
    let busy_us: f64 = times.iter().map(|timed| linker.pricing.busy_us(timed)).sum();
    let devices: usize = times.iter().map(|timed| timed.passes.len()).sum();
    let bubble = (1.0 - busy_us / (devices as f64 * step_us)).clamp(0.0, 1.0);
    StepPrediction { step_us, bubble, lower_bound_us: 0.0 }
}
