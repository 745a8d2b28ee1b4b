//! Simulated steps against closed forms, an independent oracle, laws, and times worked out by hand.

mod cases;
mod closed_forms;
mod drawn;
mod formula;
mod laws;
mod oracle;
mod refused;
