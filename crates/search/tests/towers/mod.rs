//! Models that are no chain.

use rannc_ir::testing::GraphBuilder;
use rannc_ir::{Arg, DType, Dim, Graph, ValueId};

/// Towers of so many layers each, joined behind the last, with the loss inside. A tower's first layer takes the batch, or
/// what the first layer of the tower before it makes.
pub fn towers(layers: &[(u32, bool)], width: i64) -> Graph {
    let mut builder = GraphBuilder::new("Towers");
    let input = builder.input(DType::Float32, &[Dim::rows(1), Dim::fixed(width)]);
    let (mut first_of_last, mut tops) = (input, Vec::new());
    for (tower, &(layers, branches)) in layers.iter().enumerate() {
        let mut state = if branches { first_of_last } else { input };
        for layer in 0..layers {
            state = builder.linear(state, width, &format!("towers.{tower}.{layer}"));
            state = builder.pointwise("aten.relu.default", &[state]);
            first_of_last = if layer == 0 { state } else { first_of_last };
        }
        tops.push(state);
    }
    builder.module("head");
    let joined = tops.into_iter().reduce(|one, other| builder.pointwise("aten.add.Tensor", &[one, other]));
    let joined: ValueId = joined.expect("there is a tower");
    let joined = builder.linear(joined, width, "head");
    let loss = builder.op("aten.mean.default", vec![Arg::Value(joined)], &[]);
    builder.finish(&[loss])
}
