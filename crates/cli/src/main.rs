//! The `rannc` command.
fn main() {}
