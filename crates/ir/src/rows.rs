//! Where the rows of the batch lie in a Value, and what else a Value knows of them.
//!
//! Each Op is followed by the rule of its operator in [`crate::ops`]; without a rule, or where the rule does not hold,
//! its results count as mixing rows. Nothing is concluded from extents alone: they only confirm what a rule says.

use std::collections::BTreeSet;

use crate::entity::Arena;
use crate::follow::{follow, given_by_groups, sole_batch_dim};
use crate::graph::{Dim, Graph, OpId, ValueDef, ValueId};
use crate::row_state::{Batches, Join, Mixing, RowDim, RowState};
use crate::storages::Storages;

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
    Rows::new(graph, &Storages::new(graph), graph.mixing, &BTreeSet::new()).row_dims()
}

impl Rows {
    /// Follows the rows through a verified graph; the Ops in `mixed` mix rows where they put batches one after another.
    pub fn new(graph: &Graph, storages: &Storages, mixing: Mixing, mixed: &BTreeSet<OpId>) -> Self {
        let states = graph.values.values().map(|value| given(&value.def, &value.shape)).collect();
        let spoiled = graph.values.ids().map(|_| None).collect();
        let mut rows = Self { states, mixing: Vec::new(), spoiled };
        let given = given_by_groups(graph);
        for (id, op) in graph.ops.iter() {
            let operands = op.operands();
            let joined = operands.iter().any(|&value| {
                rows.spoiled[storages.root[value]].is_some()
                    || matches!(rows.states[value], RowState::Partial(_) | RowState::Mixed)
            });
            let batches = if mixed.contains(&id) { Batches::Mixed } else { Batches::InLine };
            let found = if joined { None } else { rows.followed(graph, id, &given, batches) };
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

    fn followed(
        &mut self,
        graph: &Graph,
        op: OpId,
        given: &Arena<ValueId, bool>,
        batches: Batches,
    ) -> Option<Vec<RowState>> {
        match follow(graph, &graph.ops[op], &self.states, given, batches) {
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
        (ValueDef::Input(_), Some(rows)) if rows.dim == 0 => RowState::Rows(rows),
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
