//! How ranks find each other: one opens a door, and those who have its address enter.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::thread;
use std::time::{Duration, Instant};

use crate::error::JobError;
use crate::home::Home;
use crate::wire::{self, Message, Receiver, Sender};

/// How long a caller waits for the answer: longer than it is heard out, so that nobody is let in who has just given up.
const ANSWER: Duration = Duration::from_secs(10);

/// How long to wait for one address before the next one is tried.
const CONNECT: Duration = Duration::from_secs(5);

/// A pause between two attempts.
const POLL: Duration = Duration::from_millis(50);

/// Where a rank listens until those whom it expects are in.
pub struct Door {
    /// One listener for each address of this host that the others may resolve; they share a port where they can.
    listeners: Vec<TcpListener>,
    /// What a caller must know: it can only have it from the job's store.
    pub token: String,
}

impl Door {
    /// Opens a rank's door on its host's addresses. Returns also the text for the others: `host:port,address:port/token`.
    pub fn open(rank: u32, home: &Home) -> Result<(Self, String), JobError> {
        match home {
            Home::Named(host) => Self::listen(own_addresses(host), Some(host)),
            Home::At(address) => Self::listen(vec![*address], None),
        }
        .map_err(|source| JobError::Listen { rank, home: home.clone(), source })
    }

    fn listen(addresses: Vec<IpAddr>, host: Option<&str>) -> io::Result<(Self, String)> {
        let mut listeners = bind(&addresses);
        if listeners.is_empty() {
            // The name is that of a gateway, or the name service is unusual: any address will do.
            listeners = bind(&[Ipv6Addr::UNSPECIFIED.into()]);
        }
        if listeners.is_empty() {
            listeners = vec![TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0))?];
        }
        let mut targets = Vec::new();
        for listener in &listeners {
            listener.set_nonblocking(true)?;
            let address = listener.local_addr()?;
            targets.extend(host.map(|host| target(host, address.port())));
            if !address.ip().is_unspecified() {
                targets.push(address.to_string());
            }
        }
        targets.sort_by_key(|target| target.parse::<SocketAddr>().is_ok());
        targets.dedup();
        let token = random_token()?;
        let address = format!("{}/{token}", targets.join(","));
        Ok((Self { listeners, token }, address))
    }

    /// A caller that waits to be let in, if there is one. An error, such as too many open files, may pass.
    pub fn caller(&self) -> Option<TcpStream> {
        self.listeners.iter().find_map(|listener| listener.accept().ok()).map(|(stream, _)| stream)
    }
}

/// Finds the rank `above` at an address that its [`Door`] has made, and is let in.
pub fn enter(
    above: u32,
    address: &str,
    (rank, world_size): (u32, u32),
    patience: Duration,
) -> Result<(Sender, Receiver), JobError> {
    let (targets, token) = address.rsplit_once('/').ok_or_else(|| JobError::Address(address.to_owned()))?;
    let deadline = Instant::now() + patience;
    let hello = Message::Hello { token: token.to_owned(), rank, world_size };
    loop {
        match reach(targets, deadline).and_then(|stream| greet(stream, &hello)) {
            Ok((Message::Welcome, sender, receiver)) => return Ok((sender, receiver)),
            Ok((Message::Refused { reason }, ..)) => return Err(JobError::Refused { rank, above, reason }),
            Ok(_) => return Err(JobError::Address(address.to_owned())),
            Err(_) if Instant::now() < deadline => thread::sleep(POLL),
            Err(source) => return Err(JobError::Connect { rank, above, address: targets.to_owned(), source }),
        }
    }
}

fn greet(stream: TcpStream, hello: &Message) -> io::Result<(Message, Sender, Receiver)> {
    let (sender, mut receiver) = wire::split(stream)?;
    sender.send(hello)?;
    Ok((receiver.receive_before(Instant::now() + ANSWER)?, sender, receiver))
}

/// Connects with the first address of the first target that answers.
fn reach(targets: &str, deadline: Instant) -> io::Result<TcpStream> {
    let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
    for target in targets.split(',') {
        let addresses = match target.to_socket_addrs() {
            Ok(addresses) => addresses,
            Err(error) => {
                last = error;
                continue;
            }
        };
        for address in addresses {
            let left = deadline.saturating_duration_since(Instant::now());
            match TcpStream::connect_timeout(&address, left.clamp(POLL, CONNECT)) {
                Ok(stream) => return Ok(stream),
                Err(error) => last = error,
            }
        }
    }
    Err(last)
}

/// The addresses of this host that its name stands for. A host with a name of its own often has that name for an address
/// of its loopback too, where other hosts would not find it.
fn own_addresses(host: &str) -> Vec<IpAddr> {
    let Ok(found) = (host, 0).to_socket_addrs() else { return Vec::new() };
    let all: Vec<IpAddr> = found.map(|address| address.ip()).collect();
    let local = host == "localhost" || host.parse::<IpAddr>().is_ok();
    all.into_iter().filter(|address| local || !address.is_loopback()).collect()
}

fn bind(addresses: &[IpAddr]) -> Vec<TcpListener> {
    let mut bound: Vec<TcpListener> = Vec::new();
    for address in addresses {
        let port = bound.first().and_then(|first| first.local_addr().ok()).map_or(0, |first| first.port());
        let listener = TcpListener::bind((*address, port)).or_else(|_| TcpListener::bind((*address, 0)));
        bound.extend(listener);
    }
    bound
}

fn target(host: &str, port: u16) -> String {
    match host.parse::<Ipv6Addr>() {
        Ok(address) => format!("[{address}]:{port}"),
        Err(_) => format!("{host}:{port}"),
    }
}

/// 128 bits from the system's generator.
fn random_token() -> io::Result<String> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes)?;
    Ok(format!("{:032x}", u128::from_ne_bytes(bytes)))
}
