//! The rows of every rank: checked for consistency, and looked up.

use crate::check::CheckError;
use crate::partition::{OutputSource, Partition};
use crate::program::{Interval, Program, Seat};

/// Rows by microbatch and rank, after the check that they divide the batch.
pub(super) struct Layout {
    /// By microbatch and rank, the rows of the rank's slice, possibly none.
    pub slices: Vec<Vec<Interval>>,
}

impl Layout {
    pub fn new(program: &Program, partition: &Partition) -> Result<Self, CheckError> {
        check_partition(partition)?;
        check_stages(program, partition)?;
        check_rank_list(program)?;
        check_slices(program)
    }
}

/// Rows that a seat computes of a microbatch, possibly none.
pub(super) fn computed_rows(program: &Program, seat: Seat, mb: usize) -> Interval {
    program.stage_rows[seat.stage as usize].get(mb).map_or_else(Interval::default, |rows| rows[seat.replica as usize])
}

fn check_partition(partition: &Partition) -> Result<(), CheckError> {
    let exists = |stage: u32| (stage as usize) < partition.stages.len();
    let later = |from: u32, to: &[u32]| to.iter().all(|&to| from < to && exists(to));
    if !partition.crossings.iter().all(|crossing| later(crossing.from, &crossing.to)) {
        return Err(CheckError::Shape("a crossing value does not go to later stages"));
    }
    let sound = partition.outputs.iter().all(|output| match output.source {
        OutputSource::Stage(stage) => exists(stage),
        OutputSource::Input(_) => true,
    });
    if sound { Ok(()) } else { Err(CheckError::Shape("an output is made by a stage that does not exist")) }
}

fn check_stages(program: &Program, partition: &Partition) -> Result<(), CheckError> {
    if program.stage_rows.len() != partition.stages.len() {
        return Err(CheckError::Shape("stage_rows is not as long as the list of stages"));
    }
    for (stage, microbatches) in program.stage_rows.iter().enumerate() {
        if microbatches.len() != program.microbatches.len() {
            return Err(CheckError::Shape("stage_rows of a stage is not as long as the list of microbatches"));
        }
        for (mb, (replicas, &rows)) in microbatches.iter().zip(&program.microbatches).enumerate() {
            if replicas.len() != microbatches[0].len() {
                return Err(CheckError::Shape("a stage has different numbers of replicas for different microbatches"));
            }
            let end = replicas.iter().try_fold(0, |at, part| (part.lo == at && at <= part.hi).then_some(part.hi));
            if end != Some(rows) {
                return Err(CheckError::StageRows { stage, mb });
            }
        }
    }
    Ok(())
}

fn check_rank_list(program: &Program) -> Result<(), CheckError> {
    let replicas = |stage: usize| program.stage_rows[stage].first().map_or(0, Vec::len);
    let mut seen: Vec<Vec<bool>> = (0..program.stage_rows.len()).map(|stage| vec![false; replicas(stage)]).collect();
    for (rank, own) in program.ranks.iter().enumerate() {
        if own.rank as usize != rank || own.seats.is_empty() || !own.seats.is_sorted_by(|a, b| a.stage < b.stage) {
            return Err(CheckError::Shape(
                "the ranks are not numbered in order, or one has no seat or two of one stage",
            ));
        }
        for seat in &own.seats {
            let place = seen.get_mut(seat.stage as usize).and_then(|stage| stage.get_mut(seat.replica as usize));
            let place = place.ok_or(CheckError::Shape("a rank's stage or replica does not exist"))?;
            if std::mem::replace(place, true) {
                return Err(CheckError::Shape("two ranks are the same replica"));
            }
        }
    }
    if seen.iter().flatten().all(|&seen| seen) { Ok(()) } else { Err(CheckError::Shape("a replica has no rank")) }
}

fn check_slices(program: &Program) -> Result<Layout, CheckError> {
    if program.slices.len() != program.ranks.len() {
        return Err(CheckError::Shape("slices is not as long as the list of ranks"));
    }
    let mut slices = vec![vec![Interval::default(); program.ranks.len()]; program.microbatches.len()];
    let mut ends = vec![0; program.microbatches.len()];
    for (rank, own) in program.slices.iter().enumerate() {
        let (mut local_end, mut next_mb) = (0, 0);
        for slice in own {
            let gap = CheckError::Slices { rank, mb: slice.mb };
            let Some(end) = ends.get_mut(slice.mb as usize) else { return Err(gap) };
            let sound = slice.mb >= next_mb
                && slice.local.lo == local_end
                && slice.local.lo < slice.local.hi
                && slice.at == *end
                && (program.gather_inputs || rank == 0);
            if !sound {
                return Err(gap);
            }
            *end += slice.local.hi - slice.local.lo;
            slices[slice.mb as usize][rank] = Interval::new(slice.at, *end);
            (local_end, next_mb) = (slice.local.hi, slice.mb + 1);
        }
    }
    if ends != program.microbatches {
        return Err(CheckError::Shape("the slices do not make up the microbatches"));
    }
    if ends.iter().sum::<u64>() != program.total_rows {
        return Err(CheckError::Shape("the microbatches do not make up the batch"));
    }
    Ok(Layout { slices })
}
