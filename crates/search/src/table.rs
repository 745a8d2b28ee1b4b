//! All Stages that one number of microbatches allows, priced.

use crate::price::{Links, Pricing, Span};

/// A priced Stage.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Entry {
    pub(crate) microbatch_us: f64,
    pub(crate) backward_us: f64,
    pub(crate) end_us: f64,
    /// Microbatches in flight that its memory allows; 0 when it does not fit at all.
    pub(crate) max_in_flight: u64,
}

impl Entry {
    /// Prices a Stage whose Blocks need `workspace_bytes`.
    fn new(pricing: &Pricing<'_>, span: Span, links: &Links, workspace_bytes: f64) -> Self {
        let footprint = pricing.footprint(span, workspace_bytes);
        let free_bytes = pricing.settings.usable_bytes(pricing.cluster) - footprint.fixed_bytes;
        let time = pricing.time(span, links);
        Self {
            microbatch_us: time.microbatch_us(),
            backward_us: time.backward_us,
            end_us: time.end_us(),
            max_in_flight: room(free_bytes, footprint.microbatch_bytes),
        }
    }

    /// Prices a Stage whose first Replica has this rank.
    pub(crate) fn priced(pricing: &Pricing<'_>, span: Span, rank: u32) -> Self {
        let workspaces = (span.first..span.end).map(|block| pricing.workspace_bytes(block, span.replicas));
        let links = pricing.links(rank..rank + span.replicas);
        Self::new(pricing, span, &links, workspaces.fold(0.0, f64::max))
    }
}

/// Prices of every run of Blocks on every number of Replicas.
pub(crate) struct StageTable {
    pub(crate) blocks: usize,
    pub(crate) devices: u32,
    /// For each first rank and number of Replicas, the layer of `entries` with its links.
    layers: Vec<usize>,
    /// By layer, end, first.
    entries: Vec<Entry>,
}

impl StageTable {
    /// Prices all Stages.
    pub(crate) fn new(pricing: &Pricing<'_>) -> Self {
        let (blocks, devices) = (pricing.chain.len(), pricing.settings.world_size);
        let mut kinds: Vec<(u32, Links)> = Vec::new();
        let mut layers = vec![0; (devices * devices) as usize];
        for first in 0..devices {
            for replicas in 1..=devices - first {
                let kind = (replicas, pricing.links(first..first + replicas));
                let layer = kinds.iter().position(|known| *known == kind).unwrap_or_else(|| {
                    kinds.push(kind);
                    kinds.len() - 1
                });
                layers[(first * devices + replicas - 1) as usize] = layer;
            }
        }
        let mut table = Self { blocks, devices, layers, entries: Vec::new() };
        for (replicas, links) in kinds {
            table.fill(pricing, replicas, &links);
        }
        table
    }

    fn fill(&mut self, pricing: &Pricing<'_>, replicas: u32, links: &Links) {
        let usable_bytes = pricing.settings.usable_bytes(pricing.cluster);
        let workspaces: Vec<f64> = (0..self.blocks).map(|block| pricing.workspace_bytes(block, replicas)).collect();
        for end in 1..=self.blocks {
            let start = self.entries.len();
            self.entries.resize(start + end, Entry::default());
            let mut workspace_bytes: f64 = 0.0;
            for first in (0..end).rev() {
                let span = Span { first, end, replicas };
                if pricing.model_bytes(span) > usable_bytes {
                    break;
                }
                workspace_bytes = workspace_bytes.max(workspaces[first]);
                self.entries[start + first] = Entry::new(pricing, span, links, workspace_bytes);
            }
        }
    }

    /// The Stages with these last Block, first rank and number of Replicas, by first Block.
    pub(crate) fn ending(&self, end: usize, rank: u32, replicas: u32) -> &[Entry] {
        let layer = self.layers[(rank * self.devices + replicas - 1) as usize];
        let start = layer * self.blocks * (self.blocks + 1) / 2 + end * (end - 1) / 2;
        &self.entries[start..start + end]
    }
}

/// How many microbatches fit into the free memory.
fn room(free_bytes: f64, microbatch_bytes: f64) -> u64 {
    if free_bytes < 0.0 {
        0
    } else if microbatch_bytes <= 0.0 {
        u64::MAX
    } else {
        (free_bytes / microbatch_bytes) as u64
    }
}
