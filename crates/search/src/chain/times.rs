//! What Blocks cost on a device with some number of rows, as sums.

use rannc_cost::ComputeCost;

use super::own_costs::OwnCosts;

/// Costs of the Blocks before each place of a chain, and their memory, with some number of rows.
#[derive(Clone, Debug)]
pub(crate) struct Times {
    /// Kind of the device.
    pub(super) kind: usize,
    /// What batch-free ops that several Blocks use take, by the roofline's time: no Block is measured with them.
    pub(super) clone_scale: f64,
    before: Vec<ComputeCost>,
    /// Blocks that ran out of memory.
    too_large: Vec<u32>,
    /// What Blocks keep, as measured, beyond the operators' account.
    more_kept_bytes: Vec<f64>,
    /// By Block, its largest temporary memory.
    workspace_bytes: Vec<f64>,
}

impl Times {
    /// Adds up what Blocks cost, in their order.
    pub(super) fn new(kind: usize, clone_scale: f64, own: &[OwnCosts]) -> Self {
        let (mut before, mut too_large, mut more_kept_bytes) = (ComputeCost::default(), 0, 0.0);
        let mut times = Self {
            kind,
            clone_scale,
            before: vec![before],
            too_large: vec![too_large],
            more_kept_bytes: vec![more_kept_bytes],
            workspace_bytes: own.iter().map(|own| own.workspace_bytes).collect(),
        };
        for OwnCosts { cost, saved_bytes, left_bytes, .. } in own {
            before = before + cost.unwrap_or_default();
            times.before.push(before);
            too_large += u32::from(cost.is_none());
            times.too_large.push(too_large);
            more_kept_bytes += saved_bytes - left_bytes;
            times.more_kept_bytes.push(more_kept_bytes);
        }
        times
    }

    /// True when a Block of a run ran out of memory while it was measured.
    pub(crate) fn is_too_large(&self, first: usize, end: usize) -> bool {
        self.too_large[first] < self.too_large[end]
    }

    /// Largest temporary memory of one Block.
    pub(crate) fn workspace_bytes(&self, block: usize) -> f64 {
        self.workspace_bytes[block]
    }

    /// The Blocks of a run.
    pub(crate) fn blocks(&self, first: usize, end: usize) -> ComputeCost {
        self.before[end] - self.before[first]
    }

    /// What a run keeps, as measured, beyond the operators' account.
    pub(super) fn more_kept_bytes(&self, first: usize, end: usize) -> f64 {
        self.more_kept_bytes[end] - self.more_kept_bytes[first]
    }
}
