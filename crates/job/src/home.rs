//! Where a rank is found.

use std::fmt;
use std::net::IpAddr;

/// Where other ranks find a rank's host.
#[derive(Debug, Clone)]
pub enum Home {
    /// By a name that they know.
    Named(String),
    /// At an address by which it speaks with them already.
    At(IpAddr),
}

impl fmt::Display for Home {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Named(host) => formatter.write_str(host),
            Self::At(address) => address.fmt(formatter),
        }
    }
}
