//! Who waits for what when ranks wait for each other.

use std::fmt::Write as _;

use thiserror::Error;

use crate::program::Action;

/// A rank that cannot go on, and which of its tasks waits.
pub type Stuck = (u32, usize);

/// A rank that cannot go on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blocked {
    /// The rank.
    pub rank: u32,
    /// Place of the Action among the rank's forward and backward Actions.
    pub position: usize,
    /// The Action that waits, or that does not end.
    pub action: Action,
}

/// Ranks that wait for each other.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("deadlock:{}", list(.0))]
pub struct Deadlock(
    /// Every rank that cannot go on.
    pub Vec<Blocked>,
);

/// Why the machine cannot run a Program to its end.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Halt {
    /// The Program's lists have lengths or indices that do not fit together.
    #[error("the program's lists do not fit together: {0}")]
    Shape(&'static str),
    /// Ranks wait for each other.
    #[error(transparent)]
    Deadlock(#[from] Deadlock),
}

fn list(blocked: &[Blocked]) -> String {
    blocked.iter().fold(String::new(), |mut text, Blocked { rank, position, action }| {
        write!(text, " rank {rank} waits in action {position}, {action};").expect("a String takes any text");
        text
    })
}
