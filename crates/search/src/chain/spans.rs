//! Which Blocks run together as one Span: those of one repeated module, as [`rannc_plan::Partition::with_spans`] does.

use std::collections::HashMap;

use rannc_cost::Blocks;
use rannc_ir::{Analysis, Graph, OpRun, repeated_module};
use rannc_plan::{LONGER_SPANS, SPAN_LEVELS};

/// The Spans of a Graph, if all Blocks were one Stage, as Blocks: of those of one Block the hash is the Block's.
pub fn whole_spans(graph: &Graph, analysis: &Analysis, blocks: &Blocks) -> Blocks {
    let spans = spans(graph, analysis, blocks);
    let places: Vec<usize> = (0..spans.len()).collect();
    let ops = |place: usize| blocks.blocks[place].ops;
    let run = |span: &[usize]| OpRun { first: ops(span[0]).first, end: ops(span[span.len() - 1]).end };
    Blocks::of(graph, analysis, places.chunk_by(|&left, &right| spans[left] == spans[right]).map(run))
}

/// The Span of each Block, if all Blocks were one Stage.
pub(super) fn spans(graph: &Graph, analysis: &Analysis, blocks: &Blocks) -> Vec<usize> {
    let by_level: Vec<Vec<usize>> = SPAN_LEVELS.map(|level| spans_at(graph, analysis, blocks, level)).collect();
    let shortest = by_level.iter().map(|spans| code(blocks, spans)).min().unwrap_or(0);
    by_level.into_iter().find(|spans| code(blocks, spans) <= LONGER_SPANS * shortest).unwrap_or_default()
}

fn spans_at(graph: &Graph, analysis: &Analysis, blocks: &Blocks, level: usize) -> Vec<usize> {
    let module = |op: u32| repeated_module(&graph.ops[analysis.main_ops[op as usize]].module, level);
    let mut span = 0;
    let mut spans = vec![0; blocks.blocks.len()];
    for (place, pair) in (1..).zip(blocks.blocks.windows(2)) {
        span += usize::from(module(pair[0].ops.end - 1) != module(pair[1].ops.first));
        spans[place] = span;
    }
    spans
}

/// Ops of all Spans that are not alike.
fn code(blocks: &Blocks, spans: &[usize]) -> usize {
    let places: Vec<usize> = (0..spans.len()).collect();
    let kinds = |span: &[usize]| -> Vec<u32> { span.iter().map(|&place| blocks.blocks[place].kind).collect() };
    let ops = |span: &[usize]| -> usize { span.iter().map(|&place| blocks.blocks[place].own_ops.len()).sum() };
    let all = places.chunk_by(|&left, &right| spans[left] == spans[right]);
    let functions: HashMap<Vec<u32>, usize> = all.map(|span| (kinds(span), ops(span))).collect();
    functions.values().sum()
}
