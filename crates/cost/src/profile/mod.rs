//! What was measured, and its file.

mod block;
mod fault;
mod file;
mod profile;
mod update;

pub use block::{BlockPoint, BlockProfile};
pub use fault::ProfileFault;
pub use file::ProfileError;
pub use profile::{PROFILE_SCHEMA, Profile};
pub use update::MeasuredUpdate;
