//! Tests RDMA on this machine: both ends of its connections in one process, over a real device,
//! with all data compared.
//!
//! ```text
//! modprobe rdma_rxe; ip link add dummy0 type dummy
//! ip addr add 10.9.0.1/24 dev dummy0; ip link set dummy0 up
//! rdma link add rxe0 type rxe netdev dummy0
//! pingpong 10.9.0.1                  # connect, SEND, WRITE, READ, errors, reject, disconnect
//! pingpong 10.9.0.1 --port dummy0    # the port goes down and up: asynchronous events
//! pingpong 10.9.0.1 --remove rxe0    # the device goes away under a connection
//! ```
//!
//! Every step prints its result. The first step that fails ends the program with status 1.

use std::error::Error;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::BorrowedFd;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nacre_hugepages::{Arena, ArenaOptions, Buf, ClassSpec, Pool, register_all};
use nacre_transport_rdma_verbs::*;

type Outcome<T> = Result<T, Box<dyn Error>>;

/// Time limit for each step; soft-RoCE in an emulated machine is slow.
const PATIENCE: Duration = Duration::from_secs(30);

fn main() -> Outcome<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let provider = VerbsProvider::open()?;
    show_devices(&provider)?;
    match args[..] {
        [] => Ok(()),
        [address] => basics(&provider, address.parse()?),
        [address, "--port", netdev] => port_events(&provider, address.parse()?, netdev),
        [address, "--remove", link] => removal(&provider, address.parse()?, link),
        _ => Err("pingpong [ADDRESS [--port NETDEV | --remove RDMA-LINK]]".into()),
    }
}

fn show_devices(provider: &VerbsProvider) -> Outcome<()> {
    let devices = provider.verbs_devices()?;
    if devices.is_empty() {
        let absence = provider.absence();
        println!("{absence} ({}); {}", absence.reason(), absence.remedy());
    }
    for device in devices {
        println!("{:#?}", device.attributes());
        for port in 1..=device.attributes().ports {
            println!("port {port}: {:?}", device.port_state(port)?);
            for gid in device.gids(port)? {
                let text = std::net::Ipv6Addr::from(gid.raw);
                println!(
                    "  gid {} {text} {:?} ifindex {}",
                    gid.index, gid.kind, gid.netdev
                );
            }
        }
    }
    Ok(())
}

/// One end: memory, queues, connection manager.
struct End {
    name: &'static str,
    domain: Arc<dyn ProtectionDomain>,
    cq: Arc<dyn CompletionQueue>,
    srq: Option<Arc<dyn SharedReceiveQueue>>,
    pool: Pool,
    slot: usize,
    arena: Arena,
}

impl End {
    fn new(device: &Arc<dyn Device>, access: Access, shared: bool) -> Outcome<Self> {
        let name = if shared { "target" } else { "host" };
        let classes = [
            ClassSpec {
                size: 4096,
                count: 32,
            },
            ClassSpec {
                size: 1 << 20,
                count: 4,
            },
        ];
        let arena = Arena::allocate(ArenaOptions::new(Pool::bytes_for(&classes) as u64))?;
        let domain = device.protection_domain(access)?;
        let slot =
            register_all(std::slice::from_ref(&arena), &domain.hook()).map_err(with_cause)?;
        let registrations = domain.registrations();
        check(registrations.regions == 1, "one region is registered")?;
        println!("{name}: {registrations:?}");
        Ok(Self {
            name,
            cq: domain.completion_queue(64)?,
            srq: shared
                .then(|| domain.shared_receive_queue(32, 1, 0))
                .transpose()?,
            pool: Pool::on_arena(&arena, &classes)?,
            domain,
            slot,
            arena,
        })
    }

    fn buf(&self, len: usize, fill: impl Fn(usize) -> u8) -> Buf {
        let mut buf = self.pool.acquire(len).expect("the pool has enough");
        let bytes = buf.bytes_mut().expect("it has one user");
        bytes.iter_mut().enumerate().for_each(|(i, b)| *b = fill(i));
        buf.truncate(len);
        buf
    }

    fn key(&self, buf: &Buf) -> MrKey {
        MrKey::from_bits(buf.key(self.slot).expect("registered"))
    }

    fn sge(&self, buf: &Buf) -> Sge {
        Sge {
            address: buf.as_ptr().addr() as u64,
            length: buf.len() as u32,
            lkey: self.key(buf).lkey,
        }
    }

    /// Waits for `count` completions: arms the queue, polls again, sleeps.
    fn completions(&self, count: usize) -> Outcome<Vec<WorkCompletion>> {
        let mut all = Vec::new();
        let start = Instant::now();
        while all.len() < count {
            let mut some = [WorkCompletion::EMPTY; 16];
            let mut got = self.cq.poll(&mut some)?;
            if got == 0 {
                self.cq.arm()?;
                got = self.cq.poll(&mut some)?;
                if got == 0 {
                    wait(self.cq.fd(), start)?;
                    self.cq.disarm();
                }
            }
            all.extend_from_slice(&some[..got]);
        }
        Ok(all)
    }

    fn one(&self, what: &str) -> Outcome<WorkCompletion> {
        let done = self.completions(1)?.remove(0);
        println!(
            "{}: {what}: {} {:?} {} bytes",
            self.name, done.status, done.opcode, done.byte_len
        );
        Ok(done)
    }
}

/// A queue pair and its buffers, which live at least as long as the queue pair.
struct Side<'a> {
    end: &'a End,
    id: CmId,
    qp: Arc<dyn QueuePair>,
    kept: Vec<Buf>,
}

impl Side<'_> {
    fn receive(&mut self, wr_id: u64, len: usize) -> Outcome<usize> {
        let buf = self.end.buf(len, |_| 0);
        let sges = [self.end.sge(&buf)];
        let requests = [RecvWr {
            wr_id,
            first_sge: 0,
            sges: 1,
        }];
        // SAFETY: `kept` holds the buffer until the queue pair is dropped; no code touches it
        // before completion.
        unsafe {
            match &self.end.srq {
                Some(srq) => srq.post_recv(&requests, &sges)?,
                None => self.qp.post_recv(&requests, &sges)?,
            }
        }
        self.kept.push(buf);
        Ok(self.kept.len() - 1)
    }

    /// Posts a chain of operations over all of `bufs`, in order; each operation uses its number of
    /// buffers. The last operation is signaled.
    fn post(&mut self, ops: &[(SendOp, u32)], bufs: Vec<Buf>, inline: bool) -> Outcome<()> {
        let sges: Vec<Sge> = bufs.iter().map(|buf| self.end.sge(buf)).collect();
        let mut first_sge = 0;
        let mut requests = Vec::new();
        for (index, &(op, sges)) in ops.iter().enumerate() {
            requests.push(SendWr {
                wr_id: index as u64,
                op,
                first_sge,
                sges,
                signaled: index + 1 == ops.len(),
                inline,
                fence: false,
            });
            first_sge += sges;
        }
        // SAFETY: as in `receive`.
        unsafe { self.qp.post_send(&requests, &sges)? };
        self.kept.extend(bufs);
        Ok(())
    }
}

/// Both connection managers. They receive the events of both ends of one device.
struct Managers {
    target: Box<dyn ConnectionManager>,
    host: Box<dyn ConnectionManager>,
    listening: Listening,
}

impl Managers {
    fn new(provider: &VerbsProvider, address: IpAddr) -> Outcome<Self> {
        let mut target = provider.connection_manager()?;
        let host = provider.connection_manager()?;
        let options = CmOptions {
            tos: 104,
            ack_timeout: None,
        };
        let listening = target.listen(SocketAddr::new(address, 0), 8, options)?;
        println!("listening: {listening:?}");
        check(
            listening.device.is_some(),
            "the address belongs to a device",
        )?;
        Ok(Self {
            target,
            host,
            listening,
        })
    }

    /// Resolves address and route on the host's side.
    fn route(&mut self, port: u16) -> Outcome<CmId> {
        let to = SocketAddr::new(self.listening.address.ip(), port);
        let options = CmOptions {
            tos: 104,
            ack_timeout: Some(16),
        };
        let id = self.host.resolve_address(None, to, PATIENCE, options)?;
        let event = next(&mut *self.host)?;
        check(
            event.id == id && matches!(event.kind, CmEventKind::AddressResolved { .. }),
            "address resolved",
        )?;
        self.host.resolve_route(id, PATIENCE)?;
        let event = next(&mut *self.host)?;
        check(event.kind == CmEventKind::RouteResolved, "route resolved")?;
        Ok(id)
    }

    fn connect<'a>(&mut self, target: &'a End, host: &'a End) -> Outcome<(Side<'a>, Side<'a>)> {
        let id = self.route(self.listening.address.port())?;
        let qp = self.host.create_qp(id, init(host))?;
        println!("host: queue pair {} {:?}", qp.number(), qp.caps());
        let hosts = Side {
            end: host,
            id,
            qp,
            kept: Vec::new(),
        };
        let params = ConnParams {
            private_data: b"hello".iter().copied().collect(),
            responder_resources: 4,
            initiator_depth: 0,
            retry_count: 7,
            rnr_retry_count: 7,
        };
        self.host.connect(id, &params)?;
        let event = next(&mut *self.target)?;
        let CmEventKind::ConnectRequest {
            listener,
            ref params,
            ..
        } = event.kind
        else {
            return Err(format!("no connect request: {event:?}").into());
        };
        check(
            listener == self.listening.id,
            "the request names its listener",
        )?;
        check(
            params.private_data.starts_with(b"hello\0"),
            "private data of the request",
        )?;
        let depths = (params.responder_resources, params.initiator_depth);
        // The depths as the target must pass them on: the host's answer limits requests to it.
        check(depths == (0, 4), "the READ depths of the request")?;
        let qp = self.target.create_qp(event.id, init(target))?;
        println!("target: queue pair {} {:?}", qp.number(), qp.caps());
        let targets = Side {
            end: target,
            id: event.id,
            qp,
            kept: Vec::new(),
        };
        let answer = ConnParams {
            private_data: b"welcome".iter().copied().collect(),
            responder_resources: 0,
            initiator_depth: 4,
            ..params.clone()
        };
        self.target.accept(event.id, &answer)?;
        let event = next(&mut *self.host)?;
        let CmEventKind::Established { ref params } = event.kind else {
            return Err(format!("host not established: {event:?}").into());
        };
        check(
            params.private_data.starts_with(b"welcome\0"),
            "private data of the reply",
        )?;
        let depths = (params.responder_resources, params.initiator_depth);
        check(depths == (4, 0), "the READ depths of the reply")?;
        let event = next(&mut *self.target)?;
        check(
            matches!(event.kind, CmEventKind::Established { .. }),
            "target established",
        )?;
        Ok((targets, hosts))
    }
}

fn init(end: &End) -> QpInit<'_> {
    QpInit {
        domain: &end.domain,
        send_cq: &end.cq,
        recv_cq: &end.cq,
        srq: end.srq.as_ref(),
        caps: QpCaps {
            max_send_wr: 16,
            max_recv_wr: if end.srq.is_some() { 0 } else { 16 },
            max_send_sge: 4,
            max_recv_sge: 1,
            max_inline: 64,
        },
    }
}

fn basics(provider: &VerbsProvider, address: IpAddr) -> Outcome<()> {
    let mut managers = Managers::new(provider, address)?;
    let device = provider.device(managers.listening.device.ok_or("no device")?)?;
    let target = End::new(&device, Access::Local, true)?;
    let host = End::new(&device, Access::Remote, false)?;
    let (mut t, mut h) = managers.connect(&target, &host)?;

    messages(&mut t, &mut h)?;
    one_sided(&mut t, &mut h)?;
    target.cq.resize(256)?;
    check(target.cq.capacity() >= 256, "a completion queue grows")?;
    messages(&mut t, &mut h)?;
    let from = t.id;
    access_error(t, &mut h)?;
    managers.target.destroy(from);
    disconnected(&mut *managers.host, h.id, "host, after the target's error")?;
    managers.host.destroy(h.id);
    drop(h);

    // The host disconnects cleanly; posted requests flush.
    let (t, mut h) = managers.connect(&target, &host)?;
    h.receive(5, 64)?;
    managers.host.disconnect(h.id)?;
    let flushed = host.one("a receive after the disconnect")?;
    check(
        flushed.status == WcStatus::WorkRequestFlushed && flushed.wr_id == 5,
        "flushed",
    )?;
    disconnected(&mut *managers.target, t.id, "target")?;
    managers.target.disconnect(t.id)?;
    disconnected(&mut *managers.host, h.id, "host, after the target's answer")?;
    managers.target.destroy(t.id);
    managers.host.destroy(h.id);
    drop((t, h));

    // Destroying an id while its queue pair exists ends the connection too.
    let (t, h) = managers.connect(&target, &host)?;
    managers.target.destroy(t.id);
    disconnected(
        &mut *managers.host,
        h.id,
        "host, after the target destroyed its id",
    )?;
    check(
        managers.target.next_event()?.is_none(),
        "no event of a destroyed id",
    )?;
    managers.host.destroy(h.id);
    drop((t, h));

    refusals(&mut managers, &host)?;
    drop(managers);
    target.arena.unregister(target.slot);
    check(
        target.domain.registrations().regions == 0,
        "no memory is registered at the end",
    )?;
    check(
        target.domain.registrations().registered_total == 1,
        "nothing was registered on the way",
    )?;
    println!("PASS basics");
    Ok(())
}

/// SEND both ways, inline and from registered memory.
fn messages(t: &mut Side<'_>, h: &mut Side<'_>) -> Outcome<()> {
    for (inline, len) in [(true, 48), (false, 4096)] {
        let at = t.receive(100, 4096)?;
        h.post(
            &[(SendOp::Send, 1)],
            vec![h.end.buf(len, |i| i as u8 ^ 0x5a)],
            inline,
        )?;
        let received = t.end.one("received")?;
        let ok = received.status.is_success() && received.byte_len as usize == len;
        check(
            ok && received.opcode == WcOpcode::Recv && received.wr_id == 100,
            "a SEND arrives",
        )?;
        check(
            received.qp == t.qp.number(),
            "the completion names its queue pair",
        )?;
        check(
            matches(&mut t.kept[at], len, |i| i as u8 ^ 0x5a),
            "the received bytes",
        )?;
        check(h.end.one("sent")?.status.is_success(), "the SEND succeeded")?;
    }
    Ok(())
}

/// WRITE and SEND in one chain, READ with several entries: the operations of a target.
fn one_sided(t: &mut Side<'_>, h: &mut Side<'_>) -> Outcome<()> {
    const LEN: usize = 1 << 20;
    let memory = h.end.buf(LEN, |_| 0);
    let (address, rkey) = (memory.as_ptr().addr() as u64, h.end.key(&memory).rkey);
    h.kept.push(memory);
    let at = h.kept.len() - 1;
    let reply = h.receive(200, 64)?;
    let write = SendOp::Write { address, rkey };
    let send = SendOp::Send;
    let bufs = vec![
        t.end.buf(LEN - 4096, |i| (i / 7) as u8),
        t.end.buf(4096, |i| ((i + LEN - 4096) / 7) as u8),
        t.end.buf(16, |i| i as u8),
    ];
    t.post(&[(write, 2), (send, 1)], bufs, false)?;
    let received = h.end.one("received")?;
    check(
        received.wr_id == 200 && received.byte_len == 16,
        "the SEND after the WRITE",
    )?;
    check(
        matches(&mut h.kept[at], LEN, |i| (i / 7) as u8),
        "the written data",
    )?;
    check(
        matches(&mut h.kept[reply], 16, |i| i as u8),
        "the sent data",
    )?;
    let done = t.end.one("chain done")?;
    check(
        done.status.is_success() && done.wr_id == 1,
        "one completion for the chain",
    )?;

    let source = h.end.buf(8192, |i| (i / 3) as u8);
    let (address, rkey) = (source.as_ptr().addr() as u64, h.end.key(&source).rkey);
    h.kept.push(source);
    let first = t.kept.len();
    let bufs = vec![t.end.buf(4096, |_| 0), t.end.buf(4096, |_| 0)];
    t.post(&[(SendOp::Read { address, rkey }, 2)], bufs, false)?;
    let done = t.end.one("READ")?;
    check(
        done.status.is_success() && done.opcode == WcOpcode::Read,
        "a READ is done",
    )?;
    check(
        matches(&mut t.kept[first], 4096, |i| (i / 3) as u8),
        "the first half",
    )?;
    check(
        matches(&mut t.kept[first + 1], 4096, |i| ((i + 4096) / 3) as u8),
        "the second half",
    )?;
    // Everything that was posted has completed.
    t.kept.clear();
    h.kept.clear();
    Ok(())
}

/// A WRITE with a key that the peer never announced: it fails with its own error, and the queue
/// pair ends.
fn access_error(mut t: Side<'_>, h: &mut Side<'_>) -> Outcome<()> {
    let memory = h.end.buf(64, |_| 0);
    let write = SendOp::Write {
        address: memory.as_ptr().addr() as u64,
        rkey: h.end.key(&memory).rkey ^ 0xff00,
    };
    let buf = t.end.buf(64, |_| 1);
    t.post(&[(write, 1)], vec![buf], false)?;
    let done = t.end.one("WRITE with a wrong key")?;
    println!(
        "  Work completion error: {}: {}; {}",
        done.status,
        done.status.meaning(),
        done.status.remedy()
    );
    check(
        done.status == WcStatus::RemoteAccess,
        "a wrong key is refused",
    )?;
    let buf = t.end.buf(64, |_| 1);
    t.post(&[(SendOp::Send, 1)], vec![buf], false)?;
    let done = t.end.one("SEND after the error")?;
    check(
        done.status == WcStatus::WorkRequestFlushed,
        "the queue pair flushes",
    )?;
    t.qp.set_error()?;
    h.qp.set_error()?;
    Ok(())
}

fn refusals(managers: &mut Managers, host: &End) -> Outcome<()> {
    for port in [managers.listening.address.port(), 9] {
        let id = managers.route(port)?;
        let qp = managers.host.create_qp(id, init(host))?;
        managers.host.connect(id, &ConnParams::default())?;
        if port != 9 {
            let event = next(&mut *managers.target)?;
            managers.target.reject(event.id, b"no")?;
            managers.target.destroy(event.id);
        }
        let event = next(&mut *managers.host)?;
        let CmEventKind::Rejected {
            status,
            private_data,
        } = event.kind
        else {
            return Err(format!("not rejected: {event:?}").into());
        };
        println!(
            "rejected with reason {status}, {} bytes",
            private_data.len()
        );
        let by_us = status == 28 && private_data.starts_with(b"no\0");
        check(
            if port == 9 { status == 8 } else { by_us },
            "the reason of a reject",
        )?;
        managers.host.destroy(id);
        drop(qp);
    }
    Ok(())
}

fn port_events(provider: &VerbsProvider, address: IpAddr, netdev: &str) -> Outcome<()> {
    let managers = Managers::new(provider, address)?;
    let device = provider.device(managers.listening.device.ok_or("no device")?)?;
    for (state, expected) in [
        ("down", AsyncEvent::PortError { port: 1 }),
        ("up", AsyncEvent::PortActive { port: 1 }),
    ] {
        run(&["ip", "link", "set", netdev, state])?;
        let start = Instant::now();
        loop {
            wait(device.async_fd(), start)?;
            let event = device.next_async_event()?;
            println!("{state}: {event:?}, port {:?}", device.port_state(1)?);
            if event == Some(expected) {
                break;
            }
        }
    }
    println!("PASS port");
    Ok(())
}

fn removal(provider: &VerbsProvider, address: IpAddr, link: &str) -> Outcome<()> {
    let mut managers = Managers::new(provider, address)?;
    let device = provider.device(managers.listening.device.ok_or("no device")?)?;
    let before = device.id();
    let target = End::new(&device, Access::Local, true)?;
    let host = End::new(&device, Access::Remote, false)?;
    let (t, h) = managers.connect(&target, &host)?;
    let name = link.to_owned();
    let deleting = std::thread::spawn(move || {
        run(&["rdma", "link", "delete", &name]).map_err(|e| e.to_string())
    });
    let mut removed = Vec::new();
    let expected = [managers.listening.id, t.id];
    while !expected.iter().all(|id| removed.contains(id)) {
        let event = next(&mut *managers.target)?;
        if event.kind == CmEventKind::DeviceRemoval {
            managers.target.destroy(event.id);
            removed.push(event.id);
        }
    }
    while next(&mut *managers.host)?.kind != CmEventKind::DeviceRemoval {}
    managers.host.destroy(h.id);
    drop((t, h));
    target.arena.unregister(target.slot);
    host.arena.unregister(host.slot);
    drop((target, host, device));
    let start = Instant::now();
    while !deleting.is_finished() {
        check(
            start.elapsed() < PATIENCE,
            "the device is deleted after its last user releases it",
        )?;
        std::thread::sleep(Duration::from_millis(20));
    }
    deleting.join().map_err(|_| "a thread panicked")??;
    check(
        provider.devices()?.iter().all(|d| d.id() != before),
        "the device is no longer listed",
    )?;
    println!("PASS remove");
    Ok(())
}

fn next(manager: &mut dyn ConnectionManager) -> Outcome<CmEvent> {
    let start = Instant::now();
    loop {
        if let Some(event) = manager.next_event()? {
            println!("event of {:?}: {}", event.id, name(&event.kind));
            return Ok(event);
        }
        wait(manager.fd(), start)?;
    }
}

/// The variant's name, without its fields.
fn name(kind: &CmEventKind) -> String {
    let text = format!("{kind:?}");
    text.split(' ').next().unwrap_or_default().to_owned()
}

fn disconnected(manager: &mut dyn ConnectionManager, id: CmId, who: &str) -> Outcome<()> {
    let event = next(manager)?;
    println!("{who}: {event:?}");
    check(
        event.id == id && event.kind == CmEventKind::Disconnected,
        "disconnected",
    )
}

fn wait(fd: BorrowedFd<'_>, start: Instant) -> Outcome<()> {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let timeout = Timespec {
        tv_sec: 1,
        tv_nsec: 0,
    };
    poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&timeout))?;
    check(start.elapsed() < PATIENCE, "the wait ends in time")
}

fn matches(buf: &mut Buf, len: usize, fill: impl Fn(usize) -> u8) -> bool {
    let bytes = buf.bytes_mut().expect("it has one user");
    (0..len).all(|i| bytes[i] == fill(i))
}

fn check(holds: bool, what: &str) -> Outcome<()> {
    if holds {
        Ok(())
    } else {
        Err(format!("FAIL: {what}").into())
    }
}

fn with_cause(error: impl Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

fn run(command: &[&str]) -> Outcome<()> {
    let status = Command::new(command[0]).args(&command[1..]).status()?;
    check(status.success(), &format!("{command:?}"))
}
