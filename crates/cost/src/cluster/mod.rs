//! Devices, nodes and links, and their file.

mod check;
mod cluster;
mod collective;
mod device;
mod efficiency;
mod file;
mod of_ranks;
mod preset;
mod shares;
mod tables;
mod text;

pub use check::MOST_DEVICES;
pub use cluster::{Cluster, Level, Link, Node, RankGroup};
pub use collective::Collective;
pub use device::{Device, FlopRates, update_us};
pub use efficiency::{Curve, Efficiency, Products};
pub use of_ranks::{MeasuredLevel, RankDevice};
pub use preset::{FRAMEWORK_BYTES, Preset, presets};
