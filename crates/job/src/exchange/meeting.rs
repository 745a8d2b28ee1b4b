//! How the ranks of an exchange come together: each knows the one above it and waits for those below.

use std::io;
use std::net::TcpStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::{Exchange, link::Link, tree};
use crate::door::{self, Door};
use crate::error::JobError;
use crate::home::Home;
use crate::reception::{self, Guests};
use crate::wire::{Message, Receiver, Sender};

/// A rank whose door is open for those below it.
pub struct Meeting {
    rank: u32,
    world_size: u32,
    address: String,
    below: Arc<Below>,
}

impl Meeting {
    /// Opens the door of a rank that others are below of.
    pub fn open(rank: u32, world_size: u32, home: &Home) -> Result<Self, JobError> {
        let below = Arc::new(Below::new(rank, world_size));
        let mut address = String::new();
        if !below.are_complete() {
            let (door, text) = Door::open(rank, home)?;
            address = text;
            let guests = Arc::clone(&below);
            reception::spawn(move || reception::let_in(door, &guests)).map_err(JobError::Thread)?;
        }
        Ok(Self { rank, world_size, address, below })
    }

    /// For the ranks below this one; empty if there are none.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Connects with the rank above, and waits for those below. `addresses` are those of all ranks.
    pub fn join(self, addresses: &[String], patience: Duration) -> Result<Exchange, JobError> {
        let place = (self.rank, self.world_size);
        let above = tree::above(self.rank).map(|above| {
            let address = addresses.get(above as usize).map_or("", String::as_str);
            let (_, receiver) = door::enter(above, address, place, patience)?;
            Ok::<_, JobError>((above, receiver.into_stream()))
        });
        let streams = above.transpose()?.into_iter();
        let links = streams.chain(self.below.all_within(patience)?).map(|(rank, stream)| Link::new(rank, stream));
        let links = links.collect::<Result<Vec<_>, _>>().map_err(JobError::Thread)?;
        Ok(Exchange::new(place, links))
    }
}

/// The ranks just below one.
struct Below {
    rank: u32,
    world_size: u32,
    places: Mutex<Places>,
    changed: Condvar,
}

struct Places {
    /// Of each rank, whether it has come, and its connection when it is in.
    all: Vec<(u32, bool, Option<TcpStream>)>,
    is_closed: bool,
}

impl Below {
    fn new(rank: u32, world_size: u32) -> Self {
        let all = tree::below(rank, world_size).into_iter().map(|rank| (rank, false, None)).collect();
        Self { rank, world_size, places: Mutex::new(Places { all, is_closed: false }), changed: Condvar::new() }
    }

    fn places(&self) -> MutexGuard<'_, Places> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The connections of all, as soon as they are in.
    fn all_within(&self, patience: Duration) -> Result<Vec<(u32, TcpStream)>, JobError> {
        let is_short = |places: &mut Places| places.all.iter().any(|(_, _, stream)| stream.is_none());
        let waited = self.changed.wait_timeout_while(self.places(), patience, is_short);
        let (mut places, _) = waited.unwrap_or_else(PoisonError::into_inner);
        places.is_closed = true;
        let taken = places.all.drain(..).map(|(rank, _, stream)| match stream {
            Some(stream) => Ok((rank, stream)),
            None => Err(JobError::Missing { rank, above: self.rank, within_s: patience.as_secs_f64() }),
        });
        taken.collect()
    }
}

impl Drop for Meeting {
    fn drop(&mut self) {
        self.below.places().is_closed = true;
    }
}

impl Guests for Below {
    fn are_complete(&self) -> bool {
        let places = self.places();
        places.is_closed || places.all.iter().all(|(_, _, stream)| stream.is_some())
    }

    fn objection(&self, rank: u32, world_size: u32) -> Option<String> {
        if world_size != self.world_size {
            return Some(format!("it counts {world_size} ranks, rank {} counts {}", self.rank, self.world_size));
        }
        let mut places = self.places();
        let Some((_, has_come, _)) = places.all.iter_mut().find(|place| place.0 == rank) else {
            return Some(format!("rank {rank} is not below rank {}", self.rank));
        };
        std::mem::replace(has_come, true).then(|| format!("there is a rank {rank} already"))
    }

    fn free(&self, rank: u32) {
        if let Some(place) = self.places().all.iter_mut().find(|place| place.0 == rank) {
            place.1 = false;
        }
    }

    fn welcome(&self, _: u32, sender: Sender) -> io::Result<()> {
        sender.send(&Message::Welcome)
    }

    fn seat(self: &Arc<Self>, rank: u32, receiver: Receiver) {
        if let Some(place) = self.places().all.iter_mut().find(|place| place.0 == rank) {
            place.2 = Some(receiver.into_stream());
        }
        self.changed.notify_all();
    }
}
