//! Statistics of a Graph.

use std::collections::BTreeMap;

use rannc_cost::{Cluster, base_name, format_bytes, tensor_bytes};
use rannc_ir::{Analysis, Graph, ValueId};
use rannc_search::Blocks;

use crate::table::table;

/// Kinds of ops that are listed.
const LISTED_OPS: usize = 15;

/// Sizes of a verified graph and the ops that it uses most.
pub fn graph_summary(graph: &Graph) -> String {
    let analysis = Analysis::new(graph);
    let cuts = analysis.cuts.iter().filter(|refusal| refusal.is_none()).count().saturating_sub(2);
    let host = &Cluster::preset("cpu", 1, 1).expect("one node with one device").kinds[0];
    let blocks = Blocks::new(graph, &analysis, host, 1, graph.sample_rows);
    let bytes = |value: ValueId| tensor_bytes(&graph.values[value]).at(0) as u64;
    let params_bytes = graph.params.values().map(|param| bytes(param.value)).sum();
    let buffers_bytes = graph.buffers.values().map(|buffer| bytes(buffer.value)).sum();
    let elements = graph.params.values().map(|param| {
        let value = &graph.values[param.value];
        bytes(param.value) / value.dtype.bytes()
    });
    let mode = if graph.training { "training" } else { "evaluation" };
    let facts = [
        ("Graph", format!("{} ({mode})", graph.name)),
        ("Hash", graph.hash()),
        ("Ops", format!("{}, of which {} are batch-free", graph.ops.len(), graph.ops.len() - analysis.main_ops.len())),
        ("Places to cut", cuts.to_string()),
        ("Blocks", format!("{}, of {} different kinds", blocks.blocks.len(), blocks.kinds)),
        ("Parameters", format!("{} elements, {}", elements.sum::<u64>(), format_bytes(params_bytes))),
        ("Buffers", format!("{}, {}", graph.buffers.len(), format_bytes(buffers_bytes))),
        ("Inputs", graph.inputs.len().to_string()),
        ("Outputs", graph.outputs.len().to_string()),
        ("Sample rows", graph.sample_rows.to_string()),
    ];
    let lines: String = facts.iter().map(|(name, fact)| format!("{name:<14}{fact}\n")).collect();
    format!("{lines}\n{}", op_table(graph))
}

fn op_table(graph: &Graph) -> String {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for op in graph.ops.values() {
        *counts.entry(base_name(&op.target)).or_insert(0) += 1;
    }
    let mut counts: Vec<(&str, usize)> = counts.into_iter().collect();
    counts.sort_by_key(|&(_, count)| std::cmp::Reverse(count));
    let others: usize = counts.iter().skip(LISTED_OPS).map(|(_, count)| count).sum();
    let listed = counts.iter().take(LISTED_OPS).map(|(name, count)| vec![(*name).to_owned(), count.to_string()]);
    let mut rows: Vec<Vec<String>> = listed.collect();
    if others > 0 {
        rows.push(vec!["others".to_owned(), others.to_string()]);
    }
    table(&["Op", "Count"], rows, 1)
}

#[cfg(test)]
mod tests {
    use rannc_ir::testing::mlp;

    use super::*;

    #[test]
    fn a_summary_counts() {
        let text = graph_summary(&mlp(3, 8));
        assert!(text.starts_with("Graph         Mlp (training)\n"), "{text}");
        assert!(text.contains("Ops           7, of which 0 are batch-free\n"), "{text}");
        assert!(text.contains("Places to cut 6\n"), "{text}");
        assert!(text.contains("Blocks        7, of 4 different kinds\n"), "{text}");
        assert!(text.contains("Parameters    216 elements, 864 B\n"), "{text}");
        assert!(text.contains("linear") && text.contains("relu"));
    }
}
