//! How the ranks find rank 0's watchdog, and who is let in.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::thread;
use std::time::{Duration, Instant};

use super::WatchdogError;
use super::wire::{self, Message, Receiver, Sender};

/// How long a caller may take to say who it is.
pub const HANDSHAKE: Duration = Duration::from_secs(5);

/// How long a rank waits for the answer: longer, so that rank 0 does not let in who has just given up.
const ANSWER: Duration = Duration::from_secs(10);

/// Callers that are heard out at the same time; others wait in the system's queue.
pub const MAX_GREETERS: usize = 64;

/// How long to wait for one address before the next one is tried.
const CONNECT: Duration = Duration::from_secs(5);

/// A pause between two attempts.
const POLL: Duration = Duration::from_millis(50);

/// Where rank 0 listens until all ranks are in.
pub struct Door {
    /// One listener for each address of this host that the others may resolve; they share a port where they can.
    listeners: Vec<TcpListener>,
    /// What a caller must know: it can only have it from the job's store.
    pub token: String,
}

impl Door {
    /// Opens the door on the addresses that `host`, this host's name as the other ranks know it, stands for. Returns also
    /// the text for the other ranks: `host:port,address:port/token`.
    pub fn open(host: &str) -> Result<(Self, String), WatchdogError> {
        let failed = |source| WatchdogError::Listen { host: host.to_owned(), source };
        let mut bound = bind(&own_addresses(host));
        if bound.is_empty() {
            // The name is that of a gateway, or the name service is unusual: any address will do.
            bound = bind(&[Ipv6Addr::UNSPECIFIED.into()]);
        }
        if bound.is_empty() {
            bound = vec![TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).map_err(failed)?];
        }
        let mut targets = Vec::new();
        for listener in &bound {
            listener.set_nonblocking(true).map_err(failed)?;
            let address = listener.local_addr().map_err(failed)?;
            targets.push(target(host, address.port()));
            if !address.ip().is_unspecified() {
                targets.push(address.to_string());
            }
        }
        targets.sort_by_key(|target| target.parse::<SocketAddr>().is_ok());
        targets.dedup();
        let token = random_token().map_err(failed)?;
        let address = format!("{}/{token}", targets.join(","));
        Ok((Self { listeners: bound, token }, address))
    }

    /// A caller that waits to be let in, if there is one. An error, such as too many open files, may pass.
    pub fn caller(&self) -> Option<TcpStream> {
        self.listeners.iter().find_map(|listener| listener.accept().ok()).map(|(stream, _)| stream)
    }
}

/// Finds rank 0 at an address that [`Door::open`] has made, and is let in.
pub fn enter(
    address: &str,
    (rank, world_size): (u32, u32),
    patience: Duration,
) -> Result<(Sender, Receiver), WatchdogError> {
    let (targets, token) = address.rsplit_once('/').ok_or_else(|| WatchdogError::Address(address.to_owned()))?;
    let deadline = Instant::now() + patience;
    let hello = Message::Hello { token: token.to_owned(), rank, world_size };
    loop {
        match reach(targets, deadline).and_then(|stream| greet(stream, &hello)) {
            Ok((Message::Welcome, sender, receiver)) => return Ok((sender, receiver)),
            Ok((Message::Refused { reason }, ..)) => return Err(WatchdogError::Refused { rank, reason }),
            Ok(_) => return Err(WatchdogError::Address(address.to_owned())),
            Err(_) if Instant::now() < deadline => thread::sleep(POLL),
            Err(source) => return Err(WatchdogError::Connect { rank, address: targets.to_owned(), source }),
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
