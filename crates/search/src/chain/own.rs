//! What Replicas may divide of any run of Blocks: the parameters that no Block outside of it uses.

use std::ops::Range;

use super::interval::{IntervalSums, IntervalSumsBuilder};
use super::largest::Largest;
use super::spec::{BlockSpec, StateSpec};

/// Trainable parameters that no Block outside of a run uses, each once.
#[derive(Clone, Debug)]
pub(crate) struct OwnParams {
    pub(crate) bytes: IntervalSums,
    /// Their gradients, as far as they stay.
    pub(crate) grad_bytes: IntervalSums,
    /// Their gradients as they are summed over ranks.
    pub(crate) message_bytes: IntervalSums,
    /// Their working copies.
    pub(crate) copy_bytes: IntervalSums,
    /// What Replicas send each other of them, once for each Span that uses them.
    pub(crate) gathered_bytes: IntervalSums,
    /// The same of the largest Span, at most.
    pub(crate) largest_gathered: Largest,
    /// Gradients of the largest Span as they are summed over ranks, at most.
    pub(crate) largest_summed: Largest,
    /// The largest gradient, as it is summed over ranks.
    pub(crate) largest_message: Largest,
    /// Of each Block.
    span_of: Vec<usize>,
}

impl OwnParams {
    pub(super) fn new(blocks: &[BlockSpec], states: &[StateSpec]) -> Self {
        let len = blocks.len();
        let span_of: Vec<usize> = blocks.iter().map(|block| block.span).collect();
        let trainable: Vec<&StateSpec> = states.iter().filter(|state| state.trainable).collect();
        let spans = |state: &StateSpec| state.blocks.chunk_by(|left, right| span_of[*left] == span_of[*right]).count();
        let own = |amount: &dyn Fn(&StateSpec) -> f64| {
            let mut builder = IntervalSumsBuilder::new(len);
            for state in &trainable {
                if let (Some(&first), Some(&last)) = (state.blocks.first(), state.blocks.last()) {
                    builder.add_once(0..first + 1, &[last], amount(state));
                }
            }
            builder.finish()
        };
        let of_span = |amount: fn(&StateSpec) -> f64| {
            let mut builder = IntervalSumsBuilder::new(len);
            trainable.iter().for_each(|state| builder.add_once(0..len, &state.blocks, amount(state)));
            Largest::of_groups(&builder.finish(), &span_of)
        };
        let mut messages = vec![0.0; len];
        for state in &trainable {
            for &block in &state.blocks {
                messages[block] = state.message_bytes.max(messages[block]);
            }
        }
        Self {
            bytes: own(&|state| state.bytes),
            grad_bytes: own(&StateSpec::grad_bytes),
            message_bytes: own(&|state| state.message_bytes),
            copy_bytes: own(&|state| state.copy_bytes),
            gathered_bytes: own(&|state| state.gathered_bytes() * spans(state) as f64),
            largest_gathered: of_span(StateSpec::gathered_bytes),
            largest_summed: of_span(|state| state.message_bytes),
            largest_message: Largest::of_places(&messages),
            span_of,
        }
    }

    /// Spans of a run.
    pub(crate) fn spans(&self, run: &Range<usize>) -> usize {
        1 + self.span_of[run.end - 1] - self.span_of[run.start]
    }
}
