//! The JSON form.

use serde::Deserialize;
use serde_json::error::Category;

use crate::error::GraphError;
use crate::graph::{Graph, SCHEMA};

#[derive(Deserialize)]
struct Header {
    schema: u64,
}

impl Graph {
    /// Reads the JSON form and verifies it.
    ///
    /// # Errors
    /// When the text is no JSON, has another schema version, is no graph, or the graph is not valid.
    pub fn from_json(text: &str) -> Result<Self, GraphError> {
        // The version comes first: a graph of another one may well look damaged.
        let header: Header = serde_json::from_str(text).map_err(classify)?;
        if header.schema != u64::from(SCHEMA) {
            return Err(GraphError::Schema { found: header.schema });
        }
        let graph: Self = serde_json::from_str(text).map_err(classify)?;
        graph.verify()?;
        Ok(graph)
    }

    /// The JSON form, on one line.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("every map of a graph has strings as keys")
    }
}

fn classify(error: serde_json::Error) -> GraphError {
    match error.classify() {
        Category::Data => GraphError::Damaged(error),
        Category::Syntax | Category::Eof | Category::Io => GraphError::NotJson(error),
    }
}
