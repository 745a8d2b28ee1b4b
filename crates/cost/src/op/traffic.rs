//! Bytes that ops move, and kernels that they launch.

use rannc_ir::{DType, ValueDef, ValueId};

use super::kind::OpKind;
use super::operation::{Operation, is_lookup, tensor_bytes};
use super::poly::Poly;
use super::saved::SavedTensors;

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

    /// Bytes that a backward of this kind reads and writes, and the kernels that it launches for
    /// `products` matrix products; without what [`Operation::summed`] tells.
    pub(crate) fn backward_traffic(&self, kind: OpKind, products: u32) -> (Poly, f64) {
        let wanted = self.wanted();
        let gradients: Poly = wanted.iter().map(|&value| tensor_bytes(self.value(value))).sum();
        let passes = f64::from(products);
        match kind {
            // Each product reads the gradient of the result.
            OpKind::Matrix | OpKind::Convolution => {
                (self.forward_bytes() + gradients + self.result_bytes() * (passes - 1.0).max(0.0), passes)
            }
            OpKind::Attention => (self.forward_bytes() + gradients, 2.0),
            OpKind::Normalisation if self.name == "cross_entropy_loss" => (gradients * 4.0, 3.0),
            // Gradients of weights take another pass.
            OpKind::Normalisation if wanted.len() > 1 => (self.read_back() * 2.0 + gradients, 2.0),
            OpKind::Pointwise => (self.read_back() + gradients, wanted.len() as f64),
            OpKind::Normalisation | OpKind::Embedding => (self.read_back() + gradients, 1.0),
        }
    }

    /// Bytes of sums around the backward, and their number: over the rows for a bias, and of gradients
    /// with those that parameters already have.
    pub(crate) fn summed(&self, kind: OpKind) -> (Poly, f64) {
        let (mut bytes, mut sums) = (Poly::default(), 0.0);
        for value in self.wanted() {
            let value = self.value(value);
            if matches!(kind, OpKind::Matrix | OpKind::Convolution) && value.shape.len() == 1 {
                // Sums over rows run at half the speed of a copy.
                bytes += self.result_bytes() * 2.0;
                sums += 1.0;
            }
            if matches!(value.def, ValueDef::Param(_)) {
                bytes += tensor_bytes(value) * 3.0;
                sums += 1.0;
            }
        }
        (bytes, sums)
    }

    /// The gradient of the results, and what was saved.
    fn read_back(&self) -> Poly {
        let SavedTensors { values, private_bytes } = SavedTensors::new(self, false);
        self.result_bytes() + private_bytes + values.iter().map(|&value| tensor_bytes(self.value(value))).sum::<Poly>()
    }

    /// Operands that get a gradient.
    fn wanted(&self) -> Vec<ValueId> {
        self.operands().into_iter().filter(|&value| self.requires_grad(value)).collect()
    }

    /// The gradient of a part is copied into zeros of the whole; other views cost nothing. Bytes and kernels.
    pub(crate) fn view_backward(&self) -> (Poly, f64) {
        let whole = self.tensor(0).filter(|_| takes_part(self.name) && self.has_backward());
        whole.map_or_else(Default::default, |whole| (tensor_bytes(self.value(whole)) + self.result_bytes(), 1.0))
    }

    /// One byte an element.
    fn mask_bytes(&self) -> Poly {
        self.result_elements() * DType::Bool.bytes() as f64
    }
}

fn takes_part(name: &str) -> bool {
    matches!(name, "slice" | "select" | "narrow" | "split" | "split_with_sizes" | "chunk" | "unbind" | "diagonal")
}
