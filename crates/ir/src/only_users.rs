//! Batch-free ops that only a few neighbours need.

use std::collections::{BTreeMap, HashMap};

use crate::analysis::Analysis;
use crate::graph::{Graph, Op, OpId, ValueId};

/// For each batch-free op that may run with the main ops of a single run, not once a step: that run, which alone uses it.
/// What is given out and what touches a storage that is changed in place is not among them.
pub fn only_users(graph: &Graph, analysis: &Analysis, run_of: impl Fn(OpId) -> usize) -> BTreeMap<OpId, usize> {
    let mut users = Users(graph.outputs.iter().map(|&value| (value, None)).collect());
    let mut found = BTreeMap::new();
    let ids: Vec<OpId> = graph.ops.ids().collect();
    for id in ids.into_iter().rev() {
        let op = &graph.ops[id];
        if !analysis.batch_free[id] {
            users.add(op, Some(run_of(id)));
        } else if users.has(op) || !op.mutates.is_empty() {
            let mut touched = op.operands().into_iter().chain(op.results.iter().copied());
            let stays = analysis.once[id] || touched.any(|value| analysis.storages.is_changed(value));
            let user = users.only_one_of(op).filter(|_| !stays);
            users.add(op, user);
            found.extend(user.map(|run| (id, run)));
        }
    }
    found
}

/// By Value that is used, the one run that uses it; none where there are several.
struct Users(HashMap<ValueId, Option<usize>>);

impl Users {
    fn add(&mut self, op: &Op, user: Option<usize>) {
        for value in op.operands() {
            self.0.entry(value).and_modify(|known| *known = known.filter(|_| *known == user)).or_insert(user);
        }
    }

    fn has(&self, op: &Op) -> bool {
        op.results.iter().any(|value| self.0.contains_key(value))
    }

    /// The one run that uses an op's results.
    fn only_one_of(&self, op: &Op) -> Option<usize> {
        let mut found = op.results.iter().filter_map(|value| self.0.get(value).copied());
        let first = found.next().flatten()?;
        found.all(|other| other == Some(first)).then_some(first)
    }
}
