//! What the user types and sees.

mod clusters;
mod errors;
mod folder;
mod graphs;
mod help;
mod interrupts;
mod json;
mod plan_files;
mod plans;
mod searches;
mod simulations;
mod widths;
