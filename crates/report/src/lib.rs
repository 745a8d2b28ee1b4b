//! What a person looks at: plans, graphs, clusters and simulated steps as text tables, and the same
//! content as JSON. Every function returns text and does nothing else.

mod cluster;
mod diff;
mod explain;
mod figures;
mod format;
mod graph;
mod idle;
mod plan;
mod simulation;
mod table;
mod timeline;
mod trace;
mod whatif;

use serde::Serialize;

pub use cluster::{ClusterTables, PresetList};
pub use diff::{Amount, Change, PlanDiff, Segment};
pub use explain::{Cut, Explanation, Question, RunnerUp, SearchFacts, StageShares, StepShares};
pub use figures::{StepFigures, Workload};
pub use format::paragraph;
pub use graph::{GraphSummary, OpKind, TensorTotals};
pub use plan::{Deployment, DeploymentStage, PlanTables};
pub use simulation::{SimulatedRank, Simulation};
pub use table::{Column, amount, table, text};
pub use timeline::draw;
pub use trace::{TracedStep, chrome_trace};
pub use whatif::{Case, PlanShape, Price, WhatIf};

/// Something to show: as text for people, as JSON with the same content for programs.
pub trait Report: Serialize {
    /// The text for a terminal `width` columns wide, its last line ended.
    fn text(&self, width: usize) -> String;

    /// The JSON, its last line ended.
    fn json(&self) -> String {
        let mut json = serde_json::to_string_pretty(self).expect("reports hold strings, finite numbers and lists");
        json.push('\n');
        json
    }
}
