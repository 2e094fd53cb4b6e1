//! Tests of listeners on wildcard and on link-local addresses.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6, TcpStream};
use std::time::{Duration, Instant};

use nacre_nvmf::transport::{Address, HostTransport, ListenerId, ListenerOptions, Plug};
use nacre_random_ports::free_port;
use nacre_reactor::Clock;

use crate::{TcpConfig, TcpHostOptions, TcpPlug, connect_host};

/// Goal: a listener on `::` takes IPv4 hosts, unless another listener has its port for IPv4,
/// whichever comes first. Method: count the connections of each listener.
#[test]
fn a_listener_on_every_address_takes_ipv4_too() {
    const SIX: ListenerId = ListenerId(1);
    const FOUR: ListenerId = ListenerId(2);
    let plug = TcpPlug::new(TcpConfig::default()).unwrap();
    // A port that the kernel chooses for `[::]:0` may be in use for IPv4 by a parallel test. That
    // test's listener would then take the IPv4 hosts, so the port is one that is free for IPv4.
    let port = free_port(Ipv4Addr::UNSPECIFIED.into());
    let any = SocketAddr::from((Ipv6Addr::UNSPECIFIED, port));
    plug.listen(SIX, &Address::Ip(any), &ListenerOptions::default())
        .unwrap();
    // Without cores every connection that arrives is refused, and counted.
    let arrives = |text: &str, at: ListenerId| {
        let before = plug.listener_counts(at).unwrap();
        let address = SocketAddr::new(text.parse().unwrap(), any.port());
        drop(TcpStream::connect(address).unwrap());
        let deadline = Instant::now() + Duration::from_secs(10);
        while plug.listener_counts(at).unwrap() == before {
            assert!(
                Instant::now() < deadline,
                "{address} does not lead to {at:?}"
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    arrives("::1", SIX);
    arrives("127.0.0.1", SIX);
    for four in ["0.0.0.0", "127.0.0.1"] {
        let four = SocketAddr::new(four.parse().unwrap(), any.port());
        plug.listen(FOUR, &Address::Ip(four), &ListenerOptions::default())
            .unwrap();
        arrives("127.0.0.1", FOUR);
        arrives("::1", SIX);
        plug.unlisten(FOUR);
        arrives("127.0.0.1", SIX);
    }
    // Held, and in the other order.
    plug.hold(true);
    plug.hold(false);
    arrives("127.0.0.1", SIX);
    plug.unlisten(SIX);
    let v4 = SocketAddr::new("127.0.0.1".parse().unwrap(), any.port());
    assert!(TcpStream::connect(v4).is_err());
    plug.listen(FOUR, &Address::Ip(v4), &ListenerOptions::default())
        .unwrap();
    plug.listen(SIX, &Address::Ip(any), &ListenerOptions::default())
        .unwrap();
    arrives("127.0.0.1", FOUR);
    arrives("::1", SIX);
    // A refused listener gives its address back.
    plug.unlisten(FOUR);
    let elsewhere = SocketAddr::new("192.0.2.77".parse().unwrap(), any.port());
    plug.listen(FOUR, &Address::Ip(elsewhere), &ListenerOptions::default())
        .unwrap_err();
    arrives("127.0.0.1", SIX);
}

/// A listener on a link-local address needs the interface, and a host on one takes the target's.
#[test]
fn link_local_addresses() {
    let plug = TcpPlug::new(TcpConfig::default()).unwrap();
    let listen = |address: SocketAddr| {
        plug.listen(
            ListenerId(1),
            &Address::Ip(address),
            &ListenerOptions::default(),
        )
    };
    let refused = listen("[fe80::1]:0".parse().unwrap()).unwrap_err();
    assert!(refused.to_string().contains("fe80::1%eth0"), "{refused}");
    let Some((address, scope)) = link_local() else {
        eprintln!("no interface here has a link-local address");
        return;
    };
    let scoped = SocketAddr::V6(SocketAddrV6::new(address, 0, 0, scope));
    let Address::Ip(bound) = listen(scoped).unwrap() else {
        panic!("not an IP address");
    };
    let options = TcpHostOptions {
        source: Some(address.into()),
        ..TcpHostOptions::default()
    };
    let mut host = connect_host(bound, options).unwrap();
    let mut events = Vec::new();
    let (clock, deadline) = (Clock::real(), Instant::now() + Duration::from_secs(10));
    while plug.rejected().1 == 0 {
        assert!(Instant::now() < deadline, "{events:?}");
        host.poll(clock.now(), &mut events, 8);
    }
}

/// Such an address, and the index of its interface.
fn link_local() -> Option<(Ipv6Addr, u32)> {
    let table = std::fs::read_to_string("/proc/net/if_inet6").ok()?;
    table.lines().find_map(|line| {
        let mut fields = line.split_whitespace();
        let bits = u128::from_str_radix(fields.next()?, 16).ok()?;
        let index = u32::from_str_radix(fields.next()?, 16).ok()?;
        let address = Ipv6Addr::from_bits(bits);
        address.is_unicast_link_local().then_some((address, index))
    })
}
