//! Dividing Graphs over Stages.

use std::collections::{BTreeSet, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};

use proptest::prelude::*;
use rannc_ir::testing::{GraphBuilder, graphs, mlp};
use rannc_ir::{Analysis, Arg, DType, Dim, Graph, OpId, OpRun, ParamId, ValueDef, ValueId};
use rannc_plan::{InputPart, OutputSource, Partition, PartitionError};

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

/// What holds for every partition, however it was made.
fn check(graph: &Graph, partition: &Partition) {
    let analysis = Analysis::new(graph);
    let mut stage_of: HashMap<OpId, u32> = HashMap::new();
    for (stage, part) in (0..).zip(&partition.stages) {
        assert!(part.ops.is_sorted(), "stage {stage} runs in order");
        for &op in part.ops.iter().filter(|&&op| !analysis.batch_free[op]) {
            assert_eq!(stage_of.insert(op, stage), None, "{op} runs in one stage");
        }
    }
    assert_eq!(stage_of.len(), analysis.main_ops.len(), "every main op runs");
    for group in &analysis.groups {
        let stages: BTreeSet<u32> = group.ops.iter().map(|op| stage_of[op]).collect();
        assert_eq!(stages.len(), 1, "{} split {group:?}", graph.name);
    }
    check_closed(graph, partition);
    check_meaning(graph, partition);
    check_crossings(graph, partition, &analysis, &stage_of);
    check_outputs(graph, partition);
    check_stored(graph, partition, &analysis);
}

/// A stage's ops read only what the stage makes, receives or holds, and it holds nothing else.
fn check_closed(graph: &Graph, partition: &Partition) {
    for part in &partition.stages {
        let mut known: BTreeSet<ValueId> = part.receives.iter().copied().collect();
        known.extend(part.inputs.iter().map(|input| graph.inputs[input.index as usize]));
        known.extend(part.params.iter().map(|&param| graph.params[param].value));
        known.extend(part.buffers.iter().map(|&buffer| graph.buffers[buffer].value));
        known.extend(part.constants.iter().map(|&constant| graph.constants[constant].value));
        let mut used: BTreeSet<ValueId> = part.outputs.iter().chain(&part.sends).copied().collect();
        used.extend(part.mutated_buffers.iter().map(|&buffer| graph.buffers[buffer].value));
        used.extend(part.mutated_buffers.iter().filter_map(|&buffer| graph.buffers[buffer].update));
        let mut made = known.clone();
        for &op in &part.ops {
            let operands = graph.ops[op].operands();
            assert!(operands.iter().all(|operand| made.contains(operand)), "{op} lacks an operand");
            used.extend(operands);
            made.extend(&graph.ops[op].results);
        }
        assert!(used.iter().all(|value| made.contains(value)), "{part:?} lacks what it gives");
        assert!(known.iter().all(|value| used.contains(value)), "{part:?} holds what it does not use");
    }
}

fn check_crossings(graph: &Graph, partition: &Partition, analysis: &Analysis, stage_of: &HashMap<OpId, u32>) {
    assert!(partition.crossings.is_sorted_by_key(|crossing| crossing.value));
    let mut expected: BTreeSet<(ValueId, u32, u32)> = BTreeSet::new();
    for (consumer, &to) in stage_of {
        for value in graph.ops[*consumer].operands() {
            if let ValueDef::Op { op, .. } = graph.values[value].def
                && let Some(&from) = stage_of.get(&op)
                && from != to
            {
                assert!(from < to, "{value} flows back");
                expected.insert((value, from, to));
            }
        }
    }
    let mut found = BTreeSet::new();
    for crossing in &partition.crossings {
        assert_eq!(Some(crossing.row_dim), analysis.row_dims[crossing.value]);
        assert_eq!(crossing.requires_grad, graph.values[crossing.value].requires_grad);
        assert!(partition.stages[crossing.from as usize].sends.contains(&crossing.value));
        for &to in &crossing.to {
            assert!(partition.stages[to as usize].receives.contains(&crossing.value));
            found.insert((crossing.value, crossing.from, to));
        }
    }
    assert_eq!(found, expected);
    let count = |list: fn(&rannc_plan::StagePart) -> usize| partition.stages.iter().map(list).sum::<usize>();
    assert_eq!(count(|part| part.sends.len()), partition.crossings.len());
    assert_eq!(count(|part| part.receives.len()), found.len());
}

fn check_outputs(graph: &Graph, partition: &Partition) {
    let values: Vec<ValueId> = partition.outputs.iter().map(|output| output.value).collect();
    assert_eq!(values, graph.outputs);
    for output in &partition.outputs {
        match output.source {
            OutputSource::Stage(stage) => {
                let made = &partition.stages[stage as usize].outputs;
                assert_eq!(made.iter().filter(|&&value| value == output.value).count(), 1);
            }
            OutputSource::Input(input) => assert_eq!(graph.inputs[input as usize], output.value),
        }
    }
}

fn check_stored(graph: &Graph, partition: &Partition, analysis: &Analysis) {
    for (id, buffer) in graph.buffers.iter() {
        let changers = partition.stages.iter().filter(|part| part.mutated_buffers.contains(&id)).count();
        assert_eq!(changers, usize::from(analysis.storages.is_changed(buffer.value)), "{id}");
    }
    for id in graph.params.ids() {
        let holders = (0..).zip(&partition.stages).filter(|(_, part)| part.params.contains(&id));
        let holders: Vec<u32> = holders.map(|(stage, _)| stage).collect();
        let tied = partition.tied.iter().find(|tied| tied.param == id);
        assert_eq!(tied.map(|tied| &tied.stages), (holders.len() > 1).then_some(&holders), "{id}");
    }
}

/// Runs Ops on storages whose contents are hashes of all that went into them.
#[derive(Default)]
struct Machine {
    contents: Vec<u64>,
    storage: HashMap<ValueId, usize>,
    /// What each Op read.
    read: HashMap<OpId, Vec<u64>>,
}

fn mix(what: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    what.hash(&mut hasher);
    hasher.finish()
}

impl Machine {
    fn hold(&mut self, value: ValueId, content: u64) {
        self.storage.insert(value, self.contents.len());
        self.contents.push(content);
    }

    fn hold_leaf(&mut self, value: ValueId) {
        self.hold(value, mix(value));
    }

    fn content(&self, value: ValueId) -> u64 {
        self.contents[self.storage[&value]]
    }

    fn run(&mut self, graph: &Graph, ops: impl IntoIterator<Item = OpId>) {
        for id in ops {
            let op = &graph.ops[id];
            let read: Vec<u64> = op.operands().into_iter().map(|value| self.content(value)).collect();
            for (place, value) in op.mutates.iter().enumerate() {
                self.contents[self.storage[value]] = mix((id, "changed", place, &read));
            }
            for (place, &result) in op.results.iter().enumerate() {
                match graph.values[result].alias_of {
                    Some(base) => drop(self.storage.insert(result, self.storage[&base])),
                    None => self.hold(result, mix((id, "made", place, &read))),
                }
            }
            self.read.insert(id, read);
        }
    }
}

/// Every op, cloned ones included, reads in its stage what it reads in the whole graph, and outputs
/// and buffers end up the same.
fn check_meaning(graph: &Graph, partition: &Partition) {
    let mut whole = Machine::default();
    let leaves = graph.values.iter().filter(|(_, value)| !matches!(value.def, ValueDef::Op { .. }));
    leaves.for_each(|(id, _)| whole.hold_leaf(id));
    whole.run(graph, graph.ops.ids());

    let mut sent: HashMap<ValueId, u64> = HashMap::new();
    let mut machines = Vec::new();
    for part in &partition.stages {
        let mut machine = Machine::default();
        part.inputs.iter().for_each(|input| machine.hold_leaf(input.value));
        part.params.iter().for_each(|&param| machine.hold_leaf(graph.params[param].value));
        part.buffers.iter().for_each(|&buffer| machine.hold_leaf(graph.buffers[buffer].value));
        part.constants.iter().for_each(|&constant| machine.hold_leaf(graph.constants[constant].value));
        part.receives.iter().for_each(|value| machine.hold(*value, sent[value]));
        machine.run(graph, part.ops.iter().copied());
        for (op, read) in &machine.read {
            assert_eq!(read, &whole.read[op], "{op}");
        }
        sent.extend(part.sends.iter().map(|&value| (value, machine.content(value))));
        for buffer in part.mutated_buffers.iter().map(|&buffer| &graph.buffers[buffer]) {
            let stored = buffer.update.unwrap_or(buffer.value);
            assert_eq!(machine.content(stored), whole.content(stored), "{}", buffer.name);
        }
        machines.push(machine);
    }
    for output in &partition.outputs {
        let content = match output.source {
            OutputSource::Stage(stage) => machines[stage as usize].content(output.value),
            OutputSource::Input(_) => mix(output.value),
        };
        assert_eq!(content, whole.content(output.value), "output {}", output.index);
    }
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
        let followed = partition.follow(&graph, &graph).expect("its own partition shows that there is one");
        check(&graph, &followed);
        let held = |partition: &Partition, stage: usize| -> BTreeSet<ParamId> {
            partition.stages[stage].params.iter().copied().collect()
        };
        for stage in 0..partition.stages.len() {
            prop_assert!(held(&followed, stage).is_subset(&held(&partition, stage)));
        }
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
    check(&graph, &partition.follow(&graph, &graph).expect("it follows itself"));
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
    check(&graph, &partition.follow(&graph, &graph).expect("it follows itself"));
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
    let followed = partition.follow(&training, &evaluation).expect("all is held somewhere");
    check(&evaluation, &followed);
    let buffers = followed.stages.iter().map(|part| part.buffers.len());
    assert_eq!(buffers.collect::<Vec<_>>(), [1, 2]);
    assert!(followed.stages.iter().all(|part| part.mutated_buffers.is_empty()));
}

#[test]
fn a_graph_that_cannot_follow_names_the_op() {
    let training = normed(&["a", "b"], true);
    let partition = divide(&training, &[0, 2, 4]);
    let message = |other: &Graph| partition.follow(&training, other).expect_err("it cannot follow").to_string();
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
    assert!(matches!(partition.follow(&other, &other), Err(PartitionError::OtherGraph(_))));
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
    let followed = partition.follow(&plain, &pulled).expect("the norm moves to the second stage");
    check(&pulled, &followed);
    assert_eq!(followed.stages[1].ops.len(), 3);
}
