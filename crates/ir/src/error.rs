//! What can be wrong with a graph file.

use thiserror::Error;

use crate::graph::SCHEMA;
use crate::problem::VerifyErrors;

/// Why a graph could not be read.
#[derive(Debug, Error)]
pub enum GraphError {
    /// The text is no JSON, or ends too early.
    #[error("the graph file is not JSON or was cut short: {0}")]
    NotJson(#[source] serde_json::Error),
    /// The file was written by another version.
    #[error("the graph file has schema version {found}, this program reads version {SCHEMA}; capture the model again")]
    Schema {
        /// Version in the file.
        found: u64,
    },
    /// It is JSON, but not a graph.
    #[error("the graph file is damaged: {0}")]
    Damaged(#[source] serde_json::Error),
    /// The text form has an error.
    #[error("line {line}, column {column}: {what}")]
    Text {
        /// Line, from 1.
        line: u32,
        /// Column in characters, from 1.
        column: u32,
        /// What was expected or found.
        what: String,
    },
    /// It is a graph, but contradicts itself.
    #[error("the graph is not valid: {0}")]
    Invalid(#[from] VerifyErrors),
}
