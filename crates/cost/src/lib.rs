//! The cost model: clusters, Blocks, measured profiles, a roofline for single ops where nothing has been
//! measured, what ops save for their backward, communication times.

mod block;
mod cluster;
mod error;
mod op;
mod profile;
mod units;

pub use block::{Block, Blocks, ModuleNames, nominal_us};
pub use cluster::{
    Cluster, Collective, Curve, Device, Efficiency, FRAMEWORK_BYTES, FlopRates, Level, Link, MOST_DEVICES,
    MeasuredLevel, Node, Preset, Products, RankDevice, RankGroup, presets, update_us,
};
pub use error::{ClusterFault, CostError, Part};
pub use op::{ComputeCost, FlopClass, OpKind, OpWork, Operation, Poly, SavedTensors, Work, base_name, tensor_bytes};
pub use profile::{BlockPoint, BlockProfile, MeasuredUpdate, PROFILE_SCHEMA, Profile, ProfileError, ProfileFault};
pub use units::{counted, format_bytes, format_us};
