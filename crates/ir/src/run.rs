//! Runs of main Ops: what Blocks and Stages are made of.

use serde::{Deserialize, Serialize};

/// A run `first..end` of a Graph's main Ops (all Ops but the batch-free ones), by place in their list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OpRun {
    /// First main Op.
    pub first: u32,
    /// One past the last main Op.
    pub end: u32,
}
