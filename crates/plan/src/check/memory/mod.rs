//! Does a rank hold no more at a time than the Plan promises?
//!
//! The proof follows the Actions alone, so that it holds however long anything takes. A Plan promises amounts, not how it
//! came to them: where what its own Program needs goes beyond them, they are those of another model of the same step, and
//! promise nothing.

mod held;
mod promises;
mod whole;

use std::fmt;

pub use self::promises::Promises;
use super::CheckError;
use crate::partition::Partition;
use crate::program::{Action, Program, RankProgram};

/// What takes memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holding {
    /// Microbatches between forward and backward, and messages.
    Activations,
    /// Params that are whole although Replicas divide them.
    Params,
    /// Gradients that are whole although Replicas divide them.
    Gradients,
}

impl fmt::Display for Holding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Activations => "activations and messages",
            Self::Params => "gathered parameters",
            Self::Gradients => "gradients that are summed in parts",
        })
    }
}

/// Checks what the ranks of a Program that [`check`](super::check) has found right hold: Params and gradients that are
/// whole for a while, and where it trains in the microbatches that its Plan was made for, activations and messages.
///
/// # Errors
/// The first Action that needs more.
pub fn check_memory(program: &Program, partition: &Partition, promises: &Promises) -> Result<(), CheckError> {
    if !promises.are_of(partition) {
        return Ok(());
    }
    let held = promises.is_planned(program).then(|| promises.held(program));
    for own in &program.ranks {
        whole::check_gathers(program, own, promises)?;
        whole::check_sums(program, own, promises)?;
        if let Some(held) = &held {
            held::check_held(program, partition, own, promises, held)?;
        }
    }
    Ok(())
}

/// An Action of a rank that holds too much.
fn refused(own: &RankProgram, position: usize, what: Holding, bytes: u64, promised: u64) -> CheckError {
    let action = actions(own).nth(position).expect("it was found there").clone();
    CheckError::Memory { rank: own.rank, position, action, what, bytes, promised }
}

fn actions(own: &RankProgram) -> impl Iterator<Item = &Action> {
    own.forward.iter().chain(&own.backward)
}
