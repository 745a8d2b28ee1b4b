//! What a rank hears from those that are connected with it.

use std::io;
use std::sync::Arc;
use std::thread;

use super::peers::Standing;
use super::{SETTLE, Watchdog};
use crate::reception::Guests;
use crate::wire::{Message, Receiver, Sender, Stop};

impl Guests for Watchdog {
    fn are_complete(&self) -> bool {
        self.is_over() || self.peers().are_complete()
    }

    fn objection(&self, rank: u32, world_size: u32) -> Option<String> {
        if world_size != self.world_size {
            return Some(format!("it counts {world_size} ranks, rank 0 counts {}", self.world_size));
        }
        if rank == 0 || rank >= world_size {
            return Some(format!("there is no rank {rank} to connect among {world_size}"));
        }
        (!self.claim(rank)).then(|| format!("there is a rank {rank} already"))
    }

    fn free(&self, rank: u32) {
        self.peers().get(rank).standing = Standing::Unknown;
    }

    fn welcome(&self, rank: u32, sender: Sender) -> io::Result<()> {
        // Under the lock, so that a `Bye` of just now waits for the rank to be among those who hear it.
        let mut peers = self.peers();
        sender.send(&Message::Welcome)?;
        if self.is_over() {
            sender.send(&Message::Bye)?;
        }
        peers.get(rank).sender = Some(Arc::new(sender));
        Ok(())
    }

    fn seat(self: &Arc<Self>, rank: u32, receiver: Receiver) {
        self.listen_to(rank, receiver);
    }
}

impl Watchdog {
    /// Takes the place of a rank, once.
    pub(super) fn claim(&self, rank: u32) -> bool {
        let mut peers = self.peers();
        let peer = peers.get(rank);
        let free = peer.standing == Standing::Unknown;
        if free {
            peer.standing = Standing::Working;
        }
        free
    }

    /// Hears a connected rank until it is gone.
    pub(super) fn listen_to(self: &Arc<Self>, rank: u32, mut receiver: Receiver) {
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

    pub(super) fn failure(&self, rank: u32, text: &str, place: &str) -> Stop {
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
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::super::{Limits, POLL};
    use super::*;

    /// A rank may leave as soon as another one knows that it is connected with it.
    #[test]
    fn who_has_just_come_hears_that_a_rank_leaves() {
        let long = Duration::from_secs(30);
        let limits = Limits {
            heartbeat: long,
            silence: long,
            stall: long,
            left: long,
            different: long,
            late: long,
            grace: long,
        };
        for round in 0..200 {
            let (host, address) = Watchdog::listen(2, "127.0.0.1", limits, || ()).expect("a door");
            let guest = Watchdog::connect(&address, (1, 2), long, limits, || ()).expect("a place");
            host.close();
            let start = Instant::now();
            while guest.peers().get(0).standing != Standing::Left {
                assert!(start.elapsed() < Duration::from_secs(5), "round {round}: the guest takes the host for dead");
                thread::sleep(POLL);
            }
        }
    }
}
