//! Ends the job on all ranks, with one message, when a rank dies, fails, leaves or stalls.
//!
//! The watchdogs form a star. Rank 0 listens; every other rank connects, tells at intervals which Action it is in, and
//! says whether it ends well (`Bye`) or by an exception (`Fail`). A connection that closes without either means that the
//! process has died; the kernel closes it at once even after `kill -9`. Rank 0 judges and orders `Stop`; a rank that loses rank 0
//! judges for itself. All of it runs on threads that never need the GIL, because a rank that waits in a collective may hold it.

mod peers;
mod position;
pub mod python;
mod wire;

use std::io::{self, Write};
use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use peers::{Peers, Standing};
use position::Position;
use wire::{Beat, Message, Receiver, Sender, Stop};

/// The exit status of a rank that the watchdog ends: EX_TEMPFAIL, as the same job may well work the next time.
pub const EXIT_STATUS: i32 = 75;

/// How long rank 0 waits after a rank has failed: if another rank has died, that is the cause and the failure its effect.
const SETTLE: Duration = Duration::from_millis(300);

/// How long rank 0 lives on after an order to stop, so that the order is delivered before its connections close.
const LINGER: Duration = Duration::from_millis(200);

/// How long an unknown caller may take to say who it is.
const HANDSHAKE: Duration = Duration::from_secs(10);

/// A pause between two looks at something that another rank or thread does.
const POLL: Duration = Duration::from_millis(50);

/// Why there is no watchdog.
#[derive(Debug, thiserror::Error)]
pub enum WatchdogError {
    /// The port cannot be opened.
    #[error("rank 0's watchdog cannot listen on {host}")]
    Listen {
        /// The local address asked for.
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
    /// In one Action.
    pub stall: Duration,
    /// In one Action, when a rank has left.
    pub left: Duration,
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
    /// Called before the process ends, to save what its language runtime has buffered.
    flush: fn(),
}

impl Watchdog {
    /// Rank 0's watchdog and the address for the other ranks, at which `host` is this host's name as they know it.
    pub fn listen(
        world_size: u32,
        (host, bind): (&str, &str),
        limits: Limits,
        flush: fn(),
    ) -> Result<(Arc<Self>, String), WatchdogError> {
        let failed = |source| WatchdogError::Listen { host: bind.to_owned(), source };
        let listener = TcpListener::bind((bind, 0)).map_err(failed)?;
        let port = listener.local_addr().map_err(failed)?.port();
        let token = random_token();
        let address = format!("{host}:{port}/{token}");
        let watchdog = Arc::new(Self::new(0, world_size, limits, flush));
        watchdog.spawn(move |watchdog| watchdog.accept(&listener, &token));
        watchdog.spawn(|watchdog| watchdog.beat());
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
        let failed = |source| WatchdogError::Connect { rank, address: address.to_owned(), source };
        let (host, token) = address.rsplit_once('/').ok_or_else(|| WatchdogError::Address(address.to_owned()))?;
        let (sender, mut receiver) = reach(host, patience).and_then(wire::split).map_err(failed)?;
        receiver.set_silence(HANDSHAKE).map_err(failed)?;
        sender.send(&Message::Hello { token: token.to_owned(), rank, world_size }).map_err(failed)?;
        match receiver.receive().map_err(failed)? {
            Message::Welcome => {}
            Message::Refused { reason } => return Err(WatchdogError::Refused { rank, reason }),
            _ => return Err(WatchdogError::Address(address.to_owned())),
        }
        let watchdog = Arc::new(Self::new(rank, world_size, limits, flush));
        watchdog.admit(0, sender);
        watchdog.spawn(move |watchdog| watchdog.listen_to(0, receiver));
        watchdog.spawn(|watchdog| watchdog.beat());
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
            flush,
        }
    }

    /// Where this rank is.
    pub fn position(&self) -> &Position {
        &self.position
    }

    /// This rank ends by an uncaught exception, which it has printed already. Returns when it may go on to end, which it
    /// may not if its exception is only the effect of another rank's end.
    pub fn fail(self: &Arc<Self>, text: &str) {
        if self.is_over() {
            return;
        }
        let action = self.position.beat().action;
        self.peers().get(self.rank).standing = Standing::Failed;
        if self.rank == 0 {
            // On this thread, as the interpreter must not end before the order is delivered.
            thread::sleep(SETTLE);
            self.order(&self.failure(0, text, action.as_deref()));
        } else {
            self.broadcast(&Message::Fail { text: text.to_owned(), action });
        }
        if self.await_verdict().is_some_and(|stop| stop.said_by != Some(self.rank)) {
            // The thread that has brought the verdict leaves the process within this time.
            thread::sleep(self.limits.grace + 2 * SETTLE);
        }
        let grace = self.limits.grace;
        self.spawn(move |watchdog| {
            // The interpreter may hang while it ends, in a library that waits for the other ranks.
            thread::sleep(grace);
            (watchdog.flush)();
            leave_process(EXIT_STATUS);
        });
    }

    /// Why the job ends, as soon as rank 0 has decided on this rank's failure.
    fn await_verdict(&self) -> Option<&Stop> {
        let start = Instant::now();
        while self.verdict.get().is_none() && start.elapsed() < 2 * SETTLE {
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

    fn spawn(self: &Arc<Self>, run: impl FnOnce(&Arc<Self>) + Send + 'static) {
        let watchdog = Arc::clone(self);
        thread::spawn(move || run(&watchdog));
    }

    fn admit(&self, rank: u32, sender: Sender) {
        let mut peers = self.peers();
        let peer = peers.get(rank);
        peer.sender = Some(Arc::new(sender));
        peer.standing = Standing::Working;
    }

    /// Lets the other ranks in, each once. Other callers are let go: a scan of the ports must not end a job.
    fn accept(self: &Arc<Self>, listener: &TcpListener, token: &str) {
        for stream in listener.incoming() {
            let (Ok(stream), token) = (stream, token.to_owned()) else { continue };
            self.spawn(move |watchdog| {
                if let Ok(Some((rank, receiver))) = watchdog.greet(stream, &token) {
                    watchdog.listen_to(rank, receiver);
                }
            });
        }
    }

    /// Hears out a caller; it is a rank of this job if it knows the token.
    fn greet(&self, stream: TcpStream, expected: &str) -> io::Result<Option<(u32, Receiver)>> {
        let (sender, mut receiver) = wire::split(stream)?;
        receiver.set_silence(HANDSHAKE)?;
        let Message::Hello { token, rank, world_size } = receiver.receive()? else { return Ok(None) };
        if token != expected {
            return Ok(None);
        }
        if let Some(reason) = self.objection(rank, world_size) {
            sender.send(&Message::Refused { reason })?;
            return Ok(None);
        }
        sender.send(&Message::Welcome)?;
        self.admit(rank, sender);
        Ok(Some((rank, receiver)))
    }

    fn objection(&self, rank: u32, world_size: u32) -> Option<String> {
        if world_size != self.world_size {
            return Some(format!("it counts {world_size} ranks, rank 0 counts {}", self.world_size));
        }
        if rank == 0 || rank >= world_size {
            return Some(format!("there is no rank {rank} to connect among {world_size}"));
        }
        let known = self.peers().get(rank).standing != Standing::Unknown;
        known.then(|| format!("there is a rank {rank} already"))
    }

    /// Hears a connected rank until it is gone.
    fn listen_to(self: &Arc<Self>, rank: u32, mut receiver: Receiver) {
        let silence = receiver.set_silence(self.limits.silence);
        loop {
            match silence.as_ref().map_err(io::Error::kind).and_then(|()| receiver.receive().map_err(|e| e.kind())) {
                Ok(Message::Beat(beat)) => self.peers().hear(rank, beat),
                Ok(Message::Bye) => self.peers().get(rank).standing = Standing::Left,
                Ok(Message::Fail { text, action }) => self.hear_failure(rank, &text, action.as_deref()),
                Ok(Message::Stop(stop)) => self.obey(&stop),
                Ok(Message::Hello { .. } | Message::Welcome | Message::Refused { .. }) => {}
                Err(kind) => return self.lose(rank, kind),
            }
        }
    }

    fn hear_failure(self: &Arc<Self>, rank: u32, text: &str, action: Option<&str>) {
        self.peers().get(rank).standing = Standing::Failed;
        let stop = self.failure(rank, text, action);
        self.spawn(move |watchdog| {
            thread::sleep(SETTLE);
            watchdog.order(&stop);
        });
    }

    fn failure(&self, rank: u32, text: &str, action: Option<&str>) -> Stop {
        let place = action.map(|action| format!(" during \"{action}\"")).unwrap_or_default();
        Stop {
            cause: format!("rank {rank} failed{place}: {}", text.trim_end().trim_end_matches('.')),
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
            let place = match &peer.beat.action {
                Some(action) => format!("during \"{action}\""),
                None => "outside a step".to_owned(),
            };
            if matches!(kind, io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) {
                let seconds = self.limits.silence.as_secs_f64();
                format!("rank {rank} has not been heard of for {seconds} s, last {place}")
            } else {
                match &peer.beat.action {
                    Some(_) => format!("rank {rank} died {place}"),
                    // A short step can have begun since the last beat.
                    None => format!("rank {rank} died; when last heard of, it was {place}"),
                }
            }
        };
        self.order(&Stop { cause, said_by: None, grace_ms: 0 });
    }

    /// Sends beats and looks at the clock, until the script has ended.
    fn beat(self: &Arc<Self>) {
        while !self.is_over() {
            let beat = self.position.beat();
            self.peers().hear(self.rank, beat.clone());
            self.broadcast(&Message::Beat(beat));
            if let Some(cause) = self.overdue() {
                self.order(&Stop { cause, said_by: None, grace_ms: 0 });
            }
            thread::sleep(self.limits.heartbeat);
        }
    }

    /// Why some rank has waited too long. A rank other than 0 knows only of itself and rank 0, which judges before.
    fn overdue(&self) -> Option<String> {
        let peers = self.peers();
        if let (Some(left), Some((rank, action))) = (peers.left(), peers.stuck(self.limits.left)) {
            return Some(format!("rank {left} has left (its script ended) while rank {rank} waits in \"{action}\""));
        }
        if self.rank != 0 {
            return None;
        }
        let (rank, _) = peers.stuck(self.limits.stall)?;
        let seconds = self.limits.stall.as_secs_f64();
        Some(format!("rank {rank} has made no progress for {seconds} s: {}", peers.report()))
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
        let place = self.place();
        thread::sleep(Duration::from_millis(stop.grace_ms));
        if self.is_over() {
            return;
        }
        (self.flush)();
        let line = format!("RaNNC: {}. Rank {} was {place}. All ranks stop.\n", stop.cause, self.rank);
        // With nowhere left to say it, ending is still right.
        let _ = io::stderr().write_all(line.as_bytes());
        leave_process(EXIT_STATUS);
    }

    fn place(&self) -> String {
        match self.position.beat() {
            Beat { action: Some(action), .. } => format!("at \"{action}\""),
            Beat { action: None, .. } => "outside a step".to_owned(),
        }
    }
}

/// Connects as soon as rank 0 can be reached.
fn reach(host: &str, patience: Duration) -> io::Result<TcpStream> {
    let start = Instant::now();
    loop {
        let attempt = host.to_socket_addrs().and_then(|mut addresses| {
            let address = addresses.next().ok_or(io::ErrorKind::AddrNotAvailable)?;
            TcpStream::connect_timeout(&address, patience)
        });
        match attempt {
            Err(_) if start.elapsed() < patience => thread::sleep(POLL),
            result => return result,
        }
    }
}

/// 128 bits from the standard library's randomly keyed hasher.
fn random_token() -> String {
    use std::hash::{BuildHasher, RandomState};
    format!("{:016x}{:016x}", RandomState::new().hash_one(0), RandomState::new().hash_one(1))
}

/// Leaves the process at once.
///
/// `std::process::exit` would run the exit handlers of libraries, and NCCL's wait for ranks that are gone.
#[allow(unsafe_code)] // the standard library has no safe equivalent
fn leave_process(status: i32) -> ! {
    // SAFETY: `_exit` takes any status, touches no memory of this process, and does not return.
    unsafe { libc::_exit(status) }
}
