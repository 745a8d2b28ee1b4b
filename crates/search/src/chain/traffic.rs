//! What runs of Blocks exchange with others.

use super::interval::IntervalSumsBuilder;
use super::spec::{Affine, BatchSpec, CrossingSpec, OutputSpec};
use super::sums::{AffineSums, BlockSums};

/// What runs exchange with other Blocks.
#[derive(Clone, Debug)]
pub(crate) struct Traffic {
    /// Values from earlier Blocks, each once.
    pub(crate) in_bytes: AffineSums,
    /// Gradients for earlier Blocks.
    pub(crate) in_grad_bytes: AffineSums,
    /// Values for later Blocks, each once.
    pub(crate) out_bytes: AffineSums,
    /// Gradients from later Blocks, one for each Value.
    pub(crate) out_grad_bytes: AffineSums,
}

/// What runs surely exchange with the ranks' own batches, as far as it has rows: of inputs, those that no Block before them
/// uses.
#[derive(Clone, Debug)]
pub(crate) struct BatchTraffic {
    pub(crate) input_bytes: BlockSums,
    pub(crate) output_bytes: BlockSums,
    /// Gradients of outputs.
    pub(crate) output_grad_bytes: BlockSums,
}

impl BatchTraffic {
    pub(super) fn new(len: usize, BatchSpec { inputs, outputs }: &BatchSpec) -> Self {
        let inputs = inputs.iter().filter(|input| input.has_rows);
        let with_grads = outputs.iter().filter(|output| output.requires_grad);
        let made = |output: &OutputSpec| (output.made_by, output.bytes);
        Self {
            input_bytes: BlockSums::new(len, inputs.filter_map(|input| Some((*input.used_by.first()?, input.bytes)))),
            output_bytes: BlockSums::new(len, outputs.iter().map(made)),
            output_grad_bytes: BlockSums::new(len, with_grads.map(made)),
        }
    }
}

/// Counts a Value in the runs that it concerns.
type Count = fn(&mut IntervalSumsBuilder<Affine>, &CrossingSpec);

impl Traffic {
    /// With all other Blocks.
    pub(super) fn whole(len: usize, crossings: &[CrossingSpec]) -> Self {
        let incoming: Count = |sums, value| sums.add_once(value.made_by + 1..usize::MAX, &value.used_by, value.bytes);
        let outgoing: Count = |sums, value| {
            if let Some(&last) = value.used_by.last() {
                sums.add_open(value.made_by, last, value.bytes);
            }
        };
        Self::new(len, crossings, incoming, outgoing)
    }

    /// With the Block right before a run, and with the one right after it: what surely moves between a Stage and the
    /// very next one. Only of Values whose gradients come back, so that both wait for each other.
    pub(super) fn direct(len: usize, crossings: &[CrossingSpec]) -> Self {
        let incoming: Count =
            |sums, value| sums.add_once(value.made_by + 1..value.made_by + 2, &value.used_by, value.bytes);
        let outgoing: Count =
            |sums, value| value.used_by.iter().for_each(|&user| sums.add_ending(value.made_by, user, value.bytes));
        let with_grads: Vec<_> = crossings.iter().filter(|crossing| crossing.requires_grad).cloned().collect();
        Self::new(len, &with_grads, incoming, outgoing)
    }

    fn new(len: usize, crossings: &[CrossingSpec], incoming: Count, outgoing: Count) -> Self {
        let sums = |count: Count, which: fn(&&CrossingSpec) -> bool| {
            AffineSums::new(len, |builder| crossings.iter().filter(which).for_each(|crossing| count(builder, crossing)))
        };
        Self {
            in_bytes: sums(incoming, |_| true),
            in_grad_bytes: sums(incoming, |crossing| crossing.requires_grad),
            out_bytes: sums(outgoing, |_| true),
            out_grad_bytes: sums(outgoing, |crossing| crossing.requires_grad),
        }
    }
}
