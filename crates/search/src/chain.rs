//! The chain of Blocks: what any run of it costs, composed from sums.

use rannc_cost::{Device, OpCost, OpWork};

use crate::interval::{IntervalSums, IntervalSumsBuilder};

/// `fixed + per_row * rows`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Affine {
    pub(crate) fixed: f64,
    pub(crate) per_row: f64,
}

impl Affine {
    pub(crate) fn at(self, rows: u64) -> f64 {
        self.fixed + self.per_row * rows as f64
    }
}

/// What one Block does.
#[derive(Clone, Debug, Default)]
pub(crate) struct BlockSpec {
    pub(crate) work: Vec<OpWork>,
    /// Memory of each op's temporary tensors.
    pub(crate) workspace_bytes: Vec<Affine>,
    /// Kept for the backward and known to this Block alone.
    pub(crate) private_bytes: Affine,
    /// Outputs of the model, which wait for the end of the step.
    pub(crate) output_bytes: Affine,
}

/// A parameter, buffer or constant, with the Blocks that read it.
#[derive(Clone, Debug)]
pub(crate) struct StateSpec {
    pub(crate) bytes: f64,
    pub(crate) trainable: bool,
    pub(crate) blocks: Vec<usize>,
}

/// A batch-free op, with the Blocks that it is cloned for.
#[derive(Clone, Debug)]
pub(crate) struct CloneSpec {
    pub(crate) cost: OpCost,
    pub(crate) blocks: Vec<usize>,
}

/// A Value that one Block makes and later ones use.
#[derive(Clone, Debug)]
pub(crate) struct CrossingSpec {
    pub(crate) bytes: Affine,
    pub(crate) requires_grad: bool,
    pub(crate) made_by: usize,
    /// Increasing, all after `made_by`.
    pub(crate) used_by: Vec<usize>,
}

/// A tensor that is kept until the backward.
#[derive(Clone, Debug, Default)]
pub(crate) struct KeptSpec {
    pub(crate) bytes: Affine,
    /// Blocks that save it.
    pub(crate) savers: Vec<usize>,
    /// If it crosses Blocks: who makes and who uses it. A Stage that receives it keeps it.
    pub(crate) crossing: Option<(usize, Vec<usize>)>,
}

/// Everything a chain is made from.
#[derive(Clone, Debug, Default)]
pub(crate) struct ChainSpec {
    pub(crate) blocks: Vec<BlockSpec>,
    pub(crate) states: Vec<StateSpec>,
    pub(crate) clones: Vec<CloneSpec>,
    pub(crate) crossings: Vec<CrossingSpec>,
    pub(crate) kept: Vec<KeptSpec>,
}

/// Sums of [`Affine`] amounts over all runs.
#[derive(Clone, Debug)]
pub(crate) struct AffineSums {
    fixed: IntervalSums,
    per_row: IntervalSums,
}

impl AffineSums {
    fn new(len: usize, mut add: impl FnMut(&mut IntervalSumsBuilder, fn(Affine) -> f64)) -> Self {
        let mut sums = |part: fn(Affine) -> f64| {
            let mut builder = IntervalSumsBuilder::new(len);
            add(&mut builder, part);
            builder.finish()
        };
        Self { fixed: sums(|amount| amount.fixed), per_row: sums(|amount| amount.per_row) }
    }

    pub(crate) fn at(&self, first: usize, end: usize, rows: u64) -> f64 {
        self.fixed.at(first, end) + self.per_row.at(first, end) * rows as f64
    }
}

/// A chain of Blocks. All sums are over runs `first..end` of Blocks.
#[derive(Clone, Debug)]
pub(crate) struct Chain {
    blocks: Vec<BlockSpec>,
    /// Parameters, buffers and constants, each once.
    pub(crate) state_bytes: IntervalSums,
    /// Trainable parameters, each once.
    pub(crate) trainable_bytes: IntervalSums,
    /// Forward of the batch-free ops, each once.
    pub(crate) clone_forward_us: IntervalSums,
    /// Backward of the batch-free ops, each once.
    pub(crate) clone_backward_us: IntervalSums,
    /// Values from earlier Blocks, each once.
    pub(crate) in_bytes: AffineSums,
    /// Gradients for earlier Blocks.
    pub(crate) in_grad_bytes: AffineSums,
    /// Values for later Blocks, each once.
    pub(crate) out_bytes: AffineSums,
    /// Gradients from later Blocks, one for each Value.
    pub(crate) out_grad_bytes: AffineSums,
    /// Kept for the backward, received Values included.
    pub(crate) kept_bytes: AffineSums,
    /// Outputs of the model.
    pub(crate) output_bytes: AffineSums,
}

impl Chain {
    pub(crate) fn new(spec: ChainSpec) -> Self {
        let ChainSpec { blocks, states, clones, crossings, kept } = spec;
        let len = blocks.len();
        let once = |terms: &mut dyn Iterator<Item = (&[usize], f64)>| {
            let mut builder = IntervalSumsBuilder::new(len);
            terms.for_each(|(places, amount)| builder.add_once(0..len, places, amount));
            builder.finish()
        };
        let trainable = states.iter().filter(|state| state.trainable);
        Self {
            state_bytes: once(&mut states.iter().map(|state| (state.blocks.as_slice(), state.bytes))),
            trainable_bytes: once(&mut trainable.map(|state| (state.blocks.as_slice(), state.bytes))),
            clone_forward_us: once(&mut clones.iter().map(|clone| (clone.blocks.as_slice(), clone.cost.forward_us))),
            clone_backward_us: once(&mut clones.iter().map(|clone| (clone.blocks.as_slice(), clone.cost.backward_us))),
            in_bytes: incoming(len, &crossings, |_| true),
            in_grad_bytes: incoming(len, &crossings, |crossing| crossing.requires_grad),
            out_bytes: outgoing(len, &crossings, |_| true),
            out_grad_bytes: outgoing(len, &crossings, |crossing| crossing.requires_grad),
            kept_bytes: kept_sums(&blocks, &kept),
            output_bytes: AffineSums::new(len, |builder, part| {
                for (place, block) in blocks.iter().enumerate() {
                    builder.add_once(0..len, &[place], part(block.output_bytes));
                }
            }),
            blocks,
        }
    }

    /// Number of Blocks.
    pub(crate) fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Largest temporary memory of one Block.
    pub(crate) fn workspace_bytes(&self, block: usize, rows: u64) -> f64 {
        self.blocks[block].workspace_bytes.iter().map(|bytes| bytes.at(rows)).fold(0.0, f64::max)
    }

    /// Times of all Blocks for `rows` rows.
    pub(crate) fn times(&self, device: &Device, rows: u64) -> Times {
        let mut times = Times { rows, forward_us: vec![0.0], backward_us: vec![0.0] };
        let (mut forward_us, mut backward_us) = (0.0, 0.0);
        for block in &self.blocks {
            for cost in block.work.iter().map(|work| work.at(device, rows)) {
                forward_us += cost.forward_us;
                backward_us += cost.backward_us;
            }
            times.forward_us.push(forward_us);
            times.backward_us.push(backward_us);
        }
        times
    }
}

/// Times of the Blocks before each place of a chain.
#[derive(Clone, Debug)]
pub(crate) struct Times {
    pub(crate) rows: u64,
    forward_us: Vec<f64>,
    backward_us: Vec<f64>,
}

impl Times {
    pub(crate) fn forward_us(&self, first: usize, end: usize) -> f64 {
        self.forward_us[end] - self.forward_us[first]
    }
    pub(crate) fn backward_us(&self, first: usize, end: usize) -> f64 {
        self.backward_us[end] - self.backward_us[first]
    }
}

fn incoming(len: usize, crossings: &[CrossingSpec], which: fn(&CrossingSpec) -> bool) -> AffineSums {
    AffineSums::new(len, |builder, part| {
        for crossing in crossings.iter().filter(|crossing| which(crossing)) {
            builder.add_once(crossing.made_by + 1..len, &crossing.used_by, part(crossing.bytes));
        }
    })
}

fn outgoing(len: usize, crossings: &[CrossingSpec], which: fn(&CrossingSpec) -> bool) -> AffineSums {
    AffineSums::new(len, |builder, part| {
        for crossing in crossings.iter().filter(|crossing| which(crossing)) {
            if let Some(&last) = crossing.used_by.last() {
                builder.add_open(crossing.made_by, last, part(crossing.bytes));
            }
        }
    })
}

fn kept_sums(blocks: &[BlockSpec], kept: &[KeptSpec]) -> AffineSums {
    let len = blocks.len();
    AffineSums::new(len, |builder, part| {
        for (place, block) in blocks.iter().enumerate() {
            builder.add_once(0..len, &[place], part(block.private_bytes));
        }
        for KeptSpec { bytes, savers, crossing } in kept {
            let Some((made_by, used_by)) = crossing else {
                builder.add_once(0..len, savers, part(*bytes));
                continue;
            };
            builder.add_once(0..made_by + 1, savers, part(*bytes));
            let mut holders = [savers.as_slice(), used_by.as_slice()].concat();
            holders.sort_unstable();
            builder.add_once(made_by + 1..len, &holders, part(*bytes));
        }
    })
}
