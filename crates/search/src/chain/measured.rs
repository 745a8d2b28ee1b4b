//! Measured costs of Blocks and Spans, where there are any.

use rannc_cost::{BlockProfile, Blocks, ComputeCost, Device, Profile};

use super::spec::BlockSpec;

/// What was measured of a chain's Blocks on one kind of device.
#[derive(Clone, Debug)]
pub(crate) struct Measured {
    /// By kind of Block.
    blocks: Vec<Option<BlockProfile>>,
    /// By kind of Span.
    spans: Vec<Option<BlockProfile>>,
    /// Measured time of the device by modelled time, over all Blocks that were measured: for those that were not.
    scale: f64,
    /// Time of the end of a step for each byte of trainable parameters.
    pub(crate) update_us_per_byte: Option<f64>,
    /// See [`Device::collective_slowdown`].
    pub(crate) collective_slowdown: Option<f64>,
    /// See [`Device::message_slowdown`].
    pub(crate) message_slowdown: Option<f64>,
}

impl Measured {
    /// Takes the times of Blocks and Spans from a Profile of `device`, if it has any of Blocks.
    pub(crate) fn new(
        profile: &Profile,
        device: &Device,
        blocks: &Blocks,
        spans: &Blocks,
        specs: &[BlockSpec],
        rows: u64,
    ) -> Option<Self> {
        let known = |all: &Blocks| all.hashes.iter().map(|hash| profile.block(hash).cloned()).collect::<Vec<_>>();
        let found = known(blocks);
        let (mut measured_us, mut modelled_us) = (0.0, 0.0);
        for spec in specs {
            let Some(block) = found[spec.kind as usize].as_ref().filter(|block| block.has_times() && block.fits(rows))
            else {
                continue;
            };
            let (measured, modelled) = (block.cost(rows), spec.modelled(device, rows));
            measured_us += measured.forward_us + measured.backward_us;
            modelled_us += modelled.forward_us + modelled.backward_us;
        }
        let any_us = measured_us > 0.0 && modelled_us > 0.0;
        let scale = if any_us { measured_us / modelled_us } else { 1.0 };
        found.iter().any(Option::is_some).then(|| Self {
            spans: known(spans),
            blocks: found,
            scale,
            update_us_per_byte: profile.update.map(|update| update.us_per_byte()),
            collective_slowdown: profile.collective_slowdown,
            message_slowdown: profile.message_slowdown,
        })
    }

    /// Kinds of Blocks that were measured.
    pub(crate) fn kinds(&self) -> usize {
        self.blocks.iter().flatten().filter(|block| block.has_times()).count()
    }

    /// What was measured of a Block with at least so many rows, if it fitted.
    pub(crate) fn block(&self, kind: u32, rows: u64) -> Option<&BlockProfile> {
        self.blocks[kind as usize].as_ref().filter(|block| block.has_times() && block.fits(rows))
    }

    /// What was measured of a Span with at least so many rows, if it fitted.
    pub(crate) fn span(&self, kind: u32, rows: u64) -> Option<&BlockProfile> {
        self.spans[kind as usize].as_ref().filter(|span| span.has_times() && span.fits(rows))
    }

    /// Time of the device by modelled time, for what was not measured.
    pub(crate) fn scale(&self) -> f64 {
        self.scale
    }

    /// The cost of a Block that costs `modelled` by the roofline; none if it ran out of memory.
    pub(crate) fn cost(&self, kind: u32, rows: u64, modelled: ComputeCost) -> Option<ComputeCost> {
        match &self.blocks[kind as usize] {
            Some(block) if !block.fits(rows) => None,
            Some(block) if block.has_times() => Some(block.cost(rows)),
            _ => Some(ComputeCost {
                forward_us: modelled.forward_us * self.scale,
                backward_us: modelled.backward_us * self.scale,
                ..modelled
            }),
        }
    }
}
