//! Why a Plan is as it is: what binds, what its cuts cost, what else there is.

use rannc_cost::{Cluster, format_bytes, format_us, tensor_bytes};
use rannc_ir::{Analysis, Graph, OpRun};
use rannc_plan::{MemoryPrediction, Partition, PartitionError, Plan, StagePlan};
use rannc_search::{Blocks, Gain, Outcome, PassedOver, SearchReport, Settings, Stop, Undivided};
use serde::Serialize;

use crate::Report;
use crate::figures::Workload;
use crate::format::{counted, paragraph, percent, runs, savers, sharding, signed_percent};
use crate::plan::{microbatch_rows, summary};
use crate::table::{amount, table, text};
use crate::whatif::PlanShape;

/// Above this share of its memory a Stage is said to be full.
const FULL: f64 = 0.9;

/// What was searched.
#[derive(Clone, Copy, Debug)]
pub struct Question<'a> {
    /// The model.
    pub graph: &'a Graph,
    /// The devices.
    pub cluster: &'a Cluster,
    /// What was asked for.
    pub settings: &'a Settings,
}

/// Why the best Plan is the best.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Explanation {
    #[serde(skip)]
    workload: Workload,
    /// The best Plan, as in its file.
    pub plan: Plan,
    /// The best Plan in short.
    pub shape: PlanShape,
    /// The search.
    pub search: SearchFacts,
    /// What fills a step.
    pub step: StepShares,
    /// The Stages.
    pub stages: Vec<StageShares>,
    /// Between the Stages, in order.
    pub cuts: Vec<Cut>,
    /// Median of what crosses all possible cuts, for one microbatch.
    pub median_cut_bytes: u64,
    /// Step of the best Plan if memory had no limit; missing if that was not found out.
    pub unlimited_step_us: Option<f64>,
    /// What the Plan would be if the Replicas of a Stage that divide anything divided nothing.
    pub undivided: Vec<Undivided>,
    /// Other good Plans, best first.
    pub runners_up: Vec<RunnerUp>,
    /// What capabilities that the runtime lacks would gain.
    pub gains: Vec<Gain>,
}

/// Facts about the search.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SearchFacts {
    /// How far the Plan may be above the optimum, as a share of it.
    pub gap: f64,
    /// Number of Plans that the answer covers.
    pub plans_covered: f64,
    /// Blocks of the model.
    pub blocks: usize,
    /// Different Blocks.
    pub block_kinds: usize,
    /// Different Blocks whose measured times were used.
    pub measured_kinds: usize,
    /// A Plan that should be faster by less than predictions may be off, and is less simple.
    pub passed_over: Option<PassedOver>,
    /// Time that the search took.
    pub elapsed_ms: f64,
    /// Why it ended.
    pub stop: Stop,
}

impl SearchFacts {
    fn new(report: &SearchReport) -> Self {
        let &SearchReport { gap, plans_covered, blocks, block_kinds, measured_kinds, elapsed, stop, .. } = report;
        let (passed_over, elapsed_ms) = (report.passed_over.clone(), elapsed.as_secs_f64() * 1e3);
        Self { gap, plans_covered, blocks, block_kinds, measured_kinds, passed_over, elapsed_ms, stop }
    }
}

/// What fills a step, as shares of its time that add up to 1.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct StepShares {
    /// The Stage that takes longest for a microbatch.
    pub bottleneck: usize,
    /// All its microbatches.
    pub work: f64,
    /// Filling and draining the pipeline around it.
    pub fill_and_drain: f64,
    /// Its gradient reduction and optimizer.
    pub end: f64,
}

/// What one Stage takes.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StageShares {
    /// Forward, backward and transfers of one microbatch.
    pub microbatch_us: f64,
    /// The same as a share of the bottleneck's.
    pub of_bottleneck: f64,
    /// Microbatches that it holds at a time.
    pub in_flight: u64,
    /// Peak memory of a device.
    pub memory_bytes: u64,
    /// What it may use of a device.
    pub usable_bytes: u64,
    /// The largest use of memory.
    pub largest_use: &'static str,
}

/// A place where Stages are cut apart.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Cut {
    /// Last module before it.
    pub before: String,
    /// First module after it.
    pub after: String,
    /// Values that cross it, for one microbatch.
    pub bytes: u64,
}

/// Another good Plan.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RunnerUp {
    /// How much longer its step is, as a share of the best one's.
    pub loss: f64,
    /// The Plan in short.
    #[serde(flatten)]
    pub shape: PlanShape,
}

impl Explanation {
    /// Explains the outcome of a search; `unlimited_step_us` is the step of the best Plan without a limit of memory.
    ///
    /// # Errors
    /// When the Plan does not divide the graph.
    pub fn new(
        question: Question<'_>,
        outcome: Outcome,
        unlimited_step_us: Option<f64>,
        undivided: Vec<Undivided>,
    ) -> Result<Self, PartitionError> {
        let Outcome { plan, runners_up, gains, report } = outcome;
        let Question { graph, cluster, .. } = question;
        let rows = microbatch_rows(&plan, plan.batch_rows).into_iter().max().unwrap_or(0);
        let ops: Vec<OpRun> = plan.stages.iter().map(|stage| stage.ops).collect();
        let step = StepShares::new(&plan);
        let workload = Workload::new(graph, cluster, plan.world_size, plan.batch_rows);
        let runners_up = runners_up.iter().map(|other| RunnerUp {
            loss: other.predicted.step_us / plan.predicted.step_us - 1.0,
            shape: PlanShape::new(other, Some(&workload)),
        });
        Ok(Self {
            stages: stage_shares(&plan, &Partition::new(graph, &ops)?, step.bottleneck, question),
            cuts: cuts(&plan, cut_bytes(graph, &ops, rows)?),
            median_cut_bytes: median(cut_bytes(graph, &possible(graph), rows)?),
            runners_up: runners_up.collect(),
            search: SearchFacts::new(&report),
            step,
            unlimited_step_us,
            undivided,
            gains,
            shape: PlanShape::new(&plan, Some(&workload)),
            workload,
            plan,
        })
    }
}

impl StepShares {
    fn new(plan: &Plan) -> Self {
        let longest = (0..plan.stages.len())
            .max_by(|&left, &right| microbatch_us(&plan.stages[left]).total_cmp(&microbatch_us(&plan.stages[right])));
        let bottleneck = longest.unwrap_or(0);
        let stage = &plan.stages[bottleneck];
        let step_us = plan.predicted.step_us;
        let rows = microbatch_rows(plan, plan.batch_rows);
        // Of the largest microbatch, as the Stage's times are.
        let largest = rows.iter().sum::<u64>() as f64 / rows.iter().max().copied().unwrap_or(1) as f64;
        let work = (microbatch_us(stage) * largest / step_us).min(1.0);
        let end = ((stage.predicted.reduce_us + stage.predicted.update_us) / step_us).min(1.0 - work);
        Self { bottleneck, work, end, fill_and_drain: 1.0 - work - end }
    }
}

fn microbatch_us(stage: &StagePlan) -> f64 {
    stage.predicted.forward_us + stage.predicted.backward_us + stage.predicted.transfer_us
}

fn stage_shares(plan: &Plan, partition: &Partition, bottleneck: usize, question: Question<'_>) -> Vec<StageShares> {
    let Question { cluster, settings, .. } = question;
    let most_us = microbatch_us(&plan.stages[bottleneck]);
    let edges: Vec<(usize, usize)> = partition.edges().collect();
    let orders = plan.schedule.stage_orders(&plan.placement().ranks, &edges, plan.microbatches);
    let stages = plan.stages.iter().zip(orders).map(|(stage, order)| {
        let memory_bytes = stage.ranks.iter().map(|&rank| cluster.device_of(rank).memory_bytes).min().unwrap_or(0);
        StageShares {
            microbatch_us: microbatch_us(stage),
            of_bottleneck: if most_us > 0.0 { microbatch_us(stage) / most_us } else { 0.0 },
            in_flight: order.in_flight(),
            memory_bytes: stage.predicted.memory.total_bytes(),
            usable_bytes: settings.usable_bytes(memory_bytes) as u64,
            largest_use: largest_use(&stage.predicted.memory),
        }
    });
    stages.collect()
}

fn largest_use(memory: &MemoryPrediction) -> &'static str {
    memory.uses().into_iter().max_by_key(|&(_, bytes)| bytes).map_or("", |(name, _)| name)
}

fn possible(graph: &Graph) -> Vec<OpRun> {
    let blocks = Blocks::new(graph, &Analysis::new(graph));
    blocks.blocks.into_iter().map(|block| block.ops).collect()
}

/// Bytes of the Values that cross from each Stage but the last to later ones, for `rows` rows.
fn cut_bytes(graph: &Graph, stages: &[OpRun], rows: u64) -> Result<Vec<u64>, PartitionError> {
    let mut bytes = vec![0; stages.len().saturating_sub(1)];
    for crossing in Partition::new(graph, stages)?.crossings {
        let value_bytes = tensor_bytes(&graph.values[crossing.value]).at(rows) as u64;
        let last = crossing.to.last().map_or(crossing.from, |&last| last);
        bytes[crossing.from as usize..last as usize].iter_mut().for_each(|sum| *sum += value_bytes);
    }
    Ok(bytes)
}

fn median(mut amounts: Vec<u64>) -> u64 {
    amounts.sort_unstable();
    amounts.get(amounts.len() / 2).copied().unwrap_or(0)
}

fn cuts(plan: &Plan, bytes: Vec<u64>) -> Vec<Cut> {
    let cuts = plan.stages.windows(2).zip(bytes).map(|(pair, bytes)| Cut {
        before: pair[0].modules.last().cloned().unwrap_or_default(),
        after: pair[1].modules.first().cloned().unwrap_or_default(),
        bytes,
    });
    cuts.collect()
}

impl Report for Explanation {
    fn text(&self, width: usize) -> String {
        let mut text = summary(&self.plan, Some(&self.workload), width);
        text += &paragraph(&self.search_text(), width);
        text += &format!("\nWhat binds\n{}\n", self.stage_table(width));
        text += &paragraph(&self.time_text(), width);
        text += &paragraph(&self.memory_text(), width);
        if !self.cuts.is_empty() {
            let median = format_bytes(self.median_cut_bytes);
            text += "\n";
            text += &paragraph(&format!("Cuts; half of the possible ones are crossed by at most {median}"), width);
            text += &self.cut_table(width);
        }
        if !self.undivided.is_empty() {
            text +=
                &format!("\nWhat replicas divide, beside the same plan without it\n{}", self.undivided_table(width));
        }
        if !self.runners_up.is_empty() {
            text += &format!("\nRunners-up\n{}", self.runner_up_table(width));
        }
        if !self.gains.is_empty() {
            text += &format!("\nWith what was not allowed\n{}", self.gain_table(width));
        }
        text
    }
}

impl Explanation {
    fn search_text(&self) -> String {
        let SearchFacts { plans_covered, blocks, block_kinds, measured_kinds, elapsed_ms, stop, .. } = &self.search;
        let stop = match stop {
            Stop::Complete | Stop::Told => "",
            Stop::Candidates => "; stopped at the limit of candidates",
            Stop::Time => "; stopped at the limit of time",
        };
        let passed_over = self.search.passed_over.as_ref().map(|other| format!("; {other}")).unwrap_or_default();
        format!(
            "Searched: {plans_covered:.1e} plans of {} ({block_kinds} different, {measured_kinds} of them measured) in \
             {}{stop}{passed_over}",
            counted(*blocks as u64, "block", "blocks"),
            format_us(elapsed_ms * 1e3),
        )
    }

    fn stage_table(&self, width: usize) -> String {
        let columns = [
            text("Stage"),
            text("Modules"),
            amount("Ranks"),
            amount("Microbatch"),
            amount("Of longest"),
            amount("In flight"),
            amount("Memory").begins(),
            amount("Usable"),
            amount("Used"),
            text("Most of it for"),
            text("Saving"),
        ];
        let rows = self.plan.stages.iter().zip(&self.stages).enumerate().map(|(number, (stage, shares))| {
            let &StageShares { microbatch_us, of_bottleneck, in_flight, memory_bytes, usable_bytes, largest_use } =
                shares;
            vec![
                number.to_string(),
                stage.modules.join(", "),
                runs(&stage.ranks),
                format_us(microbatch_us),
                percent(of_bottleneck),
                in_flight.to_string(),
                format_bytes(memory_bytes),
                format_bytes(usable_bytes),
                percent(shares.used()),
                largest_use.to_owned(),
                savers(stage),
            ]
        });
        table(&columns, &rows.collect::<Vec<_>>(), width)
    }

    fn time_text(&self) -> String {
        let StepShares { bottleneck, work, fill_and_drain, end } = self.step;
        if self.plan.stages.len() == 1 {
            return format!(
                "Time: {} {} {} of the step, the rest is gradient reduction and optimizer.",
                counted(u64::from(self.plan.microbatches), "microbatch", "microbatches"),
                if self.plan.microbatches == 1 { "fills" } else { "fill" },
                percent(work),
            );
        }
        format!(
            "Time: stage {bottleneck} takes longest; its {} {} {} of the step, filling and draining {}, gradient \
             reduction and optimizer {}.",
            counted(u64::from(self.plan.microbatches), "microbatch", "microbatches"),
            if self.plan.microbatches == 1 { "fills" } else { "fill" },
            percent(work),
            percent(fill_and_drain),
            percent(end),
        )
    }

    fn memory_text(&self) -> String {
        let Some((number, fullest)) =
            self.stages.iter().enumerate().max_by(|(_, left), (_, right)| left.used().total_cmp(&right.used()))
        else {
            return String::new();
        };
        let full = if fullest.used() > FULL { "is full" } else { "is fullest" };
        let step_us = self.plan.predicted.step_us;
        let unlimited = match self.unlimited_step_us {
            Some(unlimited_us) if unlimited_us < step_us * 0.999 => format!(
                " Memory binds: without a limit a step would take {} ({}).",
                format_us(unlimited_us),
                signed_percent(unlimited_us / step_us - 1.0)
            ),
            Some(_) => " Memory does not bind: without a limit the best plan is no faster.".to_owned(),
            None => String::new(),
        };
        format!(
            "Memory: stage {number} {full}, with {} of what it may use, most of it for {}.{unlimited}",
            percent(fullest.used()),
            fullest.largest_use
        )
    }

    fn cut_table(&self, width: usize) -> String {
        let rows = self.cuts.iter().enumerate().map(|(number, Cut { before, after, bytes })| {
            let by_median = *bytes as f64 / self.median_cut_bytes.max(1) as f64;
            vec![
                format!("{number} | {}", number + 1),
                before.clone(),
                after.clone(),
                format_bytes(*bytes),
                format!("{by_median:.2} x"),
            ]
        });
        let columns = [text("Stages"), text("Before"), text("After"), amount("Crossed by"), amount("Median")];
        table(&columns, &rows.collect::<Vec<_>>(), width)
    }

    /// The best Plan above the others, so that a person sees what differs. All take the same rows: the time of a step
    /// tells their speed.
    fn runner_up_table(&self, width: usize) -> String {
        let row = |loss: String, shape: &PlanShape| [vec![loss], without_speeds(shape.row())].concat();
        let others = self.runners_up.iter().map(|RunnerUp { loss, shape }| row(signed_percent(*loss), shape));
        let rows: Vec<Vec<String>> = std::iter::once(row("best".to_owned(), &self.shape)).chain(others).collect();
        let columns = without_speeds(PlanShape::COLUMNS.to_vec());
        table(&[vec![amount("Loses")], columns].concat(), &rows, width)
    }

    fn undivided_table(&self, width: usize) -> String {
        let step_us = self.plan.predicted.step_us;
        let rows = self.undivided.iter().map(|&Undivided { stage, step_us: without_us, memory_bytes }| {
            let (planned, shares) = (&self.plan.stages[stage], &self.stages[stage]);
            let fits = if memory_bytes > shares.usable_bytes { "does not fit" } else { "" };
            vec![
                stage.to_string(),
                sharding(planned.sharding).unwrap_or_default(),
                format_bytes(shares.memory_bytes),
                format_bytes(memory_bytes),
                format_us(without_us),
                signed_percent(without_us / step_us - 1.0),
                fits.to_owned(),
            ]
        });
        let columns = [
            text("Stage"),
            text("Divides"),
            amount("Memory"),
            amount("Without"),
            amount("Step without").begins(),
            amount("Change"),
            text("Remark"),
        ];
        table(&columns, &rows.collect::<Vec<_>>(), width)
    }

    fn gain_table(&self, width: usize) -> String {
        let best_us = self.plan.predicted.step_us;
        let rows = self.gains.iter().map(|Gain { what, step_us }| {
            let change = |us: f64| signed_percent((us / best_us - 1.0).min(0.0));
            vec![
                (*what).to_owned(),
                step_us.map(|us| format_us(us.min(best_us))).unwrap_or_default(),
                step_us.map(change).unwrap_or_default(),
            ]
        });
        table(&[text("With"), amount("Step"), amount("Change")], &rows.collect::<Vec<_>>(), width)
    }
}

/// Of what stands beside the time of a step: columns, or the cells of a row.
fn without_speeds<T>(mut cells: Vec<T>) -> Vec<T> {
    cells.drain(PlanShape::SPEEDS);
    cells
}

impl StageShares {
    /// Share of what it may use.
    fn used(&self) -> f64 {
        self.memory_bytes as f64 / self.usable_bytes.max(1) as f64
    }
}
