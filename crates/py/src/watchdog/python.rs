//! `pyrannc._native.Watchdog`.

use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyType;

use super::Limits;
use crate::errors::{ErrorClass, OrRaiseAs};

/// How long to wait for the interpreter before its buffered output is given up.
const FLUSH_PATIENCE: Duration = Duration::from_millis(500);

/// Ends the job on all ranks, with one message, when a rank dies, fails, leaves or stalls.
#[pyclass(frozen, module = "pyrannc._native")]
pub struct Watchdog {
    inner: Arc<super::Watchdog>,
    /// What the other ranks give to `connect`.
    #[pyo3(get)]
    address: String,
}

#[pymethods]
impl Watchdog {
    /// The exit status of a rank that the watchdog ends.
    #[classattr]
    const EXIT_STATUS: i32 = super::EXIT_STATUS;

    /// Rank 0's watchdog. `host` is this host's name as the other ranks know it, `bind` the local address to listen on.
    #[classmethod]
    #[pyo3(signature = (world_size, host, *, bind="0.0.0.0", heartbeat_s=0.5, silence_s=20.0, stall_timeout_s=600.0,
                        left_timeout_s=20.0, fail_grace_s=2.0))]
    #[allow(clippy::too_many_arguments)] // keyword arguments, each with a default
    fn listen(
        _class: &Bound<'_, PyType>,
        py: Python<'_>,
        world_size: u32,
        host: &str,
        bind: &str,
        heartbeat_s: f64,
        silence_s: f64,
        stall_timeout_s: f64,
        left_timeout_s: f64,
        fail_grace_s: f64,
    ) -> PyResult<Self> {
        if world_size == 0 {
            return Err(PyValueError::new_err("world_size must be at least 1"));
        }
        let limits = limits(heartbeat_s, silence_s, stall_timeout_s, left_timeout_s, fail_grace_s)?;
        let made = py.detach(|| super::Watchdog::listen(world_size, (host, bind), limits, flush_python));
        let (inner, address) = made.or_raise_as(ErrorClass::PEER)?;
        Ok(Self { inner, address })
    }

    /// Another rank's watchdog, connected with rank 0's at its `address`.
    #[classmethod]
    #[pyo3(signature = (address, rank, world_size, *, connect_timeout_s=30.0, heartbeat_s=0.5, silence_s=20.0,
                        stall_timeout_s=600.0, left_timeout_s=20.0, fail_grace_s=2.0))]
    #[allow(clippy::too_many_arguments)] // keyword arguments, each with a default
    fn connect(
        _class: &Bound<'_, PyType>,
        py: Python<'_>,
        address: String,
        rank: u32,
        world_size: u32,
        connect_timeout_s: f64,
        heartbeat_s: f64,
        silence_s: f64,
        stall_timeout_s: f64,
        left_timeout_s: f64,
        fail_grace_s: f64,
    ) -> PyResult<Self> {
        if rank == 0 || rank >= world_size {
            return Err(PyValueError::new_err(format!("rank must be in 1..{world_size}, not {rank}")));
        }
        let patience = seconds("connect_timeout_s", connect_timeout_s)?;
        let limits = limits(heartbeat_s, silence_s, stall_timeout_s, left_timeout_s, fail_grace_s)?;
        let connect = || super::Watchdog::connect(&address, (rank, world_size), patience, limits, flush_python);
        let inner = py.detach(connect).or_raise_as(ErrorClass::PEER)?;
        Ok(Self { inner, address })
    }

    /// Gives the names of the Actions that follow; the rank is outside a step until it enters one.
    fn program(&self, names: Vec<String>) {
        self.inner.position().set_program(names);
    }

    /// The Action with this index begins.
    fn enter(&self, index: usize) {
        self.inner.position().enter(index);
    }

    /// The step is over.
    fn idle(&self) {
        self.inner.position().leave();
    }

    /// This rank ends by an uncaught exception; `message` is its class and text. The others end after a grace.
    fn fail(&self, py: Python<'_>, message: &str) {
        py.detach(|| self.inner.fail(message));
    }

    /// This rank's script has ended as it should.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.inner.close());
    }
}

fn limits(heartbeat_s: f64, silence_s: f64, stall_s: f64, left_s: f64, grace_s: f64) -> PyResult<Limits> {
    Ok(Limits {
        heartbeat: seconds("heartbeat_s", heartbeat_s)?,
        silence: seconds("silence_s", silence_s)?,
        stall: seconds("stall_timeout_s", stall_s)?,
        left: seconds("left_timeout_s", left_s)?,
        grace: seconds("fail_grace_s", grace_s)?,
    })
}

fn seconds(name: &str, value: f64) -> PyResult<Duration> {
    match Duration::try_from_secs_f64(value) {
        Ok(duration) if !duration.is_zero() => Ok(duration),
        _ => Err(PyValueError::new_err(format!("{name} must be a positive number of seconds, not {value}"))),
    }
}

/// Writes out what Python has buffered for stdout and stderr, unless the interpreter is stuck.
fn flush_python() {
    let (done, flushed) = mpsc::channel();
    thread::spawn(move || {
        Python::try_attach(|py| {
            for name in ["stdout", "stderr"] {
                // A closed stream has nothing to lose.
                let _ = py.import("sys").and_then(|sys| sys.getattr(name)?.call_method0("flush"));
            }
        });
        let _ = done.send(());
    });
    let _ = flushed.recv_timeout(FLUSH_PATIENCE);
}
