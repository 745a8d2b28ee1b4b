//! Dividing Graphs over Stages.

use std::collections::BTreeSet;

use proptest::prelude::*;
use rannc_ir::testing::{GraphBuilder, graphs, mlp};
use rannc_ir::{Analysis, Arg, BufferId, DType, Dim, Graph, OpId, OpRun, ParamId, ValueId};
use rannc_plan::{InputPart, OutputSource, Partition, PartitionError, StagePart};

const B: Dim = Dim::rows(1);

fn runs(cuts: &[u32]) -> Vec<OpRun> {
    cuts.windows(2).map(|ends| OpRun { first: ends[0], end: ends[1] }).collect()
}

fn divide(graph: &Graph, cuts: &[u32]) -> Partition {
    Partition::new(graph, &runs(cuts)).expect("the cuts are allowed")
}

fn refusal(graph: &Graph, cuts: &[u32]) -> String {
    Partition::new(graph, &runs(cuts)).expect_err("the cuts are not allowed").to_string()
}

/// A random graph with its ends and any of the allowed cuts.
fn divided() -> impl Strategy<Value = (Graph, Vec<u32>)> {
    (graphs(), prop::collection::vec(any::<prop::sample::Index>(), 0..4)).prop_map(|(graph, picks)| {
        let cuts = Analysis::new(&graph).cuts;
        let end = u32::try_from(cuts.len() - 1).expect("small");
        let allowed: Vec<u32> = (1..end).filter(|&cut| cuts[cut as usize].is_none()).collect();
        let mut chosen = BTreeSet::from([0, end]);
        if !allowed.is_empty() {
            chosen.extend(picks.iter().map(|pick| *pick.get(&allowed)));
        }
        let mut chosen: Vec<u32> = chosen.into_iter().collect();
        if end == 0 {
            chosen.push(0);
        }
        (graph, chosen)
    })
}

#[track_caller]
fn check(graph: &Graph, partition: &Partition) {
    partition.verify(graph).expect("it is one of its graph");
}

proptest! {
    #[test]
    fn partitions_are_complete_and_closed((graph, cuts) in divided()) {
        check(&graph, &divide(&graph, &cuts));
    }

    #[test]
    fn forbidden_cuts_are_refused(graph in graphs(), pick in any::<prop::sample::Index>()) {
        let cuts = Analysis::new(&graph).cuts;
        let end = u32::try_from(cuts.len() - 1).expect("small");
        let forbidden: Vec<u32> = (1..end).filter(|&cut| cuts[cut as usize].is_some()).collect();
        if !forbidden.is_empty() {
            let message = refusal(&graph, &[0, *pick.get(&forbidden), end]);
            prop_assert!(message.starts_with("stage 1 may not begin at op"), "{}", message);
        }
    }

    #[test]
    fn a_graph_follows_itself((graph, cuts) in divided()) {
        let partition = divide(&graph, &cuts);
        let followed = partition.follow(&graph, &graph, &[]).expect("its own partition shows that there is one");
        check(&graph, &followed);
        let params = |part: &StagePart| -> BTreeSet<ParamId> { part.params.iter().copied().collect() };
        let buffers = |part: &StagePart| -> BTreeSet<BufferId> { part.buffers.iter().copied().collect() };
        for (found, own) in followed.stages.iter().zip(&partition.stages) {
            prop_assert!(params(found).is_subset(&params(own)));
            prop_assert!(buffers(found).is_subset(&buffers(own)));
        }
    }
}

/// Each list of a Partition, and each Stage of a crossing, is held against the Graph.
#[test]
fn damage_is_found() {
    let graph = translator();
    let sound = divide(&graph, &[0, 2, 3, 6, 7]);
    assert_eq!(sound.verify(&graph), Ok(()));
    let damages: [fn(&mut Partition); 20] = [
        |partition| {
            partition.stages.pop();
        },
        |partition| {
            partition.stages[0].ops.pop();
        },
        |partition| partition.stages[2].ops.swap(0, 1),
        |partition| partition.stages[1].ops.push(OpId(4)),
        |partition| partition.stages[3].ops.push(OpId(99)),
        |partition| {
            partition.stages[2].inputs.pop();
        },
        |partition| partition.stages[2].inputs[0].index = 0,
        |partition| {
            partition.stages[2].receives.pop();
        },
        |partition| {
            partition.stages[0].sends.pop();
        },
        |partition| partition.stages[1].sends.push(ValueId(99)),
        |partition| {
            partition.stages[3].outputs.pop();
        },
        |partition| {
            partition.stages[0].params.pop();
        },
        |partition| partition.stages[1].params.push(ParamId(0)),
        |partition| partition.crossings.reverse(),
        |partition| {
            partition.crossings.pop();
        },
        |partition| partition.crossings[0].to.push(3),
        |partition| partition.crossings[0].from = 99,
        |partition| partition.crossings[0].requires_grad = false,
        |partition| partition.outputs[0].source = OutputSource::Stage(0),
        |partition| {
            partition.tied.pop();
        },
    ];
    for (number, damage) in damages.into_iter().enumerate() {
        let mut partition = sound.clone();
        damage(&mut partition);
        assert_ne!(partition, sound, "damage {number} does nothing");
        assert!(partition.verify(&graph).is_err(), "damage {number} passes");
    }
}

#[test]
fn runs_must_make_up_the_graph() {
    let graph = mlp(2, 4);
    assert_eq!(
        refusal(&graph, &[0, 2, 2, 5]),
        "stage 1 holds main ops 2..2, but must begin at 2 and hold at least one"
    );
    assert_eq!(refusal(&graph, &[1, 5]), "stage 0 holds main ops 1..5, but must begin at 0 and hold at least one");
    assert_eq!(refusal(&graph, &[0, 3]), "the stages end at main op 3, the graph has 5");
    assert_eq!(refusal(&graph, &[0, 3, 99]), "the stages end at main op 99, the graph has 5");
    assert!(matches!(Partition::new(&graph, &[]), Err(PartitionError::NoStages)));
}

/// Tokens and a mask from outside, a tied table, a skip, a mask made of constants.
fn translator() -> Graph {
    let mut builder = GraphBuilder::new("Translator");
    let tokens = builder.input(DType::Int64, &[B]);
    let scale = builder.input(DType::Float32, &[Dim::fixed(8)]);
    let table = builder.param("table", &[50, 8]);
    let hidden = [B, Dim::fixed(8)];
    let embedded = builder.op("aten.embedding.default", vec![Arg::Value(table), Arg::Value(tokens)], &hidden);
    let range = builder.op("aten.arange.default", vec![Arg::Int(8)], &[Dim::fixed(8)]);
    let first = builder.pointwise("aten.add.Tensor", &[embedded, range]);
    let middle = builder.linear(first, 8, "middle");
    let skip = builder.pointwise("aten.add.Tensor", &[middle, embedded]);
    let masked = builder.pointwise("aten.mul.Tensor", &[skip, range]);
    let scaled = builder.pointwise("aten.mul.Tensor", &[masked, scale]);
    let turned = builder.op("aten.t.default", vec![Arg::Value(table)], &[Dim::fixed(8), Dim::fixed(50)]);
    let logits = builder.op("aten.mm.default", vec![Arg::Value(scaled), Arg::Value(turned)], &[B, Dim::fixed(50)]);
    builder.finish(&[logits, tokens, turned, logits])
}

#[test]
fn skips_ties_clones_and_outputs_find_their_stages() {
    let graph = translator();
    let partition = divide(&graph, &[0, 2, 3, 6, 7]);
    check(&graph, &partition);
    let [first, middle, third, last] = &partition.stages[..] else { panic!("four stages") };
    let embedded = graph.ops[OpId(0)].results[0];
    assert_eq!(partition.crossings[0].value, embedded);
    assert_eq!(partition.crossings[0].to, [2]);
    assert!(partition.crossings[0].requires_grad);
    assert!(middle.ops == [OpId(3)] && first.ops.contains(&OpId(1)) && third.ops.contains(&OpId(1)));
    assert_eq!(partition.tied[0].stages, [0, 3]);
    let whole = InputPart { index: 1, value: graph.inputs[1], has_rows: false, requires_grad: false };
    assert_eq!(third.inputs, [whole]);
    assert_eq!(last.outputs, [graph.outputs[0], graph.outputs[2]]);
    let sources: Vec<OutputSource> = partition.outputs.iter().map(|output| output.source).collect();
    use OutputSource::{Input, Stage};
    assert_eq!(sources, [Stage(3), Input(0), Stage(3), Stage(3)]);
}

#[test]
fn outputs_that_the_forward_changes_come_from_where_they_are_changed() {
    let mut builder = GraphBuilder::new("Counter");
    let input = builder.input(DType::Float32, &[B, Dim::fixed(8)]);
    let count = builder.buffer("count", DType::Float32, &[]);
    builder.in_place("aten.add_.Tensor", count);
    builder.in_place("aten.relu_.default", input);
    let result = builder.pointwise("aten.exp.default", &[input]);
    let last = builder.pointwise("aten.log.default", &[result]);
    let graph = builder.finish(&[count, input, last]);
    let partition = divide(&graph, &[0, 1, 3, 4]);
    check(&graph, &partition);
    let sources: Vec<OutputSource> = partition.outputs.iter().map(|output| output.source).collect();
    assert_eq!(sources, [0, 1, 2].map(OutputSource::Stage));
}

/// In-place residual blocks, as in torchvision: every block changes the output of its last layer.
#[test]
fn what_is_final_may_be_sent_although_it_was_changed_in_place() {
    let mut builder = GraphBuilder::new("Residual");
    let mut hidden = builder.input(DType::Float32, &[B, Dim::fixed(8)]);
    for block in ["a", "b"] {
        let layer = builder.linear(hidden, 8, block);
        let added = builder.pointwise("aten.add_.Tensor", &[layer, hidden]);
        builder.last_op().mutates = vec![layer];
        builder.value_mut(added).alias_of = Some(layer);
        hidden = builder.in_place("aten.relu_.default", added);
    }
    let graph = builder.finish(&[hidden]);
    assert_eq!(rannc_ir::allowed_cuts(&graph), [true, false, false, true, false, false, true]);
    let partition = divide(&graph, &[0, 3, 6]);
    check(&graph, &partition);
    check(&graph, &partition.follow(&graph, &graph, &[]).expect("it follows itself"));
}

/// A table of positions that is filled in place, as in T5: each stage fills its own.
#[test]
fn scratch_tensors_are_cloned_with_all_that_fills_them() {
    let mut builder = GraphBuilder::new("Positions");
    let input = builder.input(DType::Float32, &[B, Dim::fixed(8)]);
    let weight = builder.param("bias", &[8]);
    let table = builder.op("aten.zeros.default", vec![], &[Dim::fixed(8)]);
    builder.pointwise("aten.copy_.default", &[table, weight]);
    builder.last_op().mutates = vec![table];
    let first = builder.pointwise("aten.add.Tensor", &[input, table]);
    let second = builder.pointwise("aten.add.Tensor", &[first, table]);
    let graph = builder.finish(&[second]);
    let partition = divide(&graph, &[0, 1, 2]);
    check(&graph, &partition);
    assert_eq!(partition.stages.iter().map(|part| part.ops.len()).collect::<Vec<_>>(), [3, 3]);
    assert_eq!(partition.tied[0].stages, [0, 1]);
    check(&graph, &partition.follow(&graph, &graph, &[]).expect("it follows itself"));
}

#[test]
fn an_input_that_depends_on_the_batch_must_have_rows() {
    let mut builder = GraphBuilder::new("Sequence");
    let input = builder.input(DType::Float32, &[Dim::fixed(8), B]);
    let result = builder.pointwise("aten.relu.default", &[input]);
    let graph = builder.finish(&[result]);
    assert_eq!(
        refusal(&graph, &[0, 1]),
        "input 0 (t0), used by op0 aten.relu.default at model.py:1, depends on the batch size but not by rows of its \
         first dimension"
    );
}

#[test]
fn a_model_without_main_ops_is_one_stage() {
    let mut builder = GraphBuilder::new("Weights");
    let weight = builder.param("weight", &[8]);
    let free = builder.pointwise("aten.exp.default", &[weight]);
    let graph = builder.finish(&[free]);
    let partition = divide(&graph, &[0, 0]);
    check(&graph, &partition);
    assert_eq!(partition.stages[0].ops, [OpId(0)]);
}

/// Layers with the given names, each batch-normed when `training` says so, else by plain arithmetic.
fn normed(layers: &[&str], training: bool) -> Graph {
    let mut builder = GraphBuilder::new("Normed");
    let mut hidden = builder.input(DType::Float32, &[B, Dim::fixed(8)]);
    for name in layers {
        hidden = builder.linear(hidden, 8, name);
        let mean = builder.buffer(&format!("{name}.mean"), DType::Float32, &[8]);
        if training {
            hidden = builder.pointwise("aten.batch_norm.default", &[hidden, mean]);
            builder.last_op().mutates = vec![mean];
        } else {
            let negative = builder.pointwise("aten.neg.default", &[mean]);
            hidden = builder.pointwise("aten.add.Tensor", &[hidden, negative]);
        }
    }
    builder.finish(&[hidden])
}

#[test]
fn evaluation_follows_training_to_parameters_and_statistics() {
    let training = normed(&["a", "b", "c"], true);
    // The first stage ends between the linear layer and the norm of `b`.
    let partition = divide(&training, &[0, 3, 6]);
    let evaluation = normed(&["a", "b", "c"], false);
    let followed = partition.follow(&training, &evaluation, &[]).expect("all is held somewhere");
    check(&evaluation, &followed);
    let buffers = followed.stages.iter().map(|part| part.buffers.len());
    assert_eq!(buffers.collect::<Vec<_>>(), [1, 2]);
    assert!(followed.stages.iter().all(|part| part.mutated_buffers.is_empty()));
}

/// Each layer has a mask, which no layer changes; for all that its operands say, what adds it might run before the cut.
#[test]
fn what_reads_a_buffer_runs_where_the_buffer_is() {
    let mut builder = GraphBuilder::new("Masked");
    let mut hidden = builder.input(DType::Float32, &[B, Dim::fixed(8)]);
    for name in ["a", "b"] {
        hidden = builder.linear(hidden, 8, name);
        let scores = builder.pointwise("aten.exp.default", &[hidden]);
        let mask = builder.buffer(&format!("{name}.mask"), DType::Float32, &[8]);
        let part = builder.pointwise("aten.neg.default", &[mask]);
        hidden = builder.pointwise("aten.add.Tensor", &[scores, part]);
    }
    let graph = builder.finish(&[hidden]);
    // The first stage ends between the linear layer of `b` and what its mask is added to.
    let partition = divide(&graph, &[0, 4, 6]);
    let followed = partition.follow(&graph, &graph, &[]).expect("it follows itself");
    check(&graph, &followed);
    let buffers = |partition: &Partition| partition.stages.iter().map(|part| part.buffers.clone()).collect::<Vec<_>>();
    assert_eq!(buffers(&followed), buffers(&partition));
}

/// The tail of the other call computes with the last layer, on all ranks.
#[test]
fn what_is_everywhere_runs_in_any_stage() {
    let training = normed(&["a", "b"], true);
    let partition = divide(&training, &[0, 2, 4]);
    let all_of = |layer: &str| ["weight", "bias", "mean"].map(|name| format!("{layer}.{name}"));
    let evaluation = normed(&["a", "z", "b"], false);
    let followed = partition.follow(&training, &evaluation, &all_of("z")).expect("all is held somewhere");
    check(&evaluation, &followed);
    let moved = normed(&["b", "a"], false);
    partition.follow(&training, &moved, &all_of("a")).expect_err("the first stage holds it, whoever else does");
}

#[test]
fn a_graph_that_cannot_follow_names_the_op() {
    let training = normed(&["a", "b"], true);
    let partition = divide(&training, &[0, 2, 4]);
    let message = |other: &Graph| partition.follow(&training, other, &[]).expect_err("it cannot follow").to_string();
    assert_eq!(
        message(&normed(&["a", "z"], false)),
        "z.weight, read by op3 aten.linear.default in z at model.py:4, is held by no stage of the plan"
    );
    assert_eq!(
        message(&normed(&["b", "a"], false)),
        "no stage can run op3 aten.linear.default in a at model.py:4: what it and the ops that must stay with it read \
         is held together by stages [0], and its operands are made in stage 1"
    );
    let other = mlp(1, 4);
    assert!(matches!(partition.follow(&other, &other, &[]), Err(PartitionError::OtherGraph(_))));
}

#[test]
fn values_that_cannot_be_sent_pull_their_users_along() {
    let build = |whole: bool| {
        let mut builder = GraphBuilder::new("Pull");
        let input = builder.input(DType::Float32, &[B, Dim::fixed(8)]);
        let first = builder.linear(input, 8, "first");
        let norm = if whole { builder.op("aten.norm.Scalar", vec![Arg::Value(input)], &[]) } else { first };
        let second = builder.linear(first, 8, "second");
        let scaled = builder.pointwise("aten.div.Tensor", &[second, norm]);
        builder.finish(&[scaled])
    };
    let (plain, pulled) = (build(false), build(true));
    let partition = divide(&plain, &[0, 1, 3]);
    let followed = partition.follow(&plain, &pulled, &[]).expect("the norm moves to the second stage");
    check(&pulled, &followed);
    assert_eq!(followed.stages[1].ops.len(), 3);
}
