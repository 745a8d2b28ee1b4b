//! One op with its graph, as the cost rules ask about it.

use rannc_ir::{Arg, Entity, Graph, Op, OpId, Value, ValueDef, ValueId};

use super::poly::Poly;

/// Bytes of a tensor.
pub fn tensor_bytes(value: &Value) -> Poly {
    Poly::elements(&value.shape) * value.dtype.bytes() as f64
}

/// The name of an op without namespace, overload and the underscore of in-place variants:
/// `aten.relu_.default` is `relu`.
pub fn base_name(target: &str) -> &str {
    let mut parts = target.split('.');
    let first = parts.next().unwrap_or(target);
    parts.next().unwrap_or(first).trim_end_matches('_')
}

pub(crate) fn is_convolution(name: &str) -> bool {
    matches!(name, "conv1d" | "conv2d" | "conv3d" | "convolution" | "_convolution")
        || name.starts_with("conv_transpose")
}

/// Products of groups of rows with matrices of their own, as of experts.
pub(crate) fn is_grouped_product(name: &str) -> bool {
    name.contains("grouped_mm")
}

pub(crate) fn is_lookup(name: &str) -> bool {
    matches!(name, "embedding" | "index_select" | "gather" | "index" | "take")
}

/// An op of a graph.
#[derive(Clone, Copy, Debug)]
pub struct Operation<'g> {
    pub(crate) graph: &'g Graph,
    pub(crate) op: &'g Op,
    pub(crate) name: &'g str,
}

impl<'g> Operation<'g> {
    /// The op with this id.
    pub fn new(graph: &'g Graph, id: OpId) -> Self {
        let op = &graph.ops[id];
        Self { graph, op, name: base_name(&op.target) }
    }

    pub(crate) fn value(&self, id: ValueId) -> &'g Value {
        &self.graph.values[id]
    }

    /// The tensor at a position of the arguments.
    pub(crate) fn tensor(&self, position: usize) -> Option<ValueId> {
        match self.op.args.get(position)? {
            Arg::Value(value) => Some(*value),
            _ => None,
        }
    }

    /// The argument at a position or, if it was given by name, under its name.
    pub(crate) fn arg(&self, position: usize, name: &str) -> Option<&'g Arg> {
        self.op.args.get(position).or_else(|| self.op.kwargs.get(name))
    }

    /// True for an argument that is `True`.
    pub(crate) fn is_set(&self, position: usize, name: &str) -> bool {
        matches!(self.arg(position, name), Some(Arg::Bool(true)))
    }

    /// Tensors that it reads, each once, in the order of their ids.
    pub(crate) fn operands(&self) -> Vec<ValueId> {
        let mut operands = self.op.operands();
        operands.sort_unstable();
        operands.dedup();
        operands
    }

    pub(crate) fn requires_grad(&self, value: ValueId) -> bool {
        self.op.grad_enabled && self.value(value).requires_grad
    }

    /// True when the backward passes through it.
    pub(crate) fn has_backward(&self) -> bool {
        self.op.results.iter().any(|&result| self.requires_grad(result))
    }

    /// True for a tensor that is the same for every row.
    pub(crate) fn is_whole(&self, value: ValueId) -> bool {
        self.value(value).shape.iter().all(|extent| extent.per_row == 0)
    }

    /// Memory for the gradients of its results, where a later part of the backward needs them once more for parameters.
    pub fn waiting_bytes(&self) -> Poly {
        let is_weight = |value: ValueId| self.requires_grad(value) && self.is_whole(value);
        let waits = !self.is_view() && self.operands().into_iter().any(is_weight);
        let results = self.op.results.iter().filter(|&&result| self.requires_grad(result) && !self.is_whole(result));
        if waits { results.map(|&result| tensor_bytes(self.value(result))).sum() } else { Poly::default() }
    }

    /// True when it only makes another view of a storage.
    pub(crate) fn is_view(&self) -> bool {
        self.op.mutates.is_empty()
            && !self.op.results.is_empty()
            && self.op.results.iter().all(|&result| self.value(result).alias_of.is_some())
    }

    /// The earliest Value with the same storage.
    pub(crate) fn root(&self, mut value: ValueId) -> ValueId {
        while let Some(base) = self.value(value).alias_of.filter(|base| base.index() < value.index()) {
            value = base;
        }
        value
    }

    /// True when the storage belongs to the model and not to the computation.
    pub(crate) fn is_state(&self, root: ValueId) -> bool {
        matches!(self.value(root).def, ValueDef::Param(_) | ValueDef::Buffer(_) | ValueDef::Constant(_))
    }

    /// Bytes of the tensor at a position of the arguments.
    pub(crate) fn bytes_at(&self, position: usize) -> Poly {
        self.tensor(position).map_or_else(Poly::default, |value| tensor_bytes(self.value(value)))
    }

    /// Bytes of all results.
    pub(crate) fn result_bytes(&self) -> Poly {
        self.op.results.iter().map(|&result| tensor_bytes(self.value(result))).sum()
    }

    /// The elements of the first result.
    pub(crate) fn result_elements(&self) -> Poly {
        self.op.results.first().map_or_else(Poly::default, |&result| Poly::elements(&self.value(result).shape))
    }

    /// Memory that a backward through it needs beside what was saved: the gradients of its results and
    /// of its operands; of a cross entropy also that of the log-probabilities in between. Of an op without
    /// backward: its results.
    pub fn workspace_bytes(&self) -> Poly {
        if self.is_view() {
            return Poly::default();
        }
        if !self.has_backward() {
            return self.result_bytes();
        }
        let operands = self.operands().into_iter().filter(|&value| self.requires_grad(value));
        let between = match self.tensor(0).filter(|_| self.name == "cross_entropy_loss") {
            Some(scores) => tensor_bytes(self.value(scores)),
            None => Poly::default(),
        };
        self.result_bytes() + between + operands.map(|value| tensor_bytes(self.value(value))).sum::<Poly>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base_names() {
        assert_eq!(base_name("aten.linear.default"), "linear");
        assert_eq!(base_name("aten.relu_.default"), "relu");
        assert_eq!(base_name("aten._softmax.default"), "_softmax");
        assert_eq!(base_name("custom"), "custom");
    }
}
