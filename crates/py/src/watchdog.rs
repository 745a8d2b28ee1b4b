//! `pyrannc._native.Watchdog`.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;
use std::time::Duration;

use pyo3::exceptions::{PyConnectionError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyType};
use rannc_job::{EXIT_STATUS, Exchange, ExchangeError, Limits, Meeting};

use crate::errors::{ErrorClass, OrRaiseAs, with_sources};

/// How long to wait for the interpreter before its buffered output is given up.
const FLUSH_PATIENCE: Duration = Duration::from_millis(500);

/// Ends the job on all ranks, with one message, when a rank dies, fails, leaves or stalls.
#[pyclass(frozen, module = "pyrannc._native")]
pub struct Watchdog {
    inner: Arc<rannc_job::Watchdog>,
    /// What the other ranks give to `connect`.
    #[pyo3(get)]
    address: String,
    meeting: Mutex<Option<Meeting>>,
    exchange: Mutex<Option<Exchange>>,
}

impl Watchdog {
    fn new(inner: Arc<rannc_job::Watchdog>, address: String) -> Self {
        Self { inner, address, meeting: Mutex::new(None), exchange: Mutex::new(None) }
    }
}

#[pymethods]
impl Watchdog {
    /// The exit status of a rank that the watchdog ends.
    #[classattr]
    const EXIT_STATUS: i32 = EXIT_STATUS;

    /// Rank 0's watchdog. `host` is this host's name as the other ranks know it; it listens on that name's addresses.
    #[classmethod]
    #[pyo3(signature = (world_size, host, *, heartbeat_s=0.5, silence_timeout_s=20.0, stall_timeout_s=600.0,
                        left_timeout_s=20.0, different_calls_timeout_s=10.0, late_notice_s=30.0, fail_grace_s=2.0))]
    #[allow(clippy::too_many_arguments)] // keyword arguments, each with a default
    fn listen(
        _class: &Bound<'_, PyType>,
        py: Python<'_>,
        world_size: u32,
        host: &str,
        heartbeat_s: f64,
        silence_timeout_s: f64,
        stall_timeout_s: f64,
        left_timeout_s: f64,
        different_calls_timeout_s: f64,
        late_notice_s: f64,
        fail_grace_s: f64,
    ) -> PyResult<Self> {
        if world_size == 0 {
            return Err(PyValueError::new_err("world_size must be at least 1"));
        }
        let limits = Limits {
            heartbeat: seconds("heartbeat_s", heartbeat_s)?,
            silence: seconds("silence_timeout_s", silence_timeout_s)?,
            stall: seconds("stall_timeout_s", stall_timeout_s)?,
            left: seconds("left_timeout_s", left_timeout_s)?,
            different: seconds("different_calls_timeout_s", different_calls_timeout_s)?,
            late: seconds("late_notice_s", late_notice_s)?,
            grace: seconds("fail_grace_s", fail_grace_s)?,
        };
        let made = py.detach(|| rannc_job::Watchdog::listen(world_size, host, limits, flush_python));
        let (inner, address) = made.or_raise_as(ErrorClass::PEER)?;
        Ok(Self::new(inner, address))
    }

    /// Another rank's watchdog, connected with rank 0's at its `address`. What takes the sight of all ranks is judged by
    /// rank 0, with its limits.
    #[classmethod]
    #[pyo3(signature = (address, rank, world_size, *, connect_timeout_s=30.0, heartbeat_s=0.5, silence_timeout_s=20.0,
                        left_timeout_s=20.0, fail_grace_s=2.0))]
    #[allow(clippy::too_many_arguments)] // keyword arguments, each with a default
    fn connect(
        _class: &Bound<'_, PyType>,
        py: Python<'_>,
        address: String,
        rank: u32,
        world_size: u32,
        connect_timeout_s: f64,
        heartbeat_s: f64,
        silence_timeout_s: f64,
        left_timeout_s: f64,
        fail_grace_s: f64,
    ) -> PyResult<Self> {
        if rank == 0 || rank >= world_size {
            return Err(PyValueError::new_err(format!("rank must be in 1..{world_size}, not {rank}")));
        }
        let patience = seconds("connect_timeout_s", connect_timeout_s)?;
        let limits = Limits {
            heartbeat: seconds("heartbeat_s", heartbeat_s)?,
            silence: seconds("silence_timeout_s", silence_timeout_s)?,
            left: seconds("left_timeout_s", left_timeout_s)?,
            grace: seconds("fail_grace_s", fail_grace_s)?,
            stall: Duration::MAX,
            different: Duration::MAX,
            late: Duration::MAX,
        };
        let connect = || rannc_job::Watchdog::connect(&address, (rank, world_size), patience, limits, flush_python);
        let inner = py.detach(connect).or_raise_as(ErrorClass::PEER)?;
        Ok(Self::new(inner, address))
    }

    /// Opens this rank's end of the exchange. Returns what `join_exchange` needs of it on the other ranks.
    fn open_exchange(&self) -> PyResult<String> {
        let (rank, world_size) = self.inner.place();
        let meeting = Meeting::open(rank, world_size, self.inner.home()).or_raise_as(ErrorClass::PEER)?;
        let address = meeting.address().to_owned();
        *locked(&self.meeting) = Some(meeting);
        Ok(address)
    }

    /// Connects the exchange of all ranks, whose ends are open at these addresses, in rank order. All ranks call it.
    #[pyo3(signature = (addresses, *, connect_timeout_s=30.0))]
    fn join_exchange(&self, py: Python<'_>, addresses: Vec<String>, connect_timeout_s: f64) -> PyResult<()> {
        let patience = seconds("connect_timeout_s", connect_timeout_s)?;
        let Some(meeting) = locked(&self.meeting).take() else {
            return Err(PyValueError::new_err("open_exchange comes before join_exchange"));
        };
        let exchange = py.detach(|| meeting.join(&addresses, patience)).or_raise_as(ErrorClass::PEER)?;
        *locked(&self.exchange) = Some(exchange);
        Ok(())
    }

    /// Every rank's text, in rank order. All ranks call it, in the same collective call and for the same `purpose`; if
    /// they are in different ones, or one is lost, it raises as soon as the watchdogs know.
    fn gather<'py>(&self, py: Python<'py>, purpose: u8, text: &[u8]) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let gathered = py.detach(|| match locked(&self.exchange).as_mut() {
            Some(exchange) => exchange.gather(self.inner.label(purpose), text, &|| self.inner.is_at_end()),
            None => Err(ExchangeError::Broken),
        });
        let gathered = gathered.map_err(|error| PyConnectionError::new_err(with_sources(&error)))?;
        Ok(gathered.texts().map(|text| PyBytes::new(py, text)).collect())
    }

    /// A collective call begins, named as a script writes it. False inside of another one, which counts alone.
    ///
    /// `new_round` is for calls that begin only when all ranks have come.
    #[pyo3(signature = (name, *, new_round=false))]
    fn begin(&self, name: &str, new_round: bool) -> bool {
        self.inner.position().begin(name, new_round)
    }

    /// The call ends, for which `begin` returned true.
    #[pyo3(signature = (*, failed=false))]
    fn end(&self, failed: bool) {
        self.inner.position().end(failed);
    }

    /// A phase of the first call begins. A `busy` rank computes by itself, and may take as long as it needs.
    #[pyo3(signature = (name, *, busy=false))]
    fn phase(&self, name: String, busy: bool) {
        self.inner.position().phase(name, busy);
    }

    /// The rank comes forward inside of what it does.
    fn advance(&self) {
        self.inner.position().advance();
    }

    /// Gives the names of the Actions that follow; the rank is at none until it enters one.
    fn program(&self, names: Vec<String>) {
        self.inner.position().set_program(names);
    }

    /// The Action with this index begins.
    fn enter(&self, index: usize) {
        self.inner.position().enter(index);
    }

    /// The step or phase is over.
    #[pyo3(signature = (*, failed=false))]
    fn idle(&self, failed: bool) {
        self.inner.position().leave(failed);
    }

    /// From now on the GPU writes to this file at which place of a replay it is: a native u32, 0 outside of any.
    fn follow(&self, path: PathBuf) -> PyResult<()> {
        Ok(self.inner.position().follow(&path)?)
    }

    /// The places of a recording have these names, by their numbers from `first` (at least 1) on.
    fn recorded(&self, first: u32, names: Vec<String>) {
        self.inner.position().recorded(first, names);
    }

    /// The recording whose places begin with `first` is gone.
    fn forgotten(&self, first: u32) {
        self.inner.position().forgotten(first);
    }

    /// Why the job ends, if that is known within so many seconds; asked by a rank whose collective has failed.
    fn explain(&self, py: Python<'_>, patience_s: f64) -> PyResult<Option<String>> {
        let patience = seconds("patience_s", patience_s)?;
        Ok(py.detach(|| self.inner.explain(patience).map(str::to_owned)))
    }

    /// This rank ends by an uncaught exception; `message` is its class and text. The others end after a grace.
    fn fail(&self, py: Python<'_>, message: &str) {
        py.detach(|| self.inner.fail(message));
    }

    /// This rank's script has ended as it should.
    fn close(&self, py: Python<'_>) {
        py.detach(|| {
            self.inner.close();
            *locked(&self.exchange) = None;
        });
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
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
    let flush = move || {
        Python::try_attach(|py| {
            for name in ["stdout", "stderr"] {
                // A closed stream has nothing to lose.
                let _ = py.import("sys").and_then(|sys| sys.getattr(name)?.call_method0("flush"));
            }
        });
        let _ = done.send(());
    };
    if thread::Builder::new().spawn(flush).is_err() {
        return;
    }
    let _ = flushed.recv_timeout(FLUSH_PATIENCE);
}
