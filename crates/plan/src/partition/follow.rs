//! Divides a second Graph of the same model like the first.

use std::collections::{HashMap, HashSet};

use rannc_ir::{Analysis, Arena, Graph, OpId, ValueDef, ValueId};

use super::divide::Divider;
use super::error::PartitionError;
use super::leaves::leaf_operands;
use super::parts::Partition;

impl Partition {
    /// Divides `other`, a second Graph of the same model (in evaluation mode, of another shape), like
    /// this partition divides `own`: an Op runs in the first Stage that is not before those of its
    /// operands and that holds the parameters and buffers that it and the batch-free Ops before it
    /// read. What no Stage does of those named in `everywhere` all hold, as they do buffers that `own` does not use. Ops
    /// that must stay together, and Ops that share a Value that cannot be sent, go to one Stage. A Stage may be left
    /// without Ops.
    ///
    /// # Errors
    /// When no Stage holds what an Op reads, or the Stage that does is before those of its operands; when
    /// `own` is not the Graph that this partition divides; when an input has no rows and yet depends on
    /// the batch.
    pub fn follow(&self, own: &Graph, other: &Graph, everywhere: &[String]) -> Result<Self, PartitionError> {
        let analysis = Analysis::new(other);
        let holders = Holders::new(self, own, everywhere)?;
        let mut needs = Needs { graph: other, analysis: &analysis, holders, clones: HashMap::new() };
        let stage_of = assign(other, &analysis, &mut needs)?;
        Divider::new(other, &analysis, stage_of, self.stages.len()).divide(|value, last| {
            let held = needs.of_value(value, None)?.map_or(Some(last), |stages| stages.last().copied());
            held.ok_or(PartitionError::NoStageForOutput { value })
        })
    }
}

/// The Stages that hold each parameter and buffer, by name.
struct Holders {
    params: HashMap<String, Vec<u32>>,
    buffers: HashMap<String, Vec<u32>>,
    /// What all of them hold, if none of them is listed for it.
    everywhere: HashSet<String>,
}

impl Holders {
    fn new(partition: &Partition, graph: &Graph, everywhere: &[String]) -> Result<Self, PartitionError> {
        let everywhere = everywhere.iter().cloned().collect();
        let mut holders = Self { params: HashMap::new(), buffers: HashMap::new(), everywhere };
        for (stage, part) in (0..).zip(&partition.stages) {
            for &id in &part.params {
                let param = graph.params.get(id).ok_or_else(|| PartitionError::OtherGraph(id.to_string()))?;
                for name in names(&param.name, &param.aliases) {
                    holders.params.entry(name.clone()).or_default().push(stage);
                }
            }
            for &id in &part.buffers {
                let buffer = graph.buffers.get(id).ok_or_else(|| PartitionError::OtherGraph(id.to_string()))?;
                for name in names(&buffer.name, &buffer.aliases) {
                    holders.buffers.entry(name.clone()).or_default().push(stage);
                }
            }
        }
        Ok(holders)
    }

    fn all_hold(&self, name: &String, aliases: &[String]) -> bool {
        names(name, aliases).any(|name| self.everywhere.contains(name))
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
                if held.is_none() && self.holders.all_hold(&param.name, &param.aliases) {
                    return Ok(None);
                }
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
