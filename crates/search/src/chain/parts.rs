//! Backwards in two parts.

use std::ops::Range;

use rannc_cost::Device;

use super::chain::Chain;
use super::measured::Measured;

/// How long a backward takes as a whole, and how long each of its two parts.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct PartTimes {
    pub(crate) whole_us: f64,
    pub(crate) input_us: f64,
    pub(crate) weight_us: f64,
}

impl Chain {
    /// Of the Blocks of a run with so many rows: as measured, else by the roofline.
    pub(crate) fn part_times(
        &self,
        run: &Range<usize>,
        device: &Device,
        measured: Option<&Measured>,
        rows: u64,
    ) -> PartTimes {
        let mut sum = PartTimes::default();
        for block in &self.blocks[run.clone()] {
            if let Some(known) = measured.and_then(|measured| measured.block(block.kind, rows)) {
                sum.whole_us += known.cost(rows).backward_us;
                sum.input_us += known.backward_input_us(rows);
                sum.weight_us += known.backward_weight_us(rows);
            } else {
                let scale = measured.map_or(1.0, Measured::scale);
                let whole_us = block.modelled(device, rows).backward_us * scale;
                let weight_us = block.modelled_weight_us(device, rows) * scale;
                sum.whole_us += whole_us;
                sum.input_us += whole_us - weight_us;
                sum.weight_us += weight_us;
            }
        }
        sum
    }

    /// Gradients that wait between the two parts of the backward of a run.
    pub(crate) fn waiting_bytes(&self, run: &Range<usize>, rows: u64) -> f64 {
        self.blocks[run.clone()].iter().map(|block| block.waiting_bytes.at(rows)).sum()
    }
}
