//! Where the rows of the batch lie in a Value, and what else a Value knows of them.
//!
//! Each Op is followed by the rule of its operator in [`crate::ops`]; without a rule, or where the rule does not hold,
//! its results count as mixing rows. Nothing is concluded from extents alone: they only confirm what a rule says.

use serde::{Deserialize, Serialize};

use crate::entity::Arena;
use crate::follow::follow;
use crate::graph::{Dim, Graph, OpId, ValueDef, ValueId};
use crate::storages::Storages;

/// The dimension of a Value that runs over the batch: rows `[lo, hi)` of the batch are
/// `[per_row * lo, per_row * hi)` of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RowDim {
    /// The dimension.
    pub dim: u32,
    /// Its extent for one row.
    pub per_row: u64,
}

/// How results of parts of the batch make that of the whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Join {
    /// Added.
    Sum,
    /// Averaged by the parts' rows.
    Mean,
    /// One after another along the row dimension.
    Rows(RowDim),
}

/// What a Value knows of the rows of the batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowState {
    /// Nothing: it is the same for any rows.
    Free,
    /// Row `i` of it depends on row `i` of the inputs alone.
    Rows(RowDim),
    /// Row `i` of it holds the number `i`.
    Numbers(RowDim),
    /// A reduction over rows: parts join by adding, or by averaging.
    Partial(Join),
    /// Several rows together, in a way that parts do not tell.
    Mixed,
}

impl RowState {
    /// Its row dimension, if each row depends on the same row of the inputs alone.
    pub const fn row_dim(self) -> Option<RowDim> {
        if let Self::Rows(rows) = self { Some(rows) } else { None }
    }
}

/// What is done where rows are mixed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mixing {
    /// All rows of the batch come together first.
    #[default]
    Batch,
    /// Each part mixes the rows that it has, as is asked for by whoever knows that this is meant.
    Parts,
}

impl Mixing {
    /// True for the way that is not written down.
    pub(crate) fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// What the Values of a Graph know of rows, and which Ops mix them.
#[derive(Clone, Debug)]
pub struct Rows {
    /// By Value.
    pub states: Arena<ValueId, RowState>,
    /// The Ops that bring rows together themselves, not only by what they take in, and how.
    pub mixing: Vec<(OpId, &'static str)>,
    /// By earliest Value of a storage: the first Op that put into it what joins or mixes rows.
    spoiled: Arena<ValueId, Option<OpId>>,
}

/// The row dimension of each Value, where there is a proven one. The graph must be a verified one.
pub fn row_dims(graph: &Graph) -> Arena<ValueId, Option<RowDim>> {
    Rows::new(graph, &Storages::new(graph), graph.mixing).row_dims()
}

impl Rows {
    /// Follows the rows through a verified graph.
    pub fn new(graph: &Graph, storages: &Storages, mixing: Mixing) -> Self {
        let states = graph.values.values().map(|value| given(&value.def, &value.shape)).collect();
        let spoiled = graph.values.ids().map(|_| None).collect();
        let mut rows = Self { states, mixing: Vec::new(), spoiled };
        for (id, op) in graph.ops.iter() {
            let operands = op.operands();
            let joined = operands.iter().any(|&value| {
                rows.spoiled[storages.root[value]].is_some()
                    || matches!(rows.states[value], RowState::Partial(_) | RowState::Mixed)
            });
            let found = if joined { None } else { rows.followed(graph, id) };
            let extents = op.results.iter().any(|&value| graph.values[value].shape.iter().any(|dim| dim.per_row != 0));
            let in_parts = mixing == Mixing::Parts && (!joined || extents);
            for (place, &result) in op.results.iter().enumerate() {
                rows.states[result] = match &found {
                    Some(states) => states[place],
                    None if in_parts => of_part(&graph.values[result].shape),
                    None => RowState::Mixed,
                };
            }
            let clean = |&value: &ValueId| !matches!(rows.states[value], RowState::Partial(_) | RowState::Mixed);
            if !op.results.iter().all(clean) || (found.is_none() && !in_parts) {
                for &value in &op.mutates {
                    rows.spoiled[storages.root[value]].get_or_insert(id);
                }
            }
        }
        rows
    }

    fn followed(&mut self, graph: &Graph, op: OpId) -> Option<Vec<RowState>> {
        match follow(graph, &graph.ops[op], &self.states) {
            Ok(states) => Some(states),
            Err(how) => {
                let made = &graph.ops[op];
                if !made.results.is_empty() || !made.mutates.is_empty() {
                    self.mixing.push((op, how));
                }
                None
            }
        }
    }

    /// True when `op` or an Op before it put into the storage of `value` what joins or mixes rows.
    pub fn spoiled_by(&self, value: ValueId, op: OpId, storages: &Storages) -> bool {
        self.spoiled[storages.root[value]].is_some_and(|first| first <= op)
    }

    /// The proven row dimensions.
    pub fn row_dims(&self) -> Arena<ValueId, Option<RowDim>> {
        self.states.values().map(|state| state.row_dim()).collect()
    }
}

fn given(def: &ValueDef, shape: &[Dim]) -> RowState {
    match (def, sole_batch_dim(shape)) {
        (ValueDef::Input(_), Some(rows)) if rows == (RowDim { dim: 0, per_row: 1 }) => RowState::Rows(rows),
        _ => RowState::Free,
    }
}

/// What a part of the batch makes of the rows that it has.
fn of_part(shape: &[Dim]) -> RowState {
    match sole_batch_dim(shape) {
        Some(rows) => RowState::Rows(rows),
        None if shape.iter().any(|dim| dim.per_row != 0) => RowState::Free,
        None => RowState::Partial(Join::Mean),
    }
}

/// The one dimension that depends on the batch, when it is a multiple of it.
pub(crate) fn sole_batch_dim(shape: &[Dim]) -> Option<RowDim> {
    let mut dependent = shape.iter().enumerate().filter(|(_, dim)| dim.per_row != 0);
    let (index, dim) = dependent.next()?;
    if dependent.next().is_some() || dim.fixed != 0 {
        return None;
    }
    Some(RowDim { dim: u32::try_from(index).ok()?, per_row: u64::try_from(dim.per_row).ok()? })
}
