//! Ends the job on all ranks, with one message, when a rank dies, fails, leaves or stalls.
//!
//! The watchdogs form a star. Rank 0 listens; every other rank connects, tells at intervals which collective calls it has
//! made and which Action it is in, and says whether it ends well (`Bye`) or by an exception (`Fail`). A connection that
//! closes without either means that the process has died; the kernel closes it at once even after `kill -9`. Rank 0 judges
//! and orders `Stop`; a rank that loses rank 0 judges for itself. All of it runs on threads that never need the GIL, because
//! a rank that waits in a collective may hold it.

mod ending;
mod hearing;
mod judge;
mod peers;
mod position;
mod replays;
mod telling;

use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::calls::Place;
use crate::door::{self, Door};
use crate::error::JobError;
use crate::home::Home;
use crate::reception;
use crate::wire::{Message, Stop};
use ending::{HAND_OUT, leave_process};
use peers::{Peers, Standing};
pub use position::Position;

/// The exit status of a rank that the watchdog ends: EX_TEMPFAIL, as the same job may well work the next time.
pub const EXIT_STATUS: i32 = 75;

/// How long rank 0 waits after a rank has failed: if another rank has died, that is the cause and the failure its effect.
const SETTLE: Duration = Duration::from_millis(300);

/// A pause between two looks at something that another rank or thread does.
const POLL: Duration = Duration::from_millis(10);

/// How long is too long.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Between two beats.
    pub heartbeat: Duration,
    /// Without a beat, a rank is dead although its connection stands (its host lost power, a child holds the socket).
    pub silence: Duration,
    /// Without progress on any rank, while one is inside a call.
    pub stall: Duration,
    /// Without progress inside a call, when a rank has left.
    pub left: Duration,
    /// Without progress inside a call, when another rank is in one that does not go with it.
    pub different: Duration,
    /// Without progress inside a call, until those who have not come are named.
    pub late: Duration,
    /// From a failure to the end of the other ranks.
    pub grace: Duration,
}

/// One rank's watchdog.
pub struct Watchdog {
    rank: u32,
    world_size: u32,
    limits: Limits,
    /// A process forked from this one inherits the connections but must not speak for it.
    process_id: u32,
    home: Home,
    position: Position,
    peers: Mutex<Peers>,
    /// The script has ended; nothing is this watchdog's business any more.
    closed: AtomicBool,
    /// Why the job ends; later causes are effects.
    verdict: OnceLock<Stop>,
    /// The verdict has come out of a call as an exception.
    handed_out: AtomicBool,
    /// An uncaught exception has been printed.
    reported: AtomicBool,
    /// The call for which late ranks were last named.
    noticed: Mutex<Option<Place>>,
    /// Called before the process ends, to save what its language runtime has buffered.
    flush: fn(),
}

impl Watchdog {
    /// Rank 0's watchdog and the address for the other ranks; `host` is this host's name as they know it.
    pub fn listen(world_size: u32, host: &str, limits: Limits, flush: fn()) -> Result<(Arc<Self>, String), JobError> {
        let home = Home::Named(host.to_owned());
        let (door, address) = Door::open(0, &home)?;
        let watchdog = Arc::new(Self::new((0, world_size), home, limits, flush));
        watchdog.spawn(move |watchdog| reception::let_in(door, watchdog)).map_err(JobError::Thread)?;
        watchdog.spawn(|watchdog| watchdog.beat()).map_err(JobError::Thread)?;
        Ok((watchdog, address))
    }

    /// Another rank's watchdog, connected with rank 0 at an address that [`Watchdog::listen`] has made.
    pub fn connect(
        address: &str,
        (rank, world_size): (u32, u32),
        patience: Duration,
        limits: Limits,
        flush: fn(),
    ) -> Result<Arc<Self>, JobError> {
        let (sender, receiver) = door::enter(0, address, (rank, world_size), patience)?;
        let home = receiver.local_address().map(Home::At);
        let home = home.map_err(|source| JobError::Connect { rank, above: 0, address: address.to_owned(), source })?;
        let watchdog = Arc::new(Self::new((rank, world_size), home, limits, flush));
        watchdog.claim(0);
        watchdog.peers().get(0).sender = Some(Arc::new(sender));
        watchdog.spawn(move |watchdog| watchdog.listen_to(0, receiver)).map_err(JobError::Thread)?;
        watchdog.spawn(|watchdog| watchdog.beat()).map_err(JobError::Thread)?;
        Ok(watchdog)
    }

    fn new((rank, world_size): (u32, u32), home: Home, limits: Limits, flush: fn()) -> Self {
        Self {
            rank,
            world_size,
            limits,
            process_id: std::process::id(),
            home,
            position: Position::default(),
            peers: Mutex::new(Peers::new(rank, world_size)),
            closed: AtomicBool::new(false),
            verdict: OnceLock::new(),
            handed_out: AtomicBool::new(false),
            reported: AtomicBool::new(false),
            noticed: Mutex::new(None),
            flush,
        }
    }

    /// This rank, and the number of ranks.
    pub fn place(&self) -> (u32, u32) {
        (self.rank, self.world_size)
    }

    /// Where other ranks find this one's host.
    pub fn home(&self) -> &Home {
        &self.home
    }

    /// True when there is nothing more to wait for: the job ends, this rank has left, or this is a child of its process.
    pub fn is_at_end(&self) -> bool {
        self.is_over() || self.verdict.get().is_some()
    }

    /// The same number on ranks that are in the same call for the same `purpose`.
    pub fn label(&self, purpose: u8) -> u64 {
        let mut hasher = DefaultHasher::new();
        purpose.hash(&mut hasher);
        self.position.with_call(|call| call.hash(&mut hasher));
        hasher.finish()
    }

    /// Where this rank is.
    pub fn position(&self) -> &Position {
        &self.position
    }

    /// Why the job ends, if that is known within `patience`; asked by a rank whose collective has failed.
    ///
    /// The caller raises it, and then the line that would say it is left out.
    pub fn explain(&self, patience: Duration) -> Option<&str> {
        if self.is_over() {
            return None;
        }
        self.position.tear();
        self.tell();
        let stop = self.await_verdict(patience).filter(|stop| stop.said_by != Some(self.rank))?;
        self.handed_out.store(true, Ordering::Release);
        Some(&stop.cause)
    }

    /// This rank ends by an uncaught exception, which it has printed already. Returns when it may go on to end, which it
    /// may not if its exception is only the effect of another rank's end.
    pub fn fail(self: &Arc<Self>, text: &str) {
        if self.is_over() {
            return;
        }
        self.reported.store(true, Ordering::Release);
        let place = self.position.failed_at();
        self.peers().get(self.rank).standing = Standing::Failed;
        if self.rank == 0 {
            // On this thread, as the interpreter must not end before the order is delivered.
            thread::sleep(SETTLE);
            self.order(&self.failure(0, text, &place));
        } else {
            self.broadcast(&Message::Fail { text: text.to_owned(), place });
        }
        if self.await_verdict(2 * SETTLE).is_some_and(|stop| stop.said_by != Some(self.rank)) {
            // The thread that has brought the verdict leaves the process within this time.
            thread::sleep(self.limits.grace + HAND_OUT + 2 * SETTLE);
        }
        let grace = self.limits.grace;
        // Without a thread, the interpreter ends in its own time.
        let _ = self.spawn(move |watchdog| {
            // The interpreter may hang while it ends, in a library that waits for the other ranks.
            thread::sleep(grace);
            (watchdog.flush)();
            leave_process(EXIT_STATUS);
        });
    }

    /// Why the job ends, as soon as that is decided.
    fn await_verdict(&self, patience: Duration) -> Option<&Stop> {
        let start = Instant::now();
        while self.verdict.get().is_none() && start.elapsed() < patience {
            thread::sleep(POLL);
        }
        self.verdict.get()
    }

    /// This rank's script has ended as it should.
    pub fn close(&self) {
        if self.is_over() || self.peers().get(self.rank).standing == Standing::Failed {
            return;
        }
        self.closed.store(true, Ordering::Release);
        self.broadcast(&Message::Bye);
    }

    fn peers(&self) -> MutexGuard<'_, Peers> {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_over(&self) -> bool {
        self.closed.load(Ordering::Acquire) || self.process_id != std::process::id()
    }

    fn spawn(self: &Arc<Self>, run: impl FnOnce(&Arc<Self>) + Send + 'static) -> io::Result<()> {
        let watchdog = Arc::clone(self);
        reception::spawn(move || run(&watchdog))
    }
}
