//! What a person looks at: plans, graphs, clusters and simulated steps as text tables, and the same
//! content as JSON. Every function returns text and does nothing else.

mod cluster;
mod diff;
mod explain;
mod format;
mod graph;
mod plan;
mod simulation;
mod table;
mod trace;
mod whatif;

use serde::Serialize;

pub use cluster::{ClusterTables, PresetList};
pub use diff::{Amount, Change, PlanDiff, Segment};
pub use explain::{Cut, Explanation, Question, RunnerUp, SearchFacts, StageShares, StepShares};
pub use graph::{GraphSummary, OpKind, TensorTotals};
pub use plan::{Deployment, DeploymentStage, PlanTables, plan_tables};
pub use simulation::{SimulatedRank, Simulation};
pub use trace::chrome_trace;
pub use whatif::{Case, PlanShape, WhatIf};

/// Something to show: as text for people, as JSON with the same content for programs.
pub trait Report: Serialize {
    /// The text, its last line ended.
    fn text(&self) -> String;

    /// The JSON, its last line ended.
    fn json(&self) -> String {
        let mut json = serde_json::to_string_pretty(self).expect("reports hold strings, finite numbers and lists");
        json.push('\n');
        json
    }
}
