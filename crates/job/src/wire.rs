//! What the watchdogs of two ranks say to each other: one JSON object a line over TCP.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{IpAddr, TcpStream};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::calls::Calls;

/// Longer lines are taken for something that is not a watchdog.
const MAX_LINE_BYTES: u64 = 1 << 20;

/// The same for a caller that nobody knows yet.
const MAX_GREETING_BYTES: usize = 1 << 10;

/// A peer that does not take a message for so long is as good as gone; the reading side finds out why.
const SEND_TIMEOUT: Duration = Duration::from_secs(2);

/// Where a rank is.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Beat {
    /// Its collective calls.
    pub calls: Calls,
    /// The Action, or the phase of the first call, that it is at.
    pub action: Option<String>,
    /// The place of a replay that its GPU is at.
    pub device: Option<String>,
    /// It computes by itself, for as long as that takes.
    pub busy: bool,
    /// The collective that it was in has failed, and it asks why.
    pub torn: bool,
    /// Grows with each call, Action and phase that begins or ends, and where its GPU is seen at another place.
    pub progress: u64,
}

impl Beat {
    /// Where the rank is, in words that go after "is" and "was".
    pub fn place(&self) -> String {
        let call = self.calls.current().map(|call| format!("in {}", call.name));
        let action = self.action.as_ref().map(|action| format!("at \"{action}\""));
        let place = match (call, action) {
            (Some(call), Some(action)) => format!("{call}, {action}"),
            (Some(place), None) | (None, Some(place)) => place,
            (None, None) => "outside of any collective call".to_owned(),
        };
        match &self.device {
            Some(device) => format!("{place}, its GPU at \"{device}\""),
            None => place,
        }
    }
}

/// One line.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Message {
    /// The first line to rank 0.
    Hello {
        /// Proves that the sender has read rank 0's address in the job's store.
        token: String,
        /// The sender.
        rank: u32,
        /// The number of ranks as the sender knows it.
        world_size: u32,
    },
    /// Rank 0's answer to a good Hello.
    Welcome,
    /// Rank 0's answer to a Hello of another job.
    Refused {
        /// What is wrong with it.
        reason: String,
    },
    /// Sent at every interval.
    Beat(Beat),
    /// The sender ends by an uncaught exception.
    Fail {
        /// Class and text of the exception.
        text: String,
        /// Where the sender was.
        place: String,
    },
    /// The sender's script has ended as it should.
    Bye,
    /// Rank 0's order to end.
    Stop(Stop),
}

/// Why all ranks end.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Stop {
    /// A sentence without its full stop.
    pub cause: String,
    /// The rank that has said it already, by its own traceback.
    pub said_by: Option<u32>,
    /// How long the ranks may go on, so that their own exceptions come out first.
    pub grace_ms: u64,
}

/// The sending side of a connection; any thread may send.
pub struct Sender(Mutex<TcpStream>);

impl Sender {
    /// Sends one line.
    pub fn send(&self, message: &Message) -> io::Result<()> {
        let mut line = serde_json::to_vec(message)?;
        line.push(b'\n');
        self.0.lock().unwrap_or_else(PoisonError::into_inner).write_all(&line)
    }
}

/// The receiving side of a connection.
pub struct Receiver(BufReader<TcpStream>);

impl Receiver {
    /// The next line.
    ///
    /// # Errors
    /// `UnexpectedEof` when the other side has closed, `WouldBlock` or `TimedOut` after the silence given to
    /// [`Receiver::set_silence`].
    pub fn receive(&mut self) -> io::Result<Message> {
        let mut line = Vec::new();
        self.0.by_ref().take(MAX_LINE_BYTES).read_until(b'\n', &mut line)?;
        if line.last() != Some(&b'\n') {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(serde_json::from_slice(&line)?)
    }

    /// The next line, if it is short and all of it comes before `deadline`.
    ///
    /// # Errors
    /// As [`Receiver::receive`].
    pub fn receive_before(&mut self, deadline: Instant) -> io::Result<Message> {
        let mut line = Vec::new();
        while line.last() != Some(&b'\n') {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || line.len() > MAX_GREETING_BYTES {
                return Err(io::ErrorKind::TimedOut.into());
            }
            self.set_silence(left)?;
            let found = self.0.fill_buf()?;
            if found.is_empty() {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let end = found.iter().position(|byte| *byte == b'\n').map_or(found.len(), |newline| newline + 1);
            line.extend_from_slice(&found[..end]);
            self.0.consume(end);
        }
        Ok(serde_json::from_slice(&line)?)
    }

    /// The connection itself, after its greeting.
    pub fn into_stream(self) -> TcpStream {
        debug_assert!(self.0.buffer().is_empty(), "nobody says more than it is asked for");
        self.0.into_inner()
    }

    /// This end's address.
    pub fn local_address(&self) -> io::Result<IpAddr> {
        Ok(self.0.get_ref().local_addr()?.ip())
    }

    /// How long `receive` waits for anything at all.
    pub fn set_silence(&self, silence: Duration) -> io::Result<()> {
        self.0.get_ref().set_read_timeout(Some(silence))
    }
}

/// Both sides of a fresh connection.
pub fn split(stream: TcpStream) -> io::Result<(Sender, Receiver)> {
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)?;
    stream.set_write_timeout(Some(SEND_TIMEOUT))?;
    let writing = stream.try_clone()?;
    Ok((Sender(Mutex::new(writing)), Receiver(BufReader::new(stream))))
}
