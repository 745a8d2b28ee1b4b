//! In which types a model computes, in words.

use rannc_cost::{OpWork, Operation};
use rannc_ir::{DType, Graph};
use rannc_plan::ReduceDType;

/// `parameters in float32, products in bfloat16, gradients summed over ranks in float32`: of each the most frequent first.
pub(super) fn precision(graph: &Graph, reduce: ReduceDType) -> String {
    let params = graph.params.values().map(|param| &graph.values[param.value]);
    let sums = params.clone().filter(|value| value.requires_grad).map(|value| reduce.of(value.dtype));
    let products =
        graph.ops.iter().filter(|&(id, _)| OpWork::new(&Operation::new(graph, id)).forward.flops.at(1) > 0.0);
    let products = products.filter_map(|(_, op)| op.results.first()).map(|&result| graph.values[result].dtype);
    let parts = [
        ("parameters in", told(params.map(|value| value.dtype))),
        ("products in", told(products)),
        ("gradients summed over ranks in", told(sums)),
    ];
    let parts = parts.into_iter().filter(|(_, types)| !types.is_empty());
    parts.map(|(what, types)| format!("{what} {types}")).collect::<Vec<_>>().join(", ")
}

fn told(types: impl Iterator<Item = DType>) -> String {
    let mut counts: Vec<(DType, usize)> = Vec::new();
    for dtype in types {
        match counts.iter_mut().find(|(known, _)| *known == dtype) {
            Some((_, count)) => *count += 1,
            None => counts.push((dtype, 1)),
        }
    }
    counts.sort_by_key(|&(_, count)| std::cmp::Reverse(count));
    counts.into_iter().map(|(dtype, _)| dtype.torch_name()).collect::<Vec<_>>().join(" and ")
}
