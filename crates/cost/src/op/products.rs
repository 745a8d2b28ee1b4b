//! Floating-point operations of matrix products, convolutions and attention.

use rannc_ir::{Arg, Dim, ValueId};

use super::kind::OpKind;
use super::operation::Operation;
use super::poly::Poly;

/// Floating-point operations of a backward with so many products, for each of the forward.
pub(crate) fn backward_flops(kind: OpKind, products: u32) -> f64 {
    match kind {
        // Computes the scores again, and four gradients.
        OpKind::Attention => 2.5,
        _ => f64::from(products),
    }
}

impl Operation<'_> {
    /// Of the forward.
    pub(crate) fn flops(&self, kind: OpKind) -> Poly {
        match kind {
            OpKind::Convolution => self.convolution_flops(),
            OpKind::Attention => self.attention_flops(),
            OpKind::Matrix => match self.name {
                "addmm" | "baddbmm" | "addbmm" | "addmv" => self.contraction_flops(1),
                "einsum" => self.einsum_flops(),
                "lstm" | "gru" | "rnn_tanh" | "rnn_relu" => self.recurrent_flops(),
                _ => self.contraction_flops(0),
            },
            OpKind::Normalisation | OpKind::Pointwise | OpKind::Embedding => Poly::default(),
        }
    }

    /// Matrix products of the backward: each factor that needs a gradient costs one more of the
    /// forward's size.
    pub(crate) fn backward_products(&self, kind: OpKind) -> u32 {
        match kind {
            OpKind::Matrix | OpKind::Convolution => self.factors().count() as u32,
            OpKind::Attention => 1,
            OpKind::Normalisation | OpKind::Pointwise | OpKind::Embedding => 0,
        }
    }

    /// Of the backward's products those for factors that are the same for every row: parameters, and what is made of
    /// them alone.
    pub(crate) fn weight_products(&self, kind: OpKind) -> u32 {
        match kind {
            OpKind::Matrix | OpKind::Convolution => self.factors().filter(|&value| self.is_whole(value)).count() as u32,
            OpKind::Attention | OpKind::Normalisation | OpKind::Pointwise | OpKind::Embedding => 0,
        }
    }

    /// The factors of its product that need gradients.
    fn factors(&self) -> impl Iterator<Item = ValueId> {
        let matrices = self.operands().into_iter().filter(|&value| self.value(value).shape.len() > 1);
        matrices.filter(|&value| self.requires_grad(value)).take(2)
    }

    /// `[.., m, k] x [k, n]`: every element of the result sums `k` products.
    fn contraction_flops(&self, position: usize) -> Poly {
        let depth = self.tensor(position).and_then(|left| self.value(left).shape.last().copied());
        self.result_elements() * Poly::extent(depth.unwrap_or(Dim::fixed(1))) * 2.0
    }

    fn convolution_flops(&self) -> Poly {
        let (Some(input), Some(weight)) = (self.tensor(0), self.tensor(1)) else { return Poly::default() };
        let transposed = self.name.contains("transpose") || self.is_set(6, "transposed");
        let positions = if transposed { Poly::elements(&self.value(input).shape) } else { self.result_elements() };
        let kernel = self.value(weight).shape.get(1..).map_or_else(Poly::default, Poly::elements);
        positions * kernel * 2.0
    }

    /// Every position of the sequence passes through every weight.
    fn recurrent_flops(&self) -> Poly {
        let Some(input) = self.tensor(0) else { return Poly::default() };
        let positions =
            self.value(input).shape.split_last().map_or_else(Poly::default, |(_, rest)| Poly::elements(rest));
        let weights = self.operands().into_iter().filter(|&value| self.is_state(self.root(value)));
        positions * weights.map(|weight| Poly::elements(&self.value(weight).shape)).sum::<Poly>() * 2.0
    }

    /// Every combination of the subscripts is one multiplication and one addition.
    fn einsum_flops(&self) -> Poly {
        let Some(Arg::Str(equation)) = self.op.args.first() else { return Poly::default() };
        let subscripts = equation.split("->").next().unwrap_or_default().split(',');
        let mut seen = Vec::new();
        let mut combinations = Poly::fixed(2.0);
        for (letters, operand) in subscripts.zip(self.op.operands()) {
            for (letter, &dim) in letters.chars().filter(|c| c.is_alphabetic()).zip(&self.value(operand).shape) {
                if !seen.contains(&letter) {
                    seen.push(letter);
                    combinations = combinations * Poly::extent(dim);
                }
            }
        }
        combinations
    }

    /// Scores and weighted values. Causal attention leaves out the half above the diagonal.
    fn attention_flops(&self) -> Poly {
        let share = if self.is_set(5, "is_causal") { 0.5 } else { 1.0 };
        self.attention_scores() * self.head_extent() * (4.0 * share)
    }

    /// Elements of the matrix of attention scores.
    pub(crate) fn attention_scores(&self) -> Poly {
        let shape = |position| self.tensor(position).map(|value| self.value(value).shape.as_slice());
        match (shape(0).and_then(<[Dim]>::split_last), shape(1)) {
            (Some((_, queries)), Some([.., keys, _])) => Poly::elements(queries) * Poly::extent(*keys),
            _ => Poly::default(),
        }
    }

    fn head_extent(&self) -> Poly {
        let last = self.tensor(0).and_then(|query| self.value(query).shape.last().copied());
        Poly::extent(last.unwrap_or(Dim::fixed(1)))
    }
}
