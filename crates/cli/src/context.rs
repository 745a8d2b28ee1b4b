//! What commands need beside their arguments.

use crate::progress::ProgressLines;

/// Where a command runs.
pub(crate) struct Context {
    /// Columns to print in.
    pub(crate) width: usize,
    pub(crate) progress: ProgressLines,
}
