//! What an op keeps from its forward for its backward.

use rannc_ir::{DType, ValueId};

use super::operation::{Operation, is_convolution, is_lookup};
use super::poly::Poly;

/// Tensors kept for the backward of one op. Parameters, buffers and constants are not listed, as they
/// are there anyway.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SavedTensors {
    /// The earliest Value of each kept storage, each once, in the order of their ids. Several ops may
    /// keep the same one.
    pub values: Vec<ValueId>,
    /// Tensors that only this op knows: masks, statistics, log-probabilities.
    pub private_bytes: Poly,
}

/// Which of its tensors an op keeps.
enum Rule {
    Nothing,
    /// All operands of floating type.
    Operands,
    /// The operands at these positions.
    At(&'static [usize]),
    Results,
    /// Of a product: each factor if the other one needs a gradient.
    Factors(usize),
    Quotient,
    /// A mask of the input's type.
    Mask,
    /// A truth value for each element.
    Bits,
    Attention,
    /// The input, and mean and deviation of every normalised group.
    Norm,
    Pool,
    CrossEntropy,
}

fn rule(name: &str) -> Rule {
    match name {
        "add"
        | "sub"
        | "rsub"
        | "neg"
        | "clone"
        | "contiguous"
        | "to"
        | "_to_copy"
        | "type_as"
        | "cat"
        | "concat"
        | "stack"
        | "sum"
        | "mean"
        | "expand"
        | "repeat"
        | "pad"
        | "constant_pad_nd"
        | "copy"
        | "reshape"
        | "flatten"
        | "view"
        | "_unsafe_view"
        | "transpose"
        | "permute"
        | "t"
        | "roll"
        | "flip"
        | "tril"
        | "triu"
        | "lerp"
        | "feature_dropout"
        | "upsample_nearest2d"
        | "upsample_bilinear2d"
        | "fill"
        | "zero" => Rule::Nothing,
        "linear" | "matmul" | "mm" | "bmm" | "mv" | "dot" | "vdot" | "mul" => Rule::Factors(0),
        "addmm" | "baddbmm" | "addbmm" | "addmv" | "addcmul" => Rule::Factors(1),
        "div" | "true_divide" => Rule::Quotient,
        "softmax" | "_softmax" | "log_softmax" | "_log_softmax" | "relu" | "tanh" | "sigmoid" | "exp" | "sqrt"
        | "rsqrt" | "reciprocal" | "hardtanh" | "relu6" => Rule::Results,
        "dropout" | "native_dropout" => Rule::Bits,
        "alpha_dropout" | "feature_alpha_dropout" => Rule::Mask,
        "scaled_dot_product_attention" => Rule::Attention,
        "layer_norm" | "native_layer_norm" | "rms_norm" | "group_norm" | "instance_norm" | "batch_norm"
        | "native_batch_norm" | "cudnn_batch_norm" => Rule::Norm,
        "max_pool1d" | "max_pool2d" | "max_pool3d" | "max_pool2d_with_indices" | "adaptive_max_pool2d" => Rule::Pool,
        "cross_entropy_loss" => Rule::CrossEntropy,
        "where" => Rule::At(&[0]),
        "masked_fill" => Rule::At(&[1]),
        "embedding" => Rule::At(&[1]),
        "gather" | "index_select" => Rule::At(&[2]),
        "nll_loss" | "nll_loss_nd" | "nll_loss2d" => Rule::At(&[0, 1]),
        name if is_convolution(name) => Rule::Factors(0),
        name if is_lookup(name) => Rule::At(&[1]),
        _ => Rule::Operands,
    }
}

impl SavedTensors {
    /// What the op keeps on the host's processor (`host`) or on an accelerator.
    pub fn new(operation: &Operation<'_>, host: bool) -> Self {
        if operation.is_view() || !operation.has_backward() {
            return Self::default();
        }
        let mut kept = Keeper { operation, saved: Self::default() };
        kept.apply(rule(operation.name), host);
        kept.saved.values.sort_unstable();
        kept.saved.values.dedup();
        kept.saved
    }
}

struct Keeper<'a, 'g> {
    operation: &'a Operation<'g>,
    saved: SavedTensors,
}

impl Keeper<'_, '_> {
    fn apply(&mut self, rule: Rule, host: bool) {
        let operation = self.operation;
        match rule {
            Rule::Nothing => {}
            Rule::Operands => self.keep_all(operation.operands()),
            Rule::At(positions) => positions.iter().for_each(|&position| self.keep_at(position)),
            Rule::Results => self.keep_all(operation.op.results.clone()),
            Rule::Factors(first) => self.factors(first),
            Rule::Quotient => self.quotient(),
            Rule::Mask => self.saved.private_bytes += self.operation.bytes_at(0),
            Rule::Bits => self.saved.private_bytes += self.operation.result_elements(),
            Rule::Attention => self.attention(host),
            Rule::Norm => self.norm(),
            Rule::Pool => {
                self.keep_at(0);
                self.saved.private_bytes += operation.result_elements() * DType::Int64.bytes() as f64;
            }
            Rule::CrossEntropy => {
                self.keep_at(1);
                self.saved.private_bytes += self.operation.bytes_at(0);
            }
        }
    }

    fn keep(&mut self, value: ValueId) {
        let root = self.operation.root(value);
        if !self.operation.is_state(root) {
            self.saved.values.push(root);
        }
    }

    fn keep_all(&mut self, values: Vec<ValueId>) {
        for value in values {
            if self.operation.value(value).dtype.is_differentiable() {
                self.keep(value);
            }
        }
    }

    /// Keeps the tensors of an argument, those of a list included.
    fn keep_at(&mut self, position: usize) {
        if let Some(arg) = self.operation.op.args.get(position) {
            arg.for_each_value(&mut |value| self.keep(value));
        }
    }

    fn needs_grad(&self, position: usize) -> bool {
        self.operation.tensor(position).is_some_and(|value| self.operation.requires_grad(value))
    }

    fn factors(&mut self, first: usize) {
        if self.needs_grad(first + 1) {
            self.keep_at(first);
        }
        if self.needs_grad(first) {
            self.keep_at(first + 1);
        }
    }

    fn quotient(&mut self) {
        self.keep_at(1);
        if self.needs_grad(1) {
            self.keep_at(0);
        }
    }

    /// A fused kernel keeps the logarithm of the sums (float32); the host has none for dropout and then
    /// keeps the weights before and after it, and none for a mask that is learned.
    fn attention(&mut self, host: bool) {
        let operation = self.operation;
        // Query, key, value and mask.
        (0..4).for_each(|position| self.keep_at(position));
        let dropout = operation.arg(4, "dropout_p").is_some_and(|p| !is_zero(p));
        let learned_mask = self.needs_grad(3);
        if host && (dropout || learned_mask) {
            let copies = if dropout { 2 } else { 1 };
            let element_bytes = operation.tensor(0).map_or(0, |query| operation.value(query).dtype.bytes());
            self.saved.private_bytes += operation.attention_scores() * (copies * element_bytes) as f64;
            return;
        }
        self.keep_all(operation.op.results.clone());
        let sums = operation.tensor(0).and_then(|query| operation.value(query).shape.split_last());
        if let Some((_, rest)) = sums {
            self.saved.private_bytes += Poly::elements(rest) * DType::Float32.bytes() as f64;
        }
    }

    fn norm(&mut self) {
        self.keep_at(0);
        let groups = match self.operation.tensor(0).map(|input| self.operation.value(input).shape.as_slice()) {
            Some([rest @ .., _]) if self.operation.name.ends_with("layer_norm") => Poly::elements(rest),
            _ => Poly::default(),
        };
        self.saved.private_bytes += groups * (2 * DType::Float32.bytes()) as f64;
    }
}

fn is_zero(arg: &rannc_ir::Arg) -> bool {
    match arg {
        rannc_ir::Arg::Int(number) => *number == 0,
        rannc_ir::Arg::Float(text) => text.parse::<f64>().is_ok_and(|number| number == 0.0),
        _ => false,
    }
}
