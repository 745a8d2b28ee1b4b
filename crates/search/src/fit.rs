//! What is short when nothing fits.

use rannc_plan::MemoryPrediction;

use crate::error::{Advice, SearchError};
use crate::price::{Pricing, Span};

/// A Stage of the Plan that comes closest, the one that needs most.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Tightest {
    needed_bytes: f64,
    span: Span,
    in_flight: u64,
    stages: usize,
}

/// Says which Stage is too large even in the Plan whose largest Stage is smallest; `describe` names a
/// Block.
pub(crate) fn shortage(pricing: &Pricing<'_>, describe: impl Fn(usize) -> String) -> SearchError {
    let usable_bytes = pricing.settings.usable_bytes(pricing.cluster);
    let Some(tightest) = Fit::new(pricing).tightest() else {
        let wanted = pricing.settings.forced_stages().unwrap_or(1);
        return SearchError::TooFewBlocks { wanted, possible: pricing.chain.len() };
    };
    let Span { first, end, replicas } = tightest.span;
    let alone_bytes = |block: usize| {
        let span = Span { first: block, end: block + 1, replicas };
        pricing.memory(span, tightest.in_flight).total_bytes()
    };
    let heaviest = (first..end).rev().max_by_key(|&block| alone_bytes(block)).unwrap_or(first);
    let memory = pricing.memory(tightest.span, tightest.in_flight);
    SearchError::DoesNotFit {
        block: describe(heaviest),
        short_bytes: (tightest.needed_bytes - usable_bytes).max(0.0).ceil() as u64,
        needed_bytes: tightest.needed_bytes.ceil() as u64,
        usable_bytes: usable_bytes as u64,
        stages: tightest.stages,
        microbatches: pricing.microbatches,
        largest: largest_use(&memory),
        advice: advice(pricing, &memory, alone_bytes(heaviest) as f64 > usable_bytes),
    }
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

/// What helps a Stage with this memory, of which one Block may be too large even alone.
fn advice(pricing: &Pricing<'_>, memory: &MemoryPrediction, alone: bool) -> Advice {
    let settings = pricing.settings;
    if memory.framework_bytes >= memory.total_bytes() / 2 {
        return Advice::HigherLimit;
    }
    if model_bytes(memory) >= memory.activations_bytes + memory.workspace_bytes + memory.comm_bytes {
        return if alone { Advice::LargerDevice } else { Advice::MoreDevices };
    }
    let twice = pricing.microbatches.saturating_mul(2);
    let may_be_smaller = settings.microbatches.is_none()
        && twice <= settings.most_rank_rows()
        && twice.saturating_mul(settings.min_microbatch_rows) <= settings.batch_rows;
    if may_be_smaller { Advice::MoreMicrobatches } else { Advice::SmallerBatch }
}

/// The least possible largest Stage, by the dynamic program of [`crate::stages`] with memory as its
/// only objective.
struct Fit<'a> {
    pricing: &'a Pricing<'a>,
    blocks: usize,
    devices: u32,
    most_stages: usize,
}

impl<'a> Fit<'a> {
    fn new(pricing: &'a Pricing<'a>) -> Self {
        let (blocks, devices) = (pricing.chain.len(), pricing.settings.world_size);
        let limit = pricing.settings.forced_stages().or(pricing.settings.max_stages.map(|stages| stages as usize));
        let most_stages = limit.unwrap_or(usize::MAX).min(blocks).min(devices as usize);
        Self { pricing, blocks, devices, most_stages }
    }

    fn tightest(&self) -> Option<Tightest> {
        let exactly = self.pricing.settings.forced_stages();
        let stride = self.devices as usize + 1;
        let mut later: Vec<Option<Tightest>> = vec![None; (self.blocks + 1) * stride];
        let mut best: Option<Tightest> = None;
        for stages in 1..=self.most_stages {
            let mut now = vec![None; later.len()];
            for replicas in 1..=self.devices {
                self.add_stage(stages, replicas, &later, &mut now);
            }
            if exactly.is_none_or(|wanted| wanted == stages) {
                best = smaller(best, now[self.devices as usize]);
            }
            later = now;
        }
        best
    }

    /// Puts a Stage with so many Replicas before the divisions into one Stage less.
    fn add_stage(&self, stages: usize, replicas: u32, later: &[Option<Tightest>], now: &mut [Option<Tightest>]) {
        let forced = self.pricing.settings.replicas.as_ref();
        if forced.is_some_and(|forced| forced.len() < stages || forced[forced.len() - stages] != replicas) {
            return;
        }
        let in_flight = self.pricing.in_flight(stages);
        let stride = self.devices as usize + 1;
        for end in 1..=self.blocks {
            let mut workspace_bytes: f64 = 0.0;
            for first in (0..end).rev() {
                workspace_bytes = workspace_bytes.max(self.pricing.workspace_bytes(first, replicas));
                let span = Span { first, end, replicas };
                let footprint = self.pricing.footprint(span, workspace_bytes);
                let needed_bytes = footprint.fixed_bytes + footprint.microbatch_bytes * in_flight as f64;
                let stage = Tightest { needed_bytes, span, in_flight, stages };
                for taken in 0..=(self.devices - replicas) as usize {
                    let rest = later[end * stride + taken];
                    let whole = if stages == 1 {
                        (end == self.blocks && taken == 0).then_some(stage)
                    } else {
                        larger(rest, stage)
                    };
                    let state = &mut now[first * stride + taken + replicas as usize];
                    *state = smaller(*state, whole);
                }
            }
        }
    }
}

fn larger(rest: Option<Tightest>, stage: Tightest) -> Option<Tightest> {
    rest.map(
        |rest| if rest.needed_bytes >= stage.needed_bytes { Tightest { stages: stage.stages, ..rest } } else { stage },
    )
}

fn smaller(left: Option<Tightest>, right: Option<Tightest>) -> Option<Tightest> {
    match (left, right) {
        (Some(left), Some(right)) => Some(if right.needed_bytes < left.needed_bytes { right } else { left }),
        (left, right) => left.or(right),
    }
}
