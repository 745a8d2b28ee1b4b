//! Does a Partition make of its Graph what the Graph means? It shares no code with what divides.

use std::collections::{BTreeSet, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};

use rannc_ir::{Analysis, Arg, Graph, Op, OpId, ValueDef, ValueId};
use thiserror::Error;

use super::parts::{OutputSource, Partition, SpanPart, StagePart};

/// How a Partition is not one of its Graph.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("the partition does not make up its graph: {0}")]
pub struct PartitionFault(String);

fn require(holds: bool, fault: impl FnOnce() -> String) -> Result<(), PartitionFault> {
    if holds { Ok(()) } else { Err(PartitionFault(fault())) }
}

impl Partition {
    /// Checks what holds for every Partition of `graph`, however it was made: each main Op runs in one Stage, Ops that
    /// stay together in the same; a Stage holds and receives what its Ops use, and nothing else; Values cross only
    /// where their rows are told; Ops read, and the Graph gives out, what they do undivided; tied Params are told. Where
    /// there are Spans, they hold each Op of their Stage once and in order, and take and give what they say.
    ///
    /// # Errors
    /// The first of these that does not hold.
    pub fn verify(&self, graph: &Graph) -> Result<(), PartitionFault> {
        let analysis = Analysis::new(graph);
        check_ids(graph, self)?;
        let stage_of = check_complete(graph, self, &analysis)?;
        self.stages.iter().try_for_each(|part| check_closed(graph, part))?;
        self.stages.iter().try_for_each(|part| check_spans(graph, &analysis, part))?;
        check_crossings(graph, self, &analysis, &stage_of)?;
        check_outputs(graph, self)?;
        check_stored(graph, self, &analysis)?;
        check_meaning(graph, &analysis, self)
    }
}

/// Checks all that indexing relies on.
fn check_ids(graph: &Graph, partition: &Partition) -> Result<(), PartitionFault> {
    for (stage, part) in partition.stages.iter().enumerate() {
        let inputs = part.inputs.iter().all(|input| graph.inputs.get(input.index as usize) == Some(&input.value));
        let values = part.receives.iter().chain(&part.sends).chain(&part.outputs);
        let exists = inputs
            && part.ops.iter().all(|&op| graph.ops.get(op).is_some())
            && part.params.iter().all(|&param| graph.params.get(param).is_some())
            && part.buffers.iter().chain(&part.mutated_buffers).all(|&buffer| graph.buffers.get(buffer).is_some())
            && part.constants.iter().all(|&constant| graph.constants.get(constant).is_some())
            && part.functions().all(|span| {
                span.ops.iter().all(|&op| graph.ops.get(op).is_some())
                    && span.takes.iter().chain(&span.gives).all(|&value| graph.values.get(value).is_some())
            })
            && values.copied().all(|value| graph.values.get(value).is_some());
        require(exists, || format!("stage {stage} has what the graph does not have"))?;
    }
    for crossing in &partition.crossings {
        let stages = partition.stages.len();
        let exists = graph.values.get(crossing.value).is_some()
            && crossing.to.iter().chain([&crossing.from]).all(|&stage| (stage as usize) < stages);
        require(exists, || format!("{} crosses from or to a stage that does not exist", crossing.value))?;
    }
    Ok(())
}

/// The Stage of each main Op.
fn check_complete(
    graph: &Graph,
    partition: &Partition,
    analysis: &Analysis,
) -> Result<HashMap<OpId, u32>, PartitionFault> {
    let mut stage_of: HashMap<OpId, u32> = HashMap::new();
    for (stage, part) in (0..).zip(&partition.stages) {
        require(part.ops.is_sorted_by(|a, b| a < b), || format!("stage {stage} does not run in order"))?;
        for &op in part.ops.iter().filter(|&&op| !analysis.batch_free[op]) {
            require(stage_of.insert(op, stage).is_none(), || format!("{op} runs in two stages"))?;
        }
    }
    require(stage_of.len() == analysis.main_ops.len(), || "a main op does not run".to_owned())?;
    for group in &analysis.groups {
        let stages: BTreeSet<u32> = group.ops.iter().map(|op| stage_of[op]).collect();
        require(stages.len() == 1, || format!("{} splits {group:?}", graph.name))?;
    }
    Ok(stage_of)
}

/// A Stage's Ops read only what the Stage makes, receives or holds, and it holds nothing else.
fn check_closed(graph: &Graph, part: &StagePart) -> Result<(), PartitionFault> {
    let mut known: BTreeSet<ValueId> = part.receives.iter().copied().collect();
    known.extend(part.inputs.iter().map(|input| input.value));
    known.extend(part.params.iter().map(|&param| graph.params[param].value));
    known.extend(part.buffers.iter().map(|&buffer| graph.buffers[buffer].value));
    known.extend(part.constants.iter().map(|&constant| graph.constants[constant].value));
    let mut used: BTreeSet<ValueId> = part.outputs.iter().chain(&part.sends).copied().collect();
    used.extend(part.mutated_buffers.iter().map(|&buffer| graph.buffers[buffer].value));
    used.extend(part.mutated_buffers.iter().filter_map(|&buffer| graph.buffers[buffer].update));
    let mut made = known.clone();
    for &op in &part.ops {
        let operands = graph.ops[op].operands();
        require(operands.iter().all(|operand| made.contains(operand)), || format!("{op} lacks an operand"))?;
        used.extend(operands);
        made.extend(&graph.ops[op].results);
    }
    require(used.iter().all(|value| made.contains(value)), || format!("{part:?} lacks what it gives"))?;
    require(known.iter().all(|value| used.contains(value)), || format!("{part:?} holds what it does not use"))
}

/// Spans hold the Stage's Ops once; each takes what was there before it, all that it uses and nothing else; what the
/// Stage gives is there in the end.
fn check_spans(graph: &Graph, analysis: &Analysis, part: &StagePart) -> Result<(), PartitionFault> {
    if part.functions().next().is_none() {
        return Ok(());
    }
    let mut ops: Vec<OpId> = part.functions().flat_map(|span| &span.ops).copied().collect();
    let each = part.spans.iter().flat_map(|span| &span.ops);
    require(each.filter(|&&op| !analysis.batch_free[op]).is_sorted(), || "the spans are in no order".to_owned())?;
    ops.sort_unstable();
    require(ops == part.ops, || format!("the spans hold {ops:?}, the stage {:?}", part.ops))?;
    let mut there: BTreeSet<ValueId> = part.receives.iter().copied().collect();
    there.extend(part.inputs.iter().map(|input| input.value));
    there.extend(part.params.iter().map(|&param| graph.params[param].value));
    there.extend(part.buffers.iter().map(|&buffer| graph.buffers[buffer].value));
    there.extend(part.constants.iter().map(|&constant| graph.constants[constant].value));
    for span in part.functions() {
        let makes: BTreeSet<ValueId> = span.ops.iter().flat_map(|&op| graph.ops[op].results.iter().copied()).collect();
        let uses: BTreeSet<ValueId> = span.ops.iter().flat_map(|&op| graph.ops[op].operands()).collect();
        let takes: BTreeSet<ValueId> = span.takes.iter().copied().collect();
        let right = takes.len() == span.takes.len() && uses.difference(&makes).eq(&takes);
        require(right, || format!("a span takes {takes:?}, but uses {uses:?}"))?;
        require(takes.is_subset(&there), || format!("a span takes {takes:?} before all of it is there"))?;
        let known = |value: &ValueId| makes.contains(value) || takes.contains(value);
        require(span.gives.iter().all(known), || "a span gives what it does not have".to_owned())?;
        there.extend(&span.gives);
    }
    check_prologue_kept(graph, analysis, part)?;
    let updates = part.mutated_buffers.iter().filter_map(|&buffer| graph.buffers[buffer].update);
    let given = part.sends.iter().chain(&part.outputs).copied().chain(updates).all(|value| there.contains(&value));
    require(given, || "a stage's result is given by no span".to_owned())
}

/// No Span changes what the prologue reads or makes: it does not run again for the next part of the batch.
fn check_prologue_kept(graph: &Graph, analysis: &Analysis, part: &StagePart) -> Result<(), PartitionFault> {
    let touched = part.prologue.iter().flat_map(|span| span.takes.iter().chain(&span.gives));
    let touched: BTreeSet<ValueId> = touched.map(|&value| analysis.storages.root[value]).collect();
    let makes = |op: OpId| part.spans.iter().any(|span| span.ops.contains(&op));
    let assigned = part.mutated_buffers.iter().filter(|&&buffer| match graph.buffers[buffer].update {
        Some(update) => matches!(graph.values[update].def, ValueDef::Op { op, .. } if makes(op)),
        None => false,
    });
    let assigned = assigned.map(|&buffer| graph.buffers[buffer].value);
    let changed = part.spans.iter().flat_map(|span| &span.ops).flat_map(|&op| graph.ops[op].mutates.iter().copied());
    for value in changed.chain(assigned) {
        let kept = !touched.contains(&analysis.storages.root[value]);
        require(kept, || format!("{value}, which the prologue reads or makes, is changed after it"))?;
    }
    Ok(())
}

fn check_crossings(
    graph: &Graph,
    partition: &Partition,
    analysis: &Analysis,
    stage_of: &HashMap<OpId, u32>,
) -> Result<(), PartitionFault> {
    let sorted = partition.crossings.is_sorted_by_key(|crossing| crossing.value);
    require(sorted, || "the crossings are in no order".to_owned())?;
    let mut expected: BTreeSet<(ValueId, u32, u32)> = BTreeSet::new();
    for (consumer, &to) in stage_of {
        for value in graph.ops[*consumer].operands() {
            if let ValueDef::Op { op, .. } = graph.values[value].def
                && let Some(&from) = stage_of.get(&op)
                && from != to
            {
                require(from < to, || format!("{value} flows back"))?;
                expected.insert((value, from, to));
            }
        }
    }
    let mut found = BTreeSet::new();
    for crossing in &partition.crossings {
        let value = crossing.value;
        require(Some(crossing.row_dim) == analysis.row_dims[value], || format!("the rows of {value} lie elsewhere"))?;
        let gradient = graph.values[value].requires_grad;
        require(crossing.requires_grad == gradient, || format!("of {value} a gradient is wrong or missing"))?;
        let sends = partition.stages[crossing.from as usize].sends.contains(&value);
        require(sends, || format!("stage {} does not send {value}", crossing.from))?;
        for &to in &crossing.to {
            let receives = partition.stages[to as usize].receives.contains(&value);
            require(receives, || format!("stage {to} does not receive {value}"))?;
            found.insert((value, crossing.from, to));
        }
    }
    require(found == expected, || format!("crossings are {found:?}, not {expected:?}"))?;
    let count = |list: fn(&StagePart) -> usize| partition.stages.iter().map(list).sum::<usize>();
    let none_more =
        count(|part| part.sends.len()) == partition.crossings.len() && count(|part| part.receives.len()) == found.len();
    require(none_more, || "a stage sends or receives what does not cross".to_owned())
}

fn check_outputs(graph: &Graph, partition: &Partition) -> Result<(), PartitionFault> {
    let values: Vec<ValueId> = partition.outputs.iter().map(|output| output.value).collect();
    require(values == graph.outputs, || format!("outputs are {values:?}, not {:?}", graph.outputs))?;
    for output in &partition.outputs {
        let has = match output.source {
            OutputSource::Stage(stage) => partition
                .stages
                .get(stage as usize)
                .is_some_and(|part| part.outputs.iter().filter(|&&value| value == output.value).count() == 1),
            OutputSource::Input(input) => graph.inputs.get(input as usize) == Some(&output.value),
        };
        require(has, || format!("output {} is not made where it should be", output.index))?;
    }
    Ok(())
}

fn check_stored(graph: &Graph, partition: &Partition, analysis: &Analysis) -> Result<(), PartitionFault> {
    for (id, buffer) in graph.buffers.iter() {
        let changers = partition.stages.iter().filter(|part| part.mutated_buffers.contains(&id)).count();
        let expected = usize::from(analysis.storages.is_changed(buffer.value));
        require(changers == expected, || format!("{id} is changed by {changers} stages, not {expected}"))?;
    }
    for id in graph.params.ids() {
        let holders = (0..).zip(&partition.stages).filter(|(_, part)| part.params.contains(&id));
        let holders: Vec<u32> = holders.map(|(stage, _)| stage).collect();
        let tied = partition.tied.iter().find(|tied| tied.param == id).map(|tied| &tied.stages);
        let right = tied == (holders.len() > 1).then_some(&holders);
        require(right, || format!("{id} is held by stages {holders:?}, but said to be tied over {tied:?}"))?;
    }
    Ok(())
}

/// Runs Ops on storages whose contents are hashes of all that went into them.
#[derive(Default)]
struct Interpreter {
    /// Which part of a batch it works on: what depends on the part's rows differs by it.
    batch_part: u32,
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

impl Interpreter {
    fn hold(&mut self, value: ValueId, content: u64) {
        self.storage.insert(value, self.contents.len());
        self.contents.push(content);
    }

    fn hold_leaf(&mut self, graph: &Graph, value: ValueId) {
        let is_input = matches!(graph.values[value].def, ValueDef::Input(_));
        self.hold(value, mix((value, is_input.then_some(self.batch_part))));
    }

    fn content(&self, value: ValueId) -> u64 {
        self.contents[self.storage[&value]]
    }

    fn run(&mut self, graph: &Graph, ops: impl IntoIterator<Item = OpId>) {
        for id in ops {
            let op = &graph.ops[id];
            let mut read: Vec<u64> = op.operands().into_iter().map(|value| self.content(value)).collect();
            if depends_on_rows(graph, op) {
                read.push(self.batch_part.into());
            }
            for (place, value) in op.mutates.iter().enumerate() {
                self.contents[self.storage[value]] = mix((id, "changed", place, &read));
            }
            for (place, &result) in op.results.iter().enumerate() {
                match self.shared(graph, op, result) {
                    Some(storage) => drop(self.storage.insert(result, storage)),
                    None => self.hold(result, mix((id, "made", place, &read))),
                }
            }
            self.read.insert(id, read);
        }
    }

    /// The storage of an operand that a result shares.
    fn shared(&self, graph: &Graph, op: &Op, result: ValueId) -> Option<usize> {
        let base = graph.values[result].alias_of?;
        let root = |mut value: ValueId| {
            while let Some(base) = graph.values[value].alias_of {
                value = base;
            }
            value
        };
        // Inputs that share memory where they come from have their own here: what is read says which is meant.
        let near = op.operands().into_iter().find(|&operand| root(operand) == root(base));
        self.storage.get(&near.unwrap_or(base)).copied()
    }

    /// Holds what a prologue has left, and given, when it ran for the part of the batch before.
    fn take_over(&mut self, graph: &Graph, analysis: &Analysis, part: &StagePart, prologue: &SpanPart, before: &Self) {
        let buffers = part.mutated_buffers.iter().map(|&buffer| graph.buffers[buffer].value);
        let mutates = |op: &OpId| graph.ops[*op].mutates.iter().map(|&value| analysis.storages.root[value]);
        let changes = |value: &ValueId| prologue.ops.iter().flat_map(mutates).any(|root| root == *value);
        for value in prologue.gives.iter().copied().chain(buffers.filter(changes)) {
            self.hold(value, before.content(value));
        }
        self.read.extend(prologue.ops.iter().map(|op| (*op, before.read[op].clone())));
    }

    /// Runs Spans, each with nothing but what it takes. What several Values share of a storage is parted by that, so that a
    /// change in one Span is not seen in another unless it is given.
    fn run_spans<'s>(&mut self, graph: &Graph, part: &StagePart, spans: impl IntoIterator<Item = &'s SpanPart>) {
        for span in spans {
            let mut own = Self { batch_part: self.batch_part, ..Self::default() };
            span.takes.iter().for_each(|&value| own.hold(value, self.content(value)));
            own.run(graph, span.ops.iter().copied());
            self.read.extend(own.read.drain());
            for &value in &span.gives {
                self.hold(value, own.content(value));
            }
            // Buffers are changed where they lie.
            let buffers = part.mutated_buffers.iter().map(|&buffer| graph.buffers[buffer].value);
            for value in buffers.filter(|value| span.takes.contains(value)) {
                self.hold(value, own.content(value));
            }
        }
    }
}

/// True when an Op's results may differ between parts of a batch with equal operands.
fn depends_on_rows(graph: &Graph, op: &Op) -> bool {
    fn of_batch_size(arg: &Arg) -> bool {
        match arg {
            Arg::Dim(dim) => dim.per_row != 0,
            Arg::List(items) => items.iter().any(of_batch_size),
            _ => false,
        }
    }
    let rows = |value: &ValueId| graph.values[*value].shape.iter().any(|dim| dim.per_row != 0);
    op.opaque
        || op.region.is_some()
        || op.args.iter().chain(op.kwargs.values()).any(of_batch_size)
        || op.results.iter().any(rows)
}

/// The whole Graph on a part of a batch.
fn run_whole(graph: &Graph, batch_part: u32) -> Interpreter {
    let mut whole = Interpreter { batch_part, ..Interpreter::default() };
    let leaves = graph.values.iter().filter(|(_, value)| !matches!(value.def, ValueDef::Op { .. }));
    leaves.for_each(|(id, _)| whole.hold_leaf(graph, id));
    whole.run(graph, graph.ops.ids());
    whole
}

/// Every Op, cloned ones included, reads in its Stage what it reads in the whole Graph, and outputs and buffers end up
/// the same: with the first part of a batch, and with the next, for which the prologues do not run again.
fn check_meaning(graph: &Graph, analysis: &Analysis, partition: &Partition) -> Result<(), PartitionFault> {
    let mut prologues: Vec<Interpreter> = Vec::new();
    for batch_part in 0..2 {
        let whole = run_whole(graph, batch_part);
        let mut sent: HashMap<ValueId, u64> = HashMap::new();
        let mut stages = Vec::new();
        for (number, part) in partition.stages.iter().enumerate() {
            let mut stage = Interpreter { batch_part, ..Interpreter::default() };
            part.inputs.iter().for_each(|input| stage.hold_leaf(graph, input.value));
            part.params.iter().for_each(|&param| stage.hold_leaf(graph, graph.params[param].value));
            part.buffers.iter().for_each(|&buffer| stage.hold_leaf(graph, graph.buffers[buffer].value));
            part.constants.iter().for_each(|&constant| stage.hold_leaf(graph, graph.constants[constant].value));
            for value in &part.receives {
                let content = sent.get(value).copied();
                let content =
                    content.ok_or_else(|| PartitionFault(format!("{value} is received before it is sent")))?;
                stage.hold(*value, content);
            }
            if part.functions().next().is_none() {
                stage.run(graph, part.ops.iter().copied());
            } else {
                if batch_part == 0 {
                    stage.run_spans(graph, part, &part.prologue);
                } else if let Some(prologue) = &part.prologue {
                    stage.take_over(graph, analysis, part, prologue, &prologues[number]);
                }
                stage.run_spans(graph, part, &part.spans);
            }
            check_stage(graph, part, &stage, &whole)?;
            sent.extend(part.sends.iter().map(|&value| (value, stage.content(value))));
            stages.push(stage);
        }
        check_given(partition, &stages, &whole)?;
        prologues = stages;
    }
    Ok(())
}

/// A Stage's Ops read, and its buffers end up as, what they do in the whole Graph.
fn check_stage(
    graph: &Graph,
    part: &StagePart,
    stage: &Interpreter,
    whole: &Interpreter,
) -> Result<(), PartitionFault> {
    for (op, read) in &stage.read {
        require(read == &whole.read[op], || format!("{op} reads something else"))?;
    }
    for buffer in part.mutated_buffers.iter().map(|&buffer| &graph.buffers[buffer]) {
        let stored = buffer.update.unwrap_or(buffer.value);
        let right = stage.content(stored) == whole.content(stored);
        require(right, || format!("{} ends up as something else", buffer.name))?;
    }
    Ok(())
}

/// The outputs are those of the whole Graph.
fn check_given(partition: &Partition, stages: &[Interpreter], whole: &Interpreter) -> Result<(), PartitionFault> {
    for output in &partition.outputs {
        let content = match output.source {
            OutputSource::Stage(stage) => stages[stage as usize].content(output.value),
            OutputSource::Input(_) => mix((output.value, Some(whole.batch_part))),
        };
        require(content == whole.content(output.value), || format!("output {} is something else", output.index))?;
    }
    Ok(())
}
