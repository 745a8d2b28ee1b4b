//! Rust errors as the exceptions of `pyrannc.errors`.

use std::error::Error;

use pyo3::prelude::*;

/// A class of `pyrannc.errors`.
#[derive(Clone, Copy)]
pub struct ErrorClass(&'static str);

impl ErrorClass {
    /// The Graph cannot be used.
    pub const CAPTURE: Self = Self("CaptureError");
    /// There is no Plan.
    pub const PLAN: Self = Self("PlanError");
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
        let text = with_sources(error);
        Python::attach(|py| {
            let made = py.import("pyrannc.errors").and_then(|module| module.getattr(self.0)?.call1((text,)));
            made.map_or_else(|import_error| import_error, PyErr::from_value)
        })
    }
}

/// Turns the error of a `Result` into a Python exception.
pub trait OrRaise<T> {
    /// The value, or the error as an exception of `class`.
    fn or_raise(self, class: ErrorClass) -> PyResult<T>;
}

impl<T, E: Error> OrRaise<T> for Result<T, E> {
    fn or_raise(self, class: ErrorClass) -> PyResult<T> {
        self.map_err(|error| class.exception(&error))
    }
}

/// The error's text followed by those of its sources, unless a text repeats its source already.
fn with_sources(error: &dyn Error) -> String {
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
