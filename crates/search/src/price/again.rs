//! Computing again: memory for time.

use std::ops::Range;

use super::at::{At, Pricing};
use super::knapsack::{Choice, Saving, largest_bytes};
use super::memory::StageMemory;
use super::saver::Again;
use super::time::RunTime;

impl Pricing<'_> {
    /// Trades memory for time.
    pub(super) fn compute_again(
        &self,
        run: &Range<usize>,
        at: &At<'_>,
        again: Again,
        time: &mut RunTime,
        memory: &mut StageMemory,
    ) {
        let rows = at.rows;
        match again {
            Again::Nothing => {}
            Again::Everything => {
                let kept_bytes = self.chain.kept_bytes.at(run.start, run.end, rows);
                let in_bytes = self.chain.traffic.in_bytes.at(run.start, run.end, rows).min(kept_bytes);
                memory.microbatch_bytes -= kept_bytes - in_bytes;
                memory.workspace_bytes += kept_bytes - in_bytes;
                time.backward_us += time.forward_us;
            }
            Again::ToHold(in_flight) => {
                let Some(choice) = self.savings(run, at, in_flight, memory) else { return };
                let us = if self.problem.in_parts { choice.least_us() } else { choice.cheapest_us() };
                match us {
                    Some(us) => {
                        memory.microbatch_bytes -= choice.needed_bytes;
                        memory.workspace_bytes += largest_bytes(&choice.savings);
                        time.backward_us += us;
                    }
                    None => memory.microbatch_bytes = f64::INFINITY,
                }
            }
        }
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
        let in_run = |saving: &Saving| Saving { count: self.chain.count(saving.kind, run), ..*saving };
        let savings: Vec<Saving> = at.savings.iter().map(in_run).filter(|saving| saving.count > 0).collect();
        let room_bytes = (usable_bytes - memory.fixed_bytes() - largest_bytes(&savings)) / in_flight as f64;
        Some(Choice { savings, needed_bytes: memory.microbatch_bytes - room_bytes })
    }
}
