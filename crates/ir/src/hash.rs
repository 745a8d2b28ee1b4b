//! Structural hashes: of a whole Graph, and of a run of Ops up to names.

use std::collections::HashMap;

use sha2::{Digest, Sha256};

use crate::analysis::Analysis;
use crate::graph::{Arg, Dim, Graph, Op, OpId, Value, ValueDef, ValueId};

/// SHA-256 of a text, in hexadecimal.
pub fn text_hash(text: &str) -> String {
    hex(&Sha256::digest(text.as_bytes()))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

impl Graph {
    /// SHA-256, in hexadecimal, of what the Graph computes: Ops, shapes, types, and the names of
    /// Params and Buffers. Names of Values, Constants and the model, module paths, source lines and
    /// the number of sample rows do not count.
    pub fn hash(&self) -> String {
        let mut encoder = Encoder::new("rannc graph 1");
        encoder.flag(self.training);
        encoder.count(self.values.len());
        for value in self.values.values() {
            encoder.tensor(value);
            encoder.def(value.def);
            encoder.maybe(value.alias_of.map(|base| base.0));
        }
        for names in self.params.values().map(|param| (&param.name, &param.aliases)) {
            encoder.names(names);
        }
        for buffer in self.buffers.values() {
            encoder.names((&buffer.name, &buffer.aliases));
            encoder.maybe(buffer.update.map(|update| update.0));
        }
        for constant in self.constants.values() {
            encoder.text(&constant.data);
        }
        encoder.count(self.ops.len());
        for op in self.ops.values() {
            let groups = Groups { region: op.region, rows: op.row_group };
            encoder.op(op, groups, &mut |encoder, value| encoder.number(u64::from(value.0)));
        }
        encoder.values(&self.inputs);
        encoder.values(&self.outputs);
        if !self.mixing.is_default() {
            encoder.text("parts mix their own rows");
        }
        encoder.finish()
    }
}

/// SHA-256, in hexadecimal, of a run of `ops`, equal for runs that are equal up to names: Values are
/// numbered by first use, so only their shapes and types and the way in which the Ops are wired count.
/// Params, Buffers and Constants from outside are told apart from tensors that other Ops make, and
/// Constants count with their data. What later Ops use of the run does not count.
pub fn block_hash(graph: &Graph, ops: &[OpId]) -> String {
    let mut encoder = Encoder::new("rannc block 1");
    let mut numbers: HashMap<ValueId, u64> = HashMap::new();
    let mut renamed = Renamed::default();
    encoder.count(ops.len());
    for op in ops.iter().map(|&op| &graph.ops[op]) {
        let groups = renamed.of(op);
        encoder.op(op, groups, &mut |encoder, value| encoder.numbered(graph, &mut numbers, value));
        for result in op.results.iter().map(|&result| &graph.values[result]) {
            if let ValueDef::Op { result: place, .. } = result.def {
                encoder.number(u64::from(place));
            }
            encoder.flag(result.alias_of.is_some());
            if let Some(base) = result.alias_of {
                encoder.numbered(graph, &mut numbers, base);
            }
        }
    }
    encoder.finish()
}

/// What an Op belongs to.
#[derive(Clone, Copy)]
struct Groups {
    region: Option<u32>,
    rows: Option<u32>,
}

/// Regions and row groups under numbers by first use.
#[derive(Default)]
struct Renamed {
    regions: HashMap<u32, u32>,
    rows: HashMap<u32, u32>,
}

impl Renamed {
    fn of(&mut self, op: &Op) -> Groups {
        fn number(known: &mut HashMap<u32, u32>, group: u32) -> u32 {
            let fresh = u32::try_from(known.len()).unwrap_or(u32::MAX);
            *known.entry(group).or_insert(fresh)
        }
        Groups {
            region: op.region.map(|region| number(&mut self.regions, region)),
            rows: op.row_group.map(|group| number(&mut self.rows, group)),
        }
    }
}

/// A run of Ops as a function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Signature {
    /// SHA-256, in hexadecimal: functions with the same compute the same of their arguments.
    pub hash: String,
    /// Its arguments: Values that the Ops read and none of them makes, by first use.
    pub takes: Vec<ValueId>,
    /// Its results, in an order that depends on the function alone.
    pub gives: Vec<ValueId>,
}

/// Tells `ops` as a function of all that comes from outside, Params, Buffers and Constants too. Its results are the
/// Values that are `wanted` of those that the Ops make, and of inputs of the Graph that they change.
pub fn signature(graph: &Graph, analysis: &Analysis, ops: &[OpId], wanted: impl Fn(ValueId) -> bool) -> Signature {
    let mut encoder = Encoder::new("rannc function 1");
    let mut numbers: HashMap<ValueId, u64> = HashMap::new();
    let mut renamed = Renamed::default();
    let (mut takes, mut gives) = (Vec::new(), Vec::new());
    encoder.count(ops.len());
    for (id, op) in ops.iter().map(|&id| (id, &graph.ops[id])) {
        let groups = renamed.of(op);
        if op.opaque {
            // Its name does not tell what it computes.
            encoder.number(u64::from(id.0));
        }
        encoder.op(op, groups, &mut |encoder, value| {
            if let Some(&number) = numbers.get(&value) {
                return encoder.number(number);
            }
            let number = numbers.len() as u64;
            numbers.insert(value, number);
            encoder.number(number);
            let tensor = &graph.values[value];
            let changed = analysis.storages.is_changed(value);
            let changed_input = changed && matches!(tensor.def, ValueDef::Input(_));
            encoder.tensor(tensor);
            encoder.flag(changed);
            encoder.flag(changed_input);
            let row_dim = analysis.row_dims[value];
            encoder.flag(row_dim.is_some());
            if let Some(rows) = row_dim {
                encoder.number(u64::from(rows.dim));
                encoder.number(rows.per_row);
            }
            let made = op.results.contains(&value);
            if let ValueDef::Op { result, .. } = tensor.def
                && made
            {
                encoder.number(u64::from(result));
            }
            if !made {
                takes.push(value);
            }
            if (made || changed_input) && wanted(value) {
                gives.push((value, number));
            }
        });
    }
    encoder.count(gives.len());
    gives.iter().for_each(|&(_, number)| encoder.number(number));
    Signature { hash: encoder.finish(), takes, gives: gives.into_iter().map(|(value, _)| value).collect() }
}

/// Feeds a hash so that no two different structures give the same bytes: every sequence is preceded
/// by its length, every alternative by a tag.
struct Encoder {
    sha: Sha256,
}

impl Encoder {
    fn new(kind: &str) -> Self {
        let mut encoder = Self { sha: Sha256::new() };
        encoder.text(kind);
        encoder
    }

    fn finish(self) -> String {
        hex(&self.sha.finalize())
    }

    fn number(&mut self, number: u64) {
        self.sha.update(number.to_le_bytes());
    }

    fn signed(&mut self, number: i64) {
        self.sha.update(number.to_le_bytes());
    }

    fn count(&mut self, count: usize) {
        self.number(count as u64);
    }

    fn tag(&mut self, tag: u8) {
        self.sha.update([tag]);
    }

    fn flag(&mut self, flag: bool) {
        self.tag(u8::from(flag));
    }

    fn maybe(&mut self, number: Option<u32>) {
        self.flag(number.is_some());
        self.number(u64::from(number.unwrap_or_default()));
    }

    fn text(&mut self, text: &str) {
        self.count(text.len());
        self.sha.update(text.as_bytes());
    }

    fn names(&mut self, (name, aliases): (&String, &Vec<String>)) {
        self.text(name);
        self.count(aliases.len());
        aliases.iter().for_each(|alias| self.text(alias));
    }

    fn values(&mut self, values: &[ValueId]) {
        self.count(values.len());
        values.iter().for_each(|value| self.number(u64::from(value.0)));
    }

    fn dim(&mut self, dim: Dim) {
        self.signed(dim.per_row);
        self.signed(dim.fixed);
    }

    fn tensor(&mut self, value: &Value) {
        self.text(value.dtype.name());
        self.count(value.shape.len());
        value.shape.iter().for_each(|&dim| self.dim(dim));
        self.flag(value.requires_grad);
    }

    fn def(&mut self, def: ValueDef) {
        let (tag, number, place) = match def {
            ValueDef::Input(index) => (0, index, 0),
            ValueDef::Param(param) => (1, param.0, 0),
            ValueDef::Buffer(buffer) => (2, buffer.0, 0),
            ValueDef::Constant(constant) => (3, constant.0, 0),
            ValueDef::Op { op, result } => (4, op.0, result),
        };
        self.tag(tag);
        self.number(u64::from(number));
        self.number(u64::from(place));
    }

    /// Writes the number of `value`, and what it is when it is met for the first time.
    fn numbered(&mut self, graph: &Graph, numbers: &mut HashMap<ValueId, u64>, value: ValueId) {
        if let Some(&number) = numbers.get(&value) {
            self.number(number);
            return;
        }
        let number = numbers.len() as u64;
        numbers.insert(value, number);
        self.number(number);
        let value = &graph.values[value];
        self.tensor(value);
        match value.def {
            // Whether an operand comes from the caller or from an earlier op makes no difference to a run.
            ValueDef::Input(_) | ValueDef::Op { .. } => self.tag(0),
            ValueDef::Param(_) => self.tag(1),
            ValueDef::Buffer(_) => self.tag(2),
            ValueDef::Constant(constant) => {
                self.tag(3);
                self.text(&graph.constants[constant].data);
            }
        }
    }

    fn op(&mut self, op: &Op, groups: Groups, value: &mut impl FnMut(&mut Self, ValueId)) {
        self.text(&op.target);
        self.count(op.args.len());
        op.args.iter().for_each(|arg| self.arg(arg, value));
        self.count(op.kwargs.len());
        for (name, arg) in &op.kwargs {
            self.text(name);
            self.arg(arg, value);
        }
        for values in [&op.results, &op.mutates] {
            self.count(values.len());
            values.iter().for_each(|&id| value(self, id));
        }
        self.flag(op.grad_enabled);
        self.flag(op.random);
        self.flag(op.opaque);
        if op.opaque {
            self.flag(op.row_wise);
        }
        self.maybe(groups.region);
        if let Some(rows) = groups.rows {
            self.tag(1);
            self.number(u64::from(rows));
        }
    }

    fn arg(&mut self, arg: &Arg, value: &mut impl FnMut(&mut Self, ValueId)) {
        match arg {
            Arg::None => self.tag(0),
            Arg::Value(id) => {
                self.tag(1);
                value(self, *id);
            }
            Arg::Dim(dim) => {
                self.tag(2);
                self.dim(*dim);
            }
            Arg::Bool(flag) => {
                self.tag(3);
                self.flag(*flag);
            }
            Arg::Int(number) => {
                self.tag(4);
                self.signed(*number);
            }
            Arg::Float(text) => {
                self.tag(5);
                self.text(text);
            }
            Arg::Str(text) => {
                self.tag(6);
                self.text(text);
            }
            Arg::Torch(text) => {
                self.tag(7);
                self.text(text);
            }
            Arg::List(items) => {
                self.tag(8);
                self.count(items.len());
                items.iter().for_each(|item| self.arg(item, value));
            }
        }
    }
}
