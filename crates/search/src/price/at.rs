//! Runs of Blocks at places: what does not depend on the run, for one Schedule and number of microbatches.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::sync::Arc;

use indexmap::IndexSet;
use rannc_cost::{Cluster, Collective, Device};
use rannc_plan::{BUCKET_BYTES, FIRST_BUCKET_BYTES, LARGEST_BUCKET_BYTES, ScheduleKind, Sharding};

use super::knapsack::{Saving, cheapest_first};
use super::place::Place;
use super::sizes::{BySize, LARGER, MicrobatchSizes};
use super::step::StepModel;
use crate::chain::{Chain, Measured, Times};
use crate::settings::Settings;

/// By first and last Block but one of a Stage, bytes that it holds because of where others are cut, as far as divisions that
/// do not fit have shown it: for gradients that several Stages send back for one of its Values.
pub(crate) type Beside = BTreeMap<(usize, usize), f64>;

/// What there is to price: a model on a cluster.
#[derive(Clone, Copy)]
pub(crate) struct Problem<'a> {
    pub(crate) chain: &'a Chain,
    pub(crate) cluster: &'a Cluster,
    /// By kind of device.
    pub(crate) measured: &'a [Option<Measured>],
    pub(crate) settings: &'a Settings,
    /// What Stages hold beside what they are priced with.
    pub(crate) beside: &'a Beside,
    /// True when parts of Blocks may be computed again: no choice of Blocks costs less.
    pub(crate) in_parts: bool,
    /// True when only those transfers take time that surely are between a Stage and the very next one.
    pub(crate) direct: bool,
}

impl<'a> Problem<'a> {
    /// As a Plan is priced: no bound, and no division has shown what Stages hold besides.
    pub(crate) const fn new(
        chain: &'a Chain,
        cluster: &'a Cluster,
        measured: &'a [Option<Measured>],
        settings: &'a Settings,
    ) -> Self {
        const NOTHING: &Beside = &Beside::new();
        Self { chain, cluster, measured, settings, beside: NOTHING, in_parts: false, direct: false }
    }

    fn collective_slowdown(&self, kind: usize) -> f64 {
        let measured = self.measured[kind].as_ref().and_then(|measured| measured.collective_slowdown);
        measured.unwrap_or(self.cluster.kinds[kind].collective_slowdown)
    }

    fn message_slowdown(&self, kind: usize) -> f64 {
        let measured = self.measured[kind].as_ref().and_then(|measured| measured.message_slowdown);
        measured.unwrap_or(self.cluster.kinds[kind].message_slowdown)
    }
}

/// Prices Stages for one Schedule and number of microbatches.
pub(crate) struct Pricing<'a> {
    pub(crate) problem: Problem<'a>,
    pub(crate) chain: &'a Chain,
    pub(crate) step: StepModel,
    pub(crate) sizes: MicrobatchSizes,
    /// Different numbers of rows of the largest Replicas.
    row_counts: IndexSet<u64>,
    /// By kind of device, by place in that list.
    times: Vec<Vec<Arc<Times>>>,
    /// By the number of Replicas less one, by size of the microbatch, place in the list.
    time_of: Vec<BySize<usize>>,
    /// See [`Device::message_slowdown`]; of the device that has most of it.
    pub(super) most_message_slowdown: f64,
}

/// A place, with what does not depend on the Stage that is there.
pub(crate) struct At<'p> {
    pub(crate) place: &'p Place,
    /// Memory that a Plan may use on each device.
    pub(crate) usable_bytes: f64,
    /// Rows of a microbatch of each size on the largest Replica.
    pub(crate) rows: BySize<u64>,
    /// See [`Pricing::foreign_rows`].
    pub(super) foreign_rows: [u64; 2],
    /// For each kind of its devices.
    pub(super) devices: Vec<DeviceTimes<'p>>,
    pub(super) framework_bytes: f64,
    /// Over all its devices.
    pub(super) collective: Collective,
    /// See [`Device::collective_slowdown`]; of the device that has most of it.
    pub(super) collective_slowdown: f64,
    /// What one Block of each kind surely frees when it is computed again, and what that takes at most; the
    /// cheapest memory first.
    pub(super) savings: Vec<Saving>,
}

/// A device, and what it takes for all Blocks with the rows of each size of microbatch.
pub(super) struct DeviceTimes<'p> {
    pub(super) device: &'p Device,
    /// See [`Device::message_slowdown`].
    pub(super) message_slowdown: f64,
    pub(super) times: BySize<Arc<Times>>,
}

impl At<'_> {
    /// See [`StagePlan::bucket_bytes`](rannc_plan::StagePlan::bucket_bytes). Where Replicas divide gradients, larger buckets
    /// take memory and smaller ones are summed for every microbatch.
    pub(crate) fn bucket_bytes(&self, sharding: Sharding) -> u64 {
        if self.place.replicas == 1 || self.place.divides(sharding) >= Sharding::Gradients {
            return BUCKET_BYTES;
        }
        (self.collective.balanced_bytes() as u64).clamp(FIRST_BUCKET_BYTES, LARGEST_BUCKET_BYTES)
    }

    /// Rows of the largest microbatch on the largest Replica.
    pub(crate) fn most_rows(&self) -> u64 {
        self.rows[LARGER]
    }

    /// By how much what does not fit into any of its devices goes beyond what a Plan may use.
    pub(crate) fn beyond_bytes(&self) -> f64 {
        let least = self.devices.iter().map(|DeviceTimes { device, .. }| device.memory_bytes).min().unwrap_or(0);
        (least as f64 - self.usable_bytes).max(1.0)
    }
}

impl<'a> Pricing<'a> {
    pub(crate) fn new(problem: Problem<'a>, schedule: ScheduleKind, microbatches: u64) -> Self {
        let Problem { chain, cluster, measured, settings, .. } = problem;
        let sizes = MicrobatchSizes::new(settings, microbatches);
        let mut row_counts: IndexSet<u64> = IndexSet::new();
        let mut place = |rows: u64| row_counts.insert_full(rows).0;
        let replicas = 1..=u64::from(settings.world_size);
        let time_of = replicas.map(|replicas| sizes.rows.map(|rows| place(rows.div_ceil(replicas)))).collect();
        let times = |(kind, device): (usize, &Device)| {
            let measured = measured[kind].as_ref();
            row_counts.iter().map(|&rows| Arc::new(chain.times(kind, device, measured, rows))).collect()
        };
        let times = cluster.kinds.iter().enumerate().map(times).collect();
        let step = StepModel::new(schedule, sizes.counts);
        let slowdowns = (0..cluster.kinds.len()).map(|kind| problem.message_slowdown(kind));
        let most_message_slowdown = slowdowns.fold(0.0, f64::max);
        Self { problem, chain, step, sizes, row_counts, times, time_of, most_message_slowdown }
    }

    /// Rows of the largest microbatch on the largest Replica.
    pub(crate) fn replica_rows(&self, replicas: u32) -> u64 {
        self.sizes.most_rows().div_ceil(u64::from(replicas))
    }

    /// Numbers of Replicas that have equally many rows each, increasing.
    pub(crate) fn equal_replicas(&self) -> Vec<RangeInclusive<u32>> {
        let mut end = 0;
        let equal = self.time_of.chunk_by(|left, right| left == right).map(|alike| {
            let start = end + 1;
            end += u32::try_from(alike.len()).expect("fewer Replicas than 2^32");
            start..=end
        });
        equal.collect()
    }

    /// Prepares a place.
    pub(crate) fn at<'p>(&'p self, place: &'p Place) -> At<'p> {
        let times = self.time_of[place.replicas as usize - 1];
        let rows = self.sizes.rows.map(|rows| rows.div_ceil(u64::from(place.replicas)));
        self.at_rows(place, rows, |kind| times.map(|time| Arc::clone(&self.times[kind][time])))
    }

    /// Prepares a place for a Replica that has so many rows of every microbatch.
    pub(crate) fn at_own_rows<'p>(&'p self, place: &'p Place, rows: u64) -> At<'p> {
        let Problem { chain, cluster, measured, .. } = self.problem;
        let known = self.row_counts.get_index_of(&rows);
        let times = |kind: usize| match known {
            Some(time) => Arc::clone(&self.times[kind][time]),
            None => Arc::new(chain.times(kind, &cluster.kinds[kind], measured[kind].as_ref(), rows)),
        };
        self.at_rows(place, [rows; 3], |kind| {
            let times = times(kind);
            [Arc::clone(&times), Arc::clone(&times), times]
        })
    }

    fn at_rows<'p>(
        &'p self,
        place: &'p Place,
        rows: BySize<u64>,
        times: impl Fn(usize) -> BySize<Arc<Times>>,
    ) -> At<'p> {
        let Problem { cluster, settings, .. } = self.problem;
        let of_kind = |kind: usize| DeviceTimes {
            device: &cluster.kinds[kind],
            message_slowdown: self.problem.message_slowdown(kind),
            times: times(kind),
        };
        let devices: Vec<_> = place.kinds().map(of_kind).collect();
        let usable = devices.iter().map(|DeviceTimes { device, .. }| settings.usable_bytes(device.memory_bytes));
        let framework = devices.iter().map(|DeviceTimes { device, .. }| device.framework_bytes).max();
        let collective = cluster.collective(place.group);
        let mut at = At {
            place,
            usable_bytes: usable.fold(f64::INFINITY, f64::min),
            rows,
            foreign_rows: self.foreign_rows(rows),
            framework_bytes: framework.unwrap_or(0) as f64,
            collective,
            collective_slowdown: place.kinds().map(|kind| self.problem.collective_slowdown(kind)).fold(0.0, f64::max),
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

    /// What one Block frees, and what it costs, of every microbatch as of the largest.
    pub(crate) fn saving(&self, block: usize, at: &At<'_>) -> Saving {
        let us = at.devices.iter().map(|DeviceTimes { times, .. }| {
            let cost = times[LARGER].blocks(block, block + 1);
            if self.problem.settings.replays { cost.forward_us } else { cost.forward_us.max(cost.forward_host_us) }
        });
        let us = us.fold(0.0, f64::max);
        let bytes = self.chain.kept_inside_bytes(block, at.most_rows());
        Saving { kind: self.chain.kind(block), bytes, us, count: 1 }
    }
}
