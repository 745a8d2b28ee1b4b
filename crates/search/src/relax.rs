//! Lower bounds for the first Stages of a Plan: each part of the objective alone, with the least
//! memory that any Plan needs.

use crate::price::Pricing;
use crate::table::StageTable;

/// For the first `blocks` Blocks on the first `units` units.
pub(crate) struct Relaxation {
    stride: usize,
    /// Least time in which a microbatch passes.
    pass_us: Vec<f64>,
    /// Least computation of the longest Stage.
    longest_us: Vec<f64>,
}

impl Relaxation {
    /// Solves the relaxed problems.
    pub(crate) fn new(pricing: &Pricing<'_>, table: &StageTable<'_>) -> Self {
        let stride = table.units as usize + 1;
        let states = (table.blocks + 1) * stride;
        let mut bounds = Self { stride, pass_us: vec![f64::INFINITY; states], longest_us: vec![f64::INFINITY; states] };
        let free = if pricing.problem.settings.may_idle { stride } else { 1 };
        bounds.pass_us[..free].fill(0.0);
        bounds.longest_us[..free].fill(0.0);
        for end in 1..=table.blocks {
            let in_flight = pricing.step.in_flight(if end == table.blocks { 1 } else { 2 });
            for units in 1..=table.units {
                for variant in 0..table.variants.len() {
                    bounds.solve(table, end, units, variant, in_flight);
                }
            }
        }
        bounds
    }

    fn solve(&mut self, table: &StageTable<'_>, end: usize, units: u32, variant: usize, in_flight: u64) {
        let state = end * self.stride + units as usize;
        let (mut pass_us, mut longest_us) = (self.pass_us[state], self.longest_us[state]);
        for count in 1..=units {
            let unit = units - count;
            for (first, entry) in table.ending(end, unit, count, variant) {
                if entry.max_in_flight < in_flight {
                    continue;
                }
                let before = first * self.stride + unit as usize;
                pass_us = pass_us.min(self.pass_us[before] + entry.cost.pass_us());
                longest_us = longest_us.min(self.longest_us[before].max(entry.cost.compute_us()));
            }
        }
        (self.pass_us[state], self.longest_us[state]) = (pass_us, longest_us);
    }

    /// Least time in which a microbatch passes the first `blocks` Blocks on `units` units.
    pub(crate) fn pass_us(&self, blocks: usize, units: u32) -> f64 {
        self.pass_us[blocks * self.stride + units as usize]
    }

    /// Least computation of the longest Stage of the first `blocks` Blocks on `units` units.
    pub(crate) fn longest_us(&self, blocks: usize, units: u32) -> f64 {
        self.longest_us[blocks * self.stride + units as usize]
    }
}
