//! Lower bounds for the first Stages of a Plan: each part of the objective alone, with the least
//! memory that any Plan needs.

use crate::price::Pricing;
use crate::table::StageTable;

/// For the first `blocks` Blocks on the first `devices` ranks.
pub(crate) struct Relaxation {
    stride: usize,
    /// Least sum of the Stages' times, with the end of the first Stage.
    sum_us: Vec<f64>,
    /// Least bottleneck.
    max_us: Vec<f64>,
}

impl Relaxation {
    /// Solves the relaxed problems.
    pub(crate) fn new(pricing: &Pricing<'_>, table: &StageTable) -> Self {
        let stride = table.devices as usize + 1;
        let states = (table.blocks + 1) * stride;
        let mut bounds = Self { stride, sum_us: vec![f64::INFINITY; states], max_us: vec![f64::INFINITY; states] };
        (bounds.sum_us[0], bounds.max_us[0]) = (0.0, 0.0);
        for end in 1..=table.blocks {
            let in_flight = pricing.in_flight(if end == table.blocks { 1 } else { 2 });
            for devices in 1..=table.devices {
                bounds.solve(table, end, devices, in_flight);
            }
        }
        bounds
    }

    fn solve(&mut self, table: &StageTable, end: usize, devices: u32, in_flight: u64) {
        let (mut sum_us, mut max_us) = (f64::INFINITY, f64::INFINITY);
        for replicas in 1..=devices {
            let rank = devices - replicas;
            for (first, entry) in table.ending(end, rank, replicas).iter().enumerate() {
                if entry.max_in_flight < in_flight {
                    continue;
                }
                let before = first * self.stride + rank as usize;
                let end_us = if first == 0 { entry.end_us } else { 0.0 };
                sum_us = sum_us.min(self.sum_us[before] + entry.microbatch_us + end_us);
                max_us = max_us.min(self.max_us[before].max(entry.microbatch_us));
            }
        }
        let state = end * self.stride + devices as usize;
        (self.sum_us[state], self.max_us[state]) = (sum_us, max_us);
    }

    /// Least sum of times of the first `blocks` Blocks on `devices` ranks.
    pub(crate) fn sum_us(&self, blocks: usize, devices: u32) -> f64 {
        self.sum_us[blocks * self.stride + devices as usize]
    }

    /// Least bottleneck of the first `blocks` Blocks on `devices` ranks.
    pub(crate) fn max_us(&self, blocks: usize, devices: u32) -> f64 {
        self.max_us[blocks * self.stride + devices as usize]
    }

    /// No Plan with so many microbatches takes less.
    pub(crate) fn step_us(&self, table: &StageTable, microbatches: u64) -> f64 {
        let waits = (microbatches - 1) as f64;
        let sum_us = self.sum_us(table.blocks, table.devices);
        if sum_us.is_finite() { sum_us + waits * self.max_us(table.blocks, table.devices) } else { sum_us }
    }
}
