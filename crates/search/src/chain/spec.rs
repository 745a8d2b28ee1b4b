//! What a chain is made from: Blocks, state, batch-free ops, Values that cross, tensors that are kept.

use std::ops::{Add, AddAssign, Range, Sub};

use rannc_cost::{ComputeCost, Device, OpWork};

/// `fixed + per_row * rows`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Affine {
    pub(crate) fixed: f64,
    pub(crate) per_row: f64,
}

impl Add for Affine {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { fixed: self.fixed + other.fixed, per_row: self.per_row + other.per_row }
    }
}

impl Sub for Affine {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        Self { fixed: self.fixed - other.fixed, per_row: self.per_row - other.per_row }
    }
}

impl AddAssign for Affine {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl Affine {
    pub(crate) fn at(self, rows: u64) -> f64 {
        self.fixed + self.per_row * rows as f64
    }
}

/// What one Block does.
#[derive(Clone, Debug, Default)]
pub(crate) struct BlockSpec {
    /// Blocks of one kind do the same.
    pub(crate) kind: u32,
    /// Its Span, if the whole chain were one Stage; increasing.
    pub(crate) span: usize,
    pub(crate) work: Vec<OpWork>,
    /// Memory of each op's temporary tensors.
    pub(crate) workspace_bytes: Vec<Affine>,
    /// Kept for the backward and known to this Block alone.
    pub(crate) private_bytes: Affine,
    /// What is left of its forward when it runs alone: all that it makes and keeps, sends, or gives out.
    pub(crate) left_bytes: Affine,
    /// Gradients that wait between the two parts of a backward.
    pub(crate) waiting_bytes: Affine,
    /// Outputs of the model, which wait for the end of the step.
    pub(crate) output_bytes: Affine,
}

/// Several Blocks that run as one where a Stage has them all.
#[derive(Clone, Debug)]
pub(crate) struct SpanSpec {
    pub(crate) blocks: Range<usize>,
    /// Spans of one kind do the same.
    pub(crate) kind: u32,
    /// As of a Block.
    pub(crate) left_bytes: Affine,
}

/// One amount for steps of one microbatch, and one for those of several.
pub(crate) type ByCount<T> = [T; 2];

/// A parameter, buffer or constant, or what is made once a step, with the Blocks that read it.
#[derive(Clone, Debug, Default)]
pub(crate) struct StateSpec {
    pub(crate) bytes: f64,
    /// What is summed over ranks of its gradient.
    pub(crate) message_bytes: f64,
    /// That has its own type.
    pub(crate) own_type_travels: bool,
    /// What gradients of several microbatches are added up in, float32 at least.
    pub(crate) accumulated_bytes: f64,
    /// Of its working copy; 0 where it has none.
    pub(crate) copy_bytes: f64,
    pub(crate) trainable: bool,
    /// True when others than Blocks use it, or it is given out: Replicas have it whole all the time.
    pub(crate) beside_spans: bool,
    pub(crate) blocks: Vec<usize>,
    /// The op that uses it first; what is used earlier has its gradient later.
    pub(crate) first_use: usize,
}

impl StateSpec {
    /// What its Replicas send each other of it where each has a part: the working copy, if there is one.
    pub(crate) fn gathered_bytes(&self) -> f64 {
        if self.copy_bytes > 0.0 { self.copy_bytes } else { self.bytes }
    }

    /// What is read and written to add a gradient of its working copy to a sum in its own type, beyond adding it to one
    /// in the copy's.
    pub(crate) fn widening_bytes(&self) -> f64 {
        if self.copy_bytes > 0.0 { 2.0 * (self.bytes - self.copy_bytes).max(0.0) } else { 0.0 }
    }

    /// What its gradient takes: in its own type and, where that is another, in that of the sums.
    pub(crate) fn grad_bytes(&self, several_microbatches: bool) -> f64 {
        let sums_bytes = self.sums_bytes(several_microbatches);
        self.bytes + if sums_bytes == self.bytes { 0.0 } else { sums_bytes }
    }

    /// The copy that is summed over ranks, where that has neither the type of the sums, which is float32 at least if it
    /// is not the gradient's, nor the gradient's: that one lies where the gradient will.
    pub(crate) fn message_copy_bytes(&self) -> f64 {
        if self.own_type_travels || self.message_bytes == self.accumulated_bytes { 0.0 } else { self.message_bytes }
    }

    fn sums_bytes(&self, several_microbatches: bool) -> f64 {
        if several_microbatches { self.accumulated_bytes } else { self.bytes.max(self.message_bytes) }
    }
}

/// An op that each Stage has once that holds one of its Blocks, and that none of these is measured with.
#[derive(Clone, Debug)]
pub(crate) struct CloneSpec {
    pub(crate) work: OpWork,
    pub(crate) blocks: Vec<usize>,
    /// It runs once a step, not once for each microbatch.
    pub(crate) once: bool,
}

/// What makes a working copy: once a step, on each Stage that holds one of these Blocks.
#[derive(Clone, Debug)]
pub(crate) struct ConversionSpec {
    pub(crate) work: OpWork,
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

/// What comes from the ranks' own batches, and what goes back to them.
#[derive(Clone, Debug, Default)]
pub(crate) struct BatchSpec {
    pub(crate) inputs: Vec<InputSpec>,
    pub(crate) outputs: Vec<OutputSpec>,
}

/// An input of the graph.
#[derive(Clone, Debug)]
pub(crate) struct InputSpec {
    pub(crate) bytes: Affine,
    /// Without rows, all of it goes to every Replica, once a step.
    pub(crate) has_rows: bool,
    /// Increasing.
    pub(crate) used_by: Vec<usize>,
}

/// An output of the graph with rows, made by a Block.
#[derive(Clone, Debug)]
pub(crate) struct OutputSpec {
    pub(crate) bytes: Affine,
    pub(crate) requires_grad: bool,
    pub(crate) made_by: usize,
}

/// A storage that is kept until the backward: a tensor with its views and what was made of it in place.
#[derive(Clone, Debug, Default)]
pub(crate) struct KeptSpec {
    pub(crate) bytes: Affine,
    /// Blocks that save it, increasing.
    pub(crate) saved_by: Vec<usize>,
    /// The Block that makes it; `None` where each Stage has its own.
    pub(crate) made_by: Option<usize>,
    /// What of it goes from one Block to later ones. A Stage that receives it keeps it, each Value in a storage of its
    /// own; the Stage that sends it keeps the whole.
    pub(crate) crossings: Vec<CrossingSpec>,
}

/// Everything a chain is made from.
#[derive(Clone, Debug, Default)]
pub(crate) struct ChainSpec {
    pub(crate) blocks: Vec<BlockSpec>,
    /// In their order.
    pub(crate) spans: Vec<SpanSpec>,
    pub(crate) states: Vec<StateSpec>,
    pub(crate) clones: Vec<CloneSpec>,
    pub(crate) conversions: Vec<ConversionSpec>,
    pub(crate) crossings: Vec<CrossingSpec>,
    pub(crate) kept: Vec<KeptSpec>,
    pub(crate) batch: BatchSpec,
}

impl BlockSpec {
    /// Its cost by the roofline.
    pub(crate) fn modelled(&self, device: &Device, rows: u64) -> ComputeCost {
        self.work.iter().map(|work| work.at(device, rows)).sum()
    }

    /// Of its backward by the roofline, what the second part of two takes.
    pub(crate) fn modelled_weight_us(&self, device: &Device, rows: u64) -> f64 {
        let of_weights = |work: &OpWork| f64::from(work.weight_products) / f64::from(work.backward_products.max(1));
        self.work.iter().map(|work| work.at(device, rows).backward_us * of_weights(work)).sum()
    }
}
