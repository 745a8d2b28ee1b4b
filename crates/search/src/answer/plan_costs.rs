//! What a given Plan costs: for the simulator, and told as a prediction.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ops::Range;

use rannc_cost::{Blocks, Cluster, Profile, tensor_bytes};
use rannc_ir::{Analysis, Graph, OpRun, ValueId};
use rannc_plan::{Call, Crew, Order, Plan, PlanFileError, Recompute, Schedule, ScheduleKind, Sharding};
use rannc_sim::Costs;
use serde::Serialize;

use super::assemble::{add_linked, step_prediction};
use super::exact_time::call_of;
use super::links::Linker;
use super::simulated_step::simulated_step;
use super::tied::TiedSum;
use crate::error::SearchError;
use crate::price::{Again, Model, Priced, Pricing, RankOrder, ReplicaPass, Replicas, Saver};
use crate::settings::Settings;
use crate::solve::FoundStage;

/// The costs of a Plan on a cluster, by the search's own model.
pub struct PlanCosts<'a> {
    graph: &'a Graph,
    cluster: &'a Cluster,
    settings: Settings,
    model: Model,
    order: RankOrder,
    stages: Vec<PlannedStage>,
    plan: &'a Plan,
    tied: Vec<TiedSum>,
    /// Of each Stage.
    repeated_grads_bytes: Vec<f64>,
    /// Of each rank.
    nodes: Vec<u32>,
    /// What has been priced already, by Stage and rows.
    known: RefCell<HashMap<(u32, Option<u64>), Priced>>,
    passes: RefCell<HashMap<(u32, u64), ReplicaPass>>,
}

/// A Stage of the Plan.
struct PlannedStage {
    run: Range<usize>,
    saver: Saver,
    /// Blocks to compute again.
    again: Vec<usize>,
}

/// A Stage whose Replicas would divide nothing.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Undivided {
    /// Its number.
    pub stage: usize,
    /// Time of a step then.
    pub step_us: f64,
    /// Peak memory of a device of the Stage then.
    pub memory_bytes: u64,
}

impl<'a> PlanCosts<'a> {
    /// Prepares a Plan of a verified graph. Of the settings, those that the Plan decides are taken from it.
    ///
    /// # Errors
    /// When the Plan is of another graph, or for more ranks than the cluster has.
    pub fn new(
        graph: &'a Graph,
        cluster: &'a Cluster,
        profiles: &[Profile],
        settings: &Settings,
        plan: &'a Plan,
    ) -> Result<Self, SearchError> {
        plan.check_graph(graph)?;
        let settings = Settings {
            world_size: plan.world_size,
            batch_rows: plan.batch_rows,
            microbatches: Some(plan.microbatches),
            replicas: None,
            stages: None,
            ..settings.clone()
        };
        cluster.check()?;
        settings.check(cluster)?;
        let analysis = Analysis::new(graph);
        let planned = plan.stages.iter().flat_map(|stage| stage.blocks.iter().map(|block| block.ops));
        let blocks = Blocks::of(graph, &analysis, planned);
        plan.check_blocks(graph, hashes(&blocks))?;
        let stages = plan.stages.iter().map(|stage| PlannedStage {
            run: places(&blocks, stage.ops),
            saver: Saver {
                again: if stage.recomputes_all() { Again::Everything } else { Again::Nothing },
                sharding: stage.sharding,
                offload: stage.offload,
            },
            again: {
                let again = places(&blocks, stage.ops).zip(&stage.blocks);
                let again = again.filter(|(_, block)| block.recompute == Recompute::Block);
                again.map(|(place, _)| place).collect()
            },
        });
        let stages = stages.collect();
        let ranks: Vec<Vec<u32>> = plan.stages.iter().map(|stage| stage.ranks.clone()).collect();
        let order = RankOrder::of_stages(cluster, &ranks);
        let model = Model::new(graph, &analysis, blocks, cluster, profiles, &settings);
        let nodes = cluster.node_table();
        let (tied, repeated_grads_bytes) = (Vec::new(), Vec::new());
        let (known, passes) = (RefCell::default(), RefCell::default());
        let mut costs = Self {
            graph,
            cluster,
            settings,
            model,
            order,
            stages,
            plan,
            nodes,
            tied,
            repeated_grads_bytes,
            known,
            passes,
        };
        let (pricing, found) = (costs.pricing(), costs.found_stages());
        let linker = costs.linker(&pricing, &found);
        (costs.tied, costs.repeated_grads_bytes) = (linker.tied_sums(), linker.repeated_grads_bytes());
        Ok(costs)
    }

    /// The same Plan with what it takes here. That no Plan takes less than another is not known of it.
    ///
    /// # Errors
    /// When its figures are none, or its ranks have several Stages and wait for each other.
    pub fn predicted(&self) -> Result<Plan, SearchError> {
        let pricing = self.pricing();
        let found = self.found_stages();
        let mut plan = self.plan.clone();
        if self.model.measured_kinds() > 0 {
            plan.eager_spans.clone_from(&self.model.eager_spans);
            plan.memory_budget_percent = self.model.memory_budget_percent;
        }
        let mut times = Vec::new();
        let linker = self.linker(&pricing, &found);
        let orders = linker.orders(&plan.schedule);
        for (((number, stage), order), found) in (0..).zip(&mut plan.stages).zip(&orders).zip(&found) {
            let priced = self.priced(number, None);
            let timed = pricing.timed(&self.replicas(number), priced.end);
            let activations_bytes = self.activations_bytes(&pricing, number, order);
            stage.predicted = pricing.prediction(&found.run, &priced, &timed, activations_bytes);
            times.push(timed);
        }
        plan.predicted = if plan.crews().iter().any(Crew::is_shared) {
            add_linked(&linker, &mut plan.stages);
            simulated_step(self.plan, self.graph, self, self.call())?
        } else {
            step_prediction(&linker, &self.plan.schedule, &mut plan.stages, &times)
        };
        Ok(plan.seal()?)
    }

    /// Of microbatches in flight, each by its size; where Blocks are chosen to compute again, all as the largest.
    fn activations_bytes(&self, pricing: &Pricing<'_>, stage: u32, order: &Order) -> f64 {
        let at = pricing.at(self.order.place(stage, 1));
        let all_alike = !self.stages[stage as usize].again.is_empty();
        let own_rows = |rows: u64| (rows < at.most_rows() && !all_alike).then_some(rows);
        let held = at.rows.map(|rows| self.priced(stage, own_rows(rows)).held_bytes());
        pricing.step.activations_bytes(order, held)
    }

    /// For each Stage whose Replicas divide anything: the same Plan where they divide nothing.
    ///
    /// # Errors
    /// When its figures are none.
    pub fn undivided(&mut self) -> Result<Vec<Undivided>, SearchError> {
        let mut found = Vec::new();
        for stage in 0..self.stages.len() {
            let sharding = std::mem::take(&mut self.stages[stage].saver.sharding);
            if sharding > Sharding::None {
                self.forget();
                let plan = self.predicted()?;
                let memory_bytes = plan.stages[stage].predicted.memory.total_bytes();
                found.push(Undivided { stage, step_us: plan.predicted.step_us, memory_bytes });
            }
            self.stages[stage].saver.sharding = sharding;
        }
        self.forget();
        Ok(found)
    }

    fn forget(&mut self) {
        self.known.get_mut().clear();
        self.passes.get_mut().clear();
    }

    /// How the call comes whose steps are simulated: as that of the steps that are told.
    pub fn call(&self) -> Call {
        call_of(&self.plan.schedule)
    }

    fn linker<'l>(&'l self, pricing: &'l Pricing<'l>, stages: &'l [FoundStage]) -> Linker<'l> {
        let Model { crossings, states, batch, .. } = &self.model;
        Linker::new(crossings, states, batch, &self.order, pricing, stages)
    }

    fn found_stages(&self) -> Vec<FoundStage> {
        let mut start = 0;
        let found = self.stages.iter().zip(&self.plan.stages).map(|(stage, planned)| {
            let end = start + u32::try_from(planned.ranks.len()).expect("as many as a cluster may have");
            let positions = std::mem::replace(&mut start, end)..end;
            FoundStage { run: stage.run.clone(), positions, saver: stage.saver }
        });
        found.collect()
    }

    fn pricing(&self) -> Pricing<'_> {
        let problem = self.model.problem(self.cluster, &self.settings);
        let schedule = match self.plan.schedule {
            Schedule::Named(schedule) => schedule,
            // Its name would only tell formulas, which nobody asks for.
            Schedule::Explicit(_) => ScheduleKind::FillDrain,
        };
        Pricing::new(problem, schedule, u64::from(self.plan.microbatches))
    }

    /// A Stage as it is with `rows` rows of a microbatch, or with the most that it gets.
    fn priced(&self, stage: u32, rows: Option<u64>) -> Priced {
        *self.known.borrow_mut().entry((stage, rows)).or_insert_with(|| self.price(stage, rows))
    }

    fn price(&self, stage: u32, rows: Option<u64>) -> Priced {
        let pricing = self.pricing();
        let PlannedStage { run, saver, again } = &self.stages[stage as usize];
        let place = self.order.place(stage, 1);
        let at = rows.map_or_else(|| pricing.at(place), |rows| pricing.at_own_rows(place, rows));
        let workspace_bytes = pricing.run_workspace_bytes(run.clone(), &at);
        let mut plain = pricing.plain(run, &at, *saver, workspace_bytes);
        let mut repeated = pricing.compute_again(run, &at, saver.again, &mut plain.memory);
        let mut held_again_bytes: f64 = 0.0;
        for saving in again.iter().map(|&block| pricing.saving(block, &at)) {
            repeated.blocks_us += saving.us * pricing.again_beside_messages(run, &at);
            plain.memory.microbatch_bytes -= saving.bytes;
            held_again_bytes = held_again_bytes.max(saving.bytes);
        }
        plain.memory.workspace_bytes += held_again_bytes;
        let waiting_bytes =
            if self.plan.schedule.splits_backward() { pricing.chain.waiting_bytes(run, at.most_rows()) } else { 0.0 };
        Priced { waiting_bytes, ..pricing.with_repeated(run, &at, *saver, &plain, repeated) }
    }

    /// The Replicas of a Stage.
    fn replicas(&self, stage: u32) -> Replicas<'_> {
        let PlannedStage { run, saver, .. } = &self.stages[stage as usize];
        Replicas {
            run: run.clone(),
            place: self.order.place(stage, 1),
            sharding: saver.sharding,
            again: self.priced(stage, None).again,
            splits_backward: self.plan.schedule.splits_backward(),
        }
    }

    /// What a Replica takes for its rows of a microbatch.
    fn pass(&self, stage: u32, rows: u64) -> ReplicaPass {
        let pass = || self.pricing().replica_pass(&self.replicas(stage), rows);
        *self.passes.borrow_mut().entry((stage, rows)).or_insert_with(pass)
    }
}

/// Checks that a Plan was made for a verified graph, and that its Blocks are still what they were then.
///
/// # Errors
/// When the graph is another one, or a Block of it.
pub fn check_plan(plan: &Plan, graph: &Graph) -> Result<(), PlanFileError> {
    plan.check_graph(graph)?;
    let analysis = Analysis::new(graph);
    let main_ops = analysis.main_ops.len();
    let runs = plan.stages.iter().flat_map(|stage| stage.blocks.iter().map(|block| block.ops));
    // Of Blocks that go beyond the graph, the division tells more.
    let blocks = Blocks::of(graph, &analysis, runs.take_while(|ops| ops.end as usize <= main_ops));
    plan.check_blocks(graph, hashes(&blocks))
}

/// The hash of each Block.
fn hashes(blocks: &Blocks) -> impl Iterator<Item = &String> {
    blocks.blocks.iter().map(|block| &blocks.hashes[block.kind as usize])
}

/// The part of a time that some of all bytes take.
fn share(us: f64, bytes: u64, all_bytes: f64) -> f64 {
    if all_bytes > 0.0 { us * (bytes as f64 / all_bytes).min(1.0) } else { 0.0 }
}

/// The Blocks that are a run of main ops.
fn places(blocks: &Blocks, ops: OpRun) -> Range<usize> {
    let place = |op: u32| blocks.blocks.partition_point(|block| block.ops.first < op);
    place(ops.first)..place(ops.end)
}

impl Costs for PlanCosts<'_> {
    fn forward_us(&self, stage: u32, rows: u64) -> f64 {
        self.pass(stage, rows).forward_us
    }

    fn backward_us(&self, stage: u32, rows: u64) -> f64 {
        self.pass(stage, rows).backward_us
    }

    fn backward_input_us(&self, stage: u32, rows: u64) -> f64 {
        self.pass(stage, rows).parts_us[0]
    }

    fn backward_weight_us(&self, stage: u32, rows: u64) -> f64 {
        self.pass(stage, rows).parts_us[1]
    }

    fn send_us(&self, src: u32, dst: u32, bytes: u64) -> f64 {
        let [src, dst] = [src, dst].map(|rank| self.nodes[rank as usize]);
        self.cluster.send_us(self.cluster.level_of_nodes(src, dst), bytes as f64)
    }

    fn value_bytes(&self, value: ValueId, rows: u64) -> u64 {
        tensor_bytes(&self.graph.values[value]).at(rows) as u64
    }

    fn reduce_us(&self, stage: u32, bytes: u64) -> f64 {
        let run = &self.stages[stage as usize].run;
        share(self.priced(stage, None).end.reduce_us, bytes, self.model.chain.own.message_bytes.at(run.start, run.end))
    }

    fn reduce_scatter_us(&self, stage: u32, bytes: u64) -> f64 {
        // Backwards of Stages that divide gradients are priced with what they hide, here is the rest.
        self.reduce_us(stage, bytes)
    }

    fn gather_us(&self, _: u32, _: u64) -> f64 {
        // Passes of Stages that divide parameters are priced with all of it, here ranks only meet.
        0.0
    }

    fn reduce_tied_us(&self, ranks: &[u32], bytes: u64) -> f64 {
        let known = self.tied.iter().find(|sum| sum.ranks == ranks);
        known.map_or(0.0, |sum| share(sum.us, bytes, sum.bytes))
    }

    fn update_us(&self, stage: u32) -> f64 {
        self.priced(stage, None).end.update_us
    }

    fn fixed_bytes(&self, stage: u32) -> u64 {
        let memory = self.priced(stage, None).memory;
        (memory.fixed_bytes() - memory.workspace_bytes + self.repeated_grads_bytes[stage as usize]) as u64
    }

    fn framework_bytes(&self, stage: u32) -> u64 {
        self.priced(stage, None).memory.framework_bytes as u64
    }

    fn microbatch_bytes(&self, stage: u32, rows: u64) -> u64 {
        self.priced(stage, Some(rows)).memory.microbatch_bytes as u64
    }

    fn waiting_bytes(&self, stage: u32, rows: u64) -> u64 {
        self.priced(stage, Some(rows)).waiting_bytes as u64
    }

    fn workspace_bytes(&self, stage: u32, rows: u64) -> u64 {
        self.priced(stage, Some(rows)).memory.workspace_bytes as u64
    }
}
