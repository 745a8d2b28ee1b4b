//! Ends the job on all ranks, with one message, when a rank dies, fails, leaves or stalls.
//!
//! The watchdogs form a star. Rank 0 listens; every other rank connects, tells at intervals which collective calls it has
//! made and which Action it is in, and says whether it ends well (`Bye`) or by an exception (`Fail`). A connection that closes without either means that the
//! process has died; the kernel closes it at once even after `kill -9`. Rank 0 judges and orders `Stop`; a rank that loses rank 0
//! judges for itself. All of it runs on threads that never need the GIL, because a rank that waits in a collective may hold it.

mod calls;
mod door;
mod judge;
mod peers;
mod position;
pub mod python;
mod wire;

use std::io::{self, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use calls::Place;
use door::{Door, HANDSHAKE, MAX_GREETERS};
use peers::{Peers, Standing};
use position::Position;
use wire::{Message, Receiver, Sender, Stop};

/// The exit status of a rank that the watchdog ends: EX_TEMPFAIL, as the same job may well work the next time.
pub const EXIT_STATUS: i32 = 75;

/// How long rank 0 waits after a rank has failed: if another rank has died, that is the cause and the failure its effect.
const SETTLE: Duration = Duration::from_millis(300);

/// How long rank 0 lives on after an order to stop, so that the order is delivered before its connections close.
const LINGER: Duration = Duration::from_millis(200);

/// How long a rank inside a call lives on after the end was decided: its collective may fail for the same cause, and then
/// the error comes out of the call.
const HAND_OUT: Duration = Duration::from_secs(1);

/// A pause between two looks at something that another rank or thread does.
const POLL: Duration = Duration::from_millis(10);

/// Why there is no watchdog.
#[derive(Debug, thiserror::Error)]
pub enum WatchdogError {
    /// The port cannot be opened.
    #[error("rank 0's watchdog cannot listen on {host}")]
    Listen {
        /// This host's name as the other ranks know it.
        host: String,
        /// What the system says.
        source: io::Error,
    },
    /// Rank 0 cannot be reached.
    #[error("rank {rank}'s watchdog cannot reach rank 0 at {address}")]
    Connect {
        /// This rank.
        rank: u32,
        /// Rank 0's address.
        address: String,
        /// What the system says.
        source: io::Error,
    },
    /// The system starts no more threads.
    #[error("the watchdog cannot start a thread")]
    Thread(#[source] io::Error),
    /// Not an address that [`Watchdog::listen`] has made.
    #[error("\"{0}\" is not the address of a watchdog")]
    Address(String),
    /// Rank 0 has another idea of the job.
    #[error("rank 0's watchdog refused rank {rank}: {reason}")]
    Refused {
        /// This rank.
        rank: u32,
        /// Rank 0's words.
        reason: String,
    },
}

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
    pub fn listen(
        world_size: u32,
        host: &str,
        limits: Limits,
        flush: fn(),
    ) -> Result<(Arc<Self>, String), WatchdogError> {
        let (door, address) = Door::open(host)?;
        let watchdog = Arc::new(Self::new(0, world_size, limits, flush));
        watchdog.spawn(move |watchdog| watchdog.let_in(&Arc::new(door))).map_err(WatchdogError::Thread)?;
        watchdog.spawn(|watchdog| watchdog.beat()).map_err(WatchdogError::Thread)?;
        Ok((watchdog, address))
    }

    /// Another rank's watchdog, connected with rank 0 at an address that [`Watchdog::listen`] has made.
    pub fn connect(
        address: &str,
        (rank, world_size): (u32, u32),
        patience: Duration,
        limits: Limits,
        flush: fn(),
    ) -> Result<Arc<Self>, WatchdogError> {
        let (sender, receiver) = door::enter(address, (rank, world_size), patience)?;
        let watchdog = Arc::new(Self::new(rank, world_size, limits, flush));
        watchdog.claim(0);
        watchdog.admit(0, sender);
        watchdog.spawn(move |watchdog| watchdog.listen_to(0, receiver)).map_err(WatchdogError::Thread)?;
        watchdog.spawn(|watchdog| watchdog.beat()).map_err(WatchdogError::Thread)?;
        Ok(watchdog)
    }

    fn new(rank: u32, world_size: u32, limits: Limits, flush: fn()) -> Self {
        Self {
            rank,
            world_size,
            limits,
            process_id: std::process::id(),
            position: Position::new(),
            peers: Mutex::new(Peers::new(rank, world_size)),
            closed: AtomicBool::new(false),
            verdict: OnceLock::new(),
            handed_out: AtomicBool::new(false),
            reported: AtomicBool::new(false),
            noticed: Mutex::new(None),
            flush,
        }
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
        thread::Builder::new().name("rannc-watchdog".to_owned()).spawn(move || run(&watchdog)).map(drop)
    }

    /// Lets the other ranks in, each once, until all are. Other callers are let go: a scan of the ports must not end a job.
    fn let_in(self: &Arc<Self>, door: &Arc<Door>) {
        let greeters = Arc::new(AtomicUsize::new(0));
        while !self.is_over() && !self.peers().are_complete() {
            while greeters.load(Ordering::Acquire) < MAX_GREETERS {
                let Some(stream) = door.caller() else { break };
                greeters.fetch_add(1, Ordering::AcqRel);
                let (door, busy) = (Arc::clone(door), Arc::clone(&greeters));
                let started = self.spawn(move |watchdog| {
                    let greeted = watchdog.greet(stream, &door.token);
                    drop(door);
                    busy.fetch_sub(1, Ordering::AcqRel);
                    if let Ok(Some((rank, receiver))) = greeted {
                        watchdog.listen_to(rank, receiver);
                    }
                });
                if started.is_err() {
                    // The caller has been let go with the thread, and will call again.
                    greeters.fetch_sub(1, Ordering::AcqRel);
                }
            }
            thread::sleep(POLL);
        }
    }

    /// Hears out a caller; it is a rank of this job if it knows the token.
    fn greet(&self, stream: TcpStream, expected: &str) -> io::Result<Option<(u32, Receiver)>> {
        let (sender, mut receiver) = wire::split(stream)?;
        let hello = receiver.receive_before(Instant::now() + HANDSHAKE)?;
        let Message::Hello { token, rank, world_size } = hello else { return Ok(None) };
        if token != expected {
            return Ok(None);
        }
        if let Some(reason) = self.objection(rank, world_size) {
            sender.send(&Message::Refused { reason })?;
            return Ok(None);
        }
        if let Err(error) = sender.send(&Message::Welcome) {
            self.peers().get(rank).standing = Standing::Unknown;
            return Err(error);
        }
        self.admit(rank, sender);
        Ok(Some((rank, receiver)))
    }

    /// Why a caller cannot be the rank that it says it is; without an objection it is.
    fn objection(&self, rank: u32, world_size: u32) -> Option<String> {
        if world_size != self.world_size {
            return Some(format!("it counts {world_size} ranks, rank 0 counts {}", self.world_size));
        }
        if rank == 0 || rank >= world_size {
            return Some(format!("there is no rank {rank} to connect among {world_size}"));
        }
        (!self.claim(rank)).then(|| format!("there is a rank {rank} already"))
    }

    /// Takes the place of a rank, once.
    fn claim(&self, rank: u32) -> bool {
        let mut peers = self.peers();
        let peer = peers.get(rank);
        let free = peer.standing == Standing::Unknown;
        if free {
            peer.standing = Standing::Working;
        }
        free
    }

    fn admit(&self, rank: u32, sender: Sender) {
        self.peers().get(rank).sender = Some(Arc::new(sender));
    }

    /// Hears a connected rank until it is gone.
    fn listen_to(self: &Arc<Self>, rank: u32, mut receiver: Receiver) {
        let silence = receiver.set_silence(self.limits.silence);
        loop {
            match silence.as_ref().map_err(io::Error::kind).and_then(|()| receiver.receive().map_err(|e| e.kind())) {
                Ok(Message::Beat(beat)) => self.peers().hear(rank, beat),
                Ok(Message::Bye) => self.peers().get(rank).standing = Standing::Left,
                Ok(Message::Fail { text, place }) => self.hear_failure(rank, &text, &place),
                Ok(Message::Stop(stop)) if rank == 0 => self.obey(&stop),
                Ok(Message::Stop(_) | Message::Hello { .. } | Message::Welcome | Message::Refused { .. }) => {}
                Err(kind) => return self.lose(rank, kind),
            }
        }
    }

    fn hear_failure(self: &Arc<Self>, rank: u32, text: &str, place: &str) {
        self.peers().get(rank).standing = Standing::Failed;
        let stop = self.failure(rank, text, place);
        let order = {
            let stop = stop.clone();
            move |watchdog: &Arc<Self>| {
                thread::sleep(SETTLE);
                watchdog.order(&stop);
            }
        };
        if self.spawn(order).is_err() {
            self.order(&stop);
        }
    }

    fn failure(&self, rank: u32, text: &str, place: &str) -> Stop {
        Stop {
            cause: format!("rank {rank} failed {place}: {}", text.trim_end().trim_end_matches('.')),
            said_by: Some(rank),
            grace_ms: self.limits.grace.as_millis() as u64,
        }
    }

    /// The connection with `rank` is over.
    fn lose(self: &Arc<Self>, rank: u32, kind: io::ErrorKind) {
        let cause = {
            let mut peers = self.peers();
            let peer = peers.get(rank);
            peer.sender = None;
            if peer.standing != Standing::Working {
                return;
            }
            let place = peer.beat.place();
            if matches!(kind, io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) {
                let seconds = self.limits.silence.as_secs_f64();
                format!("rank {rank} has not been heard of for {seconds} s (silence_timeout_s); it was last {place}")
            } else if peer.call().is_some() {
                format!("rank {rank} died while it was {place}")
            } else {
                // A short call can have begun since the last beat.
                format!("rank {rank} died; when last heard of, it was {place}")
            }
        };
        self.order(&Stop { cause, said_by: None, grace_ms: 0 });
    }

    /// Sends beats and looks at the clock, until the script has ended.
    fn beat(self: &Arc<Self>) {
        while !self.is_over() {
            self.tell();
            let cause = judge::verdict(&self.peers(), &self.limits, self.rank);
            if let Some(cause) = cause {
                self.order(&Stop { cause, said_by: None, grace_ms: 0 });
            }
            if self.rank == 0 {
                self.name_late();
            }
            thread::sleep(self.limits.heartbeat);
        }
    }

    /// Tells the other ranks, and this one's own record, where this rank is.
    fn tell(&self) {
        let beat = self.position.beat();
        self.peers().hear(self.rank, beat.clone());
        self.broadcast(&Message::Beat(beat));
    }

    /// Says once for each call which ranks have not come to it for long.
    fn name_late(&self) {
        let Some((place, text)) = judge::late(&self.peers(), &self.limits) else { return };
        let mut noticed = self.noticed.lock().unwrap_or_else(PoisonError::into_inner);
        if noticed.replace(place) != Some(place) {
            say(&text);
        }
    }

    fn broadcast(&self, message: &Message) {
        let senders = self.peers().senders();
        for sender in senders {
            // A peer that cannot be reached shows on the receiving side too, and is dealt with there.
            let _ = sender.send(message);
        }
    }

    /// Ends the job: rank 0 tells all, another rank (it has lost rank 0) ends itself.
    fn order(&self, stop: &Stop) {
        if self.is_over() || self.verdict.set(stop.clone()).is_err() {
            return;
        }
        if self.rank == 0 {
            self.broadcast(&Message::Stop(stop.clone()));
            thread::sleep(LINGER);
        }
        self.end(stop);
    }

    /// Rank 0's order has come.
    fn obey(&self, stop: &Stop) {
        if !self.is_over() && self.verdict.set(stop.clone()).is_ok() {
            self.end(stop);
        }
    }

    /// Prints the cause and leaves the process, except on the rank that ends by its own exception.
    fn end(&self, stop: &Stop) {
        if stop.said_by == Some(self.rank) {
            return;
        }
        let beat = self.position.beat();
        let grace = Duration::from_millis(stop.grace_ms);
        let patience = if beat.calls.current().is_some() { grace.max(HAND_OUT) } else { grace };
        if wait_until(&self.handed_out, patience) {
            wait_until(&self.reported, self.limits.grace);
        }
        if self.is_over() {
            return;
        }
        (self.flush)();
        let said = self.handed_out.load(Ordering::Acquire) && self.reported.load(Ordering::Acquire);
        if !said {
            say(&format!("{}. Rank {} was {}. All ranks stop.", stop.cause, self.rank, beat.place()));
        }
        leave_process(EXIT_STATUS);
    }
}

/// True as soon as `flag` is set, false when it is not within `patience`.
fn wait_until(flag: &AtomicBool, patience: Duration) -> bool {
    let start = Instant::now();
    while !flag.load(Ordering::Acquire) && start.elapsed() < patience {
        thread::sleep(POLL.min(patience));
    }
    flag.load(Ordering::Acquire)
}

/// Writes one line to stderr.
fn say(text: &str) {
    // With nowhere left to say it, going on is still right.
    let _ = io::stderr().write_all(format!("RaNNC: {text}\n").as_bytes());
}

/// Leaves the process at once.
///
/// `std::process::exit` would run the exit handlers of libraries, and NCCL's wait for ranks that are gone.
#[allow(unsafe_code)] // the standard library has no safe equivalent
fn leave_process(status: i32) -> ! {
    // SAFETY: `_exit` takes any status, touches no memory of this process, and does not return.
    unsafe { libc::_exit(status) }
}
