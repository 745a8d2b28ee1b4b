//! What each Stage of a cut Graph holds, takes in and gives out.

use std::collections::BTreeSet;

use rannc_ir::{BufferId, ConstId, OpId, ParamId, RowDim, ValueId};
use serde::{Deserialize, Serialize};

use crate::saver::Recompute;

/// A Graph divided over Stages.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Partition {
    /// The Stages in order.
    pub stages: Vec<StagePart>,
    /// Every Value that a Stage makes and a later Stage uses, each once, by increasing id.
    pub crossings: Vec<Crossing>,
    /// The Graph's outputs in order.
    pub outputs: Vec<OutputPart>,
    /// Params held by more than one Stage, by increasing id.
    pub tied: Vec<TiedParam>,
}

/// One Stage.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StagePart {
    /// Its Ops in execution order, cloned batch-free Ops included.
    pub ops: Vec<OpId>,
    /// The Graph's inputs that it uses, by increasing index.
    pub inputs: Vec<InputPart>,
    /// Values that it uses and an earlier Stage makes, by increasing id.
    pub receives: Vec<ValueId>,
    /// Values that it makes and a later Stage uses, by increasing id.
    pub sends: Vec<ValueId>,
    /// Outputs of the Graph that it makes, each once.
    pub outputs: Vec<ValueId>,
    /// Params that it reads.
    pub params: Vec<ParamId>,
    /// Buffers that it reads or changes.
    pub buffers: Vec<BufferId>,
    /// Constants that it reads.
    pub constants: Vec<ConstId>,
    /// Buffers that it changes.
    pub mutated_buffers: Vec<BufferId>,
    /// Its Ops that run once a step, before all others, whatever part of the batch comes.
    pub prologue: Option<SpanPart>,
    /// Its other Ops, first the batch-free ones that several Spans use; empty where nobody has asked for Spans.
    pub spans: Vec<SpanPart>,
}

impl Partition {
    /// By Stage, those that use what it makes, increasing.
    pub fn feeds(&self) -> Vec<Vec<u32>> {
        let mut feeds = vec![BTreeSet::new(); self.stages.len()];
        self.crossings.iter().for_each(|crossing| feeds[crossing.from as usize].extend(&crossing.to));
        feeds.into_iter().map(Vec::from_iter).collect()
    }

    /// Stages, each with one that uses what it makes, once for each Value.
    pub fn edges(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        let ends = |from: u32, to: u32| (from as usize, to as usize);
        self.crossings.iter().flat_map(move |crossing| crossing.to.iter().map(move |&to| ends(crossing.from, to)))
    }
}

impl StagePart {
    /// The prologue and the Spans, in the order in which they run.
    pub fn functions(&self) -> impl Iterator<Item = &SpanPart> {
        self.prologue.iter().chain(&self.spans)
    }
}

/// A run of a Stage's Ops as one function.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpanPart {
    /// Its Ops in execution order.
    pub ops: Vec<OpId>,
    /// Values that it uses and does not make, Params, Buffers and Constants too: its arguments.
    pub takes: Vec<ValueId>,
    /// Values that it makes, and inputs of the Graph that it changes, as far as anybody else uses them: its results.
    pub gives: Vec<ValueId>,
    /// Functions with the same compute the same of their arguments.
    pub hash: String,
    /// What of it is computed again for the backward.
    pub recompute: Recompute,
}

/// An input of the Graph, as a Stage uses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InputPart {
    /// Place in the Graph's inputs.
    pub index: u32,
    /// Its Value.
    pub value: ValueId,
    /// True when dimension 0 is the batch; otherwise every Replica gets the whole tensor.
    pub has_rows: bool,
    /// True when a gradient may flow into it.
    pub requires_grad: bool,
}

/// A Value made by one Stage and used by later ones.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Crossing {
    /// The Value.
    pub value: ValueId,
    /// The Stage that makes it.
    pub from: u32,
    /// The Stages that use it, increasing; all after `from`.
    pub to: Vec<u32>,
    /// Where its rows lie.
    pub row_dim: RowDim,
    /// True when each Stage in `to` sends a gradient back.
    pub requires_grad: bool,
}

/// An output of the Graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutputPart {
    /// Place in the Graph's outputs.
    pub index: u32,
    /// Its Value; two outputs may share one.
    pub value: ValueId,
    /// Who has it.
    pub source: OutputSource,
    /// Where its rows lie; `None` for a scalar and for anything else that is averaged over rows.
    pub row_dim: Option<RowDim>,
    /// True when a gradient may come back for it.
    pub requires_grad: bool,
}

/// Who has an output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OutputSource {
    /// The Stage with this number makes it.
    Stage(u32),
    /// It is the Graph's input with this index, handed through.
    Input(u32),
}

/// A Param held by more than one Stage; its gradient is the sum over them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TiedParam {
    /// The Param.
    pub param: ParamId,
    /// The Stages that hold it, increasing.
    pub stages: Vec<u32>,
}
