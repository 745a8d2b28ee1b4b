//! How long things take on the machine, and who is told when they happen.

use super::script::Slot;
use crate::schedule::Seated;

/// How long things take. Times are not negative, and the answer to a question is always the same.
pub trait Clock {
    /// A computation of a rank.
    fn compute(&self, rank: u32, seated: Seated) -> f64;
    /// A message, once both ends are ready and the one before it on its channel has arrived.
    fn message(&self, message: Slot) -> f64;
    /// A sum of gradients, once all its members are ready.
    fn sum(&self, sum: u32) -> f64;
    /// The optimizer's update of a rank.
    fn update(&self, rank: u32) -> f64;
}

/// Every computation takes one tick, all else no time.
#[derive(Clone, Copy, Debug)]
pub struct Ticks;

impl Clock for Ticks {
    fn compute(&self, _: u32, _: Seated) -> f64 {
        1.0
    }
    fn message(&self, _: Slot) -> f64 {
        0.0
    }
    fn sum(&self, _: u32) -> f64 {
        0.0
    }
    fn update(&self, _: u32) -> f64 {
        0.0
    }
}

/// From when to when something lasts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    /// When it starts.
    pub start: f64,
    /// When it ends.
    pub end: f64,
}

/// Why a rank does not compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pause {
    /// A message that it waits for is under way.
    Message,
    /// A sum that it waits for is under way.
    Sum,
}

/// Is told what happens, rank by rank in the order of time, but not across ranks.
pub trait Observer {
    /// A rank computes.
    fn computed(&mut self, _rank: u32, _seated: Seated, _span: Span) {}
    /// A message moves.
    fn moved(&mut self, _message: Slot, _span: Span) {}
    /// A sum runs.
    fn summed(&mut self, _sum: u32, _span: Span) {}
    /// A rank's optimizer updates.
    fn updated(&mut self, _rank: u32, _span: Span) {}
    /// A rank is idle for so long, beside what it has waited for before.
    fn paused(&mut self, _rank: u32, _time: f64, _pause: Pause) {}
}

/// Nobody is told.
impl Observer for () {}
