//! Divides the Ops of a Stage into Spans: consecutive Blocks that give up the same for memory, up to one repeated module.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use rannc_ir::{Analysis, Graph, OpId, OpRun, Signature, ValueId, only_users, repeated_module, signature};

use super::error::PartitionError;
use super::parts::{Partition, SpanPart, StagePart};
use crate::saver::Recompute;

/// Levels of nested repeated modules that may be Spans.
pub const LEVELS: std::ops::RangeInclusive<usize> = 1..=3;
/// Code may be so many times as long as the shortest for the sake of longer Spans.
pub const LONGER: usize = 2;

impl Partition {
    /// Tells Spans for every Stage. `blocks` are the Graph's Blocks in order, with what is computed again of each; a
    /// Stage of a Partition that follows another may have parts of them.
    ///
    /// # Errors
    /// When the Blocks do not make up the Graph, or one of them begins where no cut is allowed.
    pub fn with_spans(mut self, graph: &Graph, blocks: &[(OpRun, Recompute)]) -> Result<Self, PartitionError> {
        let analysis = Analysis::new(graph);
        let block_of = blocks_of_ops(graph, &analysis, blocks)?;
        let divider = Divider { graph, analysis: &analysis, blocks, block_of };
        let divided = |level| {
            let near = divider.neighbours(level);
            self.stages.iter().map(|part| divider.spans(part, level, &near)).collect::<Vec<_>>()
        };
        let by_level: Vec<Vec<Spans>> = LEVELS.map(divided).collect();
        let shortest = by_level.iter().map(|stages| code(stages)).min().unwrap_or(0);
        let chosen = by_level.into_iter().find(|stages| code(stages) <= LONGER * shortest);
        for (part, Spans { prologue, spans }) in self.stages.iter_mut().zip(chosen.unwrap_or_default()) {
            (part.prologue, part.spans) = (prologue, spans);
        }
        Ok(self)
    }
}

impl StagePart {
    /// Some of the Stage's Ops as one function that gives what of theirs the Stage does.
    pub fn function(&self, graph: &Graph, analysis: &Analysis, ops: Vec<OpId>) -> SpanPart {
        SpanPart::new(graph, analysis, ops, Recompute::None, &self.gives(graph))
    }

    /// What it gives to other Stages, outputs and buffers.
    fn gives(&self, graph: &Graph) -> BTreeSet<ValueId> {
        let updates = self.mutated_buffers.iter().filter_map(|&buffer| graph.buffers[buffer].update);
        self.sends.iter().chain(&self.outputs).copied().chain(updates).collect()
    }
}

impl SpanPart {
    fn new(
        graph: &Graph,
        analysis: &Analysis,
        ops: Vec<OpId>,
        recompute: Recompute,
        wanted: &BTreeSet<ValueId>,
    ) -> Self {
        let Signature { hash, takes, gives } = signature(graph, analysis, &ops, |value| wanted.contains(&value));
        Self { ops, takes, gives, hash, recompute }
    }
}

/// The Spans of a Stage.
struct Spans {
    prologue: Option<SpanPart>,
    spans: Vec<SpanPart>,
}

/// Ops of all functions that are not alike.
fn code(stages: &[Spans]) -> usize {
    let all = stages.iter().flat_map(|stage| &stage.spans);
    let functions: HashMap<&str, usize> = all.map(|span| (span.hash.as_str(), span.ops.len())).collect();
    functions.values().sum()
}

/// The Block of each main Op, by place in their list.
fn blocks_of_ops(
    graph: &Graph,
    analysis: &Analysis,
    blocks: &[(OpRun, Recompute)],
) -> Result<Vec<usize>, PartitionError> {
    let main_ops = analysis.main_ops.len();
    let mut block_of = Vec::with_capacity(main_ops);
    for (number, (ops, _)) in blocks.iter().enumerate() {
        if ops.first as usize != block_of.len() || ops.end <= ops.first || ops.end as usize > main_ops {
            return Err(PartitionError::Blocks { main_ops });
        }
        if let Some(refusal) = analysis.cuts[ops.first as usize] {
            let place = Box::new(graph.place(analysis.main_ops[ops.first as usize]));
            return Err(PartitionError::BlockCut { place, reason: refusal.describe(graph) });
        }
        block_of.resize(ops.end as usize, number);
    }
    if block_of.len() == main_ops { Ok(block_of) } else { Err(PartitionError::Blocks { main_ops }) }
}

/// Which Ops of the whole Graph run together, whatever the cuts.
struct Neighbours {
    /// The run of each main Op.
    run_of: HashMap<OpId, usize>,
    /// The run that alone uses a batch-free Op.
    only: BTreeMap<OpId, usize>,
}

impl Neighbours {
    /// Adds the batch-free Ops that one of a Stage's runs alone uses to it, as Blocks have them: compiled with the rest,
    /// most of what they make, such as a mask repeated for each row, is never stored. Returns the others.
    fn share_out(&self, free: Vec<OpId>, runs: &mut [(Vec<OpId>, Recompute)]) -> Vec<OpId> {
        let mut here: HashMap<usize, BTreeSet<usize>> = HashMap::new();
        for (place, (ops, _)) in runs.iter().enumerate() {
            ops.iter().for_each(|op| _ = here.entry(self.run_of[op]).or_default().insert(place));
        }
        let mut shared = Vec::new();
        for op in free {
            match self.only.get(&op).and_then(|run| here.get(run)).filter(|places| places.len() == 1) {
                Some(places) => places.iter().for_each(|&place| runs[place].0.push(op)),
                None => shared.push(op),
            }
        }
        runs.iter_mut().for_each(|(ops, _)| ops.sort_unstable());
        shared
    }
}

struct Divider<'g> {
    graph: &'g Graph,
    analysis: &'g Analysis,
    blocks: &'g [(OpRun, Recompute)],
    block_of: Vec<usize>,
}

impl Divider<'_> {
    fn neighbours(&self, level: usize) -> Neighbours {
        let runs = self.runs(self.analysis.main_ops.clone(), level);
        let of_run = |(place, (ops, _)): (usize, (Vec<OpId>, Recompute))| ops.into_iter().map(move |op| (op, place));
        let run_of: HashMap<OpId, usize> = runs.into_iter().enumerate().flat_map(of_run).collect();
        let only = only_users(self.graph, self.analysis, |op| run_of[&op]);
        Neighbours { run_of, only }
    }

    fn spans(&self, part: &StagePart, level: usize, near: &Neighbours) -> Spans {
        let (once, each): (Vec<OpId>, Vec<OpId>) = part.ops.iter().partition(|&&op| self.analysis.once[op]);
        let (free, main): (Vec<OpId>, Vec<OpId>) = each.iter().partition(|&&op| self.analysis.batch_free[op]);
        let mut wanted = part.gives(self.graph);
        let runs = if self.may_run_before(&free, &main) {
            let mut runs = self.runs(main, level);
            let shared = near.share_out(free, &mut runs);
            let first = (!shared.is_empty()).then_some((shared, Recompute::None));
            first.into_iter().chain(runs).collect()
        } else {
            vec![(each, self.recompute_of_all(&main))]
        };
        for ops in runs.iter().map(|(ops, _)| ops) {
            wanted.extend(signature(self.graph, self.analysis, ops, |_| false).takes);
        }
        let span = |ops, recompute| SpanPart::new(self.graph, self.analysis, ops, recompute, &wanted);
        Spans {
            prologue: (!once.is_empty()).then(|| span(once, Recompute::None)),
            spans: runs.into_iter().map(|(ops, recompute)| span(ops, recompute)).collect(),
        }
    }

    /// True when no main Op reads what a later batch-free Op changes in place.
    fn may_run_before(&self, free: &[OpId], main: &[OpId]) -> bool {
        let root = |value: ValueId| self.analysis.storages.root[value];
        let mut last_change: HashMap<ValueId, OpId> = HashMap::new();
        for &op in free {
            last_change.extend(self.graph.ops[op].mutates.iter().map(|&value| (root(value), op)));
        }
        let early = |&op: &OpId| {
            let operands = self.graph.ops[op].operands();
            operands.into_iter().any(|value| last_change.get(&root(value)).is_some_and(|&change| op < change))
        };
        last_change.is_empty() || !main.iter().any(early)
    }

    /// A Stage's main Ops, divided between Blocks.
    fn runs(&self, main: Vec<OpId>, level: usize) -> Vec<(Vec<OpId>, Recompute)> {
        let module = |op: OpId| repeated_module(&self.graph.ops[op].module, level);
        let mut runs: Vec<(Vec<OpId>, Recompute)> = Vec::new();
        let mut block = usize::MAX;
        for op in main {
            let (own, recompute) = (self.block(op), self.recompute(op));
            match runs.last_mut() {
                Some((ops, again))
                    if own == block
                        || (*again == recompute && ops.last().is_some_and(|&last| module(last) == module(op))) =>
                {
                    ops.push(op);
                }
                _ => runs.push((vec![op], recompute)),
            }
            block = own;
        }
        runs
    }

    /// What all of the Ops say.
    fn recompute_of_all(&self, main: &[OpId]) -> Recompute {
        let first = main.first().map(|&op| self.recompute(op)).unwrap_or_default();
        if main.iter().all(|&op| self.recompute(op) == first) { first } else { Recompute::None }
    }

    fn block(&self, op: OpId) -> usize {
        self.analysis.main_index[op].map_or(0, |place| self.block_of[place as usize])
    }

    fn recompute(&self, op: OpId) -> Recompute {
        self.blocks[self.block(op)].1
    }
}
