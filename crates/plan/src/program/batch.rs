//! Exchanges between the ranks' own batches and the Stages: what the Transfers of a Program say and does not stay where it
//! is.
//!
//! All ranks come to them in one order, by kind and microbatch. Inputs and gradients of outputs stand at the beginning of a
//! list, before anything is computed; outputs and gradients of inputs behind what makes them, and nothing but the end of the
//! list waits for them. So no exchange waits for one that comes later, and no computation for one that waits for it.

use std::collections::BTreeMap;

use rannc_ir::ValueId;

use super::Transfer;
use super::action::{BatchKind, Exchange, Parcel, Piece};
use crate::partition::{OutputSource, Partition};
use crate::schedule::{Call, Compute};

/// Where the Transfers of a batch go.
pub(super) struct BatchRoutes<'a> {
    pub(super) partition: &'a Partition,
    pub(super) call: Call,
    pub(super) gather_inputs: bool,
    pub(super) inputs: &'a [Transfer],
    pub(super) outputs: &'a [Transfer],
    /// The last microbatch with rows.
    pub(super) last: u32,
}

/// By peer.
type Parcels = BTreeMap<u32, Vec<Piece>>;

impl BatchRoutes<'_> {
    /// What each rank exchanges, in order.
    pub(super) fn exchanges(&self, ranks: usize) -> Vec<Vec<Exchange>> {
        let mut found: Vec<BTreeMap<(BatchKind, u32), [Parcels; 2]>> = vec![BTreeMap::new(); ranks];
        let mut add = |kind: BatchKind, Transfer { src, dst, mb, value, rows }: Transfer| {
            for (end, peer, direction) in [(src, dst, 0), (dst, src, 1)] {
                let parcels = &mut found[end as usize].entry((kind, mb)).or_default()[direction];
                parcels.entry(peer).or_default().push(Piece { value, rows });
            }
        };
        let back = |transfer: Transfer| Transfer { src: transfer.dst, dst: transfer.src, ..transfer };
        let (inputs, outputs) = (self.differentiable_inputs(), self.made_outputs());
        for &transfer in self.inputs.iter().filter(|transfer| transfer.src != transfer.dst) {
            add(BatchKind::Input, transfer);
            if let Some(&has_rows) = inputs.get(&transfer.value).filter(|_| self.call.trains()) {
                let mb = if has_rows { transfer.mb } else { self.last };
                add(BatchKind::InputGrad, Transfer { mb, ..back(transfer) });
            }
        }
        for &transfer in self.outputs.iter().filter(|transfer| transfer.src != transfer.dst) {
            let Some(&requires_grad) = outputs.get(&transfer.value) else { continue };
            add(BatchKind::Output, transfer);
            if self.call == Call::Halves && self.gather_inputs && requires_grad {
                add(BatchKind::OutputGrad, back(transfer));
            }
        }
        let listed = |parcels: Parcels| parcels.into_iter().map(|(peer, pieces)| Parcel { peer, pieces }).collect();
        let exchange = |((kind, mb), [sends, recvs]): ((BatchKind, u32), [Parcels; 2])| Exchange {
            kind,
            mb,
            sends: listed(sends),
            recvs: listed(recvs),
        };
        found.into_iter().map(|own| own.into_iter().map(exchange).collect()).collect()
    }

    /// The outputs that some Stage makes, and whether gradients may come back for them.
    fn made_outputs(&self) -> BTreeMap<ValueId, bool> {
        let made = |output: &&crate::partition::OutputPart| matches!(output.source, OutputSource::Stage(_));
        self.partition.outputs.iter().filter(made).map(|output| (output.value, output.requires_grad)).collect()
    }

    /// The inputs that gradients flow into, and whether they have rows.
    fn differentiable_inputs(&self) -> BTreeMap<ValueId, bool> {
        let inputs = self.partition.stages.iter().flat_map(|stage| &stage.inputs);
        inputs.filter(|input| input.requires_grad).map(|input| (input.value, input.has_rows)).collect()
    }
}

/// Behind how many of a rank's computations an exchange may stand: those that make its rows, or the rows of microbatches
/// before.
#[derive(Clone, Debug)]
pub struct ExchangePlaces {
    /// By kind, the computations that make it by increasing microbatch, and how many there are up to all of these.
    made: BTreeMap<BatchKind, Vec<(u32, usize)>>,
}

impl ExchangePlaces {
    /// Those among a list's computations.
    pub fn new(computes: impl IntoIterator<Item = Compute>) -> Self {
        let mut made: BTreeMap<BatchKind, Vec<(u32, usize)>> = BTreeMap::new();
        for (count, compute) in (1..).zip(computes) {
            if let Some(kind) = BatchKind::made_by(compute) {
                made.entry(kind).or_default().push((compute.microbatch(), count));
            }
        }
        for places in made.values_mut() {
            places.sort_unstable();
            let mut most = 0;
            places.iter_mut().for_each(|(_, count)| {
                most = most.max(*count);
                *count = most;
            });
        }
        Self { made }
    }

    /// The place of one.
    pub fn behind(&self, kind: BatchKind, mb: u32) -> usize {
        let made = self.made.get(&kind).map_or(&[][..], Vec::as_slice);
        let before = made.partition_point(|&(other, _)| other <= mb);
        before.checked_sub(1).map_or(0, |last| made[last].1)
    }
}
