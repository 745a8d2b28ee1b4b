//! The cost model: clusters, a roofline for single ops, what ops save for their backward,
//! communication times. Used where nothing has been measured.

mod cluster;
mod op;
mod poly;
mod saved;
mod units;
mod work;

pub use cluster::{Cluster, CostError, Device, FlopRates, Link, update_us};
pub use op::{Operation, base_name, tensor_bytes};
pub use poly::Poly;
pub use saved::SavedTensors;
pub use units::{format_bytes, format_us};
pub use work::{FlopClass, OpCost, OpWork, Work};
