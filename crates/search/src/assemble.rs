//! From a graph to a Plan.

use std::ops::Range;

use rannc_cost::Cluster;
use rannc_ir::{Analysis, Graph};
use rannc_plan::{PLAN_SCHEMA, Plan, Recompute, Sharding, StageOps, StagePlan, StagePrediction, StepPrediction};

use crate::blocks::Blocks;
use crate::chain::Chain;
use crate::error::SearchError;
use crate::extract::extract;
use crate::fit::shortage;
use crate::modules::ModuleNames;
use crate::price::{Pricing, Span, StepTime};
use crate::relax::Relaxation;
use crate::settings::Settings;
use crate::stages::{Found, StageSearch};
use crate::table::{Entry, StageTable};

/// A Plan must take less than this share of the time of one with fewer microbatches to replace it.
const BETTER: f64 = 1.0 - 1e-9;
/// A Plan with several Stages must take less than this share of the time of the best one with a
/// single Stage to replace it: that is how far a time that was not measured may be off, and a single
/// Stage has neither transfers nor a bubble that could turn out longer.
pub(crate) const SEVERAL_STAGES: f64 = 0.8;

/// Finds the Plan of a verified graph that takes the least time per step within the memory of the
/// cluster's devices; a single Stage that fits is kept unless several are faster by a clear margin.
/// The same arguments give the same Plan.
pub fn plan(graph: &Graph, cluster: &Cluster, settings: &Settings) -> Result<Plan, SearchError> {
    cluster.check()?;
    settings.check(cluster)?;
    let analysis = Analysis::new(graph);
    if analysis.main_ops.is_empty() {
        return Err(SearchError::Empty { graph: graph.name.clone() });
    }
    let rows = settings.batch_rows.div_ceil(u64::from(settings.world_size));
    let blocks = Blocks::new(graph, &analysis, &cluster.kinds[0], settings.world_size, rows);
    let chain = Chain::new(extract(graph, &analysis, &blocks, &cluster.kinds[0], settings.batch_rows));
    if let Some(wanted) = settings.forced_stages().filter(|&wanted| wanted > chain.len()) {
        return Err(SearchError::TooFewBlocks { wanted, possible: chain.len() });
    }
    let names = ModuleNames::new(graph, &analysis.main_ops);
    let candidates = settings.microbatch_candidates()?;
    let Some((found, lower_bound_us)) = best(&chain, cluster, settings, &candidates) else {
        let most = candidates.last().copied().unwrap_or(1);
        return Err(shortage(&Pricing::new(&chain, cluster, settings, most), |block| {
            let StageOps { first, end } = blocks.blocks[block].ops;
            let place = graph.place(analysis.main_ops[first as usize]);
            format!("{} (from {place})", names.summary(first, end).join(", "))
        }));
    };
    let pricing = Pricing::new(&chain, cluster, settings, found.microbatches);
    let assembly = Assembly { pricing: &pricing, blocks: &blocks, names: &names };
    let stages = assembly.stages(&found);
    let predicted = StepPrediction { step_us: found.step_us, bubble: bubble(&stages, &found), lower_bound_us };
    let plan = Plan {
        schema: PLAN_SCHEMA,
        pyrannc: env!("CARGO_PKG_VERSION").to_owned(),
        graph_hash: graph.hash(),
        graph_name: graph.name.clone(),
        world_size: settings.world_size,
        batch_rows: settings.batch_rows,
        microbatches: settings.microbatches.unwrap_or(u32::try_from(found.microbatches).unwrap_or(u32::MAX)),
        schedule: settings.schedule(),
        stages,
        predicted,
        checksum: String::new(),
    };
    Ok(plan.seal()?)
}

/// The chosen division over all numbers of microbatches, and a lower bound for the time of every one.
pub(crate) fn best(chain: &Chain, cluster: &Cluster, settings: &Settings, candidates: &[u64]) -> Option<(Found, f64)> {
    let mut open: Vec<(f64, u64)> = Vec::new();
    for &microbatches in candidates {
        let pricing = Pricing::new(chain, cluster, settings, microbatches);
        let table = StageTable::new(&pricing);
        open.push((Relaxation::new(&pricing, &table).step_us(&table, microbatches), microbatches));
    }
    open.retain(|(bound_us, _)| bound_us.is_finite());
    // The most promising number first, so that the others can be given up early.
    open.sort_by(|left, right| left.0.total_cmp(&right.0).then(left.1.cmp(&right.1)));
    let lower_bound_us = open.first()?.0;
    let mut best = single_stage(chain, cluster, settings, candidates);
    for (bound_us, microbatches) in open {
        if bound_us >= time_to_beat_us(best.as_ref()) {
            break;
        }
        let pricing = Pricing::new(chain, cluster, settings, microbatches);
        let table = StageTable::new(&pricing);
        let bounds = Relaxation::new(&pricing, &table);
        for width in [Some(1), None] {
            best = StageSearch::run(&pricing, &table, &bounds, width, time_to_beat_us(best.as_ref())).or(best);
        }
    }
    best.map(|found| (found, lower_bound_us))
}

/// A Plan that takes as long replaces none that is known.
fn time_to_beat_us(known: Option<&Found>) -> f64 {
    known.map_or(f64::INFINITY, |found| found.step_us * if found.spans.len() == 1 { SEVERAL_STAGES } else { BETTER })
}

/// The best Plan with one Stage, which any other one has to beat.
fn single_stage(chain: &Chain, cluster: &Cluster, settings: &Settings, candidates: &[u64]) -> Option<Found> {
    if settings.forced_stages().is_some_and(|stages| stages != 1) {
        return None;
    }
    let span = Span { first: 0, end: chain.len(), replicas: settings.world_size };
    let mut best: Option<Found> = None;
    for &microbatches in candidates {
        let pricing = Pricing::new(chain, cluster, settings, microbatches);
        let entry = Entry::priced(&pricing, span, 0);
        let step_us =
            StepTime::default().prepend(entry.microbatch_us, entry.backward_us, entry.end_us).step_us(microbatches);
        let fits = entry.max_in_flight >= pricing.in_flight(1);
        if fits && best.as_ref().is_none_or(|found| step_us < found.step_us * BETTER) {
            best = Some(Found { microbatches, spans: vec![span], step_us });
        }
    }
    best
}

struct Assembly<'a> {
    pricing: &'a Pricing<'a>,
    blocks: &'a Blocks,
    names: &'a ModuleNames<'a>,
}

impl Assembly<'_> {
    fn stages(&self, found: &Found) -> Vec<StagePlan> {
        let mut rank = 0;
        let stages = found.spans.iter().enumerate().map(|(number, &span)| {
            let ranks = rank..rank + span.replicas;
            rank = ranks.end;
            self.stage(span, ranks, found.spans.len() - number)
        });
        stages.collect()
    }

    fn stage(&self, span: Span, ranks: Range<u32>, from_end: usize) -> StagePlan {
        let Span { first, end, replicas } = span;
        let ops = StageOps { first: self.blocks.blocks[first].ops.first, end: self.blocks.blocks[end - 1].ops.end };
        let time = self.pricing.time(span, &self.pricing.links(ranks.clone()));
        let rows = self.pricing.replica_rows(replicas);
        StagePlan {
            ops,
            modules: self.names.summary(ops.first, ops.end),
            ranks: ranks.collect(),
            blocks: u32::try_from(end - first).unwrap_or(u32::MAX),
            recompute: Recompute::None,
            sharding: Sharding::None,
            offload: false,
            predicted: StagePrediction {
                forward_us: time.forward_us,
                backward_us: time.backward_us,
                transfer_us: time.transfer_us,
                reduce_us: time.reduce_us,
                update_us: time.update_us,
                in_bytes: self.pricing.chain.in_bytes.at(first, end, rows) as u64,
                out_bytes: self.pricing.chain.out_bytes.at(first, end, rows) as u64,
                memory: self.pricing.memory(span, self.pricing.in_flight(from_end)),
            },
        }
    }
}

/// The share of the devices' time in which they neither run forward nor backward.
fn bubble(stages: &[StagePlan], found: &Found) -> f64 {
    let microbatches = found.microbatches as f64;
    let devices: usize = stages.iter().map(|stage| stage.ranks.len()).sum();
    let busy = stages.iter().map(|stage| {
        stage.ranks.len() as f64 * microbatches * (stage.predicted.forward_us + stage.predicted.backward_us)
    });
    let busy_us: f64 = busy.sum();
    (1.0 - busy_us / (devices as f64 * found.step_us)).clamp(0.0, 1.0)
}
