//! Statistics of a Graph.

use std::collections::{BTreeMap, BTreeSet};
use std::iter::Sum;

use rannc_cost::{OpWork, Operation, SavedTensors, base_name, format_bytes, tensor_bytes};
use rannc_ir::{Analysis, Graph, ValueId};
use rannc_search::Blocks;
use serde::Serialize;

use crate::Report;
use crate::format::{counted, decimal, paragraph, percent};
use crate::table::{amount, table, text};

/// Kinds of ops that the text lists.
const LISTED_OPS: usize = 15;

/// Sizes of a verified Graph, and the ops that it uses.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GraphSummary {
    /// Name of the model's class.
    pub name: String,
    /// Hash of everything but source lines.
    pub hash: String,
    /// True when captured in training mode.
    pub training: bool,
    /// Rows of the captured call; amounts that depend on rows are for so many.
    pub sample_rows: u64,
    /// Ops.
    pub ops: usize,
    /// Ops that depend neither on the batch nor on chance or state.
    pub batch_free_ops: usize,
    /// Places between two main Ops where Stages may be cut apart.
    pub places_to_cut: usize,
    /// Blocks, as for one device.
    pub blocks: usize,
    /// Blocks that differ by more than names.
    pub block_kinds: usize,
    /// Parameters, shared ones once.
    pub params: TensorTotals,
    /// Buffers.
    pub buffers: TensorTotals,
    /// Inputs, e.g. `int64[b, 512]` where b is the number of rows.
    pub inputs: Vec<String>,
    /// Outputs, likewise.
    pub outputs: Vec<String>,
    /// Floating-point operations of the forward's products.
    pub forward_flops: f64,
    /// Floating-point operations of the backward's products.
    pub backward_flops: f64,
    /// Kept from forward for backward.
    pub saved_bytes: u64,
    /// Kinds of ops, most used first.
    pub op_kinds: Vec<OpKind>,
}

/// Tensors together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct TensorTotals {
    /// Number of tensors.
    pub count: u64,
    /// Their elements.
    pub elements: u64,
    /// Their bytes.
    pub bytes: u64,
}

impl Sum for TensorTotals {
    fn sum<I: Iterator<Item = Self>>(totals: I) -> Self {
        totals.fold(Self::default(), |sum, other| Self {
            count: sum.count + other.count,
            elements: sum.elements.saturating_add(other.elements),
            bytes: sum.bytes.saturating_add(other.bytes),
        })
    }
}

/// Ops with one name.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct OpKind {
    /// Name without namespace and overload.
    pub name: String,
    /// How often it is called.
    pub count: usize,
    /// Floating-point operations of all these calls' products, forward and backward.
    pub flops: f64,
}

impl GraphSummary {
    /// Sums up a verified Graph.
    pub fn new(graph: &Graph) -> Self {
        let analysis = Analysis::new(graph);
        let cuts = analysis.cuts.iter().filter(|refusal| refusal.is_none()).count().saturating_sub(2);
        let blocks = Blocks::new(graph, &analysis);
        let rows = graph.sample_rows;
        let work = graph.ops.ids().map(|op| OpWork::new(&Operation::new(graph, op)));
        let flops: Vec<[f64; 2]> =
            work.map(|work| [work.forward, work.backward].map(|way| way.flops.at(rows))).collect();
        Self {
            name: graph.name.clone(),
            hash: graph.hash(),
            training: graph.training,
            sample_rows: rows,
            ops: graph.ops.len(),
            batch_free_ops: graph.ops.len() - analysis.main_ops.len(),
            places_to_cut: cuts,
            blocks: blocks.blocks.len(),
            block_kinds: blocks.hashes.len(),
            params: graph.params.values().map(|param| totals(graph, param.value)).sum(),
            buffers: graph.buffers.values().map(|buffer| totals(graph, buffer.value)).sum(),
            inputs: graph.inputs.iter().map(|&value| shape(graph, value)).collect(),
            outputs: graph.outputs.iter().map(|&value| shape(graph, value)).collect(),
            forward_flops: flops.iter().map(|[forward, _]| forward).sum(),
            backward_flops: flops.iter().map(|[_, backward]| backward).sum(),
            saved_bytes: saved_bytes(graph),
            op_kinds: op_kinds(graph, &flops),
        }
    }
}

fn totals(graph: &Graph, value: ValueId) -> TensorTotals {
    let tensor = &graph.values[value];
    let bytes = tensor_bytes(tensor).at(0) as u64;
    TensorTotals { count: 1, elements: bytes / tensor.dtype.bytes(), bytes }
}

fn shape(graph: &Graph, value: ValueId) -> String {
    let value = &graph.values[value];
    let extents = value.shape.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    format!("{}[{extents}]", value.dtype)
}

/// Each storage is kept once, however many ops save it.
fn saved_bytes(graph: &Graph) -> u64 {
    let mut values = BTreeSet::new();
    let mut private_bytes = 0.0;
    for op in graph.ops.ids() {
        let saved = SavedTensors::new(&Operation::new(graph, op), false);
        private_bytes += saved.private_bytes.at(graph.sample_rows);
        values.extend(saved.values);
    }
    let shared_bytes: f64 =
        values.into_iter().map(|value| tensor_bytes(&graph.values[value]).at(graph.sample_rows)).sum();
    (private_bytes + shared_bytes) as u64
}

fn op_kinds(graph: &Graph, flops: &[[f64; 2]]) -> Vec<OpKind> {
    let mut kinds: BTreeMap<&str, OpKind> = BTreeMap::new();
    for (op, [forward, backward]) in graph.ops.values().zip(flops) {
        let name = base_name(&op.target);
        let kind = kinds.entry(name).or_insert_with(|| OpKind { name: name.to_owned(), count: 0, flops: 0.0 });
        kind.count += 1;
        kind.flops += forward + backward;
    }
    let mut kinds: Vec<OpKind> = kinds.into_values().collect();
    kinds.sort_by_key(|kind| std::cmp::Reverse(kind.count));
    kinds
}

impl Report for GraphSummary {
    fn text(&self, width: usize) -> String {
        let mode = if self.training { "training" } else { "evaluation" };
        let rows = counted(self.sample_rows, "row", "rows");
        let facts = [
            ("Graph", format!("{} ({mode})", self.name)),
            ("Hash", self.hash.clone()),
            ("Inputs", self.inputs.join(", ")),
            ("Outputs", self.outputs.join(", ")),
            (
                "Parameters",
                format!("{} elements, {}", decimal(self.params.elements as f64), format_bytes(self.params.bytes)),
            ),
            ("Buffers", format!("{}, {}", self.buffers.count, format_bytes(self.buffers.bytes))),
            ("Ops", format!("{}, of which {} are batch-free", self.ops, self.batch_free_ops)),
            ("Places to cut", self.places_to_cut.to_string()),
            ("Blocks", format!("{}, of {} different kinds", self.blocks, self.block_kinds)),
            (
                "Products",
                format!(
                    "{}FLOP forward, {}FLOP backward, for {rows}",
                    decimal(self.forward_flops),
                    decimal(self.backward_flops)
                ),
            ),
            ("Saved", format!("{} for the backward of {rows}", format_bytes(self.saved_bytes))),
        ];
        let lines: String = facts.iter().map(|(name, fact)| paragraph(&format!("{name:<14}{fact}"), width)).collect();
        format!("{lines}\n{}", self.op_table(width))
    }
}

impl GraphSummary {
    fn op_table(&self, width: usize) -> String {
        let all_flops = self.forward_flops + self.backward_flops;
        let share = |flops: f64| if flops > 0.0 { percent(flops / all_flops) } else { String::new() };
        let listed = self.op_kinds.iter().take(LISTED_OPS);
        let mut rows: Vec<Vec<String>> =
            listed.map(|kind| vec![kind.name.clone(), kind.count.to_string(), share(kind.flops)]).collect();
        let others = self.op_kinds.get(LISTED_OPS..).unwrap_or_default();
        if !others.is_empty() {
            let count: usize = others.iter().map(|kind| kind.count).sum();
            rows.push(vec!["others".to_owned(), count.to_string(), share(others.iter().map(|kind| kind.flops).sum())]);
        }
        table(&[text("Op"), amount("Count"), amount("FLOP")], &rows, width)
    }
}

#[cfg(test)]
mod tests {
    use rannc_ir::testing::mlp;

    use super::*;

    #[test]
    fn a_summary_counts() {
        let summary = GraphSummary::new(&mlp(3, 8));
        assert_eq!((summary.ops, summary.batch_free_ops, summary.places_to_cut), (7, 0, 6));
        assert_eq!((summary.blocks, summary.block_kinds), (7, 4));
        assert_eq!(summary.params, TensorTotals { count: 6, elements: 216, bytes: 864 });
        // Three products of 4 x 8 by 8 x 8; the input needs no gradient.
        assert_eq!(summary.forward_flops, 3.0 * 2.0 * 4.0 * 64.0);
        assert_eq!(summary.backward_flops, 5.0 * 2.0 * 4.0 * 64.0);
        assert_eq!(summary.op_kinds.iter().map(|kind| kind.count).sum::<usize>(), summary.ops);
    }

    #[test]
    fn rare_ops_are_added_up() {
        let mut summary = GraphSummary::new(&mlp(3, 8));
        let kind = |number: usize| OpKind { name: format!("op{number}"), count: 1, flops: 0.0 };
        summary.op_kinds = (0..LISTED_OPS + 3).map(kind).collect();
        let text = summary.text(80);
        assert!(text.contains("op14") && !text.contains("op15"), "{text}");
        let others = text.lines().last().map(|line| line.split_whitespace().collect::<Vec<_>>());
        assert_eq!(others, Some(vec!["others", "3"]), "{text}");
    }
}
