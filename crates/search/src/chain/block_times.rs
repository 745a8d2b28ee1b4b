//! What the Blocks of a chain cost: as measured, else by the roofline.

use rannc_cost::{ComputeCost, Device};

use super::chain::Chain;
use super::measured::Measured;
use super::own_costs::{OwnCosts, share_out};
use super::spec::BlockSpec;
use super::times::Times;

impl Chain {
    /// Times of all Blocks on the device of a kind for `rows` rows.
    ///
    /// Blocks that run as one Span where a Stage has them all share what was measured of that, in proportion to what each
    /// takes by itself: what compiled code saves between them is theirs wherever a cut falls, which only the Spans at
    /// both ends of a Stage do not always hold.
    pub(crate) fn times(&self, kind: usize, device: &Device, measured: Option<&Measured>, rows: u64) -> Times {
        let mut own = self.own_costs(device, measured, rows);
        for span in &self.spans {
            if let Some(whole) = measured.and_then(|measured| measured.span(span.kind, rows)) {
                share_out(&mut own[span.blocks.clone()], whole, span.left_bytes.at(rows), rows);
            }
        }
        Times::new(kind, measured.map_or(1.0, Measured::scale), &own)
    }

    /// What each Block costs by itself.
    fn own_costs(&self, device: &Device, measured: Option<&Measured>, rows: u64) -> Vec<OwnCosts> {
        let mut known: Vec<(u32, Option<ComputeCost>)> = Vec::new();
        let mut cost = |block: &BlockSpec| {
            if let Some((_, cost)) = known.iter().find(|(kind, _)| *kind == block.kind) {
                return *cost;
            }
            let modelled = block.modelled(device, rows);
            let cost = measured.map_or(Some(modelled), |measured| measured.cost(block.kind, rows, modelled));
            known.push((block.kind, cost));
            cost
        };
        let own = |block: &BlockSpec| {
            let measured_block = measured.and_then(|measured| measured.block(block.kind, rows));
            let modelled = block.workspace_bytes.iter().map(|bytes| bytes.at(rows)).fold(0.0, f64::max);
            let left_bytes = block.left_bytes.at(rows);
            OwnCosts {
                cost: cost(block),
                saved_bytes: measured_block.map_or(left_bytes, |block| block.saved_bytes(rows)),
                left_bytes,
                workspace_bytes: measured_block.map_or(modelled, |block| block.workspace_bytes(rows)),
            }
        };
        self.blocks.iter().map(own).collect()
    }
}
