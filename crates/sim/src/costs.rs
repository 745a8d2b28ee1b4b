//! What things cost, as the simulator asks for it.

use std::collections::HashMap;

use rannc_ir::ValueId;

use crate::error::SimError;

/// Times and memory of the Stages of one Plan.
///
/// Times are finite and not negative. They and the bytes do not shrink when rows or bytes grow; forward and backward
/// together, as what waits for a slow host may move from one to the other.
/// The answer to a question is always the same.
pub trait Costs {
    /// Forward of one Replica's `rows` rows of a microbatch.
    fn forward_us(&self, stage: u32, rows: u64) -> f64;
    /// Backward of one Replica's `rows` rows of a microbatch, recomputing included.
    fn backward_us(&self, stage: u32, rows: u64) -> f64;
    /// Of a backward in two parts the first: the gradients of what came in.
    fn backward_input_us(&self, stage: u32, rows: u64) -> f64;
    /// The second: the gradients of Params.
    fn backward_weight_us(&self, stage: u32, rows: u64) -> f64;
    /// One message from rank to rank, when nothing else moves.
    fn send_us(&self, src: u32, dst: u32, bytes: u64) -> f64;
    /// Size of `rows` rows of a Value, or of its gradient.
    fn value_bytes(&self, value: ValueId, rows: u64) -> u64;
    /// What a sum of `bytes` of the gradients of a Stage's own Params, over its ranks, adds after the last backward; what
    /// overlaps with that is not counted.
    fn reduce_us(&self, stage: u32, bytes: u64) -> f64;
    /// What a sum of `bytes` of one microbatch's gradients of a Stage's own Params, of which each rank gets its part, adds
    /// after the microbatch's backward; what overlaps with that is not counted.
    fn reduce_scatter_us(&self, stage: u32, bytes: u64) -> f64;
    /// What gathering `bytes` of a Stage's own Params, of which each rank has its part, adds before a computation; what
    /// overlaps with that is not counted.
    fn gather_us(&self, stage: u32, bytes: u64) -> f64;
    /// A sum of `bytes` of gradients over ranks of several Stages, which nothing overlaps with, be it that several Stages hold
    /// them, or that these ranks have several.
    fn reduce_tied_us(&self, ranks: &[u32], bytes: u64) -> f64;
    /// The optimizer's update.
    fn update_us(&self, stage: u32) -> f64;
    /// Memory that a rank of the Stage holds throughout the step.
    fn fixed_bytes(&self, stage: u32) -> u64;
    /// What of that is there once on a rank, however many Stages it has.
    fn framework_bytes(&self, stage: u32) -> u64;
    /// Memory that `rows` rows of a microbatch hold from the start of forward to the end of backward.
    fn microbatch_bytes(&self, stage: u32, rows: u64) -> u64;
    /// Memory that `rows` rows of a microbatch hold besides between the two parts of their backward.
    fn waiting_bytes(&self, stage: u32, rows: u64) -> u64;
    /// Further memory while forward or backward of `rows` rows runs.
    fn workspace_bytes(&self, stage: u32, rows: u64) -> u64;
}

/// What one microbatch costs on one Replica.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowCosts {
    pub(crate) forward_us: f64,
    pub(crate) backward_us: f64,
    pub(crate) backward_input_us: f64,
    pub(crate) backward_weight_us: f64,
    pub(crate) microbatch_bytes: u64,
    pub(crate) waiting_bytes: u64,
    pub(crate) workspace_bytes: u64,
}

/// [`RowCosts`] by Stage and rows, each asked for once: there are many microbatches and ranks, but few
/// different numbers of rows.
pub(crate) struct RowCostTable<'a> {
    costs: &'a dyn Costs,
    known: HashMap<(u32, u64), RowCosts>,
}

impl<'a> RowCostTable<'a> {
    pub(crate) fn new(costs: &'a dyn Costs) -> Self {
        Self { costs, known: HashMap::new() }
    }

    pub(crate) fn at(&mut self, stage: u32, rows: u64) -> Result<RowCosts, SimError> {
        if let Some(&known) = self.known.get(&(stage, rows)) {
            return Ok(known);
        }
        let name = |what| move || format!("the {what} of {rows} rows in stage {stage}");
        let found = RowCosts {
            forward_us: time(self.costs.forward_us(stage, rows), name("forward"))?,
            backward_us: time(self.costs.backward_us(stage, rows), name("backward"))?,
            backward_input_us: time(self.costs.backward_input_us(stage, rows), name("inputs' part of the backward"))?,
            backward_weight_us: time(
                self.costs.backward_weight_us(stage, rows),
                name("weights' part of the backward"),
            )?,
            microbatch_bytes: self.costs.microbatch_bytes(stage, rows),
            waiting_bytes: self.costs.waiting_bytes(stage, rows),
            workspace_bytes: self.costs.workspace_bytes(stage, rows),
        };
        self.known.insert((stage, rows), found);
        Ok(found)
    }
}

/// The time, if it is one.
pub(crate) fn time(us: f64, what: impl FnOnce() -> String) -> Result<f64, SimError> {
    if us.is_finite() && us >= 0.0 { Ok(us) } else { Err(SimError::Cost { what: what(), us }) }
}
