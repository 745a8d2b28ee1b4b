//! The chain of Blocks: what any run of it costs, composed from sums.

use std::ops::Range;

use rannc_cost::{ComputeCost, Device, OpWork};

use super::feeds::Feeds;
use super::interval::{Amount, IntervalSums, IntervalSumsBuilder};
use super::own::OwnParams;
use super::spec::{Affine, BlockSpec, ByCount, ChainSpec, CrossingSpec, KeptSpec, SpanSpec, StateSpec};
use super::sums::AffineSums;
use super::times::Times;
use super::traffic::{BatchTraffic, Traffic};

/// Rows at which ops beside those of Blocks are priced: their results hardly ever depend on the batch.
const CLONE_ROWS: u64 = 1;

/// A chain of Blocks. All sums are over runs `first..end` of Blocks.
#[derive(Clone, Debug)]
pub(crate) struct Chain {
    pub(super) blocks: Vec<BlockSpec>,
    pub(super) spans: Vec<SpanSpec>,
    /// By kind, by Block: how many of the kind are before it.
    kinds_before: Vec<Vec<usize>>,
    /// Parameters, buffers and constants, each once.
    pub(crate) state_bytes: IntervalSums,
    /// Trainable parameters, each once.
    pub(crate) trainable_bytes: IntervalSums,
    /// Their gradients as they are summed over ranks, each once.
    pub(crate) message_bytes: IntervalSums,
    /// Their gradients, as far as they stay, each once.
    pub(crate) grad_bytes: ByCount<IntervalSums>,
    /// Copies of these that are summed over ranks, each once.
    pub(crate) message_copy_bytes: IntervalSums,
    /// Working copies of parameters, each once.
    pub(crate) copy_bytes: IntervalSums,
    /// Parameters that no Block outside of the run uses.
    pub(crate) own: OwnParams,
    /// Time to make working copies on each kind of device.
    conversion_us: Vec<IntervalSums>,
    /// Time to add gradients of working copies to sums of more digits, beyond adding them in their own type, on each kind
    /// of device.
    widening_us: Vec<IntervalSums>,
    /// Batch-free ops that several Blocks use, on each kind of device, each op once.
    clones: Vec<IntervalSums<ComputeCost>>,
    /// The same of ops that run once a step.
    once: Vec<IntervalSums<ComputeCost>>,
    /// Which Blocks use what others make.
    pub(crate) feeds: Feeds,
    /// What moves between Blocks.
    pub(crate) traffic: Traffic,
    /// The part of it that is between a Stage and the very next one, whichever other Blocks these have.
    pub(crate) direct: Traffic,
    /// What moves between Blocks and the ranks' own batches.
    pub(crate) batch: BatchTraffic,
    /// Kept for the backward by the operators' own account, received and sent Values included.
    kept_bytes: AffineSums,
    /// Kept by one Block alone and made in it, by Block.
    inside_bytes: Vec<Affine>,
    /// Outputs of the model.
    pub(crate) output_bytes: AffineSums,
}

impl Chain {
    /// A chain that may run on these kinds of devices.
    pub(crate) fn new(spec: ChainSpec, devices: &[Device]) -> Self {
        let ChainSpec { blocks, spans, states, clones, conversions, crossings, kept, batch } = spec;
        let len = blocks.len();
        let clone_times = |device: &Device, once_a_step: bool| {
            let clones = clones.iter().filter(|clone| clone.once == once_a_step);
            once_each(len, clones.map(|clone| (&clone.blocks[..], clone.work.at(device, CLONE_ROWS))))
        };
        let conversion_us = |device: &Device| {
            let cost = |work: &OpWork| work.at(device, CLONE_ROWS).forward_us;
            once_each(len, conversions.iter().map(|conversion| (&conversion.blocks[..], cost(&conversion.work))))
        };
        let of = |amount: &dyn Fn(&StateSpec) -> f64, states: &mut dyn Iterator<Item = &StateSpec>| {
            once_each(len, states.map(|state| (&state.blocks[..], amount(state))))
        };
        let trainable = states.iter().filter(|state| state.trainable);
        let widening_us = |device: &Device| {
            let us = |state: &StateSpec| device.pointwise_us(state.widening_bytes());
            once_each(len, trainable.clone().map(|state| (&state.blocks[..], us(state))))
        };
        Self {
            state_bytes: of(&|state| state.bytes, &mut states.iter()),
            grad_bytes: [false, true].map(|several| of(&|state| state.grad_bytes(several), &mut trainable.clone())),
            message_copy_bytes: of(&StateSpec::message_copy_bytes, &mut trainable.clone()),
            message_bytes: of(&|state| state.message_bytes, &mut trainable.clone()),
            trainable_bytes: of(&|state| state.bytes, &mut trainable.clone()),
            copy_bytes: of(&|state| state.copy_bytes, &mut states.iter()),
            own: OwnParams::new(&blocks, &states),
            conversion_us: devices.iter().map(conversion_us).collect(),
            widening_us: devices.iter().map(widening_us).collect(),
            clones: devices.iter().map(|device| clone_times(device, false)).collect(),
            once: devices.iter().map(|device| clone_times(device, true)).collect(),
            feeds: Feeds::new(len, &crossings),
            traffic: Traffic::whole(len, &crossings),
            direct: Traffic::direct(len, &crossings),
            batch: BatchTraffic::new(len, &batch),
            kept_bytes: kept_sums(&blocks, &kept),
            inside_bytes: inside_bytes(&blocks, &kept),
            output_bytes: AffineSums::new(len, |builder| {
                for (place, block) in blocks.iter().enumerate() {
                    builder.add_once(0..len, &[place], block.output_bytes);
                }
            }),
            kinds_before: kinds_before(&blocks),
            blocks,
            spans,
        }
    }

    /// Number of Blocks.
    pub(crate) fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Kept by a run for the backward, received and sent Values included.
    pub(crate) fn kept_bytes<'t>(
        &self,
        times: impl Iterator<Item = &'t Times>,
        first: usize,
        end: usize,
        rows: u64,
    ) -> f64 {
        let more_bytes = times.map(|times| times.more_kept_bytes(first, end)).reduce(f64::max).unwrap_or(0.0);
        (self.kept_bytes.at(first, end, rows) + more_bytes).max(self.traffic.in_bytes.at(first, end, rows))
    }

    /// What a Block alone keeps for the backward, less what it takes in.
    pub(crate) fn kept_inside_bytes(&self, block: usize, rows: u64) -> f64 {
        (self.inside_bytes[block].at(rows) - self.traffic.in_bytes.at(block, block + 1, rows)).max(0.0)
    }

    /// Time to make the working copies of a run on the device of a kind.
    pub(crate) fn conversion_us(&self, kind: usize, run: &Range<usize>) -> f64 {
        self.conversion_us[kind].at(run.start, run.end)
    }

    /// The kind of a Block.
    pub(crate) fn kind(&self, block: usize) -> u32 {
        self.blocks[block].kind
    }

    /// Blocks of a kind in a run.
    pub(crate) fn count(&self, kind: u32, run: &Range<usize>) -> usize {
        let before = &self.kinds_before[kind as usize];
        before[run.end] - before[run.start]
    }

    /// What a run costs for one of so many microbatches, with its part of what runs once a step; infinite when a Block
    /// of it ran out of memory while it was measured.
    ///
    /// Gradients are measured, and estimated, as each is added to one of its own type. Those of working copies add up in
    /// more digits, to which the first microbatch of a step adds nothing: it writes them, which takes as long.
    pub(crate) fn run_cost(&self, times: &Times, first: usize, end: usize, microbatches: u64) -> ComputeCost {
        if times.is_too_large(first, end) {
            return ComputeCost { forward_us: f64::INFINITY, backward_us: f64::INFINITY, ..ComputeCost::default() };
        }
        let scaled = |cost: ComputeCost| ComputeCost {
            forward_us: cost.forward_us * times.clone_scale,
            backward_us: cost.backward_us * times.clone_scale,
            ..cost
        };
        let once = scaled(self.once[times.kind].at(first, end));
        let part = 1.0 / microbatches as f64;
        let once = ComputeCost {
            forward_us: once.forward_us * part,
            backward_us: once.backward_us * part,
            forward_host_us: once.forward_host_us * part,
            backward_host_us: once.backward_host_us * part,
        };
        let widening = ComputeCost {
            backward_us: self.widening_us[times.kind].at(first, end) * (1.0 - part),
            ..ComputeCost::default()
        };
        times.blocks(first, end) + scaled(self.clones[times.kind].at(first, end)) + once + widening
    }
}

/// Sums of amounts that count once in a run with any of their Blocks.
fn once_each<'s, T: Amount>(len: usize, amounts: impl Iterator<Item = (&'s [usize], T)>) -> IntervalSums<T> {
    let mut builder = IntervalSumsBuilder::new(len);
    amounts.for_each(|(blocks, amount)| builder.add_once(0..len, blocks, amount));
    builder.finish()
}

fn kept_sums(blocks: &[BlockSpec], kept: &[KeptSpec]) -> AffineSums {
    let len = blocks.len();
    AffineSums::new(len, |builder| {
        for (place, block) in blocks.iter().enumerate() {
            builder.add_once(0..len, &[place], block.private_bytes);
        }
        for KeptSpec { bytes, saved_by, made_by, crossings } in kept {
            let Some(made_by) = *made_by else {
                builder.add_once(0..len, saved_by, *bytes);
                continue;
            };
            for last in kept_until(len, saved_by, crossings) {
                builder.add_last(0..made_by + 1, last, *bytes);
            }
            for CrossingSpec { bytes, made_by, used_by, .. } in crossings {
                builder.add_once(made_by + 1..len, used_by, *bytes);
            }
        }
    })
}

/// The last Blocks of runs that hold the maker of a storage and keep it: because they save it, or send something of it.
fn kept_until(len: usize, saved_by: &[usize], crossings: &[CrossingSpec]) -> Vec<Range<usize>> {
    let saved = saved_by.first().map(|&first| first..len);
    let sent = crossings.iter().filter_map(|crossing| Some(crossing.made_by..*crossing.used_by.last()?));
    let mut all: Vec<Range<usize>> = saved.into_iter().chain(sent).collect();
    all.sort_by_key(|last| last.start);
    let mut apart: Vec<Range<usize>> = Vec::new();
    for last in all {
        match apart.last_mut().filter(|before| last.start <= before.end) {
            Some(before) => before.end = before.end.max(last.end),
            None => apart.push(last),
        }
    }
    apart
}

fn kinds_before(blocks: &[BlockSpec]) -> Vec<Vec<usize>> {
    let kinds = blocks.iter().map(|block| block.kind + 1).max().unwrap_or(0);
    let of_kind = |kind: u32| {
        let counts = blocks.iter().scan(0, move |before, block| {
            *before += usize::from(block.kind == kind);
            Some(*before)
        });
        std::iter::once(0).chain(counts).collect()
    };
    (0..kinds).map(of_kind).collect()
}

fn inside_bytes(blocks: &[BlockSpec], kept: &[KeptSpec]) -> Vec<Affine> {
    let mut inside: Vec<Affine> = blocks.iter().map(|block| block.private_bytes).collect();
    for KeptSpec { bytes, saved_by, crossings, .. } in kept {
        if let [only] = saved_by[..]
            && crossings.is_empty()
        {
            inside[only] += *bytes;
        }
    }
    inside
}
