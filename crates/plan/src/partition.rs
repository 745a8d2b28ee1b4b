//! Dividing a Graph's Ops over Stages, and dividing a second Graph of the same model alike.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use rannc_ir::{Analysis, Arena, Graph, OpId, OpPlace, OpRun, ParamId, ValueDef, ValueId};
use thiserror::Error;

use crate::parts::{Crossing, InputPart, OutputPart, OutputSource, Partition, StagePart, TiedParam};

/// Why a Graph cannot be divided so.
#[derive(Debug, Error)]
pub enum PartitionError {
    /// No Stages are given.
    #[error("a partition needs at least one stage")]
    NoStages,
    /// A Stage does not begin where the one before it ends, or has no Ops.
    #[error("stage {stage} holds main ops {first}..{end}, but must begin at {expected} and hold at least one")]
    Range {
        /// The Stage.
        stage: usize,
        /// Its first main Op.
        first: u32,
        /// One past its last main Op.
        end: u32,
        /// Where it must begin.
        expected: u32,
    },
    /// The Stages hold more or fewer Ops than there are.
    #[error("the stages end at main op {end}, the graph has {main_ops}")]
    End {
        /// One past the last main Op of the last Stage.
        end: u32,
        /// Main Ops of the Graph.
        main_ops: usize,
    },
    /// The Graph may not be cut there.
    #[error("stage {stage} may not begin at {place}: {reason}")]
    Cut {
        /// The Stage after the cut.
        stage: usize,
        /// Its first main Op.
        place: Box<OpPlace>,
        /// What forbids it, with places.
        reason: String,
    },
    /// An input depends on the batch other than by rows.
    #[error(
        "input {index} ({name}), used by {place}, depends on the batch size but not by rows of its first dimension"
    )]
    InputRows {
        /// Place in the Graph's inputs.
        index: u32,
        /// Name of its Value.
        name: String,
        /// An Op that uses it.
        place: Box<OpPlace>,
    },
    /// The Graph to follow is not the one that the partition divides.
    #[error("the partition to follow was made for another graph: it has no {0}")]
    OtherGraph(String),
    /// A parameter that no Stage of the partition to follow holds.
    #[error("{name}, read by {place}, is held by no stage of the plan")]
    NotHeld {
        /// Name of the parameter.
        name: String,
        /// An Op that reads it.
        place: Box<OpPlace>,
    },
    /// No Stage can run an Op.
    #[error(
        "no stage can run {place}: what it and the ops that must stay with it read is held together by stages \
         {held:?}, and its operands are made in stage {operands}"
    )]
    NoStageFor {
        /// The Op.
        place: Box<OpPlace>,
        /// Stages that hold all that it reads.
        held: Vec<u32>,
        /// Stage that makes the last of its operands.
        operands: u32,
    },
    /// No Stage holds all that an output without main Ops is made of.
    #[error("no stage holds all parameters that output value {value} is made of")]
    NoStageForOutput {
        /// The output.
        value: ValueId,
    },
}

impl Partition {
    /// Divides `graph`, a verified one, into runs of main Ops. Batch-free Ops are cloned into each Stage
    /// that needs them. Outputs that no main Op makes are left to the last Stage, or handed through when
    /// they are inputs.
    ///
    /// # Errors
    /// When the runs do not make up the list of main Ops, when a cut is not allowed, or when an input
    /// that is used has no rows and yet depends on the batch.
    pub fn new(graph: &Graph, stages: &[OpRun]) -> Result<Self, PartitionError> {
        let analysis = Analysis::new(graph);
        check_ranges(graph, &analysis, stages)?;
        let mut stage_of: Arena<OpId, u32> = graph.ops.ids().map(|_| 0).collect();
        for (stage, ops) in (0..).zip(stages) {
            for &op in &analysis.main_ops[ops.first as usize..ops.end as usize] {
                stage_of[op] = stage;
            }
        }
        Divider::new(graph, &analysis, stage_of, stages.len()).divide(|_, last| Ok(last))
    }

    /// Divides `other`, a second Graph of the same model (in evaluation mode, of another shape), like
    /// this partition divides `own`: an Op runs in the first Stage that is not before those of its
    /// operands and that holds the parameters, and the buffers that `own` changes, that it reads. Ops
    /// that must stay together, and Ops that share a Value that cannot be sent, go to one Stage. A Stage
    /// may be left without Ops.
    ///
    /// # Errors
    /// When no Stage holds what an Op reads, or the Stage that does is before those of its operands; when
    /// `own` is not the Graph that this partition divides; when an input has no rows and yet depends on
    /// the batch.
    pub fn follow(&self, own: &Graph, other: &Graph) -> Result<Self, PartitionError> {
        let analysis = Analysis::new(other);
        let holders = Holders::new(self, own)?;
        let mut needs = Needs { graph: other, analysis: &analysis, holders, clones: HashMap::new() };
        let stage_of = assign(other, &analysis, &mut needs)?;
        Divider::new(other, &analysis, stage_of, self.stages.len()).divide(|value, last| {
            let held = needs.of_value(value, None)?.map_or(Some(last), |stages| stages.last().copied());
            held.ok_or(PartitionError::NoStageForOutput { value })
        })
    }
}

fn check_ranges(graph: &Graph, analysis: &Analysis, stages: &[OpRun]) -> Result<(), PartitionError> {
    let main_ops = analysis.main_ops.len();
    let end = stages.last().ok_or(PartitionError::NoStages)?.end;
    let mut expected = 0;
    for (stage, &OpRun { first, end }) in stages.iter().enumerate() {
        let may_be_empty = main_ops == 0 && stages.len() == 1;
        if first != expected || end < first || (end == first && !may_be_empty) {
            return Err(PartitionError::Range { stage, first, end, expected });
        }
        expected = end;
    }
    if end as usize != main_ops {
        return Err(PartitionError::End { end, main_ops });
    }
    for (stage, ops) in stages.iter().enumerate() {
        if let Some(refusal) = analysis.cuts[ops.first as usize] {
            let place = Box::new(graph.place(analysis.main_ops[ops.first as usize]));
            return Err(PartitionError::Cut { stage, place, reason: refusal.describe(graph) });
        }
    }
    Ok(())
}

/// Collects what each Stage holds once every main Op has its Stage.
struct Divider<'g> {
    graph: &'g Graph,
    analysis: &'g Analysis,
    /// The Stage of each main Op; of no meaning for batch-free ones.
    stage_of: Arena<OpId, u32>,
    /// Per Stage: its Ops, clones included.
    ops: Vec<BTreeSet<OpId>>,
    /// Per Stage: the inputs, Params, Buffers and Constants that it uses.
    leaves: Vec<BTreeSet<ValueId>>,
    /// Stages that use a Value of an earlier one.
    consumers: BTreeMap<ValueId, BTreeSet<u32>>,
    /// Stage that changes a storage, by the storage's earliest Value.
    changers: HashMap<ValueId, u32>,
}

impl<'g> Divider<'g> {
    fn new(graph: &'g Graph, analysis: &'g Analysis, stage_of: Arena<OpId, u32>, stages: usize) -> Self {
        let mut changers = HashMap::new();
        for &op in &analysis.main_ops {
            for &value in &graph.ops[op].mutates {
                changers.insert(analysis.storages.root[value], stage_of[op]);
            }
        }
        for buffer in graph.buffers.values() {
            if let Some(ValueDef::Op { op, .. }) = buffer.update.map(|update| graph.values[update].def) {
                changers.insert(analysis.storages.root[buffer.value], stage_of[op]);
            }
        }
        Self {
            graph,
            analysis,
            stage_of,
            ops: vec![BTreeSet::new(); stages],
            leaves: vec![BTreeSet::new(); stages],
            consumers: BTreeMap::new(),
            changers,
        }
    }

    /// `spare` chooses the Stage for an output that no main Op makes or changes, given the last Stage.
    fn divide(
        mut self,
        mut spare: impl FnMut(ValueId, u32) -> Result<u32, PartitionError>,
    ) -> Result<Partition, PartitionError> {
        let graph = self.graph;
        for &op in &self.analysis.main_ops {
            let stage = self.stage_of[op];
            self.ops[stage as usize].insert(op);
            for value in graph.ops[op].operands() {
                self.take(stage, value);
            }
        }
        let mut stages = vec![StagePart::default(); self.ops.len()];
        self.store_buffers(&mut stages);
        let outputs = self.place_outputs(&mut stages, &mut spare)?;
        let crossings = self.crossings();
        self.check_inputs()?;
        for (stage, part) in stages.iter_mut().enumerate() {
            self.fill(stage, part);
        }
        for crossing in &crossings {
            stages[crossing.from as usize].sends.push(crossing.value);
            for &stage in &crossing.to {
                stages[stage as usize].receives.push(crossing.value);
            }
        }
        let tied = tied(&stages);
        Ok(Partition { stages, crossings, outputs, tied })
    }

    /// Lets `stage` have `value`: received, cloned with all that it is made of, or as its own leaf.
    fn take(&mut self, stage: u32, value: ValueId) {
        match self.graph.values[value].def {
            ValueDef::Op { op, .. } if self.analysis.batch_free[op] => self.clone_into(stage, op),
            ValueDef::Op { op, .. } if self.stage_of[op] == stage => {}
            ValueDef::Op { .. } => {
                self.consumers.entry(value).or_default().insert(stage);
            }
            ValueDef::Input(_) | ValueDef::Param(_) | ValueDef::Buffer(_) | ValueDef::Constant(_) => {
                self.leaves[stage as usize].insert(value);
            }
        }
    }

    fn clone_into(&mut self, stage: u32, op: OpId) {
        let (ops, leaves) = (&mut self.ops[stage as usize], &mut self.leaves[stage as usize]);
        if !ops.contains(&op) {
            let clones = self.analysis.clones(self.graph, op);
            leaves.extend(leaf_operands(self.graph, &clones).map(|(_, leaf)| leaf));
            ops.extend(clones);
        }
    }

    /// The Stage whose main Ops make or change `value`.
    fn home(&self, value: ValueId) -> Option<u32> {
        match self.graph.values[value].def {
            ValueDef::Op { op, .. } if !self.analysis.batch_free[op] => Some(self.stage_of[op]),
            _ => self.changers.get(&self.analysis.storages.root[value]).copied(),
        }
    }

    /// Gives every Buffer that is changed to the Stage that changes it.
    fn store_buffers(&mut self, stages: &mut [StagePart]) {
        let last = stages.len() - 1;
        for (id, buffer) in self.graph.buffers.iter() {
            let assigned = buffer.update.map(|update| (update, self.home(update)));
            let stage = match (self.home(buffer.value), assigned) {
                (Some(stage), _) | (None, Some((_, Some(stage)))) => stage as usize,
                // An input or a parameter itself is assigned: where the old value is read, if anywhere.
                (None, Some((_, None))) => {
                    self.leaves.iter().position(|leaves| leaves.contains(&buffer.value)).unwrap_or(last)
                }
                (None, None) => continue,
            };
            stages[stage].mutated_buffers.push(id);
            self.leaves[stage].insert(buffer.value);
            if let Some((update, _)) = assigned {
                self.take(stage as u32, update);
            }
        }
    }

    fn place_outputs(
        &mut self,
        stages: &mut [StagePart],
        spare: &mut impl FnMut(ValueId, u32) -> Result<u32, PartitionError>,
    ) -> Result<Vec<OutputPart>, PartitionError> {
        let last = (stages.len() - 1) as u32;
        let mut parts = Vec::new();
        for (index, &value) in (0..).zip(&self.graph.outputs) {
            let source = match (self.home(value), self.graph.values[value].def) {
                (Some(stage), _) => OutputSource::Stage(stage),
                (None, ValueDef::Input(input)) => OutputSource::Input(input),
                (None, _) => OutputSource::Stage(spare(value, last)?),
            };
            if let OutputSource::Stage(stage) = source {
                self.take(stage, value);
                let made = &mut stages[stage as usize].outputs;
                if !made.contains(&value) {
                    made.push(value);
                }
            }
            parts.push(OutputPart { index, value, source, row_dim: self.analysis.row_dims[value] });
        }
        Ok(parts)
    }

    fn crossings(&self) -> Vec<Crossing> {
        let crossing = |(&value, to): (&ValueId, &BTreeSet<u32>)| Crossing {
            value,
            from: self.home(value).expect("a main op makes what crosses"),
            to: to.iter().copied().collect(),
            row_dim: self.analysis.row_dims[value].expect("a value without rows is used only where it is made"),
            requires_grad: self.graph.values[value].requires_grad,
        };
        self.consumers.iter().map(crossing).collect()
    }

    fn check_inputs(&self) -> Result<(), PartitionError> {
        for op in self.ops.iter().flatten() {
            for value in self.graph.ops[*op].operands() {
                let tensor = &self.graph.values[value];
                if let ValueDef::Input(index) = tensor.def
                    && self.analysis.row_dims[value].is_none()
                    && tensor.shape.iter().any(|dim| dim.per_row != 0)
                {
                    let place = Box::new(self.graph.place(*op));
                    return Err(PartitionError::InputRows { index, name: tensor.name.clone(), place });
                }
            }
        }
        Ok(())
    }

    fn fill(&self, stage: usize, part: &mut StagePart) {
        part.ops = self.ops[stage].iter().copied().collect();
        for &value in &self.leaves[stage] {
            let tensor = &self.graph.values[value];
            match tensor.def {
                ValueDef::Input(index) => part.inputs.push(InputPart {
                    index,
                    value,
                    has_rows: self.analysis.row_dims[value].is_some(),
                    requires_grad: tensor.requires_grad,
                }),
                ValueDef::Param(param) => part.params.push(param),
                ValueDef::Buffer(buffer) => part.buffers.push(buffer),
                ValueDef::Constant(constant) => part.constants.push(constant),
                ValueDef::Op { .. } => {}
            }
        }
        part.inputs.sort_unstable_by_key(|input| input.index);
        part.params.sort_unstable();
        part.buffers.sort_unstable();
        part.constants.sort_unstable();
    }
}

/// The Params, Buffers and Constants that batch-free Ops read, with the Op.
fn leaf_operands(graph: &Graph, ops: &BTreeSet<OpId>) -> impl Iterator<Item = (OpId, ValueId)> {
    let is_leaf = |&(_, value): &(OpId, ValueId)| !matches!(graph.values[value].def, ValueDef::Op { .. });
    ops.iter().flat_map(|&op| graph.ops[op].operands().into_iter().map(move |value| (op, value))).filter(is_leaf)
}

fn tied(stages: &[StagePart]) -> Vec<TiedParam> {
    let mut holders: BTreeMap<ParamId, Vec<u32>> = BTreeMap::new();
    for (stage, part) in (0..).zip(stages) {
        for &param in &part.params {
            holders.entry(param).or_default().push(stage);
        }
    }
    let tied = holders.into_iter().filter(|(_, stages)| stages.len() > 1);
    tied.map(|(param, stages)| TiedParam { param, stages }).collect()
}

/// The Stages that hold each parameter, and each buffer that the forward changes, by name.
struct Holders {
    params: HashMap<String, Vec<u32>>,
    buffers: HashMap<String, Vec<u32>>,
}

impl Holders {
    fn new(partition: &Partition, graph: &Graph) -> Result<Self, PartitionError> {
        let mut holders = Self { params: HashMap::new(), buffers: HashMap::new() };
        for (stage, part) in (0..).zip(&partition.stages) {
            for &id in &part.params {
                let param = graph.params.get(id).ok_or_else(|| PartitionError::OtherGraph(id.to_string()))?;
                for name in names(&param.name, &param.aliases) {
                    holders.params.entry(name.clone()).or_default().push(stage);
                }
            }
            for &id in &part.mutated_buffers {
                let buffer = graph.buffers.get(id).ok_or_else(|| PartitionError::OtherGraph(id.to_string()))?;
                for name in names(&buffer.name, &buffer.aliases) {
                    holders.buffers.entry(name.clone()).or_default().push(stage);
                }
            }
        }
        Ok(holders)
    }
}

fn names<'a>(name: &'a String, aliases: &'a [String]) -> impl Iterator<Item = &'a String> {
    std::iter::once(name).chain(aliases)
}

/// Finds the Stages that hold all that an Op reads, through batch-free Ops too.
struct Needs<'g> {
    graph: &'g Graph,
    analysis: &'g Analysis,
    holders: Holders,
    /// What is known of batch-free Ops.
    clones: HashMap<OpId, Option<Vec<u32>>>,
}

impl Needs<'_> {
    /// The Stages that can run the main Op `op`, increasing; `None` means all.
    fn of_op(&mut self, op: OpId) -> Result<Option<Vec<u32>>, PartitionError> {
        let mut need = None;
        for value in self.graph.ops[op].operands() {
            need = both(need, self.of_value(value, Some(op))?);
        }
        Ok(need)
    }

    /// The Stages that can have `value` without receiving it, for the Op `reader` or as an output.
    fn of_value(&mut self, value: ValueId, reader: Option<OpId>) -> Result<Option<Vec<u32>>, PartitionError> {
        match self.graph.values[value].def {
            ValueDef::Op { op, .. } if !self.analysis.batch_free[op] => Ok(None),
            ValueDef::Op { op, .. } => {
                if let Some(need) = self.clones.get(&op) {
                    return Ok(need.clone());
                }
                let mut need = None;
                for (reader, leaf) in leaf_operands(self.graph, &self.analysis.clones(self.graph, op)) {
                    need = both(need, self.of_leaf(leaf, Some(reader))?);
                }
                self.clones.insert(op, need.clone());
                Ok(need)
            }
            _ => self.of_leaf(value, reader),
        }
    }

    fn of_leaf(&self, leaf: ValueId, reader: Option<OpId>) -> Result<Option<Vec<u32>>, PartitionError> {
        match self.graph.values[leaf].def {
            ValueDef::Param(param) => {
                let param = &self.graph.params[param];
                let held = names(&param.name, &param.aliases).find_map(|name| self.holders.params.get(name));
                held.cloned().map(Some).ok_or_else(|| match reader {
                    Some(op) => {
                        PartitionError::NotHeld { name: param.name.clone(), place: Box::new(self.graph.place(op)) }
                    }
                    None => PartitionError::NoStageForOutput { value: leaf },
                })
            }
            ValueDef::Buffer(buffer) => {
                let buffer = &self.graph.buffers[buffer];
                Ok(names(&buffer.name, &buffer.aliases).find_map(|name| self.holders.buffers.get(name)).cloned())
            }
            ValueDef::Input(_) | ValueDef::Constant(_) | ValueDef::Op { .. } => Ok(None),
        }
    }
}

fn both(left: Option<Vec<u32>>, right: Option<Vec<u32>>) -> Option<Vec<u32>> {
    match (left, right) {
        (Some(mut left), Some(right)) => {
            left.retain(|stage| right.contains(stage));
            Some(left)
        }
        (left, right) => left.or(right),
    }
}

/// The least Stage of each main Op that satisfies all: raised from 0 until nothing changes.
fn assign(graph: &Graph, analysis: &Analysis, needs: &mut Needs<'_>) -> Result<Arena<OpId, u32>, PartitionError> {
    let leader = leaders(graph, analysis);
    let mut held: Arena<OpId, Option<Vec<u32>>> = graph.ops.ids().map(|_| None).collect();
    for &op in &analysis.main_ops {
        held[leader[op]] = both(held[leader[op]].take(), needs.of_op(op)?);
    }
    let mut stage_of: Arena<OpId, u32> = graph.ops.ids().map(|_| 0).collect();
    loop {
        let mut changed = false;
        for &op in &analysis.main_ops {
            let class = leader[op];
            let made = graph.ops[op].operands().into_iter().filter_map(|value| match graph.values[value].def {
                ValueDef::Op { op, .. } if !analysis.batch_free[op] => Some(stage_of[leader[op]]),
                _ => None,
            });
            let operands = made.fold(stage_of[class], u32::max);
            let stage = match &held[class] {
                None => operands,
                Some(held) => held.iter().copied().find(|&stage| stage >= operands).ok_or_else(|| {
                    PartitionError::NoStageFor { place: Box::new(graph.place(op)), held: held.clone(), operands }
                })?,
            };
            changed |= stage != stage_of[class];
            stage_of[class] = stage;
        }
        if !changed {
            break;
        }
    }
    Ok(graph.ops.ids().map(|op| stage_of[leader[op]]).collect())
}

/// One Op for each class of main Ops that must be in one Stage.
fn leaders(graph: &Graph, analysis: &Analysis) -> Arena<OpId, OpId> {
    let mut parent: Arena<OpId, OpId> = graph.ops.ids().collect();
    for group in &analysis.groups {
        for &op in &group.ops {
            join(&mut parent, group.ops[0], op);
        }
    }
    for (producer, consumers) in analysis.unsendable(graph).into_values() {
        for consumer in consumers {
            join(&mut parent, producer, consumer);
        }
    }
    graph.ops.ids().map(|op| find(&mut parent, op)).collect()
}

fn find(parent: &mut Arena<OpId, OpId>, mut op: OpId) -> OpId {
    while parent[op] != op {
        parent[op] = parent[parent[op]];
        op = parent[op];
    }
    op
}

fn join(parent: &mut Arena<OpId, OpId>, left: OpId, right: OpId) {
    let (left, right) = (find(parent, left), find(parent, right));
    let (first, second) = (left.min(right), left.max(right));
    parent[second] = first;
}
