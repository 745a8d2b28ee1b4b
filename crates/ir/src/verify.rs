//! The verifier: what every Graph promises to those who read it.
//!
//! 1. The schema is [`SCHEMA`], and `sample_rows` is from 1 to 2^30.
//! 2. Every id that stands anywhere in the Graph belongs to an element.
//! 3. Every input, Param, Buffer and Constant has a Value whose def names it, and every Value whose
//!    def names one is that one's Value. So none has two Values and no Value has two owners.
//! 4. Every result of an Op has a def that names the Op, places in the returned tuple increase, and
//!    every Value whose def names an Op is among its results.
//! 5. Ops stand in topological order: an operand is no result of the Op itself or of a later one.
//! 6. What an Op changes in place is among its operands, each once.
//! 7. A Value shares the storage of one with a smaller id, made no later than itself.
//! 8. Names are not empty; Value names are unique, Constant names are unique, and so are the names
//!    of Params and Buffers together, further names included.
//! 9. Dimensions are sane: at most 2^32 per row and 2^48 fixed; at `sample_rows` no extent is
//!    negative and the bytes of a tensor fit 63 bits. `Dim` arguments keep the same limits.
//! 10. The shapes of Params, Buffers and Constants do not depend on the batch.
//! 11. The base64 text of a Constant is valid and holds as many bytes as its shape and type say.
//! 12. Only floating and complex Values require a gradient.
//! 13. Float arguments are floats as Python writes them, and lists nest at most 32 deep.
//! 14. Ops have a target, and their source lines count from 1.

use std::collections::HashSet;

use crate::entity::Entity;
use crate::graph::{Arg, ConstId, Dim, Graph, Op, OpId, SCHEMA, Value, ValueDef, ValueId};
use crate::problem::{
    GraphPlace, GraphProblem, MAX_FIXED, MAX_LIST_DEPTH, MAX_PER_ROW, MAX_SAMPLE_ROWS, VerifyError, VerifyErrors,
};

impl Graph {
    /// Checks every promise in this module's list.
    ///
    /// # Errors
    /// All broken ones.
    pub fn verify(&self) -> Result<(), VerifyErrors> {
        let mut verifier = Verifier { graph: self, errors: Vec::new() };
        verifier.header();
        verifier.values();
        verifier.ops();
        verifier.owners();
        if verifier.errors.is_empty() { Ok(()) } else { Err(VerifyErrors(verifier.errors)) }
    }
}

struct Verifier<'g> {
    graph: &'g Graph,
    errors: Vec<VerifyError>,
}

impl<'g> Verifier<'g> {
    fn report(&mut self, place: GraphPlace, problem: GraphProblem) {
        self.errors.push(VerifyError { place, problem });
    }

    fn header(&mut self) {
        if self.graph.schema != SCHEMA {
            self.report(GraphPlace::Graph, GraphProblem::Schema(self.graph.schema));
        }
        if !(1..=MAX_SAMPLE_ROWS).contains(&self.graph.sample_rows) {
            self.report(GraphPlace::Graph, GraphProblem::SampleRows(self.graph.sample_rows));
        }
    }

    fn values(&mut self) {
        let mut names = HashSet::new();
        for (id, value) in self.graph.values.iter() {
            let place = || GraphPlace::Value(id);
            self.name(&mut names, &value.name, place());
            self.named_back(id, value.def);
            for &dim in value.shape.iter().filter(|&&dim| !is_sane(dim)) {
                self.report(place(), GraphProblem::Dimension(dim));
            }
            self.size(id, value);
            if value.requires_grad && !value.dtype.is_differentiable() {
                self.report(place(), GraphProblem::NotDifferentiable(value.dtype));
            }
            if let Some(base) = value.alias_of {
                let earlier = base < id && self.made_at(base).is_some_and(|made| Some(made) <= self.made_at(id));
                if !earlier {
                    self.report(place(), GraphProblem::AliasNotEarlier(base));
                }
            }
        }
    }

    /// Place in execution order: 0 for what is there from the start, one past the Op's otherwise.
    fn made_at(&self, value: ValueId) -> Option<usize> {
        self.graph.values.get(value).map(|value| match value.def {
            ValueDef::Op { op, .. } => op.index() + 1,
            _ => 0,
        })
    }

    fn name<'n>(&mut self, names: &mut HashSet<&'n str>, name: &'n str, place: GraphPlace) {
        if name.is_empty() {
            self.report(place, GraphProblem::EmptyName);
        } else if !names.insert(name) {
            self.report(place, GraphProblem::DuplicateName(name.to_owned()));
        }
    }

    fn named_back(&mut self, id: ValueId, def: ValueDef) {
        let graph = self.graph;
        let (owner, named) = match def {
            ValueDef::Input(index) => ("an input", graph.inputs.get(index as usize) == Some(&id)),
            ValueDef::Param(param) => ("a parameter", graph.params.get(param).is_some_and(|param| param.value == id)),
            ValueDef::Buffer(buffer) => ("a buffer", graph.buffers.get(buffer).is_some_and(|owner| owner.value == id)),
            ValueDef::Constant(constant) => {
                ("a constant", graph.constants.get(constant).is_some_and(|constant| constant.value == id))
            }
            ValueDef::Op { op, .. } => ("an op", graph.ops.get(op).is_some_and(|op| op.results.contains(&id))),
        };
        if !named {
            self.report(GraphPlace::Value(id), GraphProblem::NotNamedBack(owner));
        }
    }

    fn size(&mut self, id: ValueId, value: &Value) {
        let Ok(rows) = i64::try_from(self.graph.sample_rows.min(MAX_SAMPLE_ROWS)) else { return };
        if !value.shape.iter().all(|&dim| is_sane(dim)) {
            return;
        }
        if let Some(&dim) = value.shape.iter().find(|dim| dim.at(rows) < 0) {
            self.report(GraphPlace::Value(id), GraphProblem::Dimension(dim));
        } else if bytes(value, rows).is_none() {
            self.report(GraphPlace::Value(id), GraphProblem::TooLarge);
        }
    }

    fn ops(&mut self) {
        for (id, op) in self.graph.ops.iter() {
            if op.target.is_empty() {
                self.report_op(id, GraphProblem::NoTarget);
            }
            if op.source.as_ref().is_some_and(|source| source.line == 0) {
                self.report_op(id, GraphProblem::SourceLine);
            }
            for arg in op.args.iter().chain(op.kwargs.values()) {
                self.arg(id, arg, 0);
            }
            self.results(id, op);
            let operands = op.operands();
            let mut changed = HashSet::new();
            for &value in &op.mutates {
                if !operands.contains(&value) || !changed.insert(value) {
                    self.report_op(id, GraphProblem::MutatesNoOperand(value));
                }
            }
        }
    }

    fn report_op(&mut self, op: OpId, problem: GraphProblem) {
        self.report(GraphPlace::Op(self.graph.place(op)), problem);
    }

    fn arg(&mut self, op: OpId, arg: &Arg, depth: usize) {
        match arg {
            Arg::Value(value) => match self.made_at(*value) {
                None => self.report_op(op, GraphProblem::NoSuchValue(*value)),
                Some(made) if made > op.index() => self.report_op(op, GraphProblem::UsedBeforeMade(*value)),
                Some(_) => {}
            },
            Arg::Dim(dim) if !is_sane(*dim) => self.report_op(op, GraphProblem::Dimension(*dim)),
            Arg::Float(text) if !is_float(text) => self.report_op(op, GraphProblem::NotAFloat(text.clone())),
            Arg::List(_) if depth == MAX_LIST_DEPTH => self.report_op(op, GraphProblem::TooDeep),
            Arg::List(items) => items.iter().for_each(|item| self.arg(op, item, depth + 1)),
            Arg::Dim(_) | Arg::Float(_) => {}
            Arg::None | Arg::Bool(_) | Arg::Int(_) | Arg::Str(_) | Arg::Torch(_) => {}
        }
    }

    fn results(&mut self, id: OpId, op: &Op) {
        let mut next_place = 0;
        for &value in &op.results {
            match self.graph.values.get(value).map(|value| value.def) {
                None => self.report_op(id, GraphProblem::NoSuchValue(value)),
                Some(ValueDef::Op { op, result }) if op == id => {
                    if u64::from(result) < next_place {
                        self.report_op(id, GraphProblem::ResultOrder(value));
                    }
                    next_place = u64::from(result) + 1;
                }
                Some(def) => self.report_op(id, GraphProblem::NotOwned(value, def)),
            }
        }
    }

    fn owners(&mut self) {
        let graph = self.graph;
        for (index, &value) in graph.inputs.iter().enumerate() {
            self.owned(GraphPlace::Input(index), value, |def| matches!(def, ValueDef::Input(i) if i as usize == index));
        }
        for (index, &value) in graph.outputs.iter().enumerate() {
            self.owned(GraphPlace::Output(index), value, |_| true);
        }
        let mut names = HashSet::new();
        for (id, param) in graph.params.iter() {
            self.stored(GraphPlace::Param(id), param.value, ValueDef::Param(id));
            for name in std::iter::once(&param.name).chain(&param.aliases) {
                self.name(&mut names, name, GraphPlace::Param(id));
            }
        }
        for (id, buffer) in graph.buffers.iter() {
            self.stored(GraphPlace::Buffer(id), buffer.value, ValueDef::Buffer(id));
            if let Some(update) = buffer.update {
                self.owned(GraphPlace::Buffer(id), update, |_| true);
            }
            for name in std::iter::once(&buffer.name).chain(&buffer.aliases) {
                self.name(&mut names, name, GraphPlace::Buffer(id));
            }
        }
        let mut names = HashSet::new();
        for (id, constant) in graph.constants.iter() {
            self.stored(GraphPlace::Constant(id), constant.value, ValueDef::Constant(id));
            self.name(&mut names, &constant.name, GraphPlace::Constant(id));
            self.data(id, constant.value, &constant.data);
        }
    }

    fn owned(&mut self, place: GraphPlace, value: ValueId, is_right: impl Fn(ValueDef) -> bool) {
        match self.graph.values.get(value).map(|value| value.def) {
            None => self.report(place, GraphProblem::NoSuchValue(value)),
            Some(def) if !is_right(def) => self.report(place, GraphProblem::NotOwned(value, def)),
            Some(_) => {}
        }
    }

    fn stored(&mut self, place: GraphPlace, value: ValueId, def: ValueDef) {
        self.owned(place.clone(), value, |found| found == def);
        let depends = |value: &Value| value.shape.iter().any(|dim| dim.per_row != 0);
        if self.graph.values.get(value).is_some_and(depends) {
            self.report(place, GraphProblem::BatchDependent);
        }
    }

    fn data(&mut self, id: ConstId, value: ValueId, data: &str) {
        let Some(expected) = self.graph.values.get(value).and_then(|value| bytes(value, 0)) else { return };
        match base64_bytes(data) {
            None => self.report(GraphPlace::Constant(id), GraphProblem::NotBase64),
            Some(found) if found != expected => {
                self.report(GraphPlace::Constant(id), GraphProblem::DataLength { found, expected });
            }
            Some(_) => {}
        }
    }
}

fn is_sane(dim: Dim) -> bool {
    dim.per_row.unsigned_abs() <= MAX_PER_ROW && dim.fixed.unsigned_abs() <= MAX_FIXED
}

/// Bytes of the tensor, `None` when an extent is negative or 63 bits do not hold them.
fn bytes(value: &Value, rows: i64) -> Option<u64> {
    let bytes = value.shape.iter().try_fold(value.dtype.bytes(), |product, dim| {
        let extent = dim.per_row.checked_mul(rows)?.checked_add(dim.fixed)?;
        product.checked_mul(u64::try_from(extent).ok()?)
    })?;
    i64::try_from(bytes).is_ok().then_some(bytes)
}

/// True for what Python's `repr` of a float can give; `1` would be an integer.
fn is_float(text: &str) -> bool {
    match text {
        "inf" | "-inf" | "nan" => true,
        _ => {
            let starts = text.strip_prefix('-').unwrap_or(text).starts_with(|c: char| c.is_ascii_digit());
            let written = text.bytes().all(|byte| b"0123456789+-.e".contains(&byte)) && text.contains(['.', 'e']);
            starts && written && text.parse::<f64>().is_ok()
        }
    }
}

/// Bytes that a base64 text stands for, `None` when it is no such text.
fn base64_bytes(text: &str) -> Option<u64> {
    let digits = text.trim_end_matches('=');
    let padding = text.len() - digits.len();
    let valid = digits.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'+' || byte == b'/');
    (valid && padding <= 2 && text.len().is_multiple_of(4)).then(|| (text.len() / 4 * 3 - padding) as u64)
}
