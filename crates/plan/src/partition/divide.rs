//! Divides a Graph's Ops over Stages.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use rannc_ir::{Analysis, Arena, Graph, OpId, OpRun, ParamId, ValueDef, ValueId};

use super::error::PartitionError;
use super::leaves::leaf_operands;
use super::parts::{Crossing, InputPart, OutputPart, OutputSource, Partition, StagePart, TiedParam};

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
pub(super) struct Divider<'g> {
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
    pub(super) fn new(graph: &'g Graph, analysis: &'g Analysis, stage_of: Arena<OpId, u32>, stages: usize) -> Self {
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
    pub(super) fn divide(
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
            let (row_dim, requires_grad) = (self.analysis.row_dims[value], self.graph.values[value].requires_grad);
            parts.push(OutputPart { index, value, source, row_dim, requires_grad });
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
