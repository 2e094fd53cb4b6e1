//! The transport conformance suite on TCP.

use std::net::SocketAddr;
use std::sync::Arc;

use nacre_nvmf::tcp::HostConfig;
use nacre_nvmf::tls::{Derivation, Identity, Psk, PskKey, PskSource, Version};
use nacre_nvmf::transport::conformance::{self, Rig};
use nacre_nvmf::transport::{
    Address, HostTransport, ListenerId, ListenerOptions, Plug, TlsPolicy, Transport,
};
use nacre_nvmf_wire::Nqn;
use nacre_nvmf_wire::tcp::Digests;
use nacre_reactor::{Clock, Nanos};

use crate::{HostTls, TcpConfig, TcpHostOptions, TcpPlug, connect_host};

pub(super) struct TcpRig {
    pub plug: TcpPlug,
    pub address: SocketAddr,
    pub transport: Box<dyn Transport>,
    pub options: TcpHostOptions,
    pub clock: Clock,
}

/// One PSK, for all hosts.
struct AnyHost;

pub(super) fn psk() -> Psk {
    let text = "NVMeTLSkey-1:01:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:";
    Psk::parse(text).unwrap()
}

impl PskSource for AnyHost {
    fn psks(&self, _identity: &Identity) -> Vec<Arc<dyn PskKey>> {
        vec![Arc::new(psk())]
    }
}

/// The key of a host that uses TLS.
pub(super) fn tls() -> HostTls {
    let name = |text| Nqn::new(text).unwrap();
    let (host, subsystem) = (
        name("nqn.2026-01.io.nacre:h"),
        name("nqn.2026-01.io.nacre:s"),
    );
    let derivation = Derivation::Standard;
    HostTls {
        identity: psk().identity(Version::One, &host, &subsystem, derivation),
        psk: psk(),
        derivation,
        helper: None,
    }
}

impl TcpRig {
    pub(super) fn new(config: TcpConfig, options: TcpHostOptions, listen: &str) -> Self {
        let tls = options.tls.is_some().then_some(TlsPolicy::Require);
        Self::with_psks(config, options, listen, tls, Arc::new(AnyHost))
    }

    pub(super) fn with_psks(
        config: TcpConfig,
        options: TcpHostOptions,
        listen: &str,
        tls: Option<TlsPolicy>,
        psks: Arc<dyn PskSource>,
    ) -> Self {
        let plug = TcpPlug::with_psks(config, psks).unwrap();
        let listen = Address::Ip(listen.parse().unwrap());
        let listener = ListenerOptions {
            tls,
            ..ListenerOptions::default()
        };
        let listening = plug.listen(ListenerId(7), &listen, &listener);
        let Address::Ip(address) = listening.unwrap() else {
            unreachable!()
        };
        let transport = plug.open(0, Arc::new(|| ())).unwrap();
        Self {
            plug,
            address,
            transport,
            options,
            clock: Clock::real(),
        }
    }
}

impl Rig for TcpRig {
    fn transport(&mut self) -> &mut dyn Transport {
        &mut *self.transport
    }

    fn connect(&mut self) -> Box<dyn HostTransport> {
        Box::new(connect_host(self.address, self.options.clone()).unwrap())
    }

    fn now(&self) -> Nanos {
        self.clock.now()
    }

    fn listener(&self) -> ListenerId {
        ListenerId(7)
    }
}

#[test]
fn over_ipv4() {
    conformance::run(|| {
        TcpRig::new(
            TcpConfig::default(),
            TcpHostOptions::default(),
            "127.0.0.1:0",
        )
    });
}

#[test]
fn over_ipv6_with_digests() {
    let machine = HostConfig {
        digests: Digests::BOTH,
        ..HostConfig::default()
    };
    let options = TcpHostOptions {
        machine,
        ..TcpHostOptions::default()
    };
    conformance::run(|| TcpRig::new(TcpConfig::default(), options.clone(), "[::1]:0"));
}

/// Socket buffers so small that every send is partial and every PDU comes in pieces.
#[test]
fn with_tiny_socket_buffers() {
    let config = TcpConfig {
        send_buffer: Some(16 << 10),
        receive_buffer: Some(16 << 10),
        ..TcpConfig::default()
    };
    let options = TcpHostOptions {
        send_buffer: Some(16 << 10),
        receive_buffer: Some(16 << 10),
        ..TcpHostOptions::default()
    };
    conformance::run(|| TcpRig::new(config.clone(), options.clone(), "127.0.0.1:0"));
}

#[test]
fn over_tls() {
    let options = TcpHostOptions {
        tls: Some(tls()),
        ..TcpHostOptions::default()
    };
    conformance::run(|| TcpRig::new(TcpConfig::default(), options.clone(), "127.0.0.1:0"));
}

#[test]
fn over_tls_with_tiny_socket_buffers() {
    let config = TcpConfig {
        send_buffer: Some(16 << 10),
        receive_buffer: Some(16 << 10),
        ..TcpConfig::default()
    };
    let options = TcpHostOptions {
        send_buffer: Some(16 << 10),
        receive_buffer: Some(16 << 10),
        tls: Some(tls()),
        ..TcpHostOptions::default()
    };
    conformance::run(|| TcpRig::new(config.clone(), options.clone(), "127.0.0.1:0"));
}
