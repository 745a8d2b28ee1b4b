//! `pyrannc._native`: conversion, errors, GIL release and the watchdog. No logic of its own.

mod cluster;
mod errors;
mod graph;
mod interrupt;
mod plan;
mod profile;
mod program;
mod random;
mod watchdog;

use pyo3::prelude::*;

/// The core of RaNNC.
#[pymodule]
mod _native {
    use std::ffi::OsString;

    use pyo3::prelude::*;
    use rannc_cli::{Around, Terminal};
    use rannc_report::{Column, amount, text};

    #[pymodule_export]
    use crate::cluster::Cluster;
    #[pymodule_export]
    use crate::graph::{Blocks, Divided, Graph};
    #[pymodule_export]
    use crate::plan::{Partition, Plan};
    #[pymodule_export]
    use crate::profile::Profile;
    #[pymodule_export]
    use crate::program::{Buckets, Program};
    #[pymodule_export]
    use crate::random::RandomStream;
    #[pymodule_export]
    use crate::watchdog::Watchdog;

    /// The version of this package.
    #[pymodule_export]
    #[allow(non_upper_case_globals)] // Python's name for it
    const version: &str = env!("CARGO_PKG_VERSION");

    /// Memory of a GPU that CUDA and communicators take besides tensors, where no cluster file says otherwise.
    #[pymodule_export]
    #[allow(non_upper_case_globals)] // likewise
    const framework_bytes: u64 = rannc_cost::FRAMEWORK_BYTES;

    /// Runs the `rannc` command; `args` starts with the name of the program. Returns the exit status.
    #[pyfunction]
    fn run_cli(py: Python<'_>, args: Vec<OsString>) -> i32 {
        py.detach(|| {
            let around = Around {
                out: &mut std::io::stdout(),
                err: &mut std::io::stderr(),
                terminal: Terminal::of_stdout(),
                interrupted: &|| Python::attach(|py| py.check_signals().is_err()),
            };
            rannc_cli::run(args.into_iter(), around)
        })
    }

    /// The text of a table in the one style of all tables, as wide as the terminal. `columns` are headers, and whether
    /// they are of amounts.
    #[pyfunction]
    fn table(columns: Vec<(String, bool)>, rows: Vec<Vec<String>>) -> String {
        let columns = columns.iter().map(|(header, is_amount)| if *is_amount { amount(header) } else { text(header) });
        let columns: Vec<Column<'_>> = columns.collect();
        rannc_report::table(&columns, &rows, Terminal::of_stdout().width())
    }

    /// The text in lines that fit the terminal.
    #[pyfunction]
    fn paragraph(text: &str) -> String {
        rannc_report::paragraph(text, Terminal::of_stdout().width())
    }
}
