//! Who is let in: the ranks of this job, each once. Other callers are let go: a scan of the ports must not end a job.

use std::io;
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::door::Door;
use crate::wire::{self, Message, Receiver, Sender};

/// How long a caller may take to say who it is.
const HANDSHAKE: Duration = Duration::from_secs(5);

/// Callers that are heard out at the same time; others wait in the system's queue.
const MAX_GREETERS: usize = 64;

/// A pause between two looks at the door.
const POLL: Duration = Duration::from_millis(10);

/// Those who are waited for.
pub trait Guests: Send + Sync + 'static {
    /// True when nobody else is waited for.
    fn are_complete(&self) -> bool;

    /// Why a caller cannot be the rank that it says it is; without an objection that rank's place is taken.
    fn objection(&self, rank: u32, world_size: u32) -> Option<String>;

    /// The rank has gone again before it was let in.
    fn free(&self, rank: u32);

    /// Tells the rank that it is in, by [`Message::Welcome`]. From that moment it must be reached by whatever is told to all:
    /// the host may leave as soon as the rank has read it.
    fn welcome(&self, rank: u32, sender: Sender) -> io::Result<()>;

    /// The rank is in. It may be listened to on this thread for as long as it stays.
    fn seat(self: &Arc<Self>, rank: u32, receiver: Receiver);
}

/// Lets guests in until they are complete, and closes the door then.
pub fn let_in<G: Guests>(door: Door, guests: &Arc<G>) {
    let door = Arc::new(door);
    let greeters = Arc::new(AtomicUsize::new(0));
    while !guests.are_complete() {
        while greeters.load(Ordering::Acquire) < MAX_GREETERS {
            // An error, such as too many open files, may pass; it must not be asked for without a pause.
            let Some(stream) = door.caller() else { break };
            greeters.fetch_add(1, Ordering::AcqRel);
            let (door, busy, hosts) = (Arc::clone(&door), Arc::clone(&greeters), Arc::clone(guests));
            let started = spawn(move || {
                let greeted = greet(stream, &door.token, &*hosts);
                drop(door);
                busy.fetch_sub(1, Ordering::AcqRel);
                if let Ok(Some((rank, receiver))) = greeted {
                    hosts.seat(rank, receiver);
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

/// Starts a thread, if the system has one more.
pub fn spawn(run: impl FnOnce() + Send + 'static) -> io::Result<()> {
    thread::Builder::new().name("rannc-watchdog".to_owned()).spawn(run).map(drop)
}

/// Hears out a caller; it is a rank of this job if it knows the token.
fn greet(stream: TcpStream, expected: &str, guests: &impl Guests) -> io::Result<Option<(u32, Receiver)>> {
    let (sender, mut receiver) = wire::split(stream)?;
    let hello = receiver.receive_before(Instant::now() + HANDSHAKE)?;
    let Message::Hello { token, rank, world_size } = hello else { return Ok(None) };
    if token != expected {
        return Ok(None);
    }
    if let Some(reason) = guests.objection(rank, world_size) {
        sender.send(&Message::Refused { reason })?;
        return Ok(None);
    }
    if let Err(error) = guests.welcome(rank, sender) {
        guests.free(rank);
        return Err(error);
    }
    Ok(Some((rank, receiver)))
}
