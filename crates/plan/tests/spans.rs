//! Spans: what runs as one function.

use std::collections::{BTreeSet, HashMap};

use proptest::prelude::*;
use rannc_ir::testing::{GraphBuilder, graphs, mlp};
use rannc_ir::{Analysis, Arg, DType, Dim, Graph, OpId, OpRun, ValueId};
use rannc_plan::{Buckets, Partition, PartitionError, Placement, Recompute, ScheduleKind, Sharding, SpanPart, Trained};

const B: Dim = Dim::rows(1);

fn runs(cuts: &[u32]) -> Vec<OpRun> {
    cuts.windows(2).map(|ends| OpRun { first: ends[0], end: ends[1] }).collect()
}

fn kept(cuts: &[u32]) -> Vec<(OpRun, Recompute)> {
    runs(cuts).into_iter().map(|ops| (ops, Recompute::None)).collect()
}

/// Each main Op that may be is a Block.
fn finest(graph: &Graph) -> Vec<u32> {
    let cuts = Analysis::new(graph).cuts;
    (0..).zip(&cuts).filter(|(_, refusal)| refusal.is_none()).map(|(place, _)| place).collect()
}

fn spanned(graph: &Graph, stages: &[u32]) -> Partition {
    let divided = Partition::new(graph, &runs(stages)).expect("the cuts are allowed");
    let spanned = divided.with_spans(graph, &kept(&finest(graph))).expect("these are its blocks");
    spanned.verify(graph).expect("it is one of its graph");
    spanned
}

fn hashes(partition: &Partition) -> Vec<&str> {
    partition.stages.iter().flat_map(|part| &part.spans).map(|span| span.hash.as_str()).collect()
}

/// A function as text, by the places of its arguments and results.
fn text(graph: &Graph, span: &SpanPart) -> String {
    let mut numbers: HashMap<ValueId, usize> = HashMap::new();
    let all = span.takes.iter().chain(span.ops.iter().flat_map(|&op| &graph.ops[op].results));
    all.for_each(|&value| {
        let next = numbers.len();
        numbers.entry(value).or_insert(next);
    });
    let of = |values: &[ValueId]| values.iter().map(|value| numbers[value]).collect::<Vec<_>>();
    let ops = span.ops.iter().map(|&op| {
        let op = &graph.ops[op];
        (&op.target, of(&op.operands()), of(&op.results), of(&op.mutates), op.grad_enabled, op.random)
    });
    let shapes = span.takes.iter().map(|&value| (graph.values[value].dtype, &graph.values[value].shape));
    format!("{:?} {:?} {:?}", shapes.collect::<Vec<_>>(), ops.collect::<Vec<_>>(), of(&span.gives))
}

/// A random graph with Stages, and Blocks of which some are computed again.
fn divided() -> impl Strategy<Value = (Graph, Vec<u32>, Vec<(OpRun, Recompute)>)> {
    let pick = any::<prop::sample::Index>();
    let picks = prop::collection::vec((pick, any::<[bool; 2]>()), 0..9);
    (graphs(), picks).prop_map(|(graph, picks)| {
        let allowed = finest(&graph);
        let end = *allowed.last().expect("the end");
        let (mut stages, mut blocks) = (BTreeSet::from([0, end]), BTreeSet::from([0, end]));
        for (pick, [is_stage, _]) in &picks {
            let place = *pick.get(&allowed);
            blocks.insert(place);
            if *is_stage {
                stages.insert(place);
            }
        }
        let mut stages: Vec<u32> = stages.into_iter().collect();
        if end == 0 {
            stages.push(0);
        }
        let again = |number: usize| {
            if picks.get(number).is_some_and(|pick| pick.1[1]) { Recompute::Block } else { Recompute::None }
        };
        let blocks = runs(&blocks.into_iter().collect::<Vec<_>>());
        (graph, stages, blocks.into_iter().enumerate().map(|(number, ops)| (ops, again(number))).collect())
    })
}

proptest! {
    #[test]
    fn spans_mean_what_the_graph_means((graph, stages, blocks) in divided()) {
        let partition = Partition::new(&graph, &runs(&stages)).expect("the cuts are allowed");
        let partition = partition.with_spans(&graph, &blocks).expect("these are its blocks");
        prop_assert_eq!(partition.verify(&graph), Ok(()));
        let analysis = Analysis::new(&graph);
        let mut texts: HashMap<&str, String> = HashMap::new();
        for span in partition.stages.iter().flat_map(|part| &part.spans) {
            let told = texts.entry(&span.hash).or_insert_with(|| text(&graph, span));
            prop_assert_eq!(told.as_str(), text(&graph, span));
        }
        // Where batch-free Ops cannot run before the others, all of the Stage stays together.
        for span in partition.stages.iter().filter(|part| part.spans.len() > 1).flat_map(|part| &part.spans) {
            for op in span.ops.iter().filter_map(|&op| analysis.main_index[op]) {
                let (_, recompute) = blocks.iter().find(|(ops, _)| (ops.first..ops.end).contains(&op)).expect("its block");
                prop_assert_eq!(*recompute, span.recompute);
            }
        }
    }

    #[test]
    fn a_graph_that_follows_has_spans_as_well((graph, stages, blocks) in divided()) {
        let partition = Partition::new(&graph, &runs(&stages)).expect("the cuts are allowed");
        if let Ok(followed) = partition.follow(&graph, &graph, &[]) {
            let followed = followed.with_spans(&graph, &blocks).expect("these are its blocks");
            prop_assert_eq!(followed.verify(&graph), Ok(()));
        }
    }
}

#[test]
fn a_layer_is_a_span_and_equal_layers_are_one_function() {
    let partition = spanned(&mlp(24, 8), &[0, 10, 49]);
    let hashes = hashes(&partition);
    assert_eq!(hashes.len(), 25, "24 layers and the loss");
    assert_eq!(hashes.iter().collect::<BTreeSet<_>>().len(), 3, "{hashes:?}");
    assert!(partition.stages.iter().all(|part| part.prologue.is_none()));
}

#[test]
fn blocks_that_are_computed_again_are_spans_of_their_own() {
    let graph = mlp(3, 8);
    let again = [(0, 1), (1, 2), (2, 4), (4, 7)].map(|(first, end)| OpRun { first, end });
    let again: Vec<(OpRun, Recompute)> =
        again.into_iter().map(|ops| (ops, if ops.first == 1 { Recompute::Block } else { Recompute::None })).collect();
    let partition = Partition::new(&graph, &runs(&[0, 7])).expect("one stage");
    let spans = partition.with_spans(&graph, &again).expect("these are its blocks").stages.remove(0).spans;
    let told: Vec<_> = spans.iter().map(|span| (span.ops.len(), span.recompute)).collect();
    let (kept, again) = (Recompute::None, Recompute::Block);
    assert_eq!(told, [(1, kept), (1, again), (2, kept), (3, kept)]);
}

#[test]
fn batch_free_ops_run_once() {
    let mut builder = GraphBuilder::new("Tied");
    let mut hidden = builder.input_with_grad(&[B, Dim::fixed(8)]);
    let (left, right) = (builder.param("left", &[8]), builder.param("right", &[8]));
    let sum = builder.pointwise("aten.add.Tensor", &[left, right]);
    for layer in 0..3 {
        builder.module(&format!("layers.{layer}"));
        hidden = builder.pointwise("aten.mul.Tensor", &[hidden, sum]);
    }
    let graph = builder.finish(&[hidden, sum]);
    let partition = spanned(&graph, &[0, 1, 3]);
    for part in &partition.stages {
        let prologue = part.prologue.as_ref().expect("both stages use the sum");
        assert_eq!((&prologue.takes, &prologue.gives), (&vec![left, right], &vec![sum]));
        assert!(part.spans.iter().all(|span| span.takes.contains(&sum)));
    }
    assert_eq!(hashes(&partition).into_iter().collect::<BTreeSet<_>>().len(), 1);
}

#[test]
fn batch_free_ops_run_with_their_only_user() {
    let mut builder = GraphBuilder::new("Masked");
    let mut hidden = builder.input_with_grad(&[B, Dim::fixed(8)]);
    let shared = builder.op("aten.zeros.default", vec![Arg::List(vec![Arg::Dim(B), Arg::Int(8)])], &[B, Dim::fixed(8)]);
    for layer in 0..3 {
        builder.module(&format!("layers.{layer}"));
        let shorter = builder.pointwise("aten.neg.default", &[shared]);
        let mask = builder.pointwise("aten.exp.default", &[shorter]);
        hidden = builder.pointwise("aten.mul.Tensor", &[hidden, mask]);
    }
    let partition = spanned(&builder.finish(&[hidden]), &[0, 3]);
    let spans: Vec<&[OpId]> = partition.stages[0].spans.iter().map(|span| &span.ops[..]).collect();
    let op = |numbers: &[u32]| numbers.iter().map(|&number| OpId(number)).collect::<Vec<_>>();
    assert_eq!(spans, [op(&[0]), op(&[1, 2, 3]), op(&[4, 5, 6]), op(&[7, 8, 9])]);
    assert_eq!(hashes(&partition).into_iter().collect::<BTreeSet<_>>().len(), 2);
}

/// A table that is filled again after it has been read.
#[test]
fn what_changes_between_its_readers_stays_in_order() {
    let mut builder = GraphBuilder::new("Scratch");
    let input = builder.input(DType::Float32, &[B, Dim::fixed(8)]);
    let weight = builder.param("weight", &[8]);
    let table = builder.op("aten.zeros.default", vec![], &[Dim::fixed(8)]);
    let first = builder.pointwise("aten.add.Tensor", &[input, table]);
    builder.pointwise("aten.copy_.default", &[table, weight]);
    builder.last_op().mutates = vec![table];
    let second = builder.pointwise("aten.add.Tensor", &[first, table]);
    let graph = builder.finish(&[second]);
    let analysis = Analysis::new(&graph);
    let last = u32::try_from(analysis.main_ops.len()).expect("few");
    let partition = spanned(&graph, &[0, last]);
    let part = &partition.stages[0];
    assert!(part.prologue.is_none());
    assert_eq!(part.spans[0].ops, part.ops);
}

/// A weight divided by a norm that a buffer estimates, and the buffer counts calls; positions as long as the batch.
fn normed() -> Graph {
    let mut builder = GraphBuilder::new("Normed");
    let input = builder.input_with_grad(&[B, Dim::fixed(8)]);
    let (weight, counter) = (builder.param("weight", &[8]), builder.buffer("counter", DType::Float32, &[8]));
    builder.in_place("aten.add_.Scalar", counter);
    let rolled = builder.pointwise("aten.lerp.Scalar", &[counter, weight]);
    let noise = builder.pointwise("aten.rand_like.default", &[weight]);
    builder.last_op().random = true;
    let scaled = builder.pointwise("aten.div.Tensor", &[weight, rolled]);
    let noisy = builder.pointwise("aten.add.Tensor", &[scaled, noise]);
    let positions = builder.op("aten.arange.default", vec![Arg::Dim(B)], &[B, Dim::fixed(1)]);
    let hidden = builder.pointwise("aten.mul.Tensor", &[input, noisy]);
    let result = builder.pointwise("aten.add.Tensor", &[hidden, positions]);
    builder.finish(&[result, positions])
}

#[test]
fn what_draws_and_changes_buffers_runs_once_and_what_counts_rows_does_not() {
    let graph = normed();
    let analysis = Analysis::new(&graph);
    let partition = spanned(&graph, &[0, u32::try_from(analysis.main_ops.len()).expect("few")]);
    let part = &partition.stages[0];
    let prologue: Vec<u32> = part.prologue.iter().flat_map(|span| &span.ops).map(|op| op.0).collect();
    assert_eq!(prologue, [0, 1, 2, 3, 4]);
    assert_eq!(part.spans[0].ops, [OpId(5)]);
}

#[test]
fn a_prologue_that_would_have_to_run_again_is_found() {
    let graph = normed();
    let end = u32::try_from(Analysis::new(&graph).main_ops.len()).expect("few");
    let sound = spanned(&graph, &[0, end]);
    // What counts rows goes ahead.
    let mut damaged = sound.clone();
    let part = &mut damaged.stages[0];
    let counted = part.spans.remove(0);
    let prologue = part.prologue.as_mut().expect("there is one");
    prologue.ops.extend(counted.ops);
    prologue.gives.extend(counted.gives);
    assert!(damaged.verify(&graph).is_err());
    // A part of the batch changes what the next one would find.
    let mut damaged = graph;
    let (noisy, last) = (ValueId(7), damaged.ops.len() - 1);
    damaged.ops[OpId(u32::try_from(last).expect("few"))].mutates = vec![noisy];
    assert!(sound.verify(&damaged).is_err());
}

#[test]
fn what_others_read_before_it_changes_does_not_run_ahead() {
    let mut builder = GraphBuilder::new("Counted");
    let input = builder.input_with_grad(&[B, Dim::fixed(8)]);
    let counter = builder.buffer("counter", DType::Float32, &[8]);
    let result = builder.pointwise("aten.mul.Tensor", &[input, counter]);
    builder.in_place("aten.add_.Scalar", counter);
    let graph = builder.finish(&[result]);
    assert!(spanned(&graph, &[0, 2]).stages[0].prologue.is_none());
}

/// A view of a view may be told as one of what both are views of, which its own Span does not know.
#[test]
fn views_of_views_are_followed() {
    let mut builder = GraphBuilder::new("Views");
    let input = builder.input_with_grad(&[B, Dim::fixed(8)]);
    builder.module("layers.0");
    let hidden = builder.linear(input, 8, "layers.0");
    let first = builder.view(hidden, &[B, Dim::fixed(2), Dim::fixed(4)]);
    builder.module("layers.1");
    let second = builder.view(first, &[B, Dim::fixed(4), Dim::fixed(2)]);
    builder.value_mut(second).alias_of = Some(hidden);
    let result = builder.pointwise("aten.relu.default", &[second]);
    let graph = builder.finish(&[result]);
    assert_eq!(hashes(&spanned(&graph, &[0, 4])).len(), 2);
    assert_eq!(hashes(&spanned(&graph, &[0, 2, 4])).len(), 2);
}

#[test]
fn arguments_that_look_alike_are_told_apart() {
    let layer = |builder: &mut GraphBuilder, hidden: ValueId, module: &str, ops: &[&str]| {
        builder.module(module);
        let bias = builder.param(&format!("{module}.bias"), &[8]);
        ops.iter().fold(hidden, |hidden, target| builder.pointwise(target, &[hidden, bias]))
    };
    let mut builder = GraphBuilder::new("Alike");
    let input = builder.input_with_grad(&[B, Dim::fixed(8)]);
    let mut hidden = layer(&mut builder, input, "layers.0", &["aten.add.Tensor", "aten.mul.Tensor"]);
    hidden = layer(&mut builder, hidden, "layers.1", &["aten.add.Tensor", "aten.mul.Tensor"]);
    hidden = layer(&mut builder, hidden, "layers.2", &["aten.mul.Tensor", "aten.add.Tensor"]);
    hidden = layer(&mut builder, hidden, "layers.3", &["aten.add.Tensor", "aten.mul.Tensor"]);
    (builder.last_op().opaque, builder.last_op().row_wise) = (true, true);
    builder.module("layers.4");
    let bias = builder.param("layers.4.bias", &[8]);
    let swapped = builder.pointwise("aten.add.Tensor", &[bias, hidden]);
    hidden = builder.pointwise("aten.mul.Tensor", &[swapped, bias]);
    let graph = builder.finish(&[hidden]);
    let partition = spanned(&graph, &[0, 10]);
    let found = hashes(&partition);
    assert_eq!(found[0], found[1]);
    assert_eq!(found.iter().collect::<BTreeSet<_>>().len(), 4, "{found:?}");
}

#[test]
fn blocks_must_make_up_the_graph() {
    let graph = mlp(2, 4);
    for wrong in [&[0, 3][..], &[1, 5], &[0, 3, 3, 5], &[0, 5, 9]] {
        let partition = Partition::new(&graph, &runs(&[0, 5])).expect("one stage");
        assert!(matches!(partition.with_spans(&graph, &kept(wrong)), Err(PartitionError::Blocks { main_ops: 5 })));
    }
    let mut builder = GraphBuilder::new("Norm");
    let input = builder.input(DType::Float32, &[B, Dim::fixed(8)]);
    let norm = builder.op("aten.norm.Scalar", vec![Arg::Value(input)], &[]);
    let scaled = builder.pointwise("aten.div.Tensor", &[input, norm]);
    let graph = builder.finish(&[scaled]);
    let partition = Partition::new(&graph, &runs(&[0, 2])).expect("one stage");
    let error = partition.with_spans(&graph, &kept(&[0, 1, 2])).expect_err("the norm cannot be sent");
    assert!(error.to_string().starts_with("a block of the plan may not begin at op1"), "{error}");
}

#[test]
fn damage_is_found() {
    let graph = mlp(3, 8);
    let sound = spanned(&graph, &[0, 4, 7]);
    let damages: [fn(&mut Vec<SpanPart>); 10] = [
        |spans| spans.truncate(1),
        |spans| spans.swap(0, 1),
        |spans| spans[1].ops.truncate(1),
        |spans| spans[1].ops.push(OpId(0)),
        |spans| spans[1].ops.push(OpId(99)),
        |spans| spans[1].ops.swap(0, 1),
        |spans| spans[1].takes.truncate(1),
        |spans| spans[1].takes.push(ValueId(0)),
        |spans| spans[0].gives.clear(),
        |spans| spans[1].gives.push(ValueId(99)),
    ];
    for (number, damage) in damages.into_iter().enumerate() {
        let mut partition = sound.clone();
        damage(&mut partition.stages[0].spans);
        assert!(partition.verify(&graph).is_err(), "damage {number} passes");
    }
}

/// A Param that two Spans use, one whose view they use, and one that a Prologue uses other than to convert it stay whole.
#[test]
fn params_of_one_span_are_divided() {
    let mut builder = GraphBuilder::new("Spans");
    let wide = [B, Dim::fixed(4)];
    let input = builder.input(DType::Float32, &wide);
    let params = ["own", "shared", "turned", "converted"].map(|name| builder.param(name, &[4, 4]));
    let row = builder.param("repeated", &[4]);
    let turned = builder.op("aten.t.default", vec![Arg::Value(params[2])], &[Dim::fixed(4), Dim::fixed(4)]);
    let half = vec![Arg::Value(params[3]), Arg::Str("bfloat16".into())];
    let converted = builder.op("aten.to.dtype", half, &[Dim::fixed(4), Dim::fixed(4)]);
    let sizes = Arg::List(vec![Arg::Dim(B), Arg::Int(4)]);
    let repeated = builder.op("aten.expand.default", vec![Arg::Value(row), sizes], &wide);
    builder.value_mut(repeated).alias_of = Some(row);
    let mut last = input;
    for (layer, weight) in
        [params[0], params[1], turned, params[1], repeated, repeated, converted].into_iter().enumerate()
    {
        builder.module(&format!("layers.{layer}"));
        let target = if weight == repeated { "aten.add.Tensor" } else { "aten.linear.default" };
        last = builder.op(target, vec![Arg::Value(last), Arg::Value(weight)], &wide);
    }
    let graph = builder.finish(&[last]);
    let ends = u32::try_from(Analysis::new(&graph).main_ops.len()).expect("few");
    let partition = spanned(&graph, &[0, ends]);
    let schedule = ScheduleKind::FillDrain.into();
    let placement = Placement {
        ranks: vec![vec![0, 1]],
        microbatches: 1,
        schedule,
        sharding: vec![Sharding::Params],
        bucket_bytes: Vec::new(),
    };
    let buckets = Buckets::of(&graph, &partition, &placement, &Trained::captured(&graph));
    let found = buckets.gradients.iter().map(|gradient| (gradient.param.0, gradient.sharding, gradient.span));
    let mut found: Vec<_> = found.collect();
    found.sort_unstable();
    let spans = partition.stages[0].spans.len() as u32;
    let (whole, divided) = (Sharding::Gradients, Sharding::Params);
    let (first, last) = (Some(1), Some(spans - 1));
    let expected = [(0, divided, first), (1, whole, None), (2, whole, None), (3, divided, last), (4, whole, None)];
    assert_eq!(found, expected);
    assert!(buckets.buckets.iter().all(|bucket| bucket.span.is_some() == (bucket.sharding == divided)));
}
