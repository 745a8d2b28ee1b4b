//! Computing again: memory for time.

use std::ops::Range;

use super::at::{At, Pricing, Problem};
use super::knapsack::{Choice, Saving, largest_bytes};
use super::memory::StageMemory;
use super::saver::Again;
use super::step::PassCost;

/// What a Stage computes again in every backward.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Repeated {
    /// All of the forward.
    pub(crate) forward: bool,
    /// Some of its Blocks, of every microbatch as of the largest.
    pub(crate) blocks_us: f64,
}

impl Repeated {
    /// Adds it to the backward.
    pub(super) fn add_to(self, pass: &mut PassCost) {
        pass.backward_us += self.blocks_us + if self.forward { pass.forward_us } else { 0.0 };
    }
}

impl Pricing<'_> {
    /// Trades memory for time.
    pub(crate) fn compute_again(
        &self,
        run: &Range<usize>,
        at: &At<'_>,
        again: Again,
        memory: &mut StageMemory,
    ) -> Repeated {
        let rows = at.most_rows();
        let mut repeated = Repeated::default();
        match again {
            Again::Nothing => {}
            Again::Everything => {
                let traffic = &self.chain.traffic;
                let passed_bytes =
                    traffic.in_bytes.at(run.start, run.end, rows) + traffic.out_bytes.at(run.start, run.end, rows);
                let inside_bytes = (self.kept_bytes(run, at) - passed_bytes).max(0.0);
                memory.microbatch_bytes -= inside_bytes;
                memory.workspace_bytes += inside_bytes;
                repeated.forward = true;
            }
            Again::ToHold(in_flight) => {
                let Some(choice) = self.savings(run, at, in_flight, memory) else { return repeated };
                let us = match self.problem {
                    Problem { in_parts: true, .. } => choice.least_us(),
                    Problem { direct: true, .. } => choice.sure_us(),
                    _ => choice.cheapest_us(),
                };
                match us {
                    Some(us) => {
                        memory.microbatch_bytes -= choice.needed_bytes;
                        memory.workspace_bytes += largest_bytes(&choice.savings);
                        repeated.blocks_us = us;
                    }
                    None => memory.microbatch_bytes = f64::INFINITY,
                }
            }
        }
        repeated
    }

    /// What each kind of Block of a run can free, and how much is needed to hold `in_flight` microbatches; `None`
    /// when everything fits as it is. One Block at a time holds again what it has freed.
    pub(crate) fn savings(
        &self,
        run: &Range<usize>,
        at: &At<'_>,
        in_flight: u64,
        memory: &StageMemory,
    ) -> Option<Choice> {
        let usable_bytes = at.usable_bytes;
        if memory.peak_bytes(in_flight) <= usable_bytes {
            return None;
        }
        let longer = self.again_beside_messages(run, at);
        let in_run =
            |saving: &Saving| Saving { count: self.chain.count(saving.kind, run), us: saving.us * longer, ..*saving };
        let savings: Vec<Saving> = at.savings.iter().map(in_run).filter(|saving| saving.count > 0).collect();
        let room_bytes = (usable_bytes - memory.fixed_bytes() - largest_bytes(&savings)) / in_flight as f64;
        Some(Choice { savings, needed_bytes: memory.microbatch_bytes - room_bytes })
    }
}
