//! Do exchanges carry what the Transfers say, and nothing else?

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use rannc_ir::ValueId;

use super::{ActionFault, CheckError};
use crate::partition::{OutputSource, Partition};
use crate::program::{BatchKind, Exchange, Piece, Program, Transfer};
use crate::schedule::Call;

/// From where to where, and whether at the end that gives or that takes.
type End = (BatchKind, u32, u32, u32, bool);

/// What has yet to be exchanged between the ranks' own batches and the Stages.
pub(super) struct Carried {
    left: HashMap<(End, Piece), (&'static str, Transfer)>,
    /// In the order in which it is packed.
    packed: BTreeMap<End, Vec<Piece>>,
    met: HashSet<(u32, BatchKind, u32)>,
    /// Inputs without rows.
    whole: BTreeSet<ValueId>,
    /// The last microbatch with rows.
    last: u32,
}

impl Carried {
    /// All of it.
    pub(super) fn new(program: &Program, partition: &Partition) -> Self {
        let inputs = || partition.stages.iter().flat_map(|stage| &stage.inputs);
        let outputs: BTreeMap<ValueId, bool> = partition
            .outputs
            .iter()
            .filter(|output| matches!(output.source, OutputSource::Stage(_)))
            .map(|output| (output.value, output.requires_grad))
            .collect();
        let mut carried = Self {
            left: HashMap::new(),
            packed: BTreeMap::new(),
            met: HashSet::new(),
            whole: inputs().filter(|input| !input.has_rows).map(|input| input.value).collect(),
            last: (0..).zip(&program.microbatches).filter(|&(_, &rows)| rows > 0).last().map_or(0, |(mb, _)| mb),
        };
        let differentiable: BTreeSet<ValueId> =
            inputs().filter(|input| input.requires_grad).map(|input| input.value).collect();
        for &transfer in program.inputs.iter().filter(|transfer| transfer.src != transfer.dst) {
            carried.add("input", BatchKind::Input, transfer);
            if program.call.trains() && differentiable.contains(&transfer.value) {
                carried.add("input", BatchKind::InputGrad, transfer);
            }
        }
        for &transfer in program.outputs.iter().filter(|transfer| transfer.src != transfer.dst) {
            let Some(&requires_grad) = outputs.get(&transfer.value) else { continue };
            carried.add("output", BatchKind::Output, transfer);
            if program.call == Call::Halves && program.gather_inputs && requires_grad {
                carried.add("output", BatchKind::OutputGrad, transfer);
            }
        }
        carried
    }

    fn add(&mut self, list: &'static str, kind: BatchKind, transfer: Transfer) {
        let Transfer { src, dst, mb, value, rows } = transfer;
        let (from, to) = if kind.is_of_backward() { (dst, src) } else { (src, dst) };
        let mb = if kind == BatchKind::InputGrad && self.whole.contains(&value) { self.last } else { mb };
        for gives in [true, false] {
            self.left.insert(((kind, mb, from, to, gives), Piece { value, rows }), (list, transfer));
        }
    }

    /// Accounts for an exchange of a rank.
    pub(super) fn exchange(&mut self, rank: u32, exchange: &Exchange) -> Result<(), ActionFault> {
        let &Exchange { kind, mb, ref sends, ref recvs } = exchange;
        if !self.met.insert((rank, kind, mb)) {
            return Err(ActionFault::Repeated);
        }
        if sends.iter().chain(recvs).any(|parcel| parcel.pieces.is_empty()) || sends.len() + recvs.len() == 0 {
            return Err(ActionFault::Empty);
        }
        for (parcels, gives) in [(sends, true), (recvs, false)] {
            for parcel in parcels {
                let (from, to) = if gives { (rank, parcel.peer) } else { (parcel.peer, rank) };
                let end = (kind, mb, from, to, gives);
                for &piece in &parcel.pieces {
                    let known = self.left.remove(&(end, piece));
                    known.ok_or(ActionFault::NotAsked { value: piece.value, rows: piece.rows })?;
                    self.packed.entry(end).or_default().push(piece);
                }
            }
        }
        Ok(())
    }

    /// True for an input without rows, to whose gradient all microbatches add.
    pub(super) fn is_whole(&self, input: ValueId) -> bool {
        self.whole.contains(&input)
    }

    /// Demands that nothing is left, and that both ends pack alike.
    pub(super) fn check_complete(self) -> Result<(), CheckError> {
        let order = |&(&(end, Piece { value, rows }), _): &(&(End, Piece), _)| (end, value, rows);
        if let Some((_, &(list, transfer))) = self.left.iter().min_by_key(order) {
            return Err(CheckError::Transfer { list, transfer, problem: "no exchange carries it" });
        }
        for (&(kind, mb, src, dst, gives), pieces) in &self.packed {
            if gives && self.packed.get(&(kind, mb, src, dst, false)) != Some(pieces) {
                return Err(CheckError::Packing { kind, mb, src, dst });
            }
        }
        Ok(())
    }
}
