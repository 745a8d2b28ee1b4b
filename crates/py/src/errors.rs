//! Rust errors as the exceptions of `pyrannc.errors`.

use std::error::Error;
use std::path::Path;

use pyo3::prelude::*;
use rannc_cli::{Kind, mistaken};
use rannc_cost::{CostError, ProfileError};
use rannc_ir::GraphError;
use rannc_plan::{CheckError, Halt, PartitionError, PlanFileError, ProgramError};
use rannc_search::SearchError;

/// A class of `pyrannc.errors`.
#[derive(Clone, Copy)]
pub struct ErrorClass(&'static str);

impl ErrorClass {
    /// The Graph cannot be used.
    pub const CAPTURE: Self = Self("CaptureError");
    /// There is no Plan.
    pub const PLAN: Self = Self("PlanError");
    /// There is none for want of memory.
    pub const MEMORY: Self = Self("MemoryShortageError");
    /// A plan file is damaged or of something else.
    pub const PLAN_FILE: Self = Self("PlanFileError");
    /// A profile is damaged or of something else.
    pub const PROFILE: Self = Self("ProfileError");
    /// A cluster file describes no cluster.
    pub const CLUSTER: Self = Self("ClusterError");
    /// Another rank is gone.
    pub const PEER: Self = Self("PeerError");

    /// A Python exception of this class whose text is that of `error` and its sources.
    ///
    /// The class is looked up only now, because `pyrannc.errors` cannot be imported while `pyrannc` itself is being imported.
    pub fn exception(self, error: &dyn Error) -> PyErr {
        self.told(with_sources(error))
    }

    /// An exception of this class with this text.
    fn told(self, text: String) -> PyErr {
        Python::attach(|py| {
            let made = py.import("pyrannc.errors").and_then(|module| module.getattr(self.0)?.call1((text,)));
            made.map_or_else(|import_error| import_error, PyErr::from_value)
        })
    }
}

/// An error that is always an exception of the same class, whoever asked.
pub trait Raised: Error + Sized {
    /// The class.
    fn class(&self) -> ErrorClass;
}

impl Raised for GraphError {
    fn class(&self) -> ErrorClass {
        ErrorClass::CAPTURE
    }
}

impl Raised for CostError {
    fn class(&self) -> ErrorClass {
        ErrorClass::CLUSTER
    }
}

impl Raised for ProfileError {
    fn class(&self) -> ErrorClass {
        ErrorClass::PROFILE
    }
}

impl Raised for PlanFileError {
    fn class(&self) -> ErrorClass {
        ErrorClass::PLAN_FILE
    }
}

impl Raised for PartitionError {
    fn class(&self) -> ErrorClass {
        ErrorClass::PLAN
    }
}

impl Raised for ProgramError {
    fn class(&self) -> ErrorClass {
        ErrorClass::PLAN
    }
}

impl Raised for CheckError {
    fn class(&self) -> ErrorClass {
        ErrorClass::PLAN
    }
}

impl Raised for Halt {
    fn class(&self) -> ErrorClass {
        ErrorClass::PLAN
    }
}

impl Raised for SearchError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::Cluster(error) => error.class(),
            Self::Plan(error) => error.class(),
            Self::DoesNotFit(_) => ErrorClass::MEMORY,
            Self::Settings { .. }
            | Self::Empty { .. }
            | Self::TooFewBlocks { .. }
            | Self::Stopped
            | Self::Told
            | Self::NoStep(_)
            | Self::Threads(_) => ErrorClass::PLAN,
        }
    }
}

/// Turns the error of a `Result` into a Python exception.
pub trait OrRaise<T> {
    /// The value, or the error as an exception of its class.
    fn or_raise(self) -> PyResult<T>;
}

impl<T, E: Raised> OrRaise<T> for Result<T, E> {
    fn or_raise(self) -> PyResult<T> {
        self.map_err(|error| error.class().exception(&error))
    }
}

/// Reads a file. An error names the file, and what it is when it is of another kind.
pub fn read_file<T, E: Raised>(path: &Path, kind: Kind, read: impl FnOnce(&Path) -> Result<T, E>) -> PyResult<T> {
    read(path).map_err(|error| {
        let file = path.display().to_string();
        let text = with_sources(&error);
        let named = if text.contains(&file) { text } else { format!("{file}: {text}") };
        error.class().told(mistaken(path, kind).unwrap_or(named))
    })
}

/// Turns the error of a `Result` that has no class of its own, such as one about a JSON text, into a Python exception.
pub trait OrRaiseAs<T> {
    /// The value, or the error as an exception of `class`.
    fn or_raise_as(self, class: ErrorClass) -> PyResult<T>;
}

impl<T, E: Error> OrRaiseAs<T> for Result<T, E> {
    fn or_raise_as(self, class: ErrorClass) -> PyResult<T> {
        self.map_err(|error| class.exception(&error))
    }
}

/// The error's text followed by those of its sources, unless a text repeats its source already.
pub fn with_sources(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}
