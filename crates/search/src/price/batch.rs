//! What a Stage surely exchanges with the ranks' own batches.

use std::ops::Range;

use rannc_plan::ScheduleKind;

use super::at::{At, Pricing};
use super::sizes::{BETWEEN, BySize, LARGER, SMALLER};
use super::step::PassCost;
use crate::chain::{BatchTraffic, BlockSums};

impl Pricing<'_> {
    /// No step takes less that has a Stage with these passes: what its first Replica waits for, one after another, from the
    /// first input to the last output, and where all forwards come first to the last gradient and backward.
    pub(super) fn batch_us(&self, run: &Range<usize>, at: &At<'_>, larger: &PassCost, smaller: &PassCost) -> f64 {
        if at.foreign_rows == [0, 0] {
            return 0.0;
        }
        let BatchTraffic { input_bytes, output_bytes, output_grad_bytes } = &self.chain.batch;
        let [first_us, inputs_us] = self.exchanges_us(input_bytes, run, at);
        let [_, outputs_us] = self.exchanges_us(output_bytes, run, at);
        let until_outputs_us = inputs_us.max(first_us + larger.forward_us) + outputs_us;
        match self.step.schedule {
            ScheduleKind::FillDrain => {
                until_outputs_us + self.exchanges_us(output_grad_bytes, run, at)[1] + smaller.backward_us
            }
            ScheduleKind::OneForwardOneBackward => until_outputs_us,
        }
    }

    /// The least that an exchange takes for the first microbatch, and for all of them: over the best links.
    fn exchanges_us(&self, bytes: &BlockSums, run: &Range<usize>, at: &At<'_>) -> [f64; 2] {
        if !bytes.has_any(run) {
            return [0.0; 2];
        }
        let [larger_us, smaller_us] = at.foreign_rows.map(|rows| match bytes.at(run, rows) {
            bytes if rows == 0 || bytes < 1.0 => 0.0,
            bytes => self.problem.cluster.least_send_us(bytes),
        });
        [larger_us, self.step.sum_us(larger_us, smaller_us)]
    }

    /// Of one of the larger microbatches, and of one of the others, how many of these rows of a Replica cannot be its rank's
    /// own.
    pub(super) fn foreign_rows(&self, rows: BySize<u64>) -> [u64; 2] {
        let settings = self.problem.settings;
        // Else they may be: one rank has all rows, or few ranks compute.
        if !settings.gather_inputs || settings.may_idle {
            return [0, 0];
        }
        // Of the microbatch between, some ranks bring a row more than of the smaller ones.
        [(LARGER, LARGER), (SMALLER, BETWEEN)].map(|(size, most)| {
            let own_rows = self.sizes.rows[most].div_ceil(u64::from(settings.world_size));
            rows[size].saturating_sub(own_rows)
        })
    }
}
