//! A graph's chain of Blocks with its costs on a cluster.

use std::collections::BTreeSet;

use rannc_cost::{Blocks, Cluster, Device, Profile};
use rannc_ir::{Analysis, Graph};

use super::at::Problem;
use crate::chain::{BatchSpec, Chain, CrossingSpec, Measured, StateSpec, extract, whole_spans};
use crate::settings::Settings;

/// A chain of Blocks with its costs.
pub(crate) struct Model {
    pub(crate) blocks: Blocks,
    pub(crate) chain: Chain,
    pub(crate) crossings: Vec<CrossingSpec>,
    pub(crate) states: Vec<StateSpec>,
    pub(crate) batch: BatchSpec,
    /// By kind of device.
    pub(crate) measured: Vec<Option<Measured>>,
    /// Of all kinds of devices.
    pub(crate) eager_spans: Vec<String>,
    /// The least of all kinds of devices, [`Profile::memory_budget_percent`].
    pub(crate) memory_budget_percent: Option<u8>,
}

impl Model {
    /// Prepares these Blocks of a graph for a cluster.
    pub(crate) fn new(
        graph: &Graph,
        analysis: &Analysis,
        blocks: Blocks,
        cluster: &Cluster,
        profiles: &[Profile],
        settings: &Settings,
    ) -> Self {
        let spans = whole_spans(graph, analysis, &blocks);
        let spec = extract(graph, analysis, &blocks, &spans, cluster.kinds[0].host, settings);
        let profile_of = |device: &Device| profiles.iter().find(|profile| profile.device == device.name);
        let measured = cluster.kinds.iter().map(|device| {
            Measured::new(profile_of(device)?, device, &blocks, &spans, &spec.blocks, settings.rank_rows())
        });
        let measured = measured.collect();
        let eager: BTreeSet<_> =
            cluster.kinds.iter().filter_map(profile_of).flat_map(|found| &found.eager_spans).collect();
        let eager_spans = eager.into_iter().cloned().collect();
        let memory_budget_percent =
            cluster.kinds.iter().filter_map(profile_of).filter_map(|found| found.memory_budget_percent).min();
        let (crossings, states, batch) = (spec.crossings.clone(), spec.states.clone(), spec.batch.clone());
        let chain = Chain::new(spec, &cluster.kinds);
        Self { blocks, chain, crossings, states, batch, measured, eager_spans, memory_budget_percent }
    }

    pub(crate) fn problem<'a>(&'a self, cluster: &'a Cluster, settings: &'a Settings) -> Problem<'a> {
        Problem::new(&self.chain, cluster, &self.measured, settings)
    }

    /// Kinds of Blocks that were measured on every kind of device.
    pub(crate) fn measured_kinds(&self) -> usize {
        self.measured.iter().map(|measured| measured.as_ref().map_or(0, Measured::kinds)).min().unwrap_or(0)
    }
}
