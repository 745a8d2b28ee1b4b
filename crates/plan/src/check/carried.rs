//! Do messages carry what the Transfers say, and nothing else?

use std::collections::{BTreeMap, BTreeSet, HashMap};

use rannc_ir::ValueId;

use super::{ActionFault, CheckError};
use crate::partition::{OutputSource, Partition};
use crate::program::{Interval, Message, Payload, Piece, Program, Transfer};
use crate::schedule::Call;

/// Rows of a Value that a message takes: what it is, from where, to where, of which microbatch.
type Key = (Payload, u32, u32, u32, ValueId, Interval);

/// What has yet to be sent between the ranks' own batches and the Stages.
pub(super) struct Carried {
    left: HashMap<Key, (&'static str, Transfer)>,
    /// Inputs without rows.
    whole: BTreeSet<ValueId>,
}

impl Carried {
    /// All of it.
    pub fn new(program: &Program, partition: &Partition) -> Self {
        let inputs = || partition.stages.iter().flat_map(|stage| &stage.inputs);
        let outputs: BTreeMap<ValueId, bool> = partition
            .outputs
            .iter()
            .filter(|output| matches!(output.source, OutputSource::Stage(_)))
            .map(|output| (output.value, output.requires_grad))
            .collect();
        let mut carried = Self { left: HashMap::new(), whole: BTreeSet::new() };
        carried.whole.extend(inputs().filter(|input| !input.has_rows).map(|input| input.value));
        let differentiable: BTreeSet<ValueId> =
            inputs().filter(|input| input.requires_grad).map(|input| input.value).collect();
        for &transfer in program.inputs.iter().filter(|transfer| transfer.src != transfer.dst) {
            carried.add("input", Payload::Input, transfer, false);
            if program.call.trains() && differentiable.contains(&transfer.value) {
                carried.add("input", Payload::InputGrad, transfer, true);
            }
        }
        for &transfer in program.outputs.iter().filter(|transfer| transfer.src != transfer.dst) {
            let Some(&requires_grad) = outputs.get(&transfer.value) else { continue };
            carried.add("output", Payload::Output, transfer, false);
            if program.call == Call::Halves && program.gather_inputs && requires_grad {
                carried.add("output", Payload::OutputGrad, transfer, true);
            }
        }
        carried
    }

    fn add(&mut self, list: &'static str, kind: Payload, transfer: Transfer, back: bool) {
        let Transfer { src, dst, mb, value, rows } = transfer;
        let (from, to) = if back { (dst, src) } else { (src, dst) };
        self.left.insert((kind, from, to, mb, value, rows), (list, transfer));
    }

    /// Accounts for a message from a rank.
    pub fn send(&mut self, rank: u32, message: &Message) -> Result<(), ActionFault> {
        if message.pieces.is_empty() {
            return Err(ActionFault::Empty);
        }
        for &Piece { value, rows } in &message.pieces {
            let known = self.left.remove(&(message.kind, rank, message.peer, message.mb, value, rows));
            known.ok_or(ActionFault::NotAsked { value, rows })?;
        }
        Ok(())
    }

    /// True for gradients that all microbatches add to.
    pub fn is_of_all_microbatches(&self, message: &Message) -> bool {
        message.pieces.iter().any(|piece| self.whole.contains(&piece.value))
    }

    /// Demands that nothing is left.
    pub fn check_complete(self) -> Result<(), CheckError> {
        match self.left.into_iter().min_by_key(|&(key, _)| key) {
            Some((_, (list, transfer))) => {
                Err(CheckError::Transfer { list, transfer, problem: "no message carries it" })
            }
            None => Ok(()),
        }
    }
}
