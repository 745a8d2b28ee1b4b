//! What ops do to a device: floating-point operations, bytes and kernels, as functions of the rows.

use super::kind::{FlopClass, OpKind};
use super::operation::Operation;
use super::poly::Poly;
use super::products::backward_flops;

/// What one direction of an op does to a device.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    /// Floating-point operations of matrix products.
    pub flops: Poly,
    /// Bytes read and written.
    pub bytes: Poly,
    /// Kernels, which share the work.
    pub launches: f64,
}

/// What an op does to a device, as a function of the rows.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct OpWork {
    /// Its kind.
    pub kind: OpKind,
    /// Its numbers.
    pub class: FlopClass,
    /// Its forward.
    pub forward: Work,
    /// Its backward.
    pub backward: Work,
    /// Matrix products that share the floating-point operations of the backward.
    pub backward_products: u32,
    /// Those of them that make gradients of what is the same for every row: of parameters.
    pub weight_products: u32,
    /// Bytes of the sums that come after the backward: of gradients of biases, and with the gradients
    /// that parameters already have.
    pub summed_bytes: Poly,
}

impl OpWork {
    /// Estimates an op.
    pub fn new(operation: &Operation<'_>) -> Self {
        let kind = OpKind::of(operation.name);
        if operation.is_view() {
            let (bytes, launches) = operation.view_backward();
            let backward = Work { bytes, launches, ..Work::default() };
            return Self { kind: OpKind::Pointwise, backward, ..Self::default() };
        }
        let results = operation.op.results.first();
        let class = results.map_or(FlopClass::Fp32, |&result| FlopClass::of(operation.value(result).dtype));
        let flops = operation.flops(kind);
        let forward = Work { flops, bytes: operation.forward_bytes(), launches: 1.0 };
        if !operation.has_backward() {
            return Self { kind, class, forward, ..Self::default() };
        }
        let backward_products = operation.backward_products(kind);
        let weight_products = operation.weight_products(kind);
        let (bytes, kernels) = operation.backward_traffic(kind, backward_products);
        let (summed_bytes, sums) = operation.summed(kind);
        let flops = flops * backward_flops(kind, backward_products);
        let backward = Work { flops, bytes, launches: kernels + sums };
        Self { kind, class, forward, backward, backward_products, weight_products, summed_bytes }
    }
}
