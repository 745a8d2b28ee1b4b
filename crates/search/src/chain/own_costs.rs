//! What one Block costs with some number of rows, by itself or as a part of its Span.

use rannc_cost::{BlockProfile, ComputeCost};

/// What one Block costs.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct OwnCosts {
    /// None if it ran out of memory.
    pub(super) cost: Option<ComputeCost>,
    /// What is left of its forward when it runs alone.
    pub(super) saved_bytes: f64,
    /// The same by the operators' account.
    pub(super) left_bytes: f64,
    pub(super) workspace_bytes: f64,
}

/// One of the costs of a Block that fits.
type Figure = fn(&mut OwnCosts) -> &mut f64;

/// Gives Blocks their shares of a Span, of whose forward `left_bytes` are left by the operators' account.
pub(super) fn share_out(blocks: &mut [OwnCosts], whole: &BlockProfile, left_bytes: f64, rows: u64) {
    if blocks.iter().any(|own| own.cost.is_none()) {
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

    fn whole() -> BlockProfile {
        let point = BlockPoint {
            rows: 2,
            fits: true,
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
    fn a_block_that_ran_out_of_memory_has_no_share() {
        let mut blocks = [block(2.0, 40.0, 10.0), OwnCosts { cost: None, ..block(6.0, 80.0, 30.0) }];
        let before = blocks;
        share_out(&mut blocks, &whole(), 80.0, 2);
        assert_eq!(blocks, before);
    }

    #[test]
    fn blocks_share_a_span_in_proportion() {
        let mut blocks = [block(2.0, 40.0, 10.0), block(6.0, 80.0, 30.0)];
        share_out(&mut blocks, &whole(), 80.0, 2);
        let cost = |forward_us, backward_us| {
            Some(ComputeCost { forward_us, backward_us, forward_host_us: 2.0, backward_host_us: 0.0 })
        };
        let expected = [
            OwnCosts { cost: cost(1.5, 2.25), saved_bytes: 20.0, left_bytes: 20.0, workspace_bytes: 7.0 },
            OwnCosts { cost: cost(4.5, 6.75), saved_bytes: 40.0, left_bytes: 60.0, workspace_bytes: 7.0 },
        ];
        assert_eq!(blocks, expected);
    }
}
