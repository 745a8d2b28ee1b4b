//! Does a rank hold no more of activations and messages at a time than the Plan promises?
//!
//! It follows the Actions alone, so that the proof holds however long anything takes: what is received is there from its
//! Recv on, what was sent is let go of when as many messages are under way behind it as the window allows, a microbatch
//! is kept from its forward to its backward. Outputs are the caller's: they are as large as the batch, whatever a
//! Program does.

use std::collections::{HashMap, HashSet, VecDeque};

use rannc_ir::{Graph, ValueId};

use super::CheckError;
use crate::partition::{Crossing, Partition};
use crate::plan::Plan;
use crate::program::{Action, Message, Payload, Program, WINDOW};
use crate::schedule::{Call, depths};

/// Each amount of a Plan is cut off to whole bytes; there are fewer of them.
const CUT_OFF: u64 = 64;

/// What a Plan promises of the memory of a step.
#[derive(Clone, Debug, Default)]
pub struct Promises {
    batch_rows: u64,
    microbatches: u64,
    /// By Stage; nothing where the Plan expects nothing.
    stages: Vec<Option<Promise>>,
    sizes: HashMap<ValueId, Size>,
}

/// Of a Stage with as many rows as it was planned for.
#[derive(Clone, Copy, Debug)]
struct Promise {
    replicas: u64,
    /// True when it may hold all microbatches at a time.
    holds_all: bool,
    /// All microbatches that are held at a time, and messages.
    bytes: u64,
    /// One microbatch between its forward and its backward.
    kept_bytes: u64,
}

/// The size of a Value, by the number of rows.
#[derive(Clone, Debug)]
struct Size {
    element_bytes: u64,
    extents: Vec<(i64, i64)>,
}

impl Size {
    /// True when it has a certain size for each row.
    fn grows(&self) -> bool {
        self.extents.iter().filter(|(per_row, _)| *per_row != 0).count() == 1
    }

    fn at(&self, rows: u64) -> u64 {
        let extent = |&(per_row, fixed): &(i64, i64)| {
            let rows = i64::try_from(rows).unwrap_or(i64::MAX);
            u64::try_from(per_row.saturating_mul(rows).saturating_add(fixed)).unwrap_or(0)
        };
        self.extents.iter().map(extent).fold(self.element_bytes, u64::saturating_mul)
    }
}

impl Promises {
    /// What a Plan promises of the Graph that it was made for, divided as it says.
    pub fn new(plan: &Plan, graph: &Graph, partition: &Partition) -> Self {
        let feeds = |crossing: &Crossing| {
            let from = crossing.from as usize;
            crossing.to.iter().map(move |&to| (from, to as usize)).collect::<Vec<_>>()
        };
        let depths = depths(plan.stages.len(), partition.crossings.iter().flat_map(feeds));
        let stage = |(number, depth): (usize, u32)| {
            let predicted = &plan.stages[number].predicted;
            let memory = &predicted.memory;
            let held = plan.schedule.order(number, depth, plan.microbatches).in_flight().max(1);
            // A microbatch has what was received for it; figures with less are those of another order.
            let fits = memory.activations_bytes / held >= predicted.in_bytes;
            (fits && memory.total_bytes() > 0).then(|| Promise {
                replicas: plan.stages[number].ranks.len() as u64,
                holds_all: held >= u64::from(plan.microbatches),
                bytes: memory.activations_bytes.saturating_add(memory.comm_bytes).saturating_add(CUT_OFF + held),
                kept_bytes: memory.activations_bytes.div_ceil(held),
            })
        };
        let of_outputs = partition.stages.iter().flat_map(|part| part.outputs.iter().copied());
        let moved = partition.crossings.iter().map(|crossing| crossing.value).chain(of_outputs);
        let size = |value: ValueId| {
            let found = &graph.values[value];
            let extents = found.shape.iter().map(|dim| (dim.per_row, dim.fixed)).collect();
            (value, Size { element_bytes: found.dtype.bytes(), extents })
        };
        Self {
            batch_rows: plan.batch_rows,
            microbatches: u64::from(plan.microbatches),
            stages: depths.into_iter().enumerate().map(stage).collect(),
            sizes: moved.map(size).collect(),
        }
    }

    /// The rows of each microbatch of a batch as it was planned for, where all have equally many.
    fn planned_rows(&self, program: &Program) -> Option<u64> {
        let ranks = if program.gather_inputs { program.ranks.len() as u64 } else { 1 };
        let parts = ranks.checked_mul(self.microbatches).filter(|&parts| parts > 0)?;
        self.batch_rows.is_multiple_of(parts).then(|| self.batch_rows / self.microbatches)
    }

    fn bytes(&self, value: ValueId, rows: u64) -> u64 {
        self.sizes.get(&value).map_or(0, |size| size.at(rows))
    }
}

/// Checks what the ranks of a Program that trains hold, in microbatches of one size as its Plan was made for. It promises
/// nothing of others, which may take other channels than those before them, nor of a call in halves, between which all
/// microbatches are held, where it has another in mind.
///
/// # Errors
/// The first Action that needs more.
pub fn check_memory(program: &Program, partition: &Partition, promises: &Promises) -> Result<(), CheckError> {
    let rows = promises.planned_rows(program);
    let is_planned = |&own: &u64| Some(own) == rows;
    let alike = promises.stages.len() == partition.stages.len() && program.microbatches.iter().all(is_planned);
    if !alike || !program.call.trains() {
        return Ok(());
    }
    for own in &program.ranks {
        let Some(promise) = promises.stages.get(own.stage as usize).copied().flatten() else { continue };
        if program.call == Call::Halves && !promise.holds_all {
            continue;
        }
        let most_rows = rows.unwrap_or(0).div_ceil(promise.replicas);
        let outputs = partition.stages[own.stage as usize].outputs.iter();
        let sizes = outputs.filter_map(|value| promises.sizes.get(value)).filter(|size| size.grows());
        let of_outputs = sizes.map(|size| size.at(most_rows)).sum::<u64>().saturating_mul(promises.microbatches);
        let promised = promise.bytes.saturating_sub(of_outputs);
        let mut live = Live::new(promises, promise);
        for (position, action) in own.forward.iter().chain(&own.backward).enumerate() {
            let bytes = live.most_during(action);
            if bytes > promised {
                let (rank, action) = (own.rank, action.clone());
                return Err(CheckError::Memory { rank, position, action, bytes, promised });
            }
        }
    }
    Ok(())
}

/// What a rank holds on its way through its Actions.
struct Live<'a> {
    promises: &'a Promises,
    promise: Promise,
    held: HashSet<u32>,
    /// Received or about to be, by what waits for it.
    arriving: HashMap<(Payload, u32), u64>,
    /// By receiver, gradients that may be under way.
    leaving: HashMap<u32, VecDeque<u64>>,
}

impl<'a> Live<'a> {
    fn new(promises: &'a Promises, promise: Promise) -> Self {
        let (arriving, leaving) = (HashMap::new(), HashMap::new());
        Self { promises, promise, held: HashSet::new(), arriving, leaving }
    }

    /// Does an Action, and returns the most that is held at any time of it.
    fn most_during(&mut self, action: &Action) -> u64 {
        match action {
            Action::Forward { mb } => {
                self.held.insert(*mb);
                // What has arrived is part of what is kept.
                self.arriving.remove(&(Payload::Value, *mb));
                self.bytes()
            }
            Action::Backward { mb } => {
                let bytes = self.bytes();
                self.held.remove(mb);
                self.arriving.remove(&(Payload::Grad, *mb));
                bytes
            }
            Action::Recv(message) => {
                let bytes = self.message_bytes(message);
                *self.arriving.entry((message.kind, message.mb)).or_default() += bytes;
                self.bytes()
            }
            Action::Send(message) => {
                // Values are part of what is kept for the backward.
                if message.kind == Payload::Grad {
                    let bytes = self.message_bytes(message);
                    let under_way = self.leaving.entry(message.peer).or_default();
                    under_way.push_back(bytes);
                    if under_way.len() > WINDOW {
                        under_way.pop_front();
                    }
                }
                self.bytes()
            }
            Action::AllReduce { .. } | Action::ReduceScatter { .. } | Action::AllGather { .. } => self.bytes(),
        }
    }

    fn message_bytes(&self, message: &Message) -> u64 {
        message.pieces.iter().map(|piece| self.promises.bytes(piece.value, piece.rows.rows())).sum()
    }

    fn bytes(&self) -> u64 {
        let held = (self.held.len() as u64).saturating_mul(self.promise.kept_bytes);
        let moving = self.arriving.values().chain(self.leaving.values().flatten()).sum::<u64>();
        held.saturating_add(moving)
    }
}
