//! Do inputs reach the Stages, and outputs their owners?

use std::collections::HashMap;

use rannc_ir::ValueId;

use super::layout::{Layout, computed_rows};
use super::{CheckError, covers_once, within};
use crate::partition::{OutputSource, Partition};
use crate::program::{Action, Interval, Program, Transfer};
use crate::schedule::Compute;

/// What a rank gets of a Value of a microbatch.
type Key = (ValueId, u32, u32);

/// The transfers of one list by what they serve, taken out as they are accounted for.
struct Ledger<'a> {
    list: &'static str,
    entries: HashMap<Key, Vec<&'a Transfer>>,
}

impl<'a> Ledger<'a> {
    fn new(list: &'static str, transfers: &'a [Transfer]) -> Self {
        let mut entries: HashMap<Key, Vec<&Transfer>> = HashMap::new();
        for transfer in transfers {
            entries.entry((transfer.value, transfer.mb, transfer.dst)).or_default().push(transfer);
        }
        Self { list, entries }
    }

    /// Demands that `rank` gets `rows` exactly once from ranks that have them.
    fn settle(
        &mut self,
        (value, mb, rank): Key,
        rows: Interval,
        rows_at: impl Fn(usize) -> Interval,
    ) -> Result<(), CheckError> {
        let transfers = self.entries.remove(&(value, mb, rank)).unwrap_or_default();
        for &transfer in &transfers {
            if !within(transfer.rows, rows_at(transfer.src as usize)) {
                return Err(self.fault(transfer, "the source does not have these rows"));
            }
        }
        let mut received: Vec<Interval> = transfers.iter().map(|transfer| transfer.rows).collect();
        if covers_once(&mut received, rows) {
            Ok(())
        } else {
            Err(CheckError::TransferRows { list: self.list, rank, mb, value, rows })
        }
    }

    /// Demands that nothing is left.
    fn close(self) -> Result<(), CheckError> {
        match self.entries.values().flatten().min() {
            Some(transfer) => Err(self.fault(transfer, "nobody needs it")),
            None => Ok(()),
        }
    }

    fn fault(&self, transfer: &Transfer, problem: &'static str) -> CheckError {
        CheckError::Transfer { list: self.list, transfer: *transfer, problem }
    }
}

pub(super) fn check_inputs(program: &Program, partition: &Partition, layout: &Layout) -> Result<(), CheckError> {
    let mut ledger = Ledger::new("input", &program.inputs);
    for own in &program.ranks {
        // What has no rows comes with the microbatch that is computed first.
        let first = own.forward.iter().find_map(Action::compute).map(Compute::microbatch);
        for (mb, slices) in (0..).zip(&layout.slices) {
            let rows = computed_rows(program, own, mb as usize);
            if rows.lo == rows.hi {
                continue;
            }
            for input in &partition.stages[own.stage as usize].inputs {
                let key = (input.value, mb, own.rank);
                if input.has_rows {
                    ledger.settle(key, rows, |src| slices.get(src).copied().unwrap_or_default())?;
                } else if first == Some(mb) {
                    ledger.settle(key, rows, |src| if src == 0 { rows } else { Interval::default() })?;
                }
            }
        }
    }
    ledger.close()
}

pub(super) fn check_outputs(program: &Program, partition: &Partition, layout: &Layout) -> Result<(), CheckError> {
    let mut ledger = Ledger::new("output", &program.outputs);
    let mut settled: Vec<ValueId> = Vec::new();
    for output in partition.outputs.iter().filter(|output| output.row_dim.is_some()) {
        if settled.contains(&output.value) {
            continue;
        }
        settled.push(output.value);
        for (mb, slices) in (0..).zip(&layout.slices) {
            let rows_at = |src: usize| match output.source {
                OutputSource::Input(_) => slices.get(src).copied().unwrap_or_default(),
                OutputSource::Stage(stage) => match program.ranks.get(src) {
                    Some(own) if own.stage == stage => computed_rows(program, own, mb as usize),
                    _ => Interval::default(),
                },
            };
            for (rank, &slice) in (0..).zip(slices) {
                let whole = Interval::new(0, program.microbatches[mb as usize]);
                let rows = if program.gather_inputs { slice } else { whole };
                if rows.lo < rows.hi {
                    ledger.settle((output.value, mb, rank), rows, rows_at)?;
                }
            }
        }
    }
    ledger.close()
}
