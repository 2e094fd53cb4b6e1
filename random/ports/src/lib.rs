//! TCP ports for the tests of all crates, where a test must name a port before the process that
//! listens on it starts. If the kernel can choose the port (`127.0.0.1:0`), that is better.

#![forbid(unsafe_code)]

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixListener};
use std::time::{SystemTime, UNIX_EPOCH};

use nacre_random::Random;
use parking_lot::Mutex;

/// A TCP port of `ip` that no process listens on, from 10,000 to 30,000: Linux gives outgoing
/// connections ports from 32,768 on. No other caller gets it, in any process of this network
/// namespace, before this process ends. Otherwise, two tests that are about to listen would get the
/// same port.
///
/// # Panics
/// If none is found, for example because this machine does not have the address.
pub fn free_port(ip: IpAddr) -> u16 {
    let reserved = (0..ATTEMPTS).find_map(|_| {
        let port = candidate();
        let reserved = reserve(port)?;
        TcpListener::bind((ip, port)).ok()?;
        Some((port, reserved))
    });
    let (port, reserved) = reserved.unwrap_or_else(|| panic!("no free port of {ip}"));
    RESERVED.lock().push(reserved);
    port
}

/// Some of these ports may be in use, never most of them.
const ATTEMPTS: u32 = 1000;

/// A port of 127.0.0.1, see [`free_port`].
pub fn local_port() -> u16 {
    free_port(Ipv4Addr::LOCALHOST.into())
}

/// An address with a free port, see [`free_port`].
pub fn free_address(ip: IpAddr) -> SocketAddr {
    SocketAddr::new(ip, free_port(ip))
}

/// The reservations of this process.
static RESERVED: Mutex<Vec<UnixListener>> = Mutex::new(Vec::new());

/// `None`: another caller has the port. The reservation is a socket with a name, so it ends with
/// the process however that dies.
fn reserve(port: u16) -> Option<UnixListener> {
    let name = format!("nacre-test-port-{port}");
    let name = UnixAddr::from_abstract_name(name).expect("a short name");
    UnixListener::bind_addr(&name).ok()
}

fn candidate() -> u16 {
    static RANDOM: Mutex<Option<Random>> = Mutex::new(None);
    let mut random = RANDOM.lock();
    let random = random.get_or_insert_with(|| {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let nanos = now.unwrap_or_default().as_nanos() as u64;
        Random::new(nanos ^ u64::from(std::process::id()) << 32)
    });
    random.within(10_000, 30_000) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: a port is given once, also while nothing listens on it. Method: so many
    /// ports that two of them would be the same by chance.
    #[test]
    fn a_port_is_given_once() {
        let mut ports: Vec<u16> = (0..400).map(|_| local_port()).collect();
        ports.sort_unstable();
        assert!(ports.windows(2).all(|pair| pair[0] != pair[1]), "{ports:?}");
        assert!(reserve(ports[0]).is_none(), "for other processes, too");
    }
}
