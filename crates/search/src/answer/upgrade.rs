//! Plan files of the schema before this one, with the Blocks that they lack.

use rannc_cost::Blocks;
use rannc_ir::{Analysis, Graph, OpRun};
use rannc_plan::{OldPlan, Plan, PlanFileError};

/// Turns the text of a plan file of the schema before this one into a Plan: its Blocks are those of the verified
/// `graph`, cut where the Plan cuts as well.
///
/// # Errors
/// When the text is no such file, is damaged, or contradicts itself, or the Plan is of another graph.
pub fn upgrade(text: &str, graph: &Graph) -> Result<Plan, PlanFileError> {
    let old = OldPlan::from_json(text)?;
    old.check_graph(graph)?;
    let analysis = Analysis::new(graph);
    let blocks = Blocks::new(graph, &analysis);
    let mut places: Vec<u32> = blocks.blocks.iter().map(|block| block.ops).chain(old.runs()).flat_map(ends).collect();
    places.sort_unstable();
    places.dedup();
    places.retain(|&place| place as usize <= analysis.main_ops.len());
    let runs = places.windows(2).map(|pair| OpRun { first: pair[0], end: pair[1] });
    let cut = Blocks::of(graph, &analysis, runs);
    let hash = |kind: u32| cut.hashes[kind as usize].clone();
    let named: Vec<(OpRun, String)> = cut.blocks.iter().map(|block| (block.ops, hash(block.kind))).collect();
    old.upgrade(graph, &named)
}

const fn ends(ops: OpRun) -> [u32; 2] {
    [ops.first, ops.end]
}
