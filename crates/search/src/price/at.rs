//! Runs of Blocks at places: what does not depend on the run, for one Schedule and number of microbatches.

use std::ops::RangeInclusive;
use std::sync::Arc;

use rannc_cost::{Cluster, Device};
use rannc_plan::ScheduleKind;

use super::knapsack::{Saving, cheapest_first};
use super::place::Place;
use super::step::StepModel;
use crate::chain::{Chain, Measured, Times};
use crate::settings::Settings;

/// What there is to price: a model on a cluster.
#[derive(Clone, Copy)]
pub(crate) struct Problem<'a> {
    pub(crate) chain: &'a Chain,
    pub(crate) cluster: &'a Cluster,
    /// By kind of device.
    pub(crate) measured: &'a [Option<Measured>],
    pub(crate) settings: &'a Settings,
    /// True when parts of Blocks may be computed again: no choice of Blocks costs less.
    pub(crate) in_parts: bool,
    /// True when only those transfers take time that surely are between a Stage and the very next one.
    pub(crate) direct: bool,
}

/// Prices Stages for one Schedule and number of microbatches.
pub(crate) struct Pricing<'a> {
    pub(crate) problem: Problem<'a>,
    pub(crate) chain: &'a Chain,
    pub(crate) step: StepModel,
    /// Rows of the largest microbatch.
    rows: u64,
    /// By kind of device, by place in the list of different row counts.
    times: Vec<Vec<Arc<Times>>>,
    /// By the number of Replicas less one, place in the list of different row counts.
    time_of: Vec<usize>,
}

/// A place, with what does not depend on the Stage that is there.
pub(crate) struct At<'p> {
    pub(crate) place: &'p Place,
    /// Memory that a Plan may use on each device.
    pub(crate) usable_bytes: f64,
    /// Rows of a microbatch on the largest Replica.
    pub(super) rows: u64,
    /// For each kind of its devices.
    pub(super) devices: Vec<(&'p Device, Arc<Times>)>,
    pub(super) framework_bytes: f64,
    /// What one Block of each kind surely frees when it is computed again, and what that takes at most; the
    /// cheapest memory first.
    pub(super) savings: Vec<Saving>,
}

impl<'a> Pricing<'a> {
    pub(crate) fn new(problem: Problem<'a>, schedule: ScheduleKind, microbatches: u64) -> Self {
        let Problem { chain, cluster, measured, settings, .. } = problem;
        let rows = settings.largest_microbatch_rows(microbatches);
        let mut row_counts: Vec<u64> = Vec::new();
        let mut time_of = Vec::new();
        for replicas in 1..=u64::from(settings.world_size) {
            let replica_rows = rows.div_ceil(replicas);
            if row_counts.last() != Some(&replica_rows) {
                row_counts.push(replica_rows);
            }
            time_of.push(row_counts.len() - 1);
        }
        let times = |(kind, device): (usize, &Device)| {
            let measured = measured[kind].as_ref();
            row_counts.iter().map(|&rows| Arc::new(chain.times(kind, device, measured, rows))).collect()
        };
        // Further microbatches have no rows.
        let microbatches = microbatches.min(settings.most_rank_rows());
        let times = cluster.kinds.iter().enumerate().map(times).collect();
        Self { problem, chain, step: StepModel { schedule, microbatches }, rows, times, time_of }
    }

    /// Rows of a microbatch on the largest Replica.
    pub(crate) fn replica_rows(&self, replicas: u32) -> u64 {
        self.rows.div_ceil(u64::from(replicas))
    }

    /// Numbers of Replicas that have equally many rows each, increasing.
    pub(crate) fn equal_replicas(&self) -> Vec<RangeInclusive<u32>> {
        let mut equal: Vec<RangeInclusive<u32>> = Vec::new();
        for (replicas, &time) in (1..).zip(&self.time_of) {
            match equal.get_mut(time) {
                Some(range) => *range = *range.start()..=replicas,
                None => equal.push(replicas..=replicas),
            }
        }
        equal
    }

    /// Prepares a place.
    pub(crate) fn at<'p>(&'p self, place: &'p Place) -> At<'p> {
        let time = self.time_of[place.replicas as usize - 1];
        self.at_rows(place, self.replica_rows(place.replicas), |kind| Arc::clone(&self.times[kind][time]))
    }

    /// Prepares a place for Replicas with fewer rows.
    pub(crate) fn at_fewer_rows<'p>(&'p self, place: &'p Place, rows: u64) -> At<'p> {
        let Problem { chain, cluster, measured, .. } = self.problem;
        let times = |kind: usize| chain.times(kind, &cluster.kinds[kind], measured[kind].as_ref(), rows);
        self.at_rows(place, rows, |kind| Arc::new(times(kind)))
    }

    fn at_rows<'p>(&'p self, place: &'p Place, rows: u64, times: impl Fn(usize) -> Arc<Times>) -> At<'p> {
        let Problem { cluster, settings, .. } = self.problem;
        let devices: Vec<_> = place.kinds().map(|kind| (&cluster.kinds[kind], times(kind))).collect();
        let usable = devices.iter().map(|(device, _)| settings.usable_bytes(device.memory_bytes));
        let framework = devices.iter().map(|(device, _)| device.framework_bytes).max();
        let mut at = At {
            place,
            usable_bytes: usable.fold(f64::INFINITY, f64::min),
            rows,
            framework_bytes: framework.unwrap_or(0) as f64,
            devices,
            savings: Vec::new(),
        };
        if self.problem.settings.savers.recompute {
            at.savings = self.savings_of_kinds(&at);
        }
        at
    }

    fn savings_of_kinds(&self, at: &At<'_>) -> Vec<Saving> {
        let mut savings: Vec<Saving> = Vec::new();
        for block in 0..self.chain.len() {
            let own = self.saving(block, at);
            match savings.iter_mut().find(|saving| saving.kind == own.kind) {
                Some(saving) => (saving.bytes, saving.us) = (saving.bytes.min(own.bytes), saving.us.max(own.us)),
                None => savings.push(own),
            }
        }
        cheapest_first(savings)
    }

    /// What one Block frees, and what it costs.
    pub(crate) fn saving(&self, block: usize, at: &At<'_>) -> Saving {
        let us = at.devices.iter().map(|(_, times)| {
            let cost = times.blocks(block, block + 1);
            cost.forward_us.max(cost.forward_host_us)
        });
        let us = us.fold(0.0, f64::max);
        let bytes = self.chain.kept_inside_bytes(block, at.rows);
        Saving { kind: self.chain.kind(block), bytes, us, count: 1 }
    }
}
