//! What this rank knows of every rank, itself included.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::calls::{Call, Place};
use crate::wire::{Beat, Sender};

/// How a rank stands to the job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// Nothing is known of it: it has not connected, or only rank 0 is connected with it.
    Unknown,
    /// It sends beats.
    Working,
    /// Its script has ended as it should.
    Left,
    /// It has said that it ends by an exception.
    Failed,
}

/// One rank.
pub struct Peer {
    /// How it stands.
    pub standing: Standing,
    /// Where to send; none for this rank itself and for unknown ones.
    pub sender: Option<Arc<Sender>>,
    /// Its last beat.
    pub beat: Beat,
    /// When that beat first showed this progress.
    since: Instant,
}

impl Peer {
    /// The collective call that a working rank is inside of.
    pub fn call(&self) -> Option<&Call> {
        self.beat.calls.current().filter(|_| self.standing == Standing::Working)
    }

    /// True for a working rank that has come no further for `limit`, and is not busy by itself.
    pub fn rests(&self, limit: Duration) -> bool {
        self.standing == Standing::Working && !self.beat.busy && self.since.elapsed() >= limit
    }

    /// True for a working rank that is outside of any call and has not begun the one at `place`.
    pub fn misses(&self, place: Place) -> bool {
        self.standing == Standing::Working && self.call().is_none() && !self.beat.calls.has_come_to(place)
    }

    /// How the rank stands, or where it is, in words that go after "rank 3".
    pub fn state(&self) -> String {
        match self.standing {
            Standing::Unknown => "has not been heard of".to_owned(),
            Standing::Left => "has left".to_owned(),
            Standing::Failed => "has failed".to_owned(),
            Standing::Working => format!("is {}", self.beat.place()),
        }
    }
}

/// All ranks, by rank.
pub struct Peers(Vec<Peer>);

impl Peers {
    /// All unknown but `rank`, this one.
    pub fn new(rank: u32, world_size: u32) -> Self {
        let unknown =
            || Peer { standing: Standing::Unknown, sender: None, beat: Beat::default(), since: Instant::now() };
        let mut peers = Self((0..world_size).map(|_| unknown()).collect());
        peers.get(rank).standing = Standing::Working;
        peers
    }

    /// The rank's record.
    pub fn get(&mut self, rank: u32) -> &mut Peer {
        &mut self.0[rank as usize]
    }

    /// All ranks with their records.
    pub fn all(&self) -> impl Iterator<Item = (u32, &Peer)> + Clone {
        (0..).zip(&self.0)
    }

    /// Takes note of a beat.
    pub fn hear(&mut self, rank: u32, beat: Beat) {
        let peer = self.get(rank);
        if peer.beat.progress != beat.progress {
            peer.since = Instant::now();
        }
        peer.beat = beat;
    }

    /// True when every rank has connected, now or earlier.
    pub fn are_complete(&self) -> bool {
        self.0.iter().all(|peer| peer.standing != Standing::Unknown)
    }

    /// The senders of all connected ranks.
    pub fn senders(&self) -> Vec<Arc<Sender>> {
        self.0.iter().filter_map(|peer| peer.sender.clone()).collect()
    }
}
