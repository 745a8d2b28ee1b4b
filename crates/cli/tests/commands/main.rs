//! What the user types and sees.

mod clusters;
mod errors;
mod folder;
mod graphs;
mod help;
mod plan_files;
mod plans;
