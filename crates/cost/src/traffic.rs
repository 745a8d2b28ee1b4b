//! Bytes that ops move, and kernels that they launch.

use rannc_ir::{DType, ValueDef, ValueId};

use crate::op::{Operation, is_lookup, tensor_bytes};
use crate::poly::Poly;
use crate::work::{OpKind, Work};

impl Operation<'_> {
    /// Bytes that it reads and writes. Of a table only the looked-up rows are read.
    pub(crate) fn forward_bytes(&self) -> Poly {
        let table = if is_lookup(self.name) { self.tensor(0) } else { None };
        let read = |value: ValueId| {
            if Some(value) == table { self.result_bytes() } else { tensor_bytes(self.value(value)) }
        };
        let once = self.result_bytes() + self.operands().into_iter().map(read).sum::<Poly>();
        let again = match self.name {
            "dropout" | "native_dropout" => self.mask_bytes(),
            // Statistics come first.
            "batch_norm" | "native_batch_norm" | "cudnn_batch_norm" | "group_norm" | "instance_norm" => {
                self.bytes_at(0)
            }
            // Log-probabilities.
            "cross_entropy_loss" => self.bytes_at(0) * 2.0,
            _ => Poly::default(),
        };
        once + again
    }

    /// What the backward of an op of this kind moves and launches; `products` are its matrix products.
    pub(crate) fn backward_traffic(&self, kind: OpKind, products: f64) -> Work {
        let wanted: Vec<ValueId> = self.operands().into_iter().filter(|&value| self.requires_grad(value)).collect();
        let gradients: Poly = wanted.iter().map(|&value| tensor_bytes(self.value(value))).sum();
        let result = self.result_bytes();
        let whole = self.forward_bytes() + gradients;
        let (bytes, launches) = match self.name {
            // Gradients pass through; that of one operand is added to others of the same tensor.
            "add" | "sub" => (result * 3.0, 1.0),
            "clone" | "contiguous" | "to" | "_to_copy" | "cat" | "concat" | "stack" | "reshape" | "flatten" => {
                (result + gradients, 1.0)
            }
            "dropout" | "native_dropout" => (result + gradients + self.mask_bytes(), 1.0),
            "cross_entropy_loss" => (gradients * 4.0, 3.0),
            _ => match kind {
                OpKind::Matrix | OpKind::Convolution => {
                    let biases = wanted.iter().filter(|&&value| self.value(value).shape.len() == 1).count() as f64;
                    (whole + result * (products + biases - 1.0).max(0.0), products + biases)
                }
                OpKind::Attention => (whole, 2.0),
                // Gradients of weights take another pass.
                OpKind::Normalisation if wanted.len() > 1 => (whole + result + self.bytes_at(0), 2.0),
                OpKind::Pointwise => (whole, (wanted.len() as f64).max(1.0)),
                OpKind::Normalisation | OpKind::Embedding => (whole, 1.0),
            },
        };
        let params = wanted.iter().filter(|&&value| matches!(self.value(value).def, ValueDef::Param(_)));
        let added = params.clone().map(|&param| tensor_bytes(self.value(param)) * 3.0).sum::<Poly>();
        Work { bytes: bytes + added, launches: launches + params.count() as f64, ..Work::default() }
    }

    /// The gradient of a part is copied into zeros of the whole; other views cost nothing.
    pub(crate) fn view_backward(&self) -> Work {
        let whole = self.tensor(0).filter(|_| takes_part(self.name) && self.has_backward());
        whole.map_or_else(Work::default, |whole| Work {
            bytes: tensor_bytes(self.value(whole)) + self.result_bytes(),
            launches: 1.0,
            ..Work::default()
        })
    }

    /// One byte an element.
    fn mask_bytes(&self) -> Poly {
        self.result_elements() * DType::Bool.bytes() as f64
    }
}

fn takes_part(name: &str) -> bool {
    matches!(name, "slice" | "select" | "narrow" | "split" | "split_with_sizes" | "chunk" | "unbind" | "diagonal")
}
