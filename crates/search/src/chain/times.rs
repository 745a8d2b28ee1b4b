//! What Blocks cost on a device with some number of rows: as measured, else by the roofline.

use rannc_cost::{BlockProfile, ComputeCost, Device};

use super::chain::Chain;
use super::measured::Measured;
use super::spec::BlockSpec;

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

/// What one Block costs.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct OwnCosts {
    /// None if it ran out of memory.
    cost: Option<ComputeCost>,
    /// What is left of its forward when it runs alone.
    saved_bytes: f64,
    /// The same by the operators' account.
    left_bytes: f64,
    workspace_bytes: f64,
}

impl Chain {
    /// Times of all Blocks on the device of a kind for `rows` rows.
    ///
    /// Blocks that run as one Span where a Stage has them all share what was measured of that, in proportion to what each
    /// takes by itself: what compiled code saves between them is theirs wherever a cut falls, which only the Spans at
    /// both ends of a Stage do not always hold.
    pub(crate) fn times(&self, kind: usize, device: &Device, measured: Option<&Measured>, rows: u64) -> Times {
        let mut own = self.own_costs(device, measured, rows);
        for span in &self.spans {
            if let Some(whole) = measured.and_then(|measured| measured.span(span.kind)) {
                share_out(&mut own[span.blocks.clone()], whole, span.left_bytes.at(rows), rows);
            }
        }
        let (mut before, mut too_large, mut more_kept_bytes) = (ComputeCost::default(), 0, 0.0);
        let mut times = Times {
            kind,
            clone_scale: measured.map_or(1.0, Measured::scale),
            before: vec![before],
            too_large: vec![too_large],
            more_kept_bytes: vec![more_kept_bytes],
            workspace_bytes: own.iter().map(|own| own.workspace_bytes).collect(),
        };
        for OwnCosts { cost, saved_bytes, left_bytes, .. } in own {
            more_kept_bytes += saved_bytes - left_bytes;
            times.more_kept_bytes.push(more_kept_bytes);
            too_large += u32::from(cost.is_none());
            before = before + cost.unwrap_or_default();
            times.before.push(before);
            times.too_large.push(too_large);
        }
        times
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

/// One of the costs of a Block that fits.
type Figure = fn(&mut OwnCosts) -> &mut f64;

/// Gives Blocks their shares of a Span, of whose forward `left_bytes` are left by the operators' account.
fn share_out(blocks: &mut [OwnCosts], whole: &BlockProfile, left_bytes: f64, rows: u64) {
    if !whole.fits(rows) {
        blocks.iter_mut().for_each(|own| own.cost = None);
    }
    if !whole.fits(rows) || blocks.iter().any(|own| own.cost.is_none()) {
        return;
    }
    let cost = whole.cost(rows);
    let figures: [(Figure, f64); 6] = [
        (|own| &mut own.cost.get_or_insert_default().forward_us, cost.forward_us),
        (|own| &mut own.cost.get_or_insert_default().backward_us, cost.backward_us),
        (|own| &mut own.cost.get_or_insert_default().forward_host_us, cost.forward_host_us),
        (|own| &mut own.cost.get_or_insert_default().backward_host_us, cost.backward_host_us),
        (|own| &mut own.saved_bytes, whole.saved_bytes(rows)),
        (|own| &mut own.left_bytes, left_bytes),
    ];
    let equal = 1.0 / blocks.len() as f64;
    for (figure, all) in figures {
        let sum: f64 = blocks.iter_mut().map(|own| *figure(own)).sum();
        for own in blocks.iter_mut() {
            let share = if sum > 0.0 { *figure(own) / sum } else { equal };
            *figure(own) = all * share;
        }
    }
    blocks.iter_mut().for_each(|own| own.workspace_bytes = whole.workspace_bytes(rows));
}

#[cfg(test)]
mod tests {
    use rannc_cost::BlockPoint;

    use super::*;

    fn block(forward_us: f64, saved_bytes: f64, left_bytes: f64) -> OwnCosts {
        let cost = Some(ComputeCost { forward_us, backward_us: 2.0 * forward_us, ..ComputeCost::default() });
        OwnCosts { cost, saved_bytes, left_bytes, workspace_bytes: 1.0 }
    }

    fn whole(fits: bool) -> BlockProfile {
        let point = BlockPoint {
            rows: 2,
            fits,
            forward_us: 6.0,
            backward_us: 9.0,
            forward_host_us: 4.0,
            backward_host_us: 0.0,
            backward_input_us: 9.0,
            backward_weight_us: 0.0,
            saved_bytes: 60,
            workspace_bytes: 7,
        };
        BlockProfile::new(vec![point])
    }

    #[test]
    fn blocks_share_a_span_in_proportion() {
        let mut blocks = [block(2.0, 40.0, 10.0), block(6.0, 80.0, 30.0)];
        share_out(&mut blocks, &whole(true), 80.0, 2);
        let cost = |forward_us, backward_us| {
            Some(ComputeCost { forward_us, backward_us, forward_host_us: 2.0, backward_host_us: 0.0 })
        };
        let expected = [
            OwnCosts { cost: cost(1.5, 2.25), saved_bytes: 20.0, left_bytes: 20.0, workspace_bytes: 7.0 },
            OwnCosts { cost: cost(4.5, 6.75), saved_bytes: 40.0, left_bytes: 60.0, workspace_bytes: 7.0 },
        ];
        assert_eq!(blocks, expected);
    }

    #[test]
    fn blocks_of_a_span_that_ran_out_of_memory_are_too_large() {
        let mut blocks = [block(2.0, 40.0, 10.0), block(6.0, 80.0, 30.0)];
        share_out(&mut blocks, &whole(false), 80.0, 2);
        assert!(blocks.iter().all(|own| own.cost.is_none()));
    }
}
