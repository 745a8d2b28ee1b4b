//! What the ranks must agree on at each call, small texts, gathered over a tree of connections.
//!
//! Texts climb to rank 0, each rank joining its own with those from below, and all of them come back down. A gather whose
//! ranks are in different calls never comes to its end: the watchdogs find that out and say so.

mod link;
mod meeting;
mod tree;

use std::io;
use std::ops::Range;
use std::thread;
use std::time::Duration;

use link::{IsOver, Link};
pub use meeting::Meeting;

/// A pause between two looks whether the job ends.
const LOOK: Duration = Duration::from_millis(50);

/// Why there is no text of all ranks.
#[derive(Debug, thiserror::Error)]
pub enum ExchangeError {
    /// A rank has closed its end, or the network has failed.
    #[error("the connection with rank {rank} is closed")]
    Lost {
        /// The other rank.
        rank: u32,
        /// What the system says.
        source: io::Error,
    },
    /// There is nothing more to wait for.
    #[error("the connection with rank {rank} is given up")]
    Over {
        /// Which has not come.
        rank: u32,
    },
    /// Not what this version of the exchange sends.
    #[error("the connection with other ranks brings texts of {found} ranks instead of {expected}")]
    Malformed {
        /// Ranks whose texts have come.
        found: usize,
        /// The number of ranks.
        expected: u32,
    },
    /// An earlier gather has failed in its midst.
    #[error("the connection with the other ranks has been given up before")]
    Broken,
}

/// One rank's end.
pub struct Exchange {
    world_size: u32,
    above: Option<Link>,
    /// By rank.
    below: Vec<Link>,
    is_broken: bool,
}

/// Every rank's text, in rank order.
pub struct Gathered {
    joined: Vec<u8>,
    parts: Vec<Range<usize>>,
}

impl Exchange {
    fn new((rank, world_size): (u32, u32), links: Vec<Link>) -> Self {
        let (above, below): (Vec<_>, Vec<_>) = links.into_iter().partition(|link| link.rank < rank);
        Self { world_size, above: above.into_iter().next(), below, is_broken: false }
    }

    /// Every rank's text, on every rank. All ranks call it, with the same label: what they are about.
    ///
    /// # Errors
    /// A rank is lost, or `is_over` says that there is nothing more to wait for; asked some times a second.
    pub fn gather(&mut self, label: u64, own: &[u8], is_over: IsOver<'_>) -> Result<Gathered, ExchangeError> {
        // Before a byte is sent: a process forked from this one shares its connections.
        if self.is_broken || is_over() {
            return Err(ExchangeError::Broken);
        }
        self.is_broken = true;
        let gathered = Gathered::read(self.joined(label, own, is_over)?, self.world_size)?;
        self.is_broken = false;
        Ok(gathered)
    }

    fn joined(&mut self, label: u64, own: &[u8], is_over: IsOver<'_>) -> Result<Vec<u8>, ExchangeError> {
        let mut joined = (own.len() as u64).to_le_bytes().to_vec();
        joined.extend_from_slice(own);
        for link in &mut self.below {
            let rank = link.rank;
            let (found, texts) = link.receive(is_over).map_err(|error| lost(rank, error))?;
            if found != label {
                while !is_over() {
                    thread::sleep(LOOK);
                }
                return Err(ExchangeError::Over { rank });
            }
            joined.extend_from_slice(texts);
        }
        if let Some(link) = &mut self.above {
            let rank = link.rank;
            link.send(label, &joined, is_over).map_err(|error| lost(rank, error))?;
            joined = link.receive(is_over).map_err(|error| lost(rank, error))?.1.to_vec();
        }
        // Those with the most ranks below them first.
        for link in self.below.iter_mut().rev() {
            link.send(label, &joined, is_over).map_err(|error| lost(link.rank, error))?;
        }
        Ok(joined)
    }
}

impl Gathered {
    fn read(joined: Vec<u8>, world_size: u32) -> Result<Self, ExchangeError> {
        let mut parts = Vec::with_capacity(world_size as usize);
        let mut at = 0;
        while let Some((length, _)) = joined.get(at..).and_then(|rest| rest.split_first_chunk::<8>()) {
            let start = at + 8;
            let end = usize::try_from(u64::from_le_bytes(*length)).ok().and_then(|length| start.checked_add(length));
            let Some(end) = end.filter(|end| *end <= joined.len()) else { break };
            parts.push(start..end);
            at = end;
        }
        if at != joined.len() || parts.len() != world_size as usize {
            return Err(ExchangeError::Malformed { found: parts.len(), expected: world_size });
        }
        Ok(Self { joined, parts })
    }

    /// The texts.
    pub fn texts(&self) -> impl ExactSizeIterator<Item = &[u8]> {
        self.parts.iter().map(|part| &self.joined[part.clone()])
    }
}

fn lost(rank: u32, source: io::Error) -> ExchangeError {
    match source.kind() {
        io::ErrorKind::Interrupted => ExchangeError::Over { rank },
        _ => ExchangeError::Lost { rank, source },
    }
}
