//! What single ops cost by the roofline, and what they keep for their backward.

mod compute_cost;
mod kind;
mod operation;
mod poly;
mod products;
mod roofline;
mod saved;
mod traffic;
mod work;

pub use compute_cost::ComputeCost;
pub use kind::{FlopClass, OpKind};
pub use operation::{Operation, base_name, tensor_bytes};
pub use poly::Poly;
pub use saved::SavedTensors;
pub use work::{OpWork, Work};
