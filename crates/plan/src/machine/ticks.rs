//! A Program where every computation takes one tick and all else no time.

use super::clock::{Observer, Span, Ticks};
use super::{Halt, Memory, ProgramScript, run};
use crate::program::Program;
use crate::schedule::{Compute, Seated};

/// What a rank computes when.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct RankTicks {
    /// The computations in order, each with the tick in which it runs.
    pub computed: Vec<(usize, Seated)>,
    /// Most microbatches that it holds at a time, each as often as it has it in its Stages.
    pub in_flight: u64,
}

/// By rank, its computations; or what holds up the ranks.
pub(crate) fn ticks(program: &Program) -> Result<Vec<RankTicks>, Halt> {
    let script = ProgramScript::new(program)?;
    let mut seen = Seen {
        trains: program.call.trains(),
        computed: vec![Vec::new(); program.ranks.len()],
        held: vec![Memory::new(0); program.ranks.len()],
    };
    if let Err(stuck) = run(&script.script, &Ticks, &mut seen) {
        return Err(script.deadlock(program, &stuck).into());
    }
    let ranks = seen.computed.into_iter().zip(seen.held);
    Ok(ranks.map(|(computed, held)| RankTicks { computed, in_flight: held.peak }).collect())
}

/// Most microbatches that each rank holds at a time, of all its Stages together: between their forward and their backward, if there is one.
///
/// # Errors
/// When the ranks wait for each other, or the Program's lists do not fit together.
pub fn in_flight(program: &Program) -> Result<Vec<u64>, Halt> {
    Ok(ticks(program)?.into_iter().map(|rank| rank.in_flight).collect())
}

struct Seen {
    trains: bool,
    computed: Vec<Vec<(usize, Seated)>>,
    held: Vec<Memory>,
}

impl Observer for Seen {
    fn computed(&mut self, rank: u32, seated: Seated, Span { start, end }: Span) {
        self.computed[rank as usize].push((start as usize, seated));
        let held = &mut self.held[rank as usize];
        if matches!(seated.compute, Compute::Forward(_)) {
            held.hold(start, 1);
        }
        if !self.trains || seated.compute.ends_microbatch() {
            held.release(end, 1);
        }
    }
}
