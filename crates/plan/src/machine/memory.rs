//! What a rank holds over time.

/// The bytes that a rank holds, followed through its computations.
#[derive(Clone, Debug)]
pub struct Memory {
    held: u64,
    /// Most at any time.
    pub peak: u64,
    /// Bytes in use from a time on, by increasing time.
    pub levels: Vec<(f64, u64)>,
}

impl Memory {
    /// A rank that holds so much throughout.
    pub fn new(fixed: u64) -> Self {
        Self { held: fixed, peak: fixed, levels: vec![(0.0, fixed)] }
    }

    /// Takes bytes from a time on.
    pub fn hold(&mut self, time: f64, bytes: u64) {
        self.held = self.held.saturating_add(bytes);
        self.note(time, self.held);
    }

    /// Gives bytes back.
    pub fn release(&mut self, time: f64, bytes: u64) {
        self.held = self.held.saturating_sub(bytes);
        self.note(time, self.held);
    }

    /// Uses bytes beside all that it holds, from a time to another.
    pub fn use_between(&mut self, start: f64, end: f64, bytes: u64) {
        self.note(start, self.held.saturating_add(bytes));
        self.note(end, self.held);
    }

    fn note(&mut self, time: f64, bytes: u64) {
        self.peak = self.peak.max(bytes);
        match self.levels.last_mut() {
            Some((since, level)) if *since == time => *level = bytes,
            _ => self.levels.push((time, bytes)),
        }
    }
}
