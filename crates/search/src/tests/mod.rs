//! Tests of the whole: brute force, laws, the formula of a step.

mod brute_force;
mod drawn;
mod sharding;
mod step;
#[path = "../../tests/towers/mod.rs"]
pub(crate) mod towers;
