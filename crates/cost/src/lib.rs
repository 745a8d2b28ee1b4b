//! The cost model: clusters, measured profiles, a roofline for single ops where nothing has been
//! measured, what ops save for their backward, communication times.

mod block_profile;
mod check;
mod cluster;
mod cluster_file;
mod cluster_text;
mod collective;
mod device;
mod efficiency;
mod error;
mod machine;
mod op;
mod poly;
mod preset;
mod products;
mod profile;
mod saved;
mod shares;
mod traffic;
mod units;
mod work;

pub use block_profile::{BlockPoint, BlockProfile};
pub use cluster::{Cluster, Group, Level, Link, Node};
pub use device::{Device, FlopRates, update_us};
pub use efficiency::{Curve, Efficiency, Products};
pub use error::{ClusterFault, CostError, Part};
pub use machine::RankDevice;
pub use op::{Operation, base_name, tensor_bytes};
pub use poly::Poly;
pub use preset::{Preset, presets};
pub use profile::{MeasuredLevel, MeasuredUpdate, PROFILE_SCHEMA, Profile, ProfileError, ProfileFault};
pub use saved::SavedTensors;
pub use units::{format_bytes, format_us};
pub use work::{ComputeCost, FlopClass, OpKind, OpWork, Work};
