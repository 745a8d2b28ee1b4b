//! The search as others call it: a graph and a cluster to Plans.

use std::sync::atomic::AtomicBool;
use std::time::Duration;

use rannc_cost::{Blocks, Cluster, ModuleNames, Profile};
use rannc_ir::{Analysis, Graph, OpRun};
use rannc_plan::{Plan, Sharding};
use serde::Serialize;

use super::assemble::Assembly;
use super::count::plans;
use super::simplest::{ESTIMATED_ERROR, MEASURED_ERROR, PassedOver, as_fast_us, dividing_less, is_simpler, leaner};
use super::whole_piece::whole_piece;
use crate::error::SearchError;
use crate::price::{Beside, Model, Pricing, RankOrder, Saver};
use crate::settings::{Savers, Settings};
use crate::solve::{Grain, Help, SearchCase, Solution, Solved, Solver, fits, shortage};
use crate::stop::{Clock, Deadline, Stop};

/// Most units of ranks that the search tells apart: its time grows with their square.
const MAX_UNITS: u32 = 64;
/// The same where a rough answer serves.
const FEW_UNITS: u32 = 16;

/// Divisions for which orders with backwards in two parts are looked for: the fastest ones by the formula.
const PUT_IN_ORDER: usize = 4;

/// What a search found, and how sure it is.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The best Plan.
    pub plan: Plan,
    /// Other good Plans, best first, as many as were asked for and there was time for.
    pub runners_up: Vec<Plan>,
    /// What each capability that the runtime lacks would gain, if that was asked for; those that there was time for.
    pub gains: Vec<Gain>,
    /// The search itself.
    pub report: SearchReport,
}

/// What the best Plan would be if the runtime could do more.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Gain {
    /// What it could do.
    pub what: &'static str,
    /// Time of a step; `None` when nothing that fits was found even then.
    pub step_us: Option<f64>,
}

/// Facts about a search.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SearchReport {
    /// No Plan takes less under the same model, but for such whose backwards come in two parts. It leaves out what no
    /// Plan surely has, as transfers past a Stage, and exchanges as far as others might have fewer: it is lower for that.
    pub lower_bound_us: f64,
    /// How far the Plan may be above the optimum: its time by the bound, less 1.
    pub gap: f64,
    /// A Plan that should be faster, by less than predictions may be off, and is less simple.
    pub passed_over: Option<PassedOver>,
    /// Number of Plans that the answer covers.
    pub plans_covered: f64,
    /// Blocks of the chain.
    pub blocks: usize,
    /// Different Blocks.
    pub block_kinds: usize,
    /// Different Blocks whose measured times were used.
    pub measured_kinds: usize,
    /// Time of the search, of which `gains` and runners-up are no part.
    pub elapsed: Duration,
    /// Why it ended.
    pub stop: Stop,
}

/// Finds the Plan of a verified graph that takes the least time per step within the memory of the
/// cluster's devices; of those that differ by less than predictions may be off, the simplest: with the fewest Stages,
/// then the fewest microbatches, then the most equal Stages, by the Schedule that holds the fewest microbatches, and with
/// Replicas that divide least.
/// Profiles of the cluster's kinds of device, by name, take the place of the roofline.
/// The same arguments give the same Plan, whatever the number of threads, unless a limit of time is met.
pub fn plan(
    graph: &Graph,
    cluster: &Cluster,
    profiles: &[Profile],
    settings: &Settings,
) -> Result<Outcome, SearchError> {
    plan_until(graph, cluster, profiles, settings, &AtomicBool::new(false))
}

/// Like [`plan`], and ends soon without a Plan when `told` becomes true.
pub fn plan_until(
    graph: &Graph,
    cluster: &Cluster,
    profiles: &[Profile],
    settings: &Settings,
    told: &AtomicBool,
) -> Result<Outcome, SearchError> {
    cluster.check()?;
    settings.check(cluster)?;
    let threads = rayon::ThreadPoolBuilder::new().num_threads(settings.threads.unwrap_or(0)).build()?;
    threads.install(|| Planner::new(graph, cluster, profiles, settings, Clock::new(told))?.outcome())
}

/// A model, ready to be searched.
struct Planner<'a> {
    graph: &'a Graph,
    graph_hash: String,
    cluster: &'a Cluster,
    settings: &'a Settings,
    analysis: Analysis,
    model: Model,
    orders: Vec<RankOrder>,
    rough: RankOrder,
    clock: Clock<'a>,
    /// Behind it nothing is begun that the first Plan does not need.
    deadline: Deadline<'a>,
}

impl<'a> Planner<'a> {
    fn new(
        graph: &'a Graph,
        cluster: &'a Cluster,
        profiles: &[Profile],
        settings: &'a Settings,
        clock: Clock<'a>,
    ) -> Result<Self, SearchError> {
        let analysis = Analysis::new(graph);
        if analysis.main_ops.is_empty() {
            return Err(SearchError::Empty { graph: graph.name.clone() });
        }
        let blocks = Blocks::new(graph, &analysis);
        let possible = blocks.blocks.len();
        if let Some(wanted) = settings.forced_stages().filter(|&wanted| wanted > possible) {
            let whole = Some(whole_piece(graph, &analysis, &blocks));
            return Err(SearchError::TooFewBlocks { wanted, possible, whole });
        }
        let model = Model::new(graph, &analysis, blocks, cluster, profiles, settings);
        let forced = settings.replicas.as_deref();
        let deadline = Deadline::new(&settings.limits, clock);
        let orders = RankOrder::all(cluster, settings.world_size, forced, MAX_UNITS, deadline);
        let rough = RankOrder::packed(cluster, settings.world_size, forced, FEW_UNITS);
        let graph_hash = graph.hash();
        Ok(Self { graph, graph_hash, cluster, settings, analysis, model, orders, rough, clock, deadline })
    }

    fn outcome(&self) -> Result<Outcome, SearchError> {
        let (mut beside, mut bound_us) = (Beside::new(), None);
        loop {
            let mut solver = self.solver(self.settings);
            solver.problem.beside = &beside;
            let cases = solver.cases(&self.settings.microbatch_candidates()?);
            let mut solved = solver.solve(&cases).map_err(|stop| self.none_found(stop))?;
            self.go_on()?;
            // Of all Plans, not of those alone that are left.
            solved.lower_bound_us = *bound_us.get_or_insert(solved.lower_bound_us);
            match self.fastest(self.settings, &solved) {
                Ok(fastest) => return self.outcome_of(&solver, &cases, &solved, fastest),
                Err(too_full) => add(&mut beside, too_full),
            }
        }
    }

    /// What is told of the fastest Plan, and which one is taken.
    fn outcome_of(
        &self,
        solver: &Solver<'_>,
        cases: &[SearchCase],
        solved: &Solved,
        (fastest, fastest_plan): (&Solution, Plan),
    ) -> Result<Outcome, SearchError> {
        let (taken, plan) = self.simplest(solver, cases, solved, (fastest, &fastest_plan));
        let (taken, plan) = self.in_two_parts(self.settings, solved, (taken, plan));
        // What the host decides is no matter of what predictions may be off.
        let passed_over = PassedOver::new(&fastest_plan, &plan).filter(|passed| passed.faster <= self.error());
        let elapsed = self.clock.begun.elapsed();
        let runners_up = self.runners_up(solver, cases, solved, (&taken, &plan))?;
        let gains = self.gains(plan.predicted.step_us);
        self.go_on()?;
        let lower_bound_us = solved.lower_bound_us.max(plan.predicted.lower_bound_us).min(plan.predicted.step_us);
        let report = SearchReport {
            lower_bound_us,
            gap: plan.predicted.step_us / lower_bound_us - 1.0,
            passed_over,
            plans_covered: plans(self.model.chain.len(), &self.orders, cases, self.settings),
            blocks: self.model.chain.len(),
            block_kinds: self.model.blocks.hashes.len(),
            measured_kinds: self.model.measured_kinds(),
            elapsed,
            stop: solved.stop.max(self.deadline.stop()),
        };
        Ok(Outcome { runners_up, gains, report, plan: plan.seal()? })
    }

    /// Ends here when nobody waits for the answer any more.
    fn go_on(&self) -> Result<(), SearchError> {
        if self.clock.is_told() { Err(SearchError::Told) } else { Ok(()) }
    }

    /// The Plan of the division, among the best one and the finalists, whose step is the shortest when it is told exactly;
    /// what the best one was not priced with where none fits. The formula rules none of them out: where Values pass over
    /// Stages it may be above the truth.
    fn fastest<'s>(&self, settings: &Settings, solved: &'s Solved) -> Result<(&'s Solution, Plan), Beside> {
        let weighed = self.weighed(settings, &solved.best, solved.lower_bound_us);
        let mut fastest = weighed.map(|plan| (&solved.best, plan));
        for finalist in solved.finalists.iter().filter(|&finalist| *finalist != solved.best) {
            if self.deadline.is_over() {
                break;
            }
            let limit_us = fastest.as_ref().map_or(f64::INFINITY, |(_, plan)| plan.predicted.step_us);
            let plan = self.assemble(settings, finalist, solved.lower_bound_us);
            if let Some(plan) = plan.filter(|plan| plan.predicted.step_us < limit_us) {
                fastest = Ok((finalist, plan));
            }
        }
        fastest
    }

    /// What differs by less than predictions may be off is equally good.
    fn error(&self) -> f64 {
        if self.model.measured_kinds() == self.model.blocks.hashes.len() { MEASURED_ERROR } else { ESTIMATED_ERROR }
    }

    /// The simplest of the Plans that are about as fast as the fastest one.
    fn simplest(
        &self,
        solver: &Solver<'_>,
        cases: &[SearchCase],
        solved: &Solved,
        (fastest, plan): (&Solution, &Plan),
    ) -> (Solution, Plan) {
        let limit_us = plan.predicted.step_us * (1.0 + self.error());
        let mut simplest = (fastest.clone(), plan.clone());
        let is_simplest = plan.stages.len() == 1 && plan.microbatches == 1;
        let others = if is_simplest { Vec::new() } else { solver.simpler(cases, solved, limit_us) };
        for other in others.iter().chain(&solved.finalists) {
            if self.deadline.is_over() {
                break;
            }
            if is_simpler(other, &simplest.0) {
                let plan = self.assemble(self.settings, other, solved.lower_bound_us);
                if let Some(plan) = plan.filter(|plan| plan.predicted.step_us < limit_us) {
                    simplest = (other.clone(), plan);
                }
            }
        }
        let simplest = self.holding_less(simplest, solved.lower_bound_us, limit_us);
        self.dividing_less(simplest, solved.lower_bound_us, limit_us)
    }

    /// A Plan whose backwards come in two parts, if it is faster by more than predictions may be off. How far it is above
    /// the optimum is not known.
    fn in_two_parts(
        &self,
        settings: &Settings,
        solved: &Solved,
        (division, plan): (Solution, Plan),
    ) -> (Solution, Plan) {
        if !settings.split_backward {
            return (division, plan);
        }
        let limit_us = plan.predicted.step_us * (1.0 - self.error());
        let mut others: Vec<&Solution> = std::iter::once(&division).chain(&solved.finalists).collect();
        others.retain(|other| other.found.stages.len() > 1 && other.case.microbatches > 1);
        others.sort_by(|one, other| one.found.step_us.total_cmp(&other.found.step_us));
        let mut best = (division.clone(), plan);
        for other in others.into_iter().take(PUT_IN_ORDER) {
            if self.deadline.is_over() {
                break;
            }
            let found = self.with_assembly(settings, other, |assembly| {
                let found = assembly.plan_in_two_parts(other, self.deadline);
                found.filter(|plan| assembly.too_full(other, plan).is_empty())
            });
            if let Some(found) = found
                && found.predicted.step_us < limit_us.min(best.1.predicted.step_us)
            {
                best = (other.clone(), found);
            }
        }
        best
    }

    /// The same division where Replicas divide less, if that is about as fast.
    fn dividing_less(
        &self,
        (division, plan): (Solution, Plan),
        lower_bound_us: f64,
        limit_us: f64,
    ) -> (Solution, Plan) {
        let SearchCase { schedule, microbatches, .. } = division.case;
        if plan.stages.iter().all(|stage| stage.sharding == Sharding::None) || self.deadline.is_over() {
            return (division, plan);
        }
        let pricing = Pricing::new(self.model.problem(self.cluster, self.settings), schedule, microbatches);
        let order = self.solver(self.settings).order(division.case);
        let less = dividing_less(&pricing, order, &division, self.error());
        let divided = self.assemble(self.settings, &less, lower_bound_us);
        let Some(mut divided) = divided.filter(|divided| divided.predicted.step_us < as_fast_us(limit_us)) else {
            return (division, plan);
        };
        if divided.predicted.step_us > limit_us {
            // No step with a host is shorter.
            divided.predicted.lower_bound_us = divided.predicted.step_us;
        }
        (less, divided)
    }

    /// The same division by a Schedule that holds fewer microbatches, if that is about as fast.
    fn holding_less(&self, (division, plan): (Solution, Plan), lower_bound_us: f64, limit_us: f64) -> (Solution, Plan) {
        let leaner = leaner(self.settings.schedules(), division.case.schedule);
        let Some(schedule) = leaner.filter(|_| !self.deadline.is_over()) else {
            return (division, plan);
        };
        let other = Solution { case: SearchCase { schedule, ..division.case }, ..division.clone() };
        let held = self.assemble(self.settings, &other, lower_bound_us);
        let peak_bytes = |plan: &Plan| plan.stages.iter().map(|stage| stage.predicted.memory.total_bytes()).max();
        let is_better = |held: &Plan| peak_bytes(held) < peak_bytes(&plan) && held.predicted.step_us < limit_us;
        let held = held.filter(is_better);
        held.map_or((division, plan), |held| (other, held))
    }

    fn solver<'s>(&'s self, settings: &'s Settings) -> Solver<'s> {
        Solver {
            problem: self.model.problem(self.cluster, settings),
            orders: &self.orders,
            rough: &self.rough,
            grain: Grain::FINE,
            clock: self.clock,
        }
    }

    /// The Plan of a division, if it fits; not sealed.
    fn assemble(&self, settings: &Settings, solution: &Solution, lower_bound_us: f64) -> Option<Plan> {
        self.weighed(settings, solution, lower_bound_us).ok()
    }

    /// The Plan of a division, or why it does not fit.
    fn weighed(&self, settings: &Settings, solution: &Solution, lower_bound_us: f64) -> Result<Plan, Beside> {
        self.with_assembly(settings, solution, |assembly| {
            let plan = assembly.plan(solution, lower_bound_us);
            let too_full = assembly.too_full(solution, &plan);
            if too_full.is_empty() { Ok(plan) } else { Err(too_full) }
        })
    }

    fn with_assembly<T>(&self, settings: &Settings, solution: &Solution, make: impl FnOnce(&Assembly<'_>) -> T) -> T {
        let problem = self.model.problem(self.cluster, settings);
        let pricing = Pricing::new(problem, solution.case.schedule, solution.case.microbatches);
        let assembly = Assembly {
            graph: self.graph,
            graph_hash: &self.graph_hash,
            blocks: &self.model.blocks,
            crossings: &self.model.crossings,
            states: &self.model.states,
            batch: &self.model.batch,
            names: &ModuleNames::new(self.graph, &self.analysis.main_ops),
            order: self.solver(self.settings).order(solution.case),
            pricing: &pricing,
            eager_spans: &self.model.eager_spans,
            memory_budget_percent: self.model.memory_budget_percent,
        };
        make(&assembly)
    }

    /// Other good Plans than this one, none of which is faster.
    fn runners_up(
        &self,
        solver: &Solver<'_>,
        cases: &[SearchCase],
        solved: &Solved,
        (taken, plan): (&Solution, &Plan),
    ) -> Result<Vec<Plan>, SearchError> {
        let count = if self.deadline.is_over() { 0 } else { self.settings.runners_up };
        let others = if count == 0 { Vec::new() } else { solver.runners_up(cases, taken, count) };
        self.go_on()?;
        let in_time = others.iter().take_while(|_| !self.deadline.is_over());
        let assembled = in_time.filter_map(|other| self.assemble(self.settings, other, solved.lower_bound_us));
        let mut runners_up: Vec<Plan> = assembled.collect();
        runners_up.retain(|other| other.predicted.step_us >= plan.predicted.step_us);
        runners_up.sort_by(|left, right| left.predicted.step_us.total_cmp(&right.predicted.step_us));
        runners_up.into_iter().map(|plan| Ok(plan.seal()?)).collect()
    }

    /// What there was time for. Of a capability that was not searched to the end, only that it gains something is known.
    fn gains(&self, best_us: f64) -> Vec<Gain> {
        let mut gains = Vec::new();
        let lacking = if self.settings.gains { more(self.settings.savers) } else { Vec::new() };
        for (what, savers) in lacking {
            if self.deadline.is_over() {
                break;
            }
            let step_us = self.step_us_with(savers).map(|us| us.min(best_us));
            if step_us.is_some_and(|us| us < best_us) || !self.deadline.is_over() {
                gains.push(Gain { what, step_us });
            }
        }
        gains
    }

    /// A step of the fastest Plan of a runtime that can save memory so, told as exactly as the best Plan, which it could
    /// carry out as well.
    fn step_us_with(&self, savers: Savers) -> Option<f64> {
        let settings = Settings { savers, ..self.settings.clone() };
        let solver = self.solver(&settings);
        let counts = settings.microbatch_candidates().ok()?;
        let solved = solver.solve(&solver.cases(&counts)).ok()?;
        let (division, plan) = self.fastest(&settings, &solved).ok()?;
        let (_, plan) = self.in_two_parts(&settings, &solved, (division.clone(), plan));
        Some(plan.predicted.step_us)
    }

    /// Why a search with this end found no Plan. More time or candidates help where something fits.
    fn none_found(&self, stop: Stop) -> SearchError {
        let (pricings, savers) = (self.leanest_pricings(), Saver::most(&self.settings.savers));
        match stop {
            Stop::Told => SearchError::Told,
            Stop::Candidates | Stop::Time if fits(&pricings, &self.rough, &savers) => SearchError::Stopped,
            Stop::Candidates | Stop::Time | Stop::Complete => self.shortage(&pricings),
        }
    }

    /// With the most microbatches, which keep the fewest activations, and with the fewest, whose gradients may need no
    /// sums of their own: one of the two takes the least memory.
    fn leanest_pricings(&self) -> Vec<Pricing<'_>> {
        let settings = self.settings;
        let counts = settings.microbatch_candidates().unwrap_or_else(|_| vec![1]);
        let ends = counts.last().into_iter().chain(counts.first().filter(|_| counts.len() > 1));
        let priced =
            |&count: &u64| Pricing::new(self.model.problem(self.cluster, settings), settings.schedules()[0], count);
        ends.map(priced).collect()
    }

    fn shortage(&self, pricings: &[Pricing<'_>]) -> SearchError {
        let settings = self.settings;
        let fitting = more(settings.savers).into_iter().filter(|(_, savers)| {
            let with = Saver::most(savers);
            fits(pricings, &self.rough, &with)
        });
        let own = settings.savers.sharding;
        let (dividing, lacking): (Vec<_>, Vec<_>) = fitting.partition(|(_, savers)| savers.sharding != own);
        let help = Help {
            divided: dividing.first().map(|(_, savers)| savers.sharding),
            would_fit: lacking.into_iter().map(|(what, _)| what).collect(),
        };
        shortage(pricings, &self.rough, help, |block| {
            let OpRun { first, end } = self.model.blocks.blocks[block].ops;
            let place = self.graph.place(self.analysis.main_ops[first as usize]);
            let names = ModuleNames::new(self.graph, &self.analysis.main_ops);
            format!("{} (from {place})", names.summary(first, end).join(", "))
        })
    }
}

/// Adds what was found. What is found again was not why a Stage is too full: it is left out from then on.
fn add(beside: &mut Beside, found: Beside) {
    for (run, bytes) in found {
        let known = beside.entry(run).or_insert(-1.0);
        *known = if bytes > *known { bytes } else { f64::INFINITY };
    }
}

/// Each capability that a runtime lacks, with those that it has.
fn more(has: Savers) -> Vec<(&'static str, Savers)> {
    let mut more = Vec::new();
    if !has.recompute {
        more.push(("recomputation", Savers { recompute: true, ..has }));
    }
    let levels = [
        ("sharded optimizer state (ZeRO 1)", Sharding::Optimizer),
        ("sharded gradients (ZeRO 2)", Sharding::Gradients),
        ("sharded parameters (ZeRO 3)", Sharding::Params),
    ];
    for (what, sharding) in levels.into_iter().filter(|(_, level)| *level > has.sharding) {
        more.push((what, Savers { sharding, ..has }));
    }
    if !has.offload {
        more.push(("optimizer state in host memory", Savers { offload: true, ..has }));
    }
    more
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::towers::towers;

    /// Towers side by side, whose Values pass over Stages.
    #[test]
    fn no_finalist_is_faster_than_the_fastest() {
        let graph = towers(&[(1, true), (1, false), (4, true), (4, true)], 512);
        let mut cluster = Cluster::preset("cpu", 1, 4).expect("a preset");
        cluster.levels.iter_mut().for_each(|level| level.send.bytes_per_s = 1e7);
        let settings =
            Settings { world_size: 4, batch_rows: 64, stages: Some(3), max_microbatches: 8, ..Settings::default() };
        let told = AtomicBool::new(false);
        let planner = Planner::new(&graph, &cluster, &[], &settings, Clock::new(&told)).expect("it can be planned");
        let solver = planner.solver(&settings);
        let solved = solver.solve(&solver.cases(&settings.microbatch_candidates().expect("some"))).expect("it fits");
        let (_, fastest) = planner.fastest(&settings, &solved).expect("it fits");
        let all = solved.finalists.iter().filter_map(|one| planner.assemble(&settings, one, 0.0));
        let least_us = all.map(|plan| plan.predicted.step_us).fold(f64::INFINITY, f64::min);
        assert!(fastest.predicted.step_us <= least_us, "{} {least_us}", fastest.predicted.step_us);
    }
}
