//! Do inputs reach the Stages, and outputs their owners?

use std::collections::{BTreeMap, HashMap};

use rannc_ir::ValueId;

use super::layout::{Layout, computed_rows};
use super::{CheckError, joined, within};
use crate::partition::{OutputSource, Partition};
use crate::program::{Action, Interval, Program, RankProgram, Transfer};
use crate::schedule::Seated;

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

    /// Demands that `rank` gets these runs of rows exactly once from ranks that have them.
    fn settle(
        &mut self,
        (value, mb, rank): Key,
        runs: Vec<Interval>,
        rows_at: impl Fn(usize) -> Interval,
    ) -> Result<(), CheckError> {
        let transfers = self.entries.remove(&(value, mb, rank)).unwrap_or_default();
        for &transfer in &transfers {
            if !within(transfer.rows, rows_at(transfer.src as usize)) {
                return Err(self.fault(transfer, "the source does not have these rows"));
            }
        }
        let mut received: Vec<Interval> = transfers.iter().map(|transfer| transfer.rows).collect();
        if joined(&mut received).as_ref() == Some(&runs) {
            return Ok(());
        }
        let lo = runs.first().map_or(0, |run| run.lo);
        let rows = Interval::new(lo, runs.last().map_or(lo, |run| run.hi));
        Err(CheckError::TransferRows { list: self.list, rank, mb, value, rows })
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
        for (mb, slices) in (0..).zip(&layout.slices) {
            let mut inputs: BTreeMap<ValueId, (bool, Vec<Interval>)> = BTreeMap::new();
            for seat in &own.seats {
                let rows = computed_rows(program, *seat, mb as usize);
                for input in partition.stages[seat.stage as usize].inputs.iter().filter(|_| !rows.is_empty()) {
                    inputs.entry(input.value).or_insert((input.has_rows, Vec::new())).1.push(rows);
                }
            }
            for (value, (has_rows, rows)) in inputs {
                let key = (value, mb, own.rank);
                if has_rows {
                    ledger.settle(key, union(rows), |src| slices.get(src).copied().unwrap_or_default())?;
                } else if let Some(rows) = first_rows(program, partition, own, value).filter(|(first, _)| *first == mb)
                {
                    let of_first = |src| if src == 0 { rows.1 } else { Interval::default() };
                    ledger.settle(key, vec![rows.1], of_first)?;
                }
            }
        }
    }
    ledger.close()
}

/// The first microbatch that a rank computes with an input, which comes with it where it has no rows, and what it computes
/// of it.
fn first_rows(program: &Program, partition: &Partition, own: &RankProgram, input: ValueId) -> Option<(u32, Interval)> {
    own.forward.iter().filter_map(Action::computed).find_map(|Seated { compute, stage }| {
        let seat = own.seat(stage)?;
        let takes = partition.stages[seat.stage as usize].inputs.iter().any(|taken| taken.value == input);
        let mb = compute.microbatch();
        takes.then(|| (mb, computed_rows(program, seat, mb as usize)))
    })
}

/// All the rows, as runs that do not touch.
fn union(mut rows: Vec<Interval>) -> Vec<Interval> {
    rows.sort_unstable();
    let mut runs: Vec<Interval> = Vec::new();
    for own in rows {
        match runs.last_mut() {
            Some(last) if own.lo <= last.hi => last.hi = last.hi.max(own.hi),
            _ => runs.push(own),
        }
    }
    runs
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
                OutputSource::Stage(stage) => {
                    let seat = program.ranks.get(src).and_then(|own| own.seat_of(stage));
                    seat.map_or_else(Interval::default, |seat| computed_rows(program, seat, mb as usize))
                }
            };
            for (rank, &slice) in (0..).zip(slices) {
                let whole = Interval::new(0, program.microbatches[mb as usize]);
                let rows = if program.gather_inputs { slice } else { whole };
                if rows.lo < rows.hi {
                    ledger.settle((output.value, mb, rank), vec![rows], rows_at)?;
                }
            }
        }
    }
    ledger.close()
}
