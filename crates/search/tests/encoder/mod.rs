//! A model to plan.

use rannc_ir::testing::GraphBuilder;
use rannc_ir::{Arg, DType, Dim, Graph, ValueId};

fn tensors(values: &[ValueId]) -> Vec<Arg> {
    values.iter().map(|&value| Arg::Value(value)).collect()
}

/// A transformer encoder for masked tokens, with the loss inside and its word table tied to the head.
pub fn encoder(layers: u32, hidden: i64, tokens: i64, vocabulary: i64) -> Graph {
    let mut builder = GraphBuilder::new("Encoder");
    let text = [Dim::rows(1), Dim::fixed(tokens)];
    let (ids, labels) = (builder.input(DType::Int64, &text), builder.input(DType::Int64, &text));
    let table = builder.param("embeddings.word.weight", &[vocabulary, hidden]);
    let wide = [Dim::rows(1), Dim::fixed(tokens), Dim::fixed(hidden)];
    builder.module("embeddings.word");
    let mut state = builder.op("aten.embedding.default", tensors(&[table, ids]), &wide);
    for layer in 0..layers {
        state = encoder_layer(&mut builder, state, &format!("encoder.layer.{layer}"));
    }
    builder.module("head");
    let scores = [Dim::rows(1), Dim::fixed(tokens), Dim::fixed(vocabulary)];
    let scores = builder.op("aten.linear.default", tensors(&[state, table]), &scores);
    let flat = builder.view(scores, &[Dim::rows(tokens), Dim::fixed(vocabulary)]);
    let labels = builder.view(labels, &[Dim::rows(tokens)]);
    let loss = builder.op("aten.cross_entropy_loss.default", tensors(&[flat, labels]), &[]);
    builder.finish(&[loss])
}

fn encoder_layer(builder: &mut GraphBuilder, state: ValueId, module: &str) -> ValueId {
    let shape = builder.shape(state);
    let hidden = shape[2].fixed;
    let heads = [Dim::rows(1), Dim::fixed(hidden / 64), shape[1], Dim::fixed(64)];
    let parts = ["query", "key", "value"].map(|part| {
        let part = builder.linear(state, hidden, &format!("{module}.attention.{part}"));
        builder.view(part, &heads)
    });
    builder.module(&format!("{module}.attention"));
    let mixed = builder.op("aten.scaled_dot_product_attention.default", tensors(&parts), &heads);
    let mixed = builder.pointwise("aten.clone.default", &[mixed]);
    let mixed = builder.view(mixed, &shape);
    let mixed = builder.linear(mixed, hidden, &format!("{module}.attention.output"));
    let sum = builder.pointwise("aten.add.Tensor", &[mixed, state]);
    let normed = layer_norm(builder, sum);
    let wide = builder.linear(normed, 4 * hidden, &format!("{module}.intermediate"));
    let wide = builder.pointwise("aten.gelu.default", &[wide]);
    let narrow = builder.linear(wide, hidden, &format!("{module}.output"));
    let sum = builder.pointwise("aten.add.Tensor", &[narrow, normed]);
    layer_norm(builder, sum)
}

fn layer_norm(builder: &mut GraphBuilder, value: ValueId) -> ValueId {
    let shape = builder.shape(value);
    let sizes = Arg::List(vec![Arg::Int(shape[2].fixed)]);
    builder.op("aten.layer_norm.default", vec![Arg::Value(value), sizes], &shape)
}
