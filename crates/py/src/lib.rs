//! `pyrannc._native`: conversion, errors, GIL release and the watchdog. No logic of its own.

mod costs;
mod errors;
mod planning;
mod random;
mod watchdog;

use pyo3::prelude::*;

/// The core of RaNNC.
#[pymodule]
mod _native {
    use std::ffi::OsString;

    use pyo3::prelude::*;

    #[pymodule_export]
    use crate::costs::{Cluster, Profile};
    #[pymodule_export]
    use crate::planning::{Blocks, Graph, Partition, Plan, Program};
    #[pymodule_export]
    use crate::random::RandomStream;
    #[pymodule_export]
    use crate::watchdog::python::Watchdog;

    /// The version of this package.
    #[pymodule_export]
    #[allow(non_upper_case_globals)] // Python's name for it
    const version: &str = env!("CARGO_PKG_VERSION");

    /// Runs the `rannc` command; `args` starts with the name of the program. Returns the exit status.
    #[pyfunction]
    fn run_cli(py: Python<'_>, args: Vec<OsString>) -> i32 {
        py.detach(|| rannc_cli::run(args.into_iter(), &mut std::io::stdout(), &mut std::io::stderr()))
    }
}
