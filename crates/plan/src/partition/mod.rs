//! Which Ops, parameters and tensors each Stage of a Graph has.

mod divide;
mod error;
mod follow;
mod leaves;
mod only_span;
mod parts;
mod spans;
mod verify;

pub use self::error::PartitionError;
pub use self::only_span::params_beside_spans;
pub(crate) use self::only_span::{computed_types, only_span};
pub use self::parts::{Crossing, InputPart, OutputPart, OutputSource, Partition, SpanPart, StagePart, TiedParam};
pub use self::spans::{LEVELS as SPAN_LEVELS, LONGER as LONGER_SPANS};
pub use self::verify::PartitionFault;
