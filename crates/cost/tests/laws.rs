//! Laws and known values of the cost model.

use proptest::prelude::*;
use rannc_cost::{Cluster, Device, OpKind, OpWork, Operation, SavedTensors, presets};
use rannc_ir::testing::{GraphBuilder, graphs};
use rannc_ir::{Arg, DType, Dim, Graph, OpId, ValueId};

fn device(name: &str) -> Device {
    Cluster::preset(name, 1, 1).expect("one device").kinds.remove(0)
}

fn last(graph: &Graph) -> OpId {
    graph.ops.ids().next_back().expect("an op was built")
}

fn saved(graph: &Graph, host: bool) -> SavedTensors {
    SavedTensors::new(&Operation::new(graph, last(graph)), host)
}

fn tensors(values: &[ValueId]) -> Vec<Arg> {
    values.iter().map(|&value| Arg::Value(value)).collect()
}

/// An input of `[b, 4, 8]` that needs a gradient, and a builder.
fn hidden() -> (GraphBuilder, ValueId) {
    let mut builder = GraphBuilder::new("Model");
    let input = builder.input_with_grad(&[Dim::rows(1), Dim::fixed(4), Dim::fixed(8)]);
    (builder, input)
}

proptest! {
    #[test]
    fn times_and_memory_are_monotone_and_not_negative(graph in graphs(), rows in 1..1000_u64) {
        for device in presets().iter().map(|preset| preset.device()) {
            for id in graph.ops.ids() {
                let operation = Operation::new(&graph, id);
                let work = OpWork::new(&operation);
                let (less, more) = (work.at(&device, rows), work.at(&device, rows + 1));
                prop_assert!(0.0 <= less.forward_us && less.forward_us <= more.forward_us);
                prop_assert!(0.0 <= less.backward_us && less.backward_us <= more.backward_us);
                let workspace = operation.workspace_bytes();
                prop_assert!(workspace.at(rows) <= workspace.at(rows + 1));
                let saved = SavedTensors::new(&operation, device.host);
                prop_assert!(saved.private_bytes.at(rows) <= saved.private_bytes.at(rows + 1));
                prop_assert!(saved.values.is_sorted());
            }
        }
    }

    #[test]
    fn nothing_is_kept_without_gradients(graph in graphs()) {
        for (id, op) in graph.ops.iter() {
            let flows = op.grad_enabled && op.results.iter().any(|&result| graph.values[result].requires_grad);
            if !flows {
                let operation = Operation::new(&graph, id);
                prop_assert_eq!(SavedTensors::new(&operation, false), SavedTensors::default());
                prop_assert_eq!(OpWork::new(&operation).at(&device("cpu"), 3).backward_us, 0.0);
            }
        }
    }
}

#[test]
fn a_linear_layer_multiplies_and_keeps_its_input() {
    let (mut builder, input) = hidden();
    let output = builder.linear(input, 16, "fc");
    let graph = builder.finish(&[output]);
    let work = OpWork::new(&Operation::new(&graph, last(&graph)));
    assert_eq!(work.forward.flops.at(3), (2 * 3 * 4 * 8 * 16) as f64);
    assert_eq!(work.backward.flops.at(3), 2.0 * work.forward.flops.at(3));
    assert_eq!(saved(&graph, false).values, [input]);
}

#[test]
fn the_first_layer_needs_no_input_gradient() {
    let mut builder = GraphBuilder::new("Model");
    let input = builder.input(DType::Float32, &[Dim::rows(1), Dim::fixed(8)]);
    let output = builder.linear(input, 16, "fc");
    let graph = builder.finish(&[output]);
    let work = OpWork::new(&Operation::new(&graph, last(&graph)));
    assert_eq!(work.backward.flops.at(3), work.forward.flops.at(3));
}

#[test]
fn a_convolution_sums_over_its_kernel() {
    let mut builder = GraphBuilder::new("Model");
    let image = [Dim::rows(1), Dim::fixed(3), Dim::fixed(8), Dim::fixed(8)];
    let (input, weight) = (builder.input_with_grad(&image), builder.param("conv.weight", &[16, 3, 5, 5]));
    let shape = [Dim::rows(1), Dim::fixed(16), Dim::fixed(4), Dim::fixed(4)];
    let output = builder.op("aten.conv2d.default", tensors(&[input, weight]), &shape);
    let graph = builder.finish(&[output]);
    let work = OpWork::new(&Operation::new(&graph, last(&graph)));
    assert_eq!(work.forward.flops.at(2), (2 * 2 * 16 * 4 * 4 * 3 * 5 * 5) as f64);
    assert_eq!(saved(&graph, false).values, [input]);
}

#[test]
fn an_einsum_counts_its_subscripts() {
    let mut builder = GraphBuilder::new("Model");
    let left = builder.input_with_grad(&[Dim::rows(1), Dim::fixed(4), Dim::fixed(8)]);
    let right = builder.input_with_grad(&[Dim::rows(1), Dim::fixed(5), Dim::fixed(8)]);
    let args = vec![Arg::Str("bik,bjk->bij".to_owned()), Arg::List(tensors(&[left, right]))];
    let output = builder.op("aten.einsum.default", args, &[Dim::rows(1), Dim::fixed(4), Dim::fixed(5)]);
    let graph = builder.finish(&[output]);
    let work = OpWork::new(&Operation::new(&graph, last(&graph)));
    assert_eq!(work.forward.flops.at(3), (2 * 3 * 4 * 5 * 8) as f64);
}

#[test]
fn attention_keeps_the_scores_only_on_the_host_with_dropout() {
    let mut builder = GraphBuilder::new("Model");
    let heads = [Dim::rows(1), Dim::fixed(2), Dim::fixed(16), Dim::fixed(8)];
    let qkv: Vec<ValueId> = (0..3).map(|_| builder.input_with_grad(&heads)).collect();
    let mut args = tensors(&qkv);
    args.extend([Arg::None, Arg::Float("0.1".to_owned())]);
    let output = builder.op("aten.scaled_dot_product_attention.default", args, &heads);
    let graph = builder.finish(&[output]);
    let fused = saved(&graph, false);
    assert_eq!(fused.values, [qkv[0], qkv[1], qkv[2], output]);
    assert_eq!(fused.private_bytes.at(1), (2 * 16 * 4) as f64);
    let host = saved(&graph, true);
    assert_eq!(host.values, qkv);
    assert_eq!(host.private_bytes.at(1), (2 * 2 * 16 * 16 * 4) as f64);
    let work = OpWork::new(&Operation::new(&graph, last(&graph)));
    assert_eq!(work.forward.flops.at(1), (4 * 2 * 16 * 16 * 8) as f64);
}

#[test]
fn pointwise_ops_keep_what_their_formulas_need() {
    let keeps = |target: &str| {
        let (mut builder, input) = hidden();
        let output = builder.pointwise(target, &[input]);
        let graph = builder.finish(&[output]);
        let (values, bytes) = (saved(&graph, false).values, saved(&graph, false).private_bytes.at(1));
        (values == [input], values == [output], bytes)
    };
    assert_eq!(keeps("aten.gelu.default"), (true, false, 0.0));
    assert_eq!(keeps("aten.relu.default"), (false, true, 0.0));
    assert_eq!(keeps("aten.softmax.int"), (false, true, 0.0));
    assert_eq!(keeps("aten.dropout.default"), (false, false, 32.0));
    assert_eq!(keeps("aten.layer_norm.default"), (true, false, 32.0));
    assert_eq!(keeps("aten.add.Tensor"), (false, false, 0.0));
}

#[test]
fn views_are_free_and_keep_nothing() {
    let (mut builder, input) = hidden();
    let view = builder.view(input, &[Dim::rows(4), Dim::fixed(8)]);
    let graph = builder.finish(&[view]);
    let work = OpWork::new(&Operation::new(&graph, last(&graph)));
    assert_eq!(work.at(&device("cpu"), 5), Default::default());
    assert_eq!(saved(&graph, false), SavedTensors::default());
}

#[test]
fn a_view_of_a_saved_storage_is_that_storage() {
    let (mut builder, input) = hidden();
    let view = builder.view(input, &[Dim::rows(4), Dim::fixed(8)]);
    let output = builder.linear(view, 8, "fc");
    let graph = builder.finish(&[output]);
    assert_eq!(saved(&graph, false).values, [input]);
}

#[test]
fn a_lookup_reads_only_the_rows_it_needs() {
    let mut builder = GraphBuilder::new("Model");
    let (tokens, table) = (builder.input(DType::Int64, &[Dim::rows(1)]), builder.param("table", &[1000, 8]));
    let output = builder.op("aten.embedding.default", tensors(&[table, tokens]), &[Dim::rows(1), Dim::fixed(8)]);
    let graph = builder.finish(&[output]);
    let work = OpWork::new(&Operation::new(&graph, last(&graph)));
    assert_eq!(work.forward.bytes.at(1), (32 + 32 + 8) as f64);
    assert_eq!(saved(&graph, false).values, [tokens]);
}

/// One op on tensors of this type, of `[b, extent]` times `[extent, extent]`.
fn product(dtype: DType, extent: i64) -> Graph {
    let mut builder = GraphBuilder::new("Model");
    let left = builder.input(dtype, &[Dim::rows(1), Dim::fixed(extent)]);
    let right = builder.input(dtype, &[Dim::fixed(extent), Dim::fixed(extent)]);
    let shape = vec![Dim::rows(1), Dim::fixed(extent)];
    builder.op_with("aten.mm.default", tensors(&[left, right]), &[(dtype, shape)]);
    builder.finish(&[left])
}

fn forward_us(graph: &Graph, device: &Device, rows: u64) -> f64 {
    OpWork::new(&Operation::new(graph, last(graph))).at(device, rows).forward_us
}

/// Measured on an H200: products of 8192 x 8192 matrices.
#[test]
fn products_are_as_quick_as_measured() {
    let device = device("H200");
    for (dtype, tflops) in [(DType::Bfloat16, 786.0), (DType::Float32, 51.0)] {
        let us = forward_us(&product(dtype, 8192), &device, 8192);
        let modelled = 2.0 * 8192.0_f64.powi(3) / us / 1e6;
        assert!((modelled / tflops - 1.0).abs() < 0.05, "{dtype:?}: {modelled} TFLOP/s");
    }
}

#[test]
fn float32_products_use_tf32_when_the_device_says_so() {
    let graph = product(DType::Float32, 4096);
    let device = device("A100-80G");
    let with_tf32 = Device { tf32: true, ..device.clone() };
    assert!(forward_us(&graph, &with_tf32, 4096) * 4.0 < forward_us(&graph, &device, 4096));
    let double = product(DType::Float64, 4096);
    assert_eq!(forward_us(&double, &with_tf32, 4096), forward_us(&double, &device, 4096));
}

#[test]
fn small_ops_wait_for_their_launch() {
    let mut builder = GraphBuilder::new("Model");
    let input = builder.input_with_grad(&[Dim::rows(1)]);
    let output = builder.pointwise("aten.gelu.default", &[input]);
    let graph = builder.finish(&[output]);
    let device = device("H200");
    let work = OpWork::new(&Operation::new(&graph, last(&graph)));
    let cost = work.at(&device, 1);
    assert_eq!(cost.forward_host_us, device.launch_us);
    assert!(0.0 < cost.backward_host_us && cost.backward_host_us < cost.forward_host_us);
    assert_eq!(cost.us(), cost.forward_host_us + cost.backward_host_us);
    let host = Device { host: true, ..device };
    let cost = work.at(&host, 1);
    assert_eq!((cost.forward_us, cost.forward_host_us, cost.backward_host_us), (host.launch_us, 0.0, 0.0));
}

#[test]
fn ops_have_their_kind() {
    let kind = |target: &str| {
        let (mut builder, input) = hidden();
        let output = builder.pointwise(target, &[input]);
        let graph = builder.finish(&[output]);
        OpWork::new(&Operation::new(&graph, last(&graph))).kind
    };
    assert_eq!(kind("aten.bmm.default"), OpKind::Matrix);
    assert_eq!(kind("aten.conv3d.default"), OpKind::Convolution);
    assert_eq!(kind("aten.scaled_dot_product_attention.default"), OpKind::Attention);
    assert_eq!(kind("aten.batch_norm.default"), OpKind::Normalisation);
    assert_eq!(kind("aten.softmax.int"), OpKind::Normalisation);
    assert_eq!(kind("aten.embedding.default"), OpKind::Embedding);
    assert_eq!(kind("aten.gelu.default"), OpKind::Pointwise);
}

#[test]
fn a_backward_adds_to_the_gradients_of_parameters() {
    let (mut builder, input) = hidden();
    let output = builder.linear(input, 16, "fc");
    let graph = builder.finish(&[output]);
    let work = OpWork::new(&Operation::new(&graph, last(&graph)));
    let (weight, bias, result) = ((8 * 16 * 4) as f64, (16 * 4) as f64, (4 * 16 * 4) as f64);
    assert_eq!(work.summed_bytes.at(1), 3.0 * (weight + bias) + 2.0 * result);
    assert_eq!((work.backward_products, work.backward.launches), (2, 5.0));
}
