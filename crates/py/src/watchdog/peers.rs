//! What this rank knows of every rank, itself included.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::wire::{Beat, Sender};

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

/// All ranks, by rank.
pub struct Peers(Vec<Peer>);

impl Peers {
    /// All unknown but `rank`, this one.
    pub fn new(rank: u32, world_size: u32) -> Self {
        let unknown = || Peer {
            standing: Standing::Unknown,
            sender: None,
            beat: Beat { action: None, progress: 0 },
            since: Instant::now(),
        };
        let mut peers = Self((0..world_size).map(|_| unknown()).collect());
        peers.get(rank).standing = Standing::Working;
        peers
    }

    /// The rank's record.
    pub fn get(&mut self, rank: u32) -> &mut Peer {
        &mut self.0[rank as usize]
    }

    /// Takes note of a beat.
    pub fn hear(&mut self, rank: u32, beat: Beat) {
        let peer = self.get(rank);
        if peer.beat.progress != beat.progress {
            peer.since = Instant::now();
        }
        peer.beat = beat;
    }

    /// The working rank that has been longest in one Action, if that is at least `limit`.
    pub fn stuck(&self, limit: Duration) -> Option<(u32, &str)> {
        let in_step = |(rank, peer): (usize, &'_ Peer)| -> Option<(Duration, usize)> {
            let waiting = peer.standing == Standing::Working && peer.beat.action.is_some();
            waiting.then(|| (peer.since.elapsed(), rank))
        };
        let (waited, rank) = self.0.iter().enumerate().filter_map(in_step).max()?;
        let action = self.0[rank].beat.action.as_deref()?;
        (waited >= limit).then_some((rank as u32, action))
    }

    /// A rank whose script has ended.
    pub fn left(&self) -> Option<u32> {
        self.0.iter().position(|peer| peer.standing == Standing::Left).map(|rank| rank as u32)
    }

    /// The senders of all connected ranks.
    pub fn senders(&self) -> Vec<Arc<Sender>> {
        self.0.iter().filter_map(|peer| peer.sender.clone()).collect()
    }

    /// Where every rank is, in a sentence.
    pub fn report(&self) -> String {
        let place = |(rank, peer): (usize, &Peer)| match peer.standing {
            Standing::Unknown => format!("rank {rank} has not been heard of"),
            Standing::Left => format!("rank {rank} has left"),
            Standing::Failed => format!("rank {rank} has failed"),
            Standing::Working => match &peer.beat.action {
                Some(action) => format!("rank {rank} is at \"{action}\""),
                None => format!("rank {rank} is outside a step"),
            },
        };
        self.0.iter().enumerate().map(place).collect::<Vec<_>>().join(", ")
    }
}
