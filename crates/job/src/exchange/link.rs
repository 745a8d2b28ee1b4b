//! A connection over which frames come and go in turn: a label, a length, and so many bytes.

use std::hint;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// A peer that answers within this time is waited for awake, as falling asleep and waking up takes about as long. Giving
/// way meanwhile would cost far more on a busy host: who gives way waits for a whole turn of others, who sleeps is woken.
const AWAKE: Duration = Duration::from_micros(50);

/// How often a rank that waits looks whether the job ends.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };

/// The label and the length, both of eight bytes.
const HEADER: usize = 16;

/// A buffer that is kept between frames is no longer than this, and no shorter than the other.
const KEPT: (usize, usize) = (1 << 12, 1 << 20);

/// Asked while a rank waits: true when there is nothing more to wait for.
pub type IsOver<'a> = &'a dyn Fn() -> bool;

/// A connection with another rank.
pub struct Link {
    /// The rank at the other end.
    pub rank: u32,
    stream: TcpStream,
    buffer: Vec<u8>,
}

impl Link {
    /// A link over a fresh connection.
    pub fn new(rank: u32, stream: TcpStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        Ok(Self { rank, stream, buffer: Vec::new() })
    }

    /// Sends a frame.
    pub fn send(&mut self, label: u64, body: &[u8], is_over: IsOver<'_>) -> io::Result<()> {
        let mut frame = Vec::with_capacity(HEADER + body.len());
        frame.extend_from_slice(&label.to_le_bytes());
        frame.extend_from_slice(&(body.len() as u64).to_le_bytes());
        frame.extend_from_slice(body);
        let mut left = &frame[..];
        while !left.is_empty() {
            match self.stream.write(left) {
                Ok(written) => left = &left[written..],
                Err(error) => self.wait(&error, PollFlags::OUT, Instant::now(), is_over)?,
            }
        }
        Ok(())
    }

    /// The label and body of the next frame. The other end sends no other one before it has had an answer.
    ///
    /// # Errors
    /// `Interrupted` when `is_over` says so.
    pub fn receive(&mut self, is_over: IsOver<'_>) -> io::Result<(u64, &[u8])> {
        let start = Instant::now();
        let mut filled = 0;
        if self.buffer.len() > KEPT.1 {
            self.buffer = Vec::new();
        }
        loop {
            let end = self.end(filled)?;
            if filled == end {
                return Ok((number(&self.buffer[..8]), &self.buffer[HEADER..end]));
            }
            if filled == self.buffer.len() {
                // A length is believed as far as bytes have come.
                self.buffer.resize((2 * filled).max(KEPT.0), 0);
            }
            match self.stream.read(&mut self.buffer[filled..]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(read) => filled += read,
                Err(error) => self.wait(&error, PollFlags::IN, start, is_over)?,
            }
        }
    }

    /// Where the frame ends of which so many bytes have come.
    fn end(&self, filled: usize) -> io::Result<usize> {
        if filled < HEADER {
            return Ok(HEADER);
        }
        let length = usize::try_from(number(&self.buffer[8..HEADER])).ok();
        let end = length.and_then(|length| length.checked_add(HEADER)).filter(|end| *end >= filled);
        end.ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    /// Waits for the connection, unless `error` is another one than that it is not ready.
    fn wait(&self, error: &io::Error, flags: PollFlags, start: Instant, is_over: IsOver<'_>) -> io::Result<()> {
        match error.kind() {
            io::ErrorKind::Interrupted => return Ok(()),
            io::ErrorKind::WouldBlock => {}
            kind => return Err(kind.into()),
        }
        if start.elapsed() < AWAKE {
            hint::spin_loop();
            return Ok(());
        }
        let ready = poll(&mut [PollFd::new(&self.stream, flags)], Some(&LOOK));
        if ready == Ok(0) && is_over() {
            return Err(io::ErrorKind::Interrupted.into());
        }
        Ok(())
    }
}

fn number(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
}
