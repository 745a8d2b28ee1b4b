//! From a graph and its Blocks to a chain.

use std::collections::{BTreeMap, BTreeSet};

use rannc_cost::{Blocks, OpWork, Operation, Poly, SavedTensors, base_name, tensor_bytes};
use rannc_ir::{Analysis, DType, Entity as _, Graph, OpId, OpRun, ParamId, ValueDef, ValueId};
use rannc_plan::{ReduceDType, params_beside_spans};

use crate::settings::Settings;

use super::conversions::{Conversions, conversions};
use super::spans::spans;
use super::spec::{
    Affine, BatchSpec, BlockSpec, ChainSpec, CloneSpec, ConversionSpec, CrossingSpec, InputSpec, KeptSpec, OutputSpec,
    SpanSpec, StateSpec,
};

/// Describes the Blocks of a graph, and its Spans, on the host's processor or on accelerators.
pub(crate) fn extract(
    graph: &Graph,
    analysis: &Analysis,
    blocks: &Blocks,
    spans: &Blocks,
    host: bool,
    settings: &Settings,
) -> ChainSpec {
    let alone = extract_blocks(graph, analysis, spans, host, settings).blocks;
    let places = |ops: OpRun| {
        let place = |op: u32| blocks.blocks.partition_point(|block| block.ops.first < op);
        place(ops.first)..place(ops.end)
    };
    let all = spans.blocks.iter().zip(alone).map(|(span, BlockSpec { left_bytes, .. })| SpanSpec {
        blocks: places(span.ops),
        kind: span.kind,
        left_bytes,
    });
    let spans = all.filter(|span| span.blocks.len() > 1).collect();
    ChainSpec { spans, ..extract_blocks(graph, analysis, blocks, host, settings) }
}

fn extract_blocks(graph: &Graph, analysis: &Analysis, blocks: &Blocks, host: bool, settings: &Settings) -> ChainSpec {
    let Settings { batch_rows, reduce_dtype: reduce, .. } = *settings;
    let mut extractor = Extractor {
        graph,
        analysis,
        host,
        batch_rows,
        reduce,
        block_of: analysis.main_ops.iter().map(|_| 0).collect(),
        states: BTreeMap::new(),
        first_uses: BTreeMap::new(),
        clones: BTreeMap::new(),
        cloned_bytes: Vec::new(),
        uses: BTreeMap::new(),
        saved_by: BTreeMap::new(),
        inputs: BTreeMap::new(),
        conversions: conversions(graph, analysis),
        beside_spans: params_beside_spans(graph, analysis),
        converted: BTreeMap::new(),
    };
    for (place, block) in blocks.blocks.iter().enumerate() {
        extractor.block_of[block.ops.first as usize..block.ops.end as usize].fill(place);
    }
    let mut spec = ChainSpec::default();
    let spans = spans(graph, analysis, blocks);
    for (place, block) in blocks.blocks.iter().enumerate() {
        let ops = &analysis.main_ops[block.ops.first as usize..block.ops.end as usize];
        spec.blocks.push(BlockSpec { kind: block.kind, span: spans[place], ..extractor.block(place, ops) });
    }
    extractor.outputs(blocks.blocks.len());
    extractor.finish(spec)
}

struct Extractor<'a> {
    graph: &'a Graph,
    analysis: &'a Analysis,
    /// True when ops run on the host's processor.
    host: bool,
    batch_rows: u64,
    reduce: ReduceDType,
    /// Block of each main op.
    block_of: Vec<usize>,
    /// Blocks that read each parameter, buffer and constant.
    states: BTreeMap<ValueId, Vec<usize>>,
    /// The main op that uses each of them first.
    first_uses: BTreeMap<ValueId, usize>,
    /// Blocks that each batch-free op is cloned for, and that of each other op that runs once a step.
    clones: BTreeMap<OpId, Vec<usize>>,
    /// What each of them keeps that nobody else knows, by Block.
    cloned_bytes: Vec<(usize, OpId, Affine)>,
    /// Blocks that use each Value of a main op, other than the one that makes it.
    uses: BTreeMap<ValueId, Vec<usize>>,
    /// Blocks that save each storage.
    saved_by: BTreeMap<ValueId, Vec<usize>>,
    /// Blocks that use each input, batch-free ops for them included.
    inputs: BTreeMap<ValueId, Vec<usize>>,
    /// The ops that make working copies.
    conversions: Conversions,
    /// Parameters that no Span has for itself.
    beside_spans: BTreeSet<ParamId>,
    /// Blocks that use the result of each of the ops that make working copies.
    converted: BTreeMap<OpId, Vec<usize>>,
}

impl Extractor<'_> {
    /// True for a working copy, which the Stage has anyway.
    fn is_copy(&self, value: ValueId) -> bool {
        matches!(self.graph.values[value].def, ValueDef::Op { op, .. } if self.conversions.param_of.contains_key(&op))
    }

    fn affine(&self, amount: Poly) -> Affine {
        let (fixed, per_row) = amount.chord(self.batch_rows);
        Affine { fixed, per_row }
    }

    fn block(&mut self, place: usize, ops: &[OpId]) -> BlockSpec {
        let mut block = BlockSpec::default();
        let mut private_bytes = Poly::default();
        for &op in ops {
            if self.analysis.once[op] {
                note(self.clones.entry(op).or_default(), place);
            } else {
                block.work.push(OpWork::new(&Operation::new(self.graph, op)));
                private_bytes += self.op(place, op, &mut block);
            }
            self.operands(place, op, &mut private_bytes, &mut block);
        }
        block.private_bytes = self.affine(private_bytes);
        block
    }

    /// Notes what an op saves and needs as temporary memory; returns what it saves for itself.
    fn op(&mut self, place: usize, op: OpId, block: &mut BlockSpec) -> Poly {
        let operation = Operation::new(self.graph, op);
        block.workspace_bytes.push(self.affine(operation.workspace_bytes()));
        block.waiting_bytes += self.affine(operation.waiting_bytes());
        let saved = SavedTensors::new(&operation, self.host);
        for value in saved.values {
            if !self.is_copy(value) {
                note(self.saved_by.entry(value).or_default(), place);
            }
        }
        saved.private_bytes
    }

    /// Notes the operands of an op, and the batch-free ops behind them.
    fn operands(&mut self, place: usize, op: OpId, private_bytes: &mut Poly, block: &mut BlockSpec) {
        let (mut open, user) = (self.graph.ops[op].operands(), op.index());
        while let Some(value) = open.pop() {
            match self.graph.values[value].def {
                ValueDef::Input(_) => {
                    note(self.inputs.entry(value).or_default(), place);
                }
                ValueDef::Param(_) | ValueDef::Buffer(_) | ValueDef::Constant(_) => {
                    note(self.states.entry(value).or_default(), place);
                    self.first_uses.entry(value).or_insert(user);
                }
                ValueDef::Op { op, .. } => match self.analysis.main_index[op] {
                    Some(made) if self.block_of[made as usize] != place => {
                        note(self.uses.entry(value).or_default(), place);
                    }
                    Some(_) => {}
                    None if let Some(&param) = self.conversions.param_of.get(&op) => {
                        note(self.states.entry(param).or_default(), place);
                        self.first_uses.entry(param).or_insert(user);
                        note(self.converted.entry(op).or_default(), place);
                    }
                    None if note(self.clones.entry(op).or_default(), place) => {
                        open.extend(self.graph.ops[op].operands());
                        if self.analysis.once[op] {
                            continue;
                        }
                        let own_bytes = self.op(place, op, block);
                        *private_bytes += own_bytes;
                        self.cloned_bytes.push((place, op, self.affine(own_bytes)));
                    }
                    None => {}
                },
            }
        }
    }

    /// Outputs that depend on no input are made in the last Stage.
    fn outputs(&mut self, blocks: usize) {
        let mut open: Vec<ValueId> = self.graph.outputs.clone();
        let mut seen = BTreeSet::new();
        while let Some(value) = open.pop() {
            match self.graph.values[value].def {
                ValueDef::Param(_) | ValueDef::Buffer(_) | ValueDef::Constant(_) => {
                    note(self.states.entry(value).or_default(), blocks - 1);
                }
                ValueDef::Op { op, .. } if self.analysis.batch_free[op] && seen.insert(op) => {
                    note(self.clones.entry(op).or_default(), blocks - 1);
                    open.extend(self.graph.ops[op].operands());
                }
                ValueDef::Input(_) | ValueDef::Op { .. } => {}
            }
        }
    }

    fn finish(self, mut spec: ChainSpec) -> ChainSpec {
        spec.states = self.states.iter().map(|(&value, blocks)| self.state(value, blocks)).collect();
        for (&op, blocks) in &self.clones {
            let work = OpWork::new(&Operation::new(self.graph, op));
            let once = self.analysis.once[op];
            match blocks[..] {
                [block] if !once => spec.blocks[block].work.push(work),
                _ => spec.clones.push(CloneSpec { work, blocks: blocks.clone(), once }),
            }
            if once {
                spec.states.push(StateSpec {
                    bytes: self.once_bytes(op),
                    blocks: blocks.clone(),
                    ..StateSpec::default()
                });
            }
        }
        for (&op, blocks) in &self.converted {
            // One kernel makes many copies.
            let mut work = OpWork::new(&Operation::new(self.graph, op));
            work.forward.launches = 0.0;
            spec.conversions.push(ConversionSpec { work, blocks: blocks.clone() });
        }
        let mut kept: BTreeMap<ValueId, KeptSpec> = BTreeMap::new();
        for (&root, saved_by) in self.saved_by.iter().filter(|(root, _)| !self.is_made_once(**root)) {
            kept.insert(root, KeptSpec { saved_by: saved_by.clone(), ..self.storage(root) });
        }
        for (value, crossing) in self.uses.iter().filter_map(|(&value, blocks)| self.crossing(value, blocks)) {
            // A view of an input, a parameter or a batch-free result is a storage of its own to those who receive it.
            let root = self.root(value);
            let root = if self.made_by(root).is_some() { root } else { value };
            kept.entry(root).or_insert_with(|| self.storage(root)).crossings.push(crossing.clone());
            spec.crossings.push(crossing);
        }
        self.note_left(&mut spec, &kept);
        spec.kept = kept.into_values().collect();
        self.note_outputs(&mut spec);
        spec.batch = self.batch();
        spec
    }

    fn batch(&self) -> BatchSpec {
        let bytes = |value: ValueId| self.affine(tensor_bytes(&self.graph.values[value]));
        let has_rows = |value: ValueId| self.analysis.row_dims[value].is_some();
        let inputs = self.inputs.iter().map(|(&value, used_by)| InputSpec {
            bytes: bytes(value),
            has_rows: has_rows(value),
            used_by: used_by.clone(),
        });
        let outputs = BTreeSet::from_iter(self.graph.outputs.iter().copied());
        let output = |value: ValueId| {
            let requires_grad = self.graph.values[value].requires_grad;
            Some(OutputSpec { bytes: bytes(value), requires_grad, made_by: self.made_by(value)? })
        };
        let outputs = outputs.into_iter().filter(|&value| has_rows(value)).filter_map(output);
        BatchSpec { inputs: inputs.collect(), outputs: outputs.collect() }
    }

    /// True for what is there for a whole step, and counts as state.
    fn is_made_once(&self, value: ValueId) -> bool {
        matches!(self.graph.values[value].def, ValueDef::Op { op, .. } if self.analysis.once[op])
    }

    /// What an op that runs once a step holds until its end: what it makes and saves, and gradients that are summed there.
    /// Those of converted parameters are taken as they come.
    fn once_bytes(&self, op: OpId) -> f64 {
        let operation = Operation::new(self.graph, op);
        let converts = matches!(base_name(&self.graph.ops[op].target), "to" | "_to_copy");
        let made = self.graph.ops[op].results.iter().filter(|&&value| self.root(value) == value);
        let made = made.map(|&value| {
            let tensor = &self.graph.values[value];
            let times = if tensor.requires_grad && !converts { 2.0 } else { 1.0 };
            times * tensor_bytes(tensor).at(0)
        });
        made.sum::<f64>() + SavedTensors::new(&operation, self.host).private_bytes.at(0)
    }

    fn storage(&self, root: ValueId) -> KeptSpec {
        let bytes = self.affine(tensor_bytes(&self.graph.values[root]));
        KeptSpec { bytes, made_by: self.made_by(root), ..KeptSpec::default() }
    }

    /// The earliest Value of a Value's storage.
    fn root(&self, mut value: ValueId) -> ValueId {
        while let Some(base) = self.graph.values[value].alias_of.filter(|base| base.index() < value.index()) {
            value = base;
        }
        value
    }

    /// The Block whose main op makes a Value.
    fn made_by(&self, value: ValueId) -> Option<usize> {
        let ValueDef::Op { op, .. } = self.graph.values[value].def else { return None };
        Some(self.block_of[self.analysis.main_index[op]? as usize])
    }

    /// What is left of the forward of each Block that runs alone, beside what is known to it alone.
    fn note_left(&self, spec: &mut ChainSpec, kept: &BTreeMap<ValueId, KeptSpec>) {
        let mut left: BTreeSet<(usize, ValueId)> = BTreeSet::new();
        for (&root, storage) in kept {
            let makers = storage.made_by.map(|place| (place, root));
            let uses = storage.saved_by.iter().chain(storage.crossings.iter().map(|crossing| &crossing.made_by));
            left.extend(makers.into_iter().filter(|(place, _)| uses.clone().any(|other| other == place)));
        }
        for &output in &self.graph.outputs {
            let root = self.root(output);
            left.extend(self.made_by(root).map(|place| (place, root)));
        }
        for (&root, saved_by) in self.saved_by.iter().filter(|(root, _)| !self.is_made_once(**root)) {
            // Of batch-free ops, a Block runs alone with those that no other one uses.
            if let ValueDef::Op { op, .. } = self.graph.values[root].def
                && let Some([only]) = self.clones.get(&op).map(Vec::as_slice)
                && saved_by.contains(only)
            {
                left.insert((*only, root));
            }
        }
        spec.blocks.iter_mut().for_each(|block| block.left_bytes += block.private_bytes);
        for &(place, op, Affine { fixed, per_row }) in &self.cloned_bytes {
            if self.clones[&op].len() > 1 {
                spec.blocks[place].left_bytes += Affine { fixed: -fixed, per_row: -per_row };
            }
        }
        for (place, root) in left {
            let bytes = self.affine(tensor_bytes(&self.graph.values[root]));
            spec.blocks[place].left_bytes += bytes;
        }
    }

    fn note_outputs(&self, spec: &mut ChainSpec) {
        for value in BTreeSet::from_iter(&self.graph.outputs) {
            let tensor = &self.graph.values[*value];
            let ValueDef::Op { op, .. } = tensor.def else { continue };
            let Some(made) = self.analysis.main_index[op] else { continue };
            spec.blocks[self.block_of[made as usize]].output_bytes += self.affine(tensor_bytes(tensor));
        }
    }

    fn state(&self, value: ValueId, blocks: &[usize]) -> StateSpec {
        let tensor = &self.graph.values[value];
        let trainable = matches!(tensor.def, ValueDef::Param(_)) && tensor.requires_grad;
        let bytes = tensor_bytes(tensor).at(0);
        let bytes_in = |dtype: DType| bytes / tensor.dtype.bytes() as f64 * dtype.bytes() as f64;
        let message = self.reduce.of(tensor.dtype);
        let accumulated_bytes = bytes_in(ReduceDType::Float32.of(tensor.dtype));
        let copy_bytes =
            self.conversions.copy_of.get(&value).map_or(0.0, |&copy| tensor_bytes(&self.graph.values[copy]).at(0));
        let beside_spans = matches!(tensor.def, ValueDef::Param(param) if self.beside_spans.contains(&param));
        let first_use = self.first_uses.get(&value).copied().unwrap_or(usize::MAX);
        StateSpec {
            bytes,
            message_bytes: bytes_in(message),
            own_type_travels: message == tensor.dtype,
            accumulated_bytes,
            copy_bytes,
            trainable,
            beside_spans,
            blocks: blocks.to_vec(),
            first_use,
        }
    }

    fn crossing(&self, value: ValueId, blocks: &[usize]) -> Option<(ValueId, CrossingSpec)> {
        let tensor = &self.graph.values[value];
        let ValueDef::Op { op, .. } = tensor.def else { return None };
        let made_by = self.block_of[self.analysis.main_index[op]? as usize];
        let bytes = self.affine(tensor_bytes(tensor));
        let requires_grad = tensor.requires_grad;
        Some((value, CrossingSpec { bytes, requires_grad, made_by, used_by: blocks.to_vec() }))
    }
}

/// Appends a Block to an increasing list; false if it stands there already.
fn note(places: &mut Vec<usize>, place: usize) -> bool {
    let fresh = places.last() != Some(&place);
    if fresh {
        places.push(place);
    }
    fresh
}
