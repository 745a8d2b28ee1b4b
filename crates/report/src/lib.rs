//! What a person looks at: text tables of Plans and Graphs. Every function returns text and does
//! nothing else.

mod graph;
mod plan;
mod table;
mod trace;

pub use graph::graph_summary;
pub use plan::{deployment, plan_tables};
pub use trace::chrome_trace;
