//! Which Values share memory, and who changes it.

use std::collections::BTreeMap;

use crate::entity::Arena;
use crate::graph::{Graph, OpId, ValueId};

/// Which Values share a storage, and which storages the forward changes.
#[derive(Clone, Debug)]
pub struct Storages {
    /// The earliest Value with the same storage.
    pub root: Arena<ValueId, ValueId>,
    /// Ops that change each storage in place, in order; none for a buffer that is only assigned to.
    changers: BTreeMap<ValueId, Vec<OpId>>,
}

impl Storages {
    /// Follows the aliases of `graph`.
    pub fn new(graph: &Graph) -> Self {
        let mut root: Arena<ValueId, ValueId> = graph.values.ids().collect();
        for (id, value) in graph.values.iter() {
            if let Some(base) = value.alias_of {
                root[id] = root[base];
            }
        }
        let mut changers: BTreeMap<ValueId, Vec<OpId>> = BTreeMap::new();
        for (id, op) in graph.ops.iter() {
            for &value in &op.mutates {
                changers.entry(root[value]).or_default().push(id);
            }
        }
        for buffer in graph.buffers.values().filter(|buffer| buffer.update.is_some()) {
            changers.entry(root[buffer.value]).or_default();
        }
        Self { root, changers }
    }

    /// True when the forward changes the storage of `value`, in place or by assigning to its buffer.
    pub fn is_changed(&self, value: ValueId) -> bool {
        self.changers.contains_key(&self.root[value])
    }

    /// The ops that change the storage of `value` in place, in order.
    pub fn changers(&self, value: ValueId) -> impl Iterator<Item = OpId> {
        self.changers.get(&self.root[value]).into_iter().flatten().copied()
    }
}
