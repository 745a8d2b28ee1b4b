//! Programs: what they look like, that they are right, that the checker finds those that are not.

mod accepted;
mod cases;
mod damage;
mod grids;
mod memory;
mod oracle;
mod refused;
mod shared;
mod views;
mod waiting;
