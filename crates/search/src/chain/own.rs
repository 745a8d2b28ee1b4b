//! What Replicas may divide of any run of Blocks: the parameters that no Block outside of it uses. What only one Span of
//! them uses need not be whole.

use std::ops::Range;

use super::interval::{IntervalSums, IntervalSumsBuilder};
use super::largest::Largest;
use super::spec::{BlockSpec, ByCount, StateSpec};

/// Trainable parameters that no Block outside of a run uses, each once.
#[derive(Clone, Debug)]
pub(crate) struct OwnParams {
    pub(crate) bytes: IntervalSums,
    /// Their gradients, as far as they stay.
    pub(crate) grad_bytes: ByCount<IntervalSums>,
    /// Their gradients as they are summed over ranks.
    pub(crate) message_bytes: IntervalSums,
    /// Those that only one Span uses.
    pub(crate) spanned_bytes: IntervalSums,
    /// Working copies of these.
    pub(crate) spanned_copy_bytes: IntervalSums,
    /// What Replicas send each other of these.
    pub(crate) gathered_bytes: IntervalSums,
    /// The same of the largest Span, at most.
    pub(crate) largest_gathered: Largest,
    /// Gradients of the largest Span as they are summed over ranks, at most.
    pub(crate) largest_summed: Largest,
    /// The largest gradient, as it is summed over ranks.
    pub(crate) largest_message: Largest,
    /// Of each Block, what is summed of the parameters that it uses first in the chain, each with the last Block that uses
    /// it; what the Block itself uses first comes first.
    first_used: Vec<Vec<(usize, f64)>>,
    /// Of each Block.
    span_of: Vec<usize>,
}

impl OwnParams {
    pub(super) fn new(blocks: &[BlockSpec], states: &[StateSpec]) -> Self {
        let len = blocks.len();
        let span_of: Vec<usize> = blocks.iter().map(|block| block.span).collect();
        let trainable: Vec<&StateSpec> = states.iter().filter(|state| state.trainable).collect();
        let only_span = |state: &StateSpec| {
            let mut spans = state.blocks.iter().map(|&block| span_of[block]);
            let first = spans.next();
            !state.beside_spans && spans.all(|span| Some(span) == first)
        };
        let own = |amount: &dyn Fn(&StateSpec) -> f64| {
            let mut builder = IntervalSumsBuilder::new(len);
            for state in &trainable {
                if let (Some(&first), Some(&last)) = (state.blocks.first(), state.blocks.last()) {
                    builder.add_once(0..first + 1, &[last], amount(state));
                }
            }
            builder.finish()
        };
        let of_span = |amount: &dyn Fn(&StateSpec) -> f64| {
            let mut builder = IntervalSumsBuilder::new(len);
            trainable.iter().for_each(|state| builder.add_once(0..len, &state.blocks, amount(state)));
            Largest::of_groups(&builder.finish(), &span_of)
        };
        let spanned =
            |amount: fn(&StateSpec) -> f64| move |state: &StateSpec| if only_span(state) { amount(state) } else { 0.0 };
        let mut messages = vec![0.0; len];
        for state in &trainable {
            for &block in &state.blocks {
                messages[block] = state.message_bytes.max(messages[block]);
            }
        }
        let mut first_used: Vec<Vec<(usize, f64)>> = vec![Vec::new(); len];
        let mut by_use = trainable.clone();
        by_use.sort_by(|one, other| {
            one.first_use.cmp(&other.first_use).then(other.message_bytes.total_cmp(&one.message_bytes))
        });
        for state in by_use {
            if let (Some(&first), Some(&last)) = (state.blocks.first(), state.blocks.last()) {
                first_used[first].push((last, state.message_bytes));
            }
        }
        Self {
            bytes: own(&|state| state.bytes),
            grad_bytes: [false, true].map(|several| own(&|state| state.grad_bytes(several))),
            message_bytes: own(&|state| state.message_bytes),
            spanned_bytes: own(&spanned(|state| state.bytes)),
            spanned_copy_bytes: own(&spanned(|state| state.copy_bytes)),
            gathered_bytes: own(&spanned(StateSpec::gathered_bytes)),
            largest_gathered: of_span(&spanned(StateSpec::gathered_bytes)),
            largest_summed: of_span(&|state| state.message_bytes),
            largest_message: Largest::of_places(&messages),
            first_used,
            span_of,
        }
    }

    /// What is summed of the parameter whose gradient comes last.
    pub(crate) fn last_message_bytes(&self, run: &Range<usize>) -> f64 {
        let mut own = self.first_used[run.clone()].iter().flatten().filter(|&&(last, _)| last < run.end);
        own.next().map_or(0.0, |&(_, bytes)| bytes)
    }

    /// Spans of a run.
    pub(crate) fn spans(&self, run: &Range<usize>) -> usize {
        1 + self.span_of[run.end - 1] - self.span_of[run.start]
    }
}
