//! Plans: what each Stage holds, the Actions of every rank, the static checker, the file format.

mod build;
mod check;
mod grid;
mod partition;
mod parts;
mod plan;
mod program;
mod routes;
mod schedule;
mod simulate;
mod view;

pub use build::{Batch, Placement, ProgramError, build, plan_channels};
pub use check::{ActionFault, Blocked, CheckError, check};
pub use grid::grid;
pub use partition::PartitionError;
pub use parts::{Crossing, InputPart, OutputPart, OutputSource, Partition, StagePart, TiedParam};
pub use plan::{
    MemoryPrediction, PLAN_SCHEMA, Plan, PlanFault, PlanFileError, Recompute, Sharding, StagePlan, StagePrediction,
    StepPrediction,
};
pub use program::{Action, Message, Payload, Piece, Program, RankProgram, Transfer};
pub use routes::{Interval, Overlap, Slice, overlaps, split_even};
pub use schedule::{Call, Compute, ScheduleKind};
pub use simulate::GRAD_WINDOW;
pub use view::RankView;
