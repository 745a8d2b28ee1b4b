//! Measured costs of one Block, as functions of the rows.
//!
//! Laws: no time or amount is negative; none falls with the rows if it does not between the points;
//! at the points they are what was measured.

use serde::{Deserialize, Serialize};

use super::fault::ProfileFault;
use crate::op::ComputeCost;

/// What one Block costs with one number of rows. Times and bytes are 0 where it does not fit.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BlockPoint {
    /// Number of rows.
    pub rows: u64,
    /// False where the device ran out of memory.
    pub fits: bool,
    /// Forward, on the device.
    pub forward_us: f64,
    /// The whole backward, on the device.
    pub backward_us: f64,
    /// What the host needs to start the forward; 0 if it computes itself.
    pub forward_host_us: f64,
    /// What the host needs to start the whole backward; 0 if it computes itself.
    pub backward_host_us: f64,
    /// Of a backward in two parts the first: the gradients of what came in.
    pub backward_input_us: f64,
    /// The second: the gradients of parameters.
    pub backward_weight_us: f64,
    /// Kept from the forward for the backward.
    pub saved_bytes: u64,
    /// Peak of temporary memory.
    pub workspace_bytes: u64,
}

impl BlockPoint {
    fn times_us(&self) -> [f64; 6] {
        [
            self.forward_us,
            self.backward_us,
            self.forward_host_us,
            self.backward_host_us,
            self.backward_input_us,
            self.backward_weight_us,
        ]
    }
}

/// What was measured of one Block, by increasing rows.
///
/// Between two points everything is linear in the rows, and so it is before the first and after the
/// last by the line through the two nearest points, which never falls. A single point gives a line
/// through zero.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct BlockProfile {
    points: Vec<BlockPoint>,
}

impl BlockProfile {
    /// A Block's points; [`crate::Profile::seal`] checks them.
    pub fn new(points: Vec<BlockPoint>) -> Self {
        Self { points }
    }

    /// The points by increasing rows.
    pub fn points(&self) -> &[BlockPoint] {
        &self.points
    }

    /// True when it fitted with at least one number of rows, so that it has times.
    pub fn has_times(&self) -> bool {
        self.points.first().is_some_and(|point| point.fits)
    }

    /// False for numbers of rows with which the device ran out of memory, or would have.
    pub fn fits(&self, rows: u64) -> bool {
        self.points.iter().all(|point| point.fits || rows < point.rows)
    }

    /// Times of the forward and the whole backward; infinite when it never fitted.
    pub fn cost(&self, rows: u64) -> ComputeCost {
        ComputeCost {
            forward_us: self.at(rows, |point| point.forward_us),
            backward_us: self.at(rows, |point| point.backward_us),
            forward_host_us: self.at(rows, |point| point.forward_host_us),
            backward_host_us: self.at(rows, |point| point.backward_host_us),
        }
    }

    /// Of a backward in two parts, time of the first, to the inputs; infinite when it never fitted.
    pub fn backward_input_us(&self, rows: u64) -> f64 {
        self.at(rows, |point| point.backward_input_us)
    }

    /// Time of the second, to the parameters; infinite when it never fitted.
    pub fn backward_weight_us(&self, rows: u64) -> f64 {
        self.at(rows, |point| point.backward_weight_us)
    }

    /// Bytes kept for the backward; infinite when it never fitted.
    pub fn saved_bytes(&self, rows: u64) -> f64 {
        self.at(rows, |point| point.saved_bytes as f64)
    }

    /// Peak of temporary memory in bytes; infinite when it never fitted.
    pub fn workspace_bytes(&self, rows: u64) -> f64 {
        self.at(rows, |point| point.workspace_bytes as f64)
    }

    fn at(&self, rows: u64, amount: impl Fn(&BlockPoint) -> f64) -> f64 {
        let fitting = &self.points[..self.points.partition_point(|point| point.fits)];
        let (less, more) = match fitting {
            [] => return f64::INFINITY,
            [only] => return amount(only) * (rows as f64 / only.rows as f64),
            [..] => {
                let more = fitting.partition_point(|point| point.rows < rows).clamp(1, fitting.len() - 1);
                (&fitting[more - 1], &fitting[more])
            }
        };
        let (start, end) = (amount(less), amount(more));
        let inside = (less.rows..=more.rows).contains(&rows);
        let rise = if inside { end - start } else { (end - start).max(0.0) };
        let share = (rows as f64 - less.rows as f64) / (more.rows - less.rows) as f64;
        let from = if rows > more.rows { end - rise } else { start };
        (from + rise * share).max(0.0)
    }

    pub(super) fn check(&self, hash: &str) -> Result<(), ProfileFault> {
        let block = || hash.to_owned();
        if self.points.is_empty() {
            return Err(ProfileFault::NoPoints { block: block() });
        }
        let (mut before, mut fitted) = (0, true);
        for point in &self.points {
            let rows = point.rows;
            let times = point.times_us();
            if rows <= before {
                return Err(ProfileFault::Rows { block: block(), before, rows });
            }
            if let Some(&us) = times.iter().find(|us| !us.is_finite() || **us < 0.0) {
                return Err(ProfileFault::Time { block: block(), rows, us });
            }
            if point.fits && !fitted {
                return Err(ProfileFault::FitsAgain { block: block(), rows });
            }
            let measured = times.iter().any(|us| *us != 0.0) || point.saved_bytes != 0 || point.workspace_bytes != 0;
            if !point.fits && measured {
                return Err(ProfileFault::FiguresWithoutRun { block: block(), rows });
            }
            (before, fitted) = (rows, point.fits);
        }
        Ok(())
    }
}
