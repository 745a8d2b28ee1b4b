//! Plans: what each Stage holds, the Actions of every rank, the static checker, the file format.

mod parts;

pub use parts::{Crossing, InputPart, OutputPart, OutputSource, Partition, StageOps, StagePart, TiedParam};
