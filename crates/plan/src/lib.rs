//! Plans: what each Stage holds, the Actions of every rank, the static checker, the file format.

mod bucket_sizes;
mod check;
mod consistent;
mod machine;
mod old_plan;
mod partition;
mod plan;
mod plan_file;
mod predicted;
mod program;
mod saver;
mod schedule;
#[cfg(feature = "testing")]
pub mod testing;

pub use bucket_sizes::{BUCKET_BYTES, FIRST_BUCKET_BYTES, LARGEST_BUCKET_BYTES, full_bytes};
pub use check::{ActionFault, CheckError, Holding, Promises, check, check_memory};
pub use consistent::PlanFault;
pub use machine::{
    Blocked, Channel, Clock, Collective, CollectiveKind, Deadlock, Halt, Joint, Lane, Memory, Observer, Pause,
    ProgramScript, Script, ScriptWriter, Slot, Span, Stuck, Task, Ticks, grid, in_flight, run,
};
pub use old_plan::OldPlan;
pub use partition::{
    Crossing, InputPart, LONGER_SPANS, OutputPart, OutputSource, Partition, PartitionError, PartitionFault,
    SPAN_LEVELS, SpanPart, StagePart, TiedParam, params_beside_spans,
};
pub use plan::{BlockPlan, PLAN_SCHEMA, Placement, Plan, StagePlan};
pub use plan_file::PlanFileError;
pub use predicted::{MemoryPrediction, PassPrediction, StagePrediction, StepPrediction, WholePrediction};
pub use program::{
    Action, Batch, BatchKind, Bucket, Buckets, Division, Exchange, ExchangePlaces, Gradient, Interval, Message, Needed,
    Overlap, Parcel, Pass, Payload, Piece, Program, ProgramError, RankProgram, RankView, ReduceDType, Seat, SeatView,
    Slice, Step, Trained, Transfer, build, overlaps, plan_channels, split_even, with_messages,
};
pub use saver::{Recompute, Sharding};
pub use schedule::{Call, Compute, Crew, Held, Order, OrderError, Schedule, ScheduleKind, Seated, WINDOW, depths};
