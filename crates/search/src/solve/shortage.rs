//! What is short when nothing fits.

use std::ops::Range;

use rannc_plan::{MemoryPrediction, Sharding};

use super::depths::{Ahead, Depths};
use crate::error::{Advice, SearchError, Shortage};
use crate::price::{At, Place, Pricing, RankOrder, Saver, StageMemory};

/// A Stage of the Plan that comes closest, the one that misses most.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Tightest<'a> {
    short_bytes: f64,
    first: usize,
    end: usize,
    place: &'a Place,
    in_flight: u64,
    stages: usize,
}

/// What would make the model fit.
pub(crate) struct Help {
    /// The least that Replicas would have to divide.
    pub divided: Option<Sharding>,
    /// What the runtime cannot do yet.
    pub would_fit: Vec<&'static str>,
}

/// Says which Stage is too large even in the Plan whose largest Stage is smallest; `describe` names a
/// Block. Of pricings, that with the most microbatches comes first.
pub(crate) fn shortage(
    pricings: &[Pricing<'_>],
    order: &RankOrder,
    help: Help,
    describe: impl Fn(usize) -> String,
) -> SearchError {
    let settings = pricings[0].problem.settings;
    let savers = Saver::most(&settings.savers);
    let closest = pricings
        .iter()
        .filter_map(|pricing| Some((pricing, Fit::new(pricing, order, &savers).tightest()?)))
        .min_by(|(_, left), (_, right)| left.short_bytes.total_cmp(&right.short_bytes));
    let Some((pricing, tightest)) = closest else {
        let wanted = settings.forced_stages().unwrap_or(1);
        return SearchError::TooFewBlocks { wanted, possible: pricings[0].chain.len(), whole: None };
    };
    let Tightest { first, end, place, .. } = tightest;
    let at = pricing.at(place);
    let usable_bytes = at.usable_bytes;
    let memory_of = |run: Range<usize>| {
        let workspace_bytes = pricing.run_workspace_bytes(run.clone(), &at);
        let memory = leanest(pricing, &run, &at, &savers, workspace_bytes);
        memory.prediction(memory.microbatch_bytes * tightest.in_flight as f64)
    };
    let alone_bytes = |block: usize| memory_of(block..block + 1).total_bytes();
    let too_large = |&block: &usize| pricing.is_too_large(&(block..block + 1), &at);
    let measured = (first..end).find(too_large);
    let heaviest = measured.or((first..end).rev().max_by_key(|&block| alone_bytes(block))).unwrap_or(first);
    let memory = memory_of(first..end);
    SearchError::DoesNotFit(Shortage {
        block: describe(heaviest),
        short_bytes: tightest.short_bytes.max(0.0).ceil() as u64,
        needed_bytes: (usable_bytes + tightest.short_bytes).ceil() as u64,
        usable_bytes: usable_bytes as u64,
        divided: help.divided,
        would_fit: help.would_fit,
        stages: tightest.stages,
        microbatches: pricing.step.microbatches,
        largest: largest_use(&memory),
        advice: advice(pricing, pricings[0].step.microbatches, &memory, alone_bytes(heaviest) as f64 > usable_bytes),
        measured_rows: measured.map(|_| u32::try_from(at.most_rows()).unwrap_or(u32::MAX)),
    })
}

/// True when some division fits if every Stage is run in one of these ways.
pub(crate) fn fits(pricings: &[Pricing<'_>], order: &RankOrder, savers: &[Saver]) -> bool {
    let fits = |tightest: Tightest<'_>| tightest.short_bytes <= 0.0;
    pricings.iter().any(|pricing| Fit::new(pricing, order, savers).tightest().is_some_and(fits))
}

fn model_bytes(memory: &MemoryPrediction) -> u64 {
    memory.params_bytes + memory.grads_bytes + memory.optimizer_bytes
}

fn largest_use(memory: &MemoryPrediction) -> &'static str {
    let uses = [
        (model_bytes(memory), "parameters, gradients and optimizer state"),
        (memory.activations_bytes, "activations kept for the backward"),
        (memory.workspace_bytes, "temporary tensors"),
        (memory.comm_bytes, "communication buffers"),
        (memory.framework_bytes, "the framework"),
    ];
    uses.into_iter().rev().max_by_key(|&(bytes, _)| bytes).map_or("", |(_, name)| name)
}

/// What helps a Stage with this memory, of which one Block may be too large even alone, where so many microbatches
/// have been tried.
fn advice(pricing: &Pricing<'_>, most_microbatches: u64, memory: &MemoryPrediction, alone: bool) -> Advice {
    let settings = pricing.problem.settings;
    if memory.framework_bytes >= memory.total_bytes() / 2 {
        return Advice::HigherLimit;
    }
    if model_bytes(memory) >= memory.activations_bytes + memory.workspace_bytes + memory.comm_bytes {
        return if alone { Advice::LargerDevice } else { Advice::MoreDevices };
    }
    let twice = most_microbatches.saturating_mul(2);
    let may_be_smaller = settings.microbatches.is_none()
        && pricing.step.microbatches == most_microbatches
        && twice <= settings.most_rank_rows()
        && twice.saturating_mul(settings.min_microbatch_rows) <= settings.batch_rows;
    if may_be_smaller { Advice::MoreMicrobatches } else { Advice::SmallerBatch }
}

/// The Plan whose Stages miss least, by the dynamic program of [`super::stages`] with memory as its only
/// objective.
struct Fit<'a> {
    pricing: &'a Pricing<'a>,
    order: &'a RankOrder,
    blocks: usize,
    units: u32,
    most_stages: usize,
    /// By place in the order, end, first.
    memory: Vec<Vec<Need>>,
}

/// Of divisions of the last Blocks, for each ahead of them the one that misses least; nothing of no Blocks.
type Closest<'a> = Vec<(Ahead, Option<Tightest<'a>>)>;

/// What a Stage needs beyond what it may use, and for each microbatch in flight.
#[derive(Clone, Copy)]
struct Need {
    short_bytes: f64,
    microbatch_bytes: f64,
    /// At least so much beyond what it may use, by its measurement.
    measured_bytes: f64,
}

impl<'a> Fit<'a> {
    fn new(pricing: &'a Pricing<'a>, order: &'a RankOrder, savers: &[Saver]) -> Self {
        let (blocks, units) = (pricing.chain.len(), order.units());
        let settings = pricing.problem.settings;
        let limit = settings.forced_stages().or(settings.max_stages.map(|stages| stages as usize));
        let most_stages = limit.unwrap_or(usize::MAX).min(blocks).min(units as usize);
        let memory = order.places().iter().map(|place| needs(pricing, place, savers)).collect();
        Self { pricing, order, blocks, units, most_stages, memory }
    }

    fn tightest(&self) -> Option<Tightest<'a>> {
        let settings = self.pricing.problem.settings;
        let exactly = settings.forced_stages();
        let stride = self.units as usize + 1;
        let mut depths = Depths::new(&self.pricing.chain.feeds, self.pricing.step.deepest());
        let mut later: Vec<Closest<'a>> = vec![Closest::new(); (self.blocks + 1) * stride];
        later[self.blocks * stride].push((Ahead::END, None));
        let mut best: Option<Tightest<'a>> = None;
        let most_units = if settings.replicas.is_some() { 1 } else { self.units };
        for stages in 1..=self.most_stages {
            let mut now = vec![Closest::new(); later.len()];
            for units in 1..=most_units {
                for taken in 0..=self.units - units {
                    self.add_stage((stages, units, taken), &mut depths, &later, &mut now);
                }
            }
            if exactly.is_none_or(|wanted| wanted == stages) {
                best = now[self.units as usize].iter().fold(best, |best, &(_, whole)| smaller(best, whole));
            }
            later = now;
        }
        best
    }

    /// Puts a Stage of so many units before the divisions of `taken` units into one Stage less.
    fn add_stage(
        &self,
        (stages, units, taken): (usize, u32, u32),
        depths: &mut Depths<'_>,
        later: &[Closest<'a>],
        now: &mut [Closest<'a>],
    ) {
        let index = self.order.place_index(self.units - taken - units, units);
        let place = &self.order.places()[index];
        let stride = self.units as usize + 1;
        for end in 1..=self.blocks {
            let needs = &self.memory[index][end * (end - 1) / 2..][..end];
            for &(ahead, rest) in &later[end * stride + taken as usize] {
                for (first, need) in needs.iter().enumerate() {
                    let (depth, ahead) = depths.put_before(&(first..end), ahead);
                    let in_flight = self.pricing.step.in_flight(depth);
                    let short_bytes = need.short_with(in_flight);
                    let stage = Tightest { short_bytes, first, end, place, in_flight, stages };
                    let whole = rest.map_or(stage, |rest| larger(rest, stage));
                    note(&mut now[first * stride + (taken + units) as usize], ahead, whole);
                }
            }
        }
    }
}

impl Need {
    /// What a Stage misses that holds so many microbatches.
    fn short_with(&self, in_flight: u64) -> f64 {
        (self.short_bytes + self.microbatch_bytes * in_flight as f64).max(self.measured_bytes)
    }
}

fn note<'a>(closest: &mut Closest<'a>, ahead: Ahead, whole: Tightest<'a>) {
    match closest.iter_mut().find(|(known, _)| *known == ahead) {
        Some((_, known)) => *known = smaller(*known, Some(whole)),
        None => closest.push((ahead, Some(whole))),
    }
}

/// By end and first.
fn needs(pricing: &Pricing<'_>, place: &Place, savers: &[Saver]) -> Vec<Need> {
    let at = pricing.at(place);
    let mut needs = Vec::new();
    for end in 1..=pricing.chain.len() {
        let mut workspace_bytes: f64 = 0.0;
        let of_run = |first: usize| {
            workspace_bytes = workspace_bytes.max(pricing.workspace_bytes(first, &at));
            let memory = leanest(pricing, &(first..end), &at, savers, workspace_bytes);
            // What ran out of memory needs more than there is.
            let measured_bytes = if pricing.is_too_large(&(first..end), &at) { at.beyond_bytes() } else { f64::MIN };
            Need {
                short_bytes: memory.fixed_bytes() - at.usable_bytes,
                microbatch_bytes: memory.microbatch_bytes,
                measured_bytes,
            }
        };
        let from_end: Vec<Need> = (0..end).rev().map(of_run).collect();
        needs.extend(from_end.into_iter().rev());
    }
    needs
}

/// Memory of a Stage that is run in that of these ways which needs least beside its microbatches.
fn leanest(
    pricing: &Pricing<'_>,
    run: &Range<usize>,
    at: &At<'_>,
    savers: &[Saver],
    workspace_bytes: f64,
) -> StageMemory {
    let asked = &pricing.problem.settings.savers;
    let allowed = savers.iter().filter(|saver| saver.may_be_at(at.place, asked));
    let memories = allowed.map(|&saver| pricing.stage(run.clone(), at, saver, workspace_bytes).memory);
    let leaner = memories.min_by(|left, right| left.fixed_bytes().total_cmp(&right.fixed_bytes()));
    leaner.expect("one of them may be anywhere")
}

fn larger<'a>(rest: Tightest<'a>, stage: Tightest<'a>) -> Tightest<'a> {
    if rest.short_bytes >= stage.short_bytes { Tightest { stages: stage.stages, ..rest } } else { stage }
}

fn smaller<'a>(left: Option<Tightest<'a>>, right: Option<Tightest<'a>>) -> Option<Tightest<'a>> {
    match (left, right) {
        (Some(left), Some(right)) => Some(if right.short_bytes < left.short_bytes { right } else { left }),
        (left, right) => left.or(right),
    }
}
