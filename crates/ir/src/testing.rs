//! Graphs for tests: a builder, a plain network, and a proptest strategy over all kinds of graphs; and
//! damaged files.
//!
//! Only with the cargo feature `testing`.

mod damage;

use indexmap::IndexMap;
use proptest::prelude::*;

use crate::dtype::DType;
use crate::entity::{Arena, Entity};
use crate::graph::{
    Arg, Buffer, BufferId, Constant, Dim, Graph, Op, OpId, Param, ParamId, SCHEMA, Source, Value, ValueDef, ValueId,
};

pub use damage::{cases, damaged};

/// Builds a graph op by op. Values are named after their ids; gradients flow from parameters and
/// floating inputs made with [`GraphBuilder::input_with_grad`].
#[derive(Clone, Debug)]
pub struct GraphBuilder {
    graph: Graph,
    module: String,
    line: u32,
}

impl GraphBuilder {
    /// An empty training graph.
    pub fn new(name: &str) -> Self {
        let graph = Graph {
            schema: SCHEMA,
            name: name.to_owned(),
            training: true,
            sample_rows: 4,
            mixing: crate::row_state::Mixing::default(),
            values: Arena::default(),
            ops: Arena::default(),
            params: Arena::default(),
            buffers: Arena::default(),
            constants: Arena::default(),
            inputs: Vec::new(),
            outputs: Vec::new(),
        };
        Self { graph, module: String::new(), line: 0 }
    }

    /// Sets the module path of the ops that follow.
    pub fn module(&mut self, path: &str) -> &mut Self {
        path.clone_into(&mut self.module);
        self
    }

    /// An input without gradient.
    pub fn input(&mut self, dtype: DType, shape: &[Dim]) -> ValueId {
        let index = u32::try_from(self.graph.inputs.len()).expect("few inputs");
        let value = self.value(dtype, shape, ValueDef::Input(index), false);
        self.graph.inputs.push(value);
        value
    }

    /// A float32 input that gets a gradient.
    pub fn input_with_grad(&mut self, shape: &[Dim]) -> ValueId {
        let value = self.input(DType::Float32, shape);
        self.graph.values[value].requires_grad = true;
        value
    }

    /// A trainable float32 parameter.
    pub fn param(&mut self, name: &str, shape: &[i64]) -> ValueId {
        let id = ParamId::new(self.graph.params.len());
        let value = self.value(DType::Float32, &fixed(shape), ValueDef::Param(id), true);
        self.graph.params.push(Param { name: name.to_owned(), aliases: Vec::new(), value });
        value
    }

    /// A buffer.
    pub fn buffer(&mut self, name: &str, dtype: DType, shape: &[i64]) -> ValueId {
        let id = BufferId::new(self.graph.buffers.len());
        let value = self.value(dtype, &fixed(shape), ValueDef::Buffer(id), false);
        self.graph.buffers.push(Buffer { name: name.to_owned(), aliases: Vec::new(), value, update: None });
        value
    }

    /// Makes the forward assign `update` to the buffer read through `buffer`.
    pub fn assign_buffer(&mut self, buffer: ValueId, update: ValueId) {
        let id = self.graph.buffers.iter().find(|(_, found)| found.value == buffer).map(|(id, _)| id);
        self.graph.buffers[id.expect("made by `buffer`")].update = Some(update);
    }

    /// A constant of bytes.
    pub fn constant(&mut self, data: &[u8]) -> ValueId {
        let id = Entity::new(self.graph.constants.len());
        let extent = i64::try_from(data.len()).expect("short data");
        let value = self.value(DType::Uint8, &fixed(&[extent]), ValueDef::Constant(id), false);
        self.graph.constants.push(Constant { name: format!("lifted_{}", id.0), value, data: base64(data) });
        value
    }

    /// An op with one float32 result.
    pub fn op(&mut self, target: &str, args: Vec<Arg>, shape: &[Dim]) -> ValueId {
        let op = self.op_with(target, args, &[(DType::Float32, shape.to_vec())]);
        self.graph.ops[op].results[0]
    }

    /// An op with any results.
    pub fn op_with(&mut self, target: &str, args: Vec<Arg>, results: &[(DType, Vec<Dim>)]) -> OpId {
        let id = OpId::new(self.graph.ops.len());
        self.line += 1;
        let mut op = Op {
            target: target.to_owned(),
            args,
            kwargs: IndexMap::new(),
            results: Vec::new(),
            mutates: Vec::new(),
            grad_enabled: true,
            random: false,
            opaque: false,
            row_wise: false,
            region: None,
            row_group: None,
            module: self.module.clone(),
            source: Some(Source { file: "model.py".to_owned(), line: self.line }),
        };
        let flows = op.operands().iter().any(|&operand| self.graph.values[operand].requires_grad);
        for (result, (dtype, shape)) in (0..).zip(results) {
            let def = ValueDef::Op { op: id, result };
            op.results.push(self.value(*dtype, shape, def, flows && dtype.is_differentiable()));
        }
        self.graph.ops.push(op)
    }

    /// The op made last, to adjust it.
    pub fn last_op(&mut self) -> &mut Op {
        let last = self.graph.ops.ids().next_back().expect("an op was made");
        &mut self.graph.ops[last]
    }

    /// A Value, to adjust it.
    pub fn value_mut(&mut self, value: ValueId) -> &mut Value {
        &mut self.graph.values[value]
    }

    /// The extents of `value`.
    pub fn shape(&self, value: ValueId) -> Vec<Dim> {
        self.graph.values[value].shape.clone()
    }

    /// `aten.linear` over the last dimension with new parameters under `module`.
    pub fn linear(&mut self, input: ValueId, features: i64, module: &str) -> ValueId {
        let mut shape = self.shape(input);
        let last = shape.last_mut().expect("a linear layer takes at least one dimension");
        let weight = self.param(&format!("{module}.weight"), &[features, last.fixed]);
        let bias = self.param(&format!("{module}.bias"), &[features]);
        *last = Dim::fixed(features);
        self.module(module).op("aten.linear.default", values(&[input, weight, bias]), &shape)
    }

    /// An op that keeps the shape of its first operand.
    pub fn pointwise(&mut self, target: &str, operands: &[ValueId]) -> ValueId {
        let shape = self.shape(operands[0]);
        self.op(target, values(operands), &shape)
    }

    /// A view of `input`.
    pub fn view(&mut self, input: ValueId, shape: &[Dim]) -> ValueId {
        let sizes = shape.iter().map(|&dim| Arg::Dim(dim)).collect();
        let view = self.op("aten.view.default", vec![Arg::Value(input), Arg::List(sizes)], shape);
        self.graph.values[view].alias_of = Some(input);
        view
    }

    /// An in-place op on `input`, whose storage the result shares.
    pub fn in_place(&mut self, target: &str, input: ValueId) -> ValueId {
        let result = self.pointwise(target, &[input]);
        self.graph.values[result].alias_of = Some(input);
        self.last_op().mutates = vec![input];
        result
    }

    /// `aten.batch_norm` in training mode with new parameters and buffers under `module`.
    pub fn batch_norm(&mut self, input: ValueId, module: &str) -> ValueId {
        let features = self.shape(input).get(1).map_or(1, |dim| dim.fixed);
        let weight = self.param(&format!("{module}.weight"), &[features]);
        let bias = self.param(&format!("{module}.bias"), &[features]);
        let mean = self.buffer(&format!("{module}.running_mean"), DType::Float32, &[features]);
        let var = self.buffer(&format!("{module}.running_var"), DType::Float32, &[features]);
        let result = self.module(module).pointwise("aten.batch_norm.default", &[input, weight, bias, mean, var]);
        self.last_op().mutates = vec![mean, var];
        result
    }

    /// The graph with these outputs.
    pub fn finish(mut self, outputs: &[ValueId]) -> Graph {
        self.graph.outputs = outputs.to_vec();
        self.graph
    }

    fn value(&mut self, dtype: DType, shape: &[Dim], def: ValueDef, requires_grad: bool) -> ValueId {
        let name = format!("t{}", self.graph.values.len());
        self.graph.values.push(Value { name, dtype, shape: shape.to_vec(), def, requires_grad, alias_of: None })
    }
}

/// `layers` equal pairs of linear and relu of `width` features, then a mean.
pub fn mlp(layers: u32, width: i64) -> Graph {
    let mut builder = GraphBuilder::new("Mlp");
    let mut hidden = builder.input(DType::Float32, &[Dim::rows(1), Dim::fixed(width)]);
    for layer in 0..layers {
        hidden = builder.linear(hidden, width, &format!("layers.{layer}"));
        hidden = builder.pointwise("aten.relu.default", &[hidden]);
    }
    let loss = builder.module("").op("aten.mean.default", values(&[hidden]), &[]);
    builder.finish(&[loss])
}

/// One step of a random graph; the numbers select operands among what exists.
#[derive(Clone, Debug)]
enum Step {
    Linear(usize),
    TiedLinear(usize, usize),
    Relu(usize),
    Join(usize, usize),
    Dropout(usize),
    FoldRows(usize),
    UnfoldRows(usize),
    Transpose(usize),
    BatchNorm(usize),
    InPlace(usize),
    ViewThenWrite(usize),
    Mask(usize),
    BatchSized(usize),
    Region(usize),
    Scale(usize),
    Embed,
    Opaque(usize),
    TwoResults(usize),
    AssignBuffer(usize),
    NoGrad(usize),
    Assert(usize),
    Scratch(usize, bool),
}

/// Valid graphs of up to about a hundred ops: chains, forks and joins, skips, tied parameters,
/// integer inputs, changed buffers, in-place ops, regions, batch-free ops, several rows per row.
pub fn graphs() -> impl Strategy<Value = Graph> {
    (prop::collection::vec(step(), 1..40), prop::collection::vec(any::<usize>(), 1..4), any::<bool>())
        .prop_map(|(steps, outputs, loss)| Recipe::new().run(&steps).finish(&outputs, loss))
}

fn step() -> impl Strategy<Value = Step> {
    // Small selectors prefer late values, so that chains are long and skips are seldom.
    let pick = || prop_oneof![3 => 0..2_usize, 1 => 0..12_usize];
    prop_oneof![
        6 => pick().prop_map(Step::Linear),
        2 => (pick(), pick()).prop_map(|(value, weight)| Step::TiedLinear(value, weight)),
        4 => pick().prop_map(Step::Relu),
        4 => (pick(), pick()).prop_map(|(left, right)| Step::Join(left, right)),
        1 => pick().prop_map(Step::Dropout),
        2 => pick().prop_map(Step::FoldRows),
        2 => pick().prop_map(Step::UnfoldRows),
        1 => pick().prop_map(Step::Transpose),
        1 => pick().prop_map(Step::BatchNorm),
        1 => pick().prop_map(Step::InPlace),
        1 => pick().prop_map(Step::ViewThenWrite),
        2 => pick().prop_map(Step::Mask),
        1 => pick().prop_map(Step::BatchSized),
        1 => pick().prop_map(Step::Region),
        1 => pick().prop_map(Step::Scale),
        1 => Just(Step::Embed),
        1 => pick().prop_map(Step::Opaque),
        1 => pick().prop_map(Step::TwoResults),
        1 => pick().prop_map(Step::AssignBuffer),
        1 => pick().prop_map(Step::NoGrad),
        1 => pick().prop_map(Step::Assert),
        2 => (pick(), any::<bool>()).prop_map(|(value, late)| Step::Scratch(value, late)),
    ]
}

const WIDTH: i64 = 8;

/// Turns steps into a graph. Every element of `live` has the shape `[b, 8]`, `[2b, 4]` or `[8, b]`.
struct Recipe {
    builder: GraphBuilder,
    tokens: ValueId,
    mask: Option<ValueId>,
    weights: Vec<ValueId>,
    live: Vec<ValueId>,
    modules: u32,
    regions: u32,
}

impl Recipe {
    fn new() -> Self {
        let mut builder = GraphBuilder::new("Random");
        let tokens = builder.input(DType::Int64, &[Dim::rows(1)]);
        let features = builder.input(DType::Float32, &flat());
        Self { builder, tokens, mask: None, weights: Vec::new(), live: vec![features], modules: 0, regions: 0 }
    }

    fn run(mut self, steps: &[Step]) -> Self {
        steps.iter().for_each(|step| self.step(step));
        self
    }

    fn step(&mut self, step: &Step) {
        match *step {
            Step::Linear(at) => self.linear(at),
            Step::TiedLinear(at, weight) => self.tied_linear(at, weight),
            Step::Relu(at) => self.unary("aten.relu.default", at),
            Step::Join(left, right) => self.join(left, right),
            Step::Dropout(at) => {
                self.unary("aten.dropout.default", at);
                let op = self.builder.last_op();
                op.random = true;
                op.args.extend([Arg::Float("0.1".to_owned()), Arg::Bool(true)]);
            }
            Step::FoldRows(at) => self.view_as(at, flat(), folded()),
            Step::UnfoldRows(at) => self.view_as(at, folded(), flat()),
            Step::Transpose(at) => self.transpose(at),
            Step::BatchNorm(at) => {
                let (input, module) = (self.with_shape(at, &flat()), self.module());
                let result = self.builder.batch_norm(input, &module);
                self.live.push(result);
            }
            Step::InPlace(at) => self.in_place(at),
            Step::ViewThenWrite(at) => self.view_then_write(at),
            Step::Mask(at) => self.add_mask(at),
            Step::BatchSized(at) => self.batch_sized(at),
            Step::Region(at) => self.region(at),
            Step::Scale(at) => self.scale(at),
            Step::Embed => self.embed(),
            Step::Opaque(at) => {
                self.unary("leaf.Custom", at);
                self.builder.last_op().opaque = true;
            }
            Step::TwoResults(at) => self.two_results(at),
            Step::AssignBuffer(at) => self.assign_buffer(at),
            Step::NoGrad(at) => self.no_grad(at),
            Step::Scratch(at, late) => self.scratch(at, late),
            Step::Assert(at) => {
                let input = self.pick(at);
                let message = Arg::Str("finite?\n\"yes\"".to_owned());
                self.builder.op_with("aten._assert_async.msg", vec![Arg::Value(input), message], &[]);
            }
        }
    }

    fn finish(mut self, outputs: &[usize], loss: bool) -> Graph {
        let mut chosen: Vec<ValueId> = outputs.iter().map(|&at| self.pick(at)).collect();
        if loss {
            let last = self.pick(0);
            chosen.push(self.builder.module("").op("aten.mean.default", values(&[last]), &[]));
        }
        self.builder.finish(&chosen)
    }

    /// The live Value `back` places from the end, as far as there are any.
    fn pick(&self, back: usize) -> ValueId {
        self.live[self.live.len() - 1 - back % self.live.len()]
    }

    fn with_shape(&self, back: usize, shape: &[Dim]) -> ValueId {
        let fitting: Vec<ValueId> = self.live.iter().copied().filter(|&v| self.builder.shape(v) == shape).collect();
        fitting[fitting.len() - 1 - back % fitting.len()]
    }

    fn module(&mut self) -> String {
        self.modules += 1;
        format!("blocks.{}", self.modules)
    }

    fn unary(&mut self, target: &str, at: usize) {
        let input = self.pick(at);
        let result = self.builder.pointwise(target, &[input]);
        self.live.push(result);
    }

    fn linear(&mut self, at: usize) {
        let (input, module) = (self.with_shape(at, &flat()), self.module());
        let result = self.builder.linear(input, WIDTH, &module);
        let weight = self.builder.last_op().operands()[1];
        self.weights.push(weight);
        self.live.push(result);
    }

    fn tied_linear(&mut self, at: usize, weight: usize) {
        let Some(&weight) = self.weights.get(weight % self.weights.len().max(1)) else { return self.linear(at) };
        let input = self.with_shape(at, &flat());
        let turned = self.builder.op("aten.t.default", values(&[weight]), &fixed(&[WIDTH, WIDTH]));
        let result = self.builder.op("aten.mm.default", values(&[input, turned]), &flat());
        self.live.push(result);
    }

    fn join(&mut self, left: usize, right: usize) {
        let left = self.pick(left);
        let right = self.with_shape(right, &self.builder.shape(left));
        let result = self.builder.pointwise("aten.add.Tensor", &[left, right]);
        self.builder.last_op().kwargs.insert("alpha".to_owned(), Arg::Int(-2));
        self.live.push(result);
    }

    fn view_as(&mut self, at: usize, from: Vec<Dim>, to: Vec<Dim>) {
        if self.live.iter().any(|&value| self.builder.shape(value) == from) {
            let input = self.with_shape(at, &from);
            let result = self.builder.view(input, &to);
            self.live.push(result);
        }
    }

    fn transpose(&mut self, at: usize) {
        let input = self.pick(at);
        let mut shape = self.builder.shape(input);
        if shape == folded() {
            return;
        }
        shape.reverse();
        let result = self.builder.op("aten.t.default", values(&[input]), &shape);
        self.builder.value_mut(result).alias_of = Some(input);
        self.live.push(result);
    }

    fn in_place(&mut self, at: usize) {
        let input = self.pick(at);
        let fresh = self.builder.pointwise("aten.clone.default", &[input]);
        let result = self.builder.in_place("aten.relu_.default", fresh);
        self.live.push(result);
    }

    fn view_then_write(&mut self, at: usize) {
        let input = self.with_shape(at, &flat());
        let fresh = self.builder.pointwise("aten.sigmoid.default", &[input]);
        let view = self.builder.view(fresh, &folded());
        self.live.push(view);
        self.builder.in_place("aten.mul_.Tensor", view);
        self.live.push(fresh);
    }

    fn add_mask(&mut self, at: usize) {
        let input = self.with_shape(at, &flat());
        let mask = match self.mask {
            Some(mask) => mask,
            None => {
                let lifted = self.builder.constant(&[0, 1, 2, 3, 4, 5, 6, 7]);
                let range = self.builder.op("aten.arange.default", vec![Arg::Int(WIDTH)], &fixed(&[WIDTH]));
                *self.mask.insert(self.builder.pointwise("aten.gt.Tensor", &[range, lifted]))
            }
        };
        let result = self.builder.pointwise("aten.add.Tensor", &[input, mask]);
        self.live.push(result);
    }

    fn batch_sized(&mut self, at: usize) {
        let input = self.pick(at);
        let shape = self.builder.shape(input);
        let sizes = shape.iter().map(|&dim| Arg::Dim(dim)).collect();
        let zeros = self.builder.op("aten.zeros.default", vec![Arg::List(sizes)], &shape);
        let device = Arg::Torch("cpu".to_owned());
        self.builder.last_op().kwargs = [("device".to_owned(), device), ("dtype".to_owned(), Arg::None)].into();
        let result = self.builder.pointwise("aten.maximum.default", &[input, zeros]);
        self.live.push(result);
    }

    fn region(&mut self, at: usize) {
        self.regions += 1;
        for target in ["aten.exp.default", "aten.log1p.default"] {
            self.unary(target, at);
            self.builder.last_op().region = Some(self.regions);
        }
    }

    fn scale(&mut self, at: usize) {
        let input = self.pick(at);
        let norm = self.builder.op("aten.norm.Scalar", values(&[input]), &[]);
        let result = self.builder.pointwise("aten.div.Tensor", &[input, norm]);
        self.live.push(result);
    }

    fn embed(&mut self) {
        let name = format!("{}.weight", self.module());
        let table = self.builder.param(&name, &[100, WIDTH]);
        let result = self.builder.op("aten.embedding.default", values(&[table, self.tokens]), &flat());
        self.live.push(result);
    }

    fn two_results(&mut self, at: usize) {
        let input = self.pick(at);
        let shape = self.builder.shape(input);
        let results = [(DType::Float32, shape.clone()), (DType::Int64, shape)];
        let op = self.builder.op_with("aten.max_pair.default", values(&[input]), &results);
        // The tuple's place 1 is not a tensor, as with some attention kernels.
        let [best, index] = self.builder.graph.ops[op].results[..] else { return };
        self.builder.value_mut(index).def = ValueDef::Op { op, result: 2 };
        let result = self.builder.pointwise("aten.add.Tensor", &[best, index]);
        self.live.extend([best, result]);
    }

    fn assign_buffer(&mut self, at: usize) {
        let name = format!("{}.average", self.module());
        let input = self.with_shape(at, &flat());
        let buffer = self.builder.buffer(&name, DType::Float32, &[WIDTH]);
        let mean = self.builder.op("aten.mean.dim", vec![Arg::Value(input), Arg::Int(0)], &fixed(&[WIDTH]));
        let update = self.builder.pointwise("aten.lerp.Scalar", &[buffer, mean]);
        self.builder.value_mut(update).requires_grad = false;
        self.builder.assign_buffer(buffer, update);
        let result = self.builder.pointwise("aten.sub.Tensor", &[input, buffer]);
        self.live.push(result);
    }

    /// A table that is filled in place and used, and filled again `late`, after its first use.
    fn scratch(&mut self, at: usize, late: bool) {
        let table = self.builder.op("aten.empty.memory_format", vec![Arg::Int(WIDTH)], &fixed(&[WIDTH]));
        let folded = self.builder.view(table, &fixed(&[2, WIDTH / 2]));
        self.builder.in_place("aten.fill_.Scalar", folded);
        for _ in 0..2 {
            let input = self.with_shape(at, &flat());
            let result = self.builder.pointwise("aten.add.Tensor", &[input, table]);
            self.live.push(result);
            if late {
                self.builder.in_place("aten.neg_.default", table);
            }
        }
    }

    fn no_grad(&mut self, at: usize) {
        self.unary("aten.sign.default", at);
        self.builder.last_op().grad_enabled = false;
        let result = self.pick(0);
        self.builder.value_mut(result).requires_grad = false;
    }
}

fn flat() -> Vec<Dim> {
    vec![Dim::rows(1), Dim::fixed(WIDTH)]
}

fn folded() -> Vec<Dim> {
    vec![Dim::rows(2), Dim::fixed(WIDTH / 2)]
}

fn fixed(shape: &[i64]) -> Vec<Dim> {
    shape.iter().map(|&extent| Dim::fixed(extent)).collect()
}

fn values(operands: &[ValueId]) -> Vec<Arg> {
    operands.iter().map(|&operand| Arg::Value(operand)).collect()
}

fn base64(data: &[u8]) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for chunk in data.chunks(3) {
        let bytes = [chunk[0], *chunk.get(1).unwrap_or(&0), *chunk.get(2).unwrap_or(&0)];
        let bits = u32::from_be_bytes([0, bytes[0], bytes[1], bytes[2]]);
        for digit in 0..4 {
            let index = (bits >> (18 - 6 * digit)) as usize & 63;
            text.push(if digit <= chunk.len() { char::from(ALPHABET[index]) } else { '=' });
        }
    }
    text
}
