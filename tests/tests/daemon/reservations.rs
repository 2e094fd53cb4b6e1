//! Reservations across restarts of the daemon: persistent ones are restored before the first
//! command, others are gone.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use nacre_nvmf_wire::commands::io::ReadWrite;
use nacre_nvmf_wire::commands::reservation::{
    Acquire, AcquireAction, AcquireData, PersistChange, Register, RegisterAction, RegisterData,
    Report, ReservationType,
};
use nacre_nvmf_wire::fabrics::{
    Connect, ConnectAttributes, ConnectData, PropertySet, PropertySize,
};
use nacre_nvmf_wire::opcode::io as opcode;
use nacre_nvmf_wire::registers::{Cc, offset};
use nacre_nvmf_wire::tcp::{CapsuleCmd, DataAlignment, Digests, IcReq};
use nacre_nvmf_wire::{Cqe, Nqn, Sgl, Sqe, StatusCode};
use nacre_tests::daemon::{Daemon, Place};
use nacre_tests::seed;
use serde_json::json;
use zerocopy::{FromBytes, IntoBytes};

const NQN: &str = "nqn.2025-01.io.nacre:reservations";
const CONFLICT: StatusCode = StatusCode::RESERVATION_CONFLICT.with_dnr();
const OK: StatusCode = StatusCode::SUCCESS;

/// One queue, one command at a time.
struct Queue(TcpStream);

impl Queue {
    fn open(address: SocketAddr) -> Option<Self> {
        let mut stream = TcpStream::connect(address).ok()?;
        stream
            .set_read_timeout(Some(Duration::from_secs(60)))
            .unwrap();
        let hello = IcReq::new(DataAlignment::DWORD, Digests::NONE, 1);
        stream.write_all(hello.as_bytes()).ok()?;
        stream.read_exact(&mut [0; 128]).ok()?;
        Some(Self(stream))
    }

    /// `None`: the connection ended.
    fn call(&mut self, sqe: Sqe, data: &[u8]) -> Option<(Cqe, Vec<u8>)> {
        let sqe = match data.len() as u32 {
            0 => sqe,
            length => sqe.with_sgl(Sgl::InCapsule { offset: 0, length }),
        };
        let length = data.len() as u32;
        let capsule = CapsuleCmd::new(sqe, length, Digests::NONE, DataAlignment::DWORD);
        self.0
            .write_all(&[capsule.as_bytes(), data].concat())
            .ok()?;
        let mut got = Vec::new();
        loop {
            let mut header = [0; 24];
            self.0.read_exact(&mut header).ok()?;
            let [kind, _, _, begins, plen @ ..] = header;
            match kind {
                5 => return Some((Cqe::read_from_bytes(&header[8..]).unwrap(), got)),
                7 => {
                    let plen = u32::from_le_bytes(plen[..4].try_into().unwrap());
                    let mut rest = vec![0; plen as usize - 24];
                    self.0.read_exact(&mut rest).ok()?;
                    got.extend_from_slice(&rest[usize::from(begins) - 24..]);
                }
                _ => panic!("a PDU of type {kind}"),
            }
        }
    }

    fn connect(&mut self, nqn: &str, host: u8, qid: u16, cntlid: u16) -> Option<u16> {
        let connect = Connect {
            qid,
            sqsize: 15,
            attributes: ConnectAttributes::empty(),
            priority_class: 0,
            kato_ms: 0,
        };
        let name = Nqn::new(&format!("nqn.2025-01.io.nacre:host{host}")).unwrap();
        let data = ConnectData::new([host; 16], cntlid, &Nqn::new(nqn).unwrap(), &name);
        let sgl = Sgl::InCapsule {
            offset: 0,
            length: 1024,
        };
        let (cqe, _) = self.call(connect.to_sqe(1, sgl), data.as_bytes())?;
        assert_eq!(cqe.status(), OK, "Connect");
        Some(cqe.dword0() as u16)
    }
}

/// A host with one I/O queue.
pub(crate) struct Host {
    _admin: Queue,
    io: Queue,
    key: u64,
}

impl Host {
    fn connect(address: SocketAddr, id: u8) -> Self {
        Self::connect_to(NQN, address, id)
    }

    /// Connects to namespace 1 of `nqn`.
    pub(crate) fn connect_to(nqn: &str, address: SocketAddr, id: u8) -> Self {
        let mut admin = Queue::open(address).expect("it listens");
        let cntlid = admin.connect(nqn, id, 0, 0xffff).expect("an answer");
        let set = PropertySet {
            size: PropertySize::Four,
            offset: offset::CC,
            value: u64::from(Cc::enabled().0),
        };
        let (cqe, _) = admin.call(set.to_sqe(2), &[]).expect("an answer");
        assert_eq!(cqe.status(), OK);
        let mut io = Queue::open(address).expect("it listens");
        io.connect(nqn, id, 1, cntlid).expect("an answer");
        Self {
            _admin: admin,
            io,
            key: u64::from(id),
        }
    }

    pub(crate) fn register(
        &mut self,
        action: RegisterAction,
        persist: PersistChange,
        new: u64,
    ) -> Option<StatusCode> {
        let register = Register {
            action,
            ignore_existing_key: false,
            persist,
        };
        let keys = RegisterData {
            crkey: self.key.into(),
            nrkey: new.into(),
        };
        let (cqe, _) = self.io.call(register.to_sqe(3, 1), keys.as_bytes())?;
        if cqe.status().is_success() {
            self.key = new;
        }
        Some(cqe.status())
    }

    pub(crate) fn acquire(&mut self, kind: ReservationType) -> StatusCode {
        let acquire = Acquire {
            action: AcquireAction::Acquire,
            ignore_existing_key: false,
            kind,
        };
        let keys = AcquireData {
            crkey: self.key.into(),
            prkey: 0.into(),
        };
        let (cqe, _) = self.io.call(acquire.to_sqe(4, 1), keys.as_bytes()).unwrap();
        cqe.status()
    }

    fn write(&mut self) -> StatusCode {
        self.write_block(512)
    }

    pub(crate) fn write_block(&mut self, bytes: usize) -> StatusCode {
        let sqe = ReadWrite::new(3, 1).to_sqe(opcode::WRITE, 5, 1);
        self.io.call(sqe, &vec![7; bytes]).unwrap().0.status()
    }

    /// Generation, type, number of registrants, PTPL, and the key of the first registrant.
    pub(crate) fn report(&mut self) -> (u32, u8, u8, u8, u64) {
        self.try_report().expect("a report")
    }

    /// See [`Host::report`].
    pub(crate) fn try_report(&mut self) -> Result<(u32, u8, u8, u8, u64), StatusCode> {
        let report = Report {
            bytes: 128,
            extended: true,
        };
        let sqe = report.to_sqe(6, 1).with_sgl(Sgl::Transport { length: 128 });
        let (cqe, page) = self.io.call(sqe, &[]).unwrap();
        if cqe.status() != OK {
            return Err(cqe.status());
        }
        let generation = u32::from_le_bytes(page[..4].try_into().unwrap());
        let key = u64::from_le_bytes(page[72..80].try_into().unwrap());
        Ok((generation, page[4], page[5], page[9], key))
    }
}

/// A RAM disk as namespace 1; its reservations are kept in a file if one is given.
fn serve(place: &Place, ptpl_file: Option<&str>) -> (Daemon, SocketAddr) {
    let mut daemon = place.start();
    daemon.create_ram("ram", 512, 1 << 20);
    daemon.create_subsystem(NQN);
    let mut namespace = json!({ "bdev_name": "ram" });
    if let Some(file) = ptpl_file {
        namespace["ptpl_file"] = file.into();
    }
    daemon.call(
        "nvmf_subsystem_add_ns",
        json!({ "nqn": NQN, "namespace": namespace }),
    );
    let address = daemon.listen(NQN, "127.0.0.1:0");
    (daemon, address)
}

fn reservation(daemon: &mut Daemon) -> serde_json::Value {
    daemon.call("nvmf_ns_get_reservation", json!({ "nqn": NQN, "nsid": 1 }))
}

/// Goal: after kill -9 a persistent reservation is in force from the first command. One that is
/// not, or no longer, persistent is gone. Both with the daemon's state and with a separate file.
#[test]
fn reservations_return_after_kill_9() {
    for in_file in [false, true] {
        let place = Place::new();
        let file = place.path("ptpl.json");
        let file = in_file.then(|| file.to_str().unwrap().to_owned());
        let (daemon, address) = serve(&place, file.as_deref());
        let mut a = Host::connect(address, 0xa);
        let keep = PersistChange::Keep;
        assert_eq!(a.register(RegisterAction::Register, keep, 10), Some(OK));
        assert_eq!(a.acquire(ReservationType::ExclusiveAccess), OK);
        assert_eq!(Host::connect(address, 0xb).write(), CONFLICT);
        daemon.kill();

        let mut daemon = place.start();
        let mut b = Host::connect(address, 0xb);
        assert_eq!(b.report(), (0, 0, 0, 0, 0), "it was not to persist");
        assert_eq!(b.write(), OK);
        let mut a = Host::connect(address, 0xa);
        assert_eq!(
            a.register(RegisterAction::Register, PersistChange::Set, 10),
            Some(OK)
        );
        assert_eq!(a.acquire(ReservationType::ExclusiveAccess), OK);
        let before = reservation(&mut daemon);
        assert_eq!(
            (&before["rtype"], &before["ptpl"]),
            (&json!(2), &json!(true))
        );
        assert_eq!(before["registrants"][0]["rkey"], "000000000000000a");
        daemon.kill();

        for _ in 0..2 {
            let mut daemon = place.start();
            let mut b = Host::connect(address, 0xb);
            assert_eq!(b.write(), CONFLICT, "{in_file}");
            let mut a = Host::connect(address, 0xa);
            assert_eq!(a.write(), OK);
            let (_, rtype, registrants, ptpl, key) = b.report();
            assert_eq!((rtype, registrants, ptpl, key), (2, 1, 1, 10));
            let now = reservation(&mut daemon);
            assert_eq!(now["registrants"], before["registrants"]);
            assert_eq!(now["conflicts"], 1);
            let state = daemon.call("state_get", serde_json::Value::Null);
            let objects = state["objects"].as_array().unwrap();
            assert!(objects.iter().all(|o| o["state"] == "live"), "{state:#}");
            daemon.kill();
        }

        let daemon = place.start();
        let mut a = Host::connect(address, 0xa);
        a.key = 10;
        let clear = PersistChange::Clear;
        assert_eq!(a.register(RegisterAction::Replace, clear, 11), Some(OK));
        assert_eq!(a.write(), OK);
        daemon.kill();
        let mut daemon = place.start();
        let mut b = Host::connect(address, 0xb);
        assert_eq!((b.write(), b.report().2), (OK, 0));

        // Removing the namespace removes its reservation.
        let set = PersistChange::Set;
        assert_eq!(b.register(RegisterAction::Register, set, 20), Some(OK));
        assert_eq!(b.acquire(ReservationType::WriteExclusive), OK);
        let own = json!({ "nqn": NQN, "nsid": 1 });
        daemon.call("nvmf_subsystem_remove_ns", own);
        let state = daemon
            .call("state_get", serde_json::Value::Null)
            .to_string();
        assert!(!state.contains("/reservation"), "{state}");
        daemon.stop();
    }
}

/// Goal: no acknowledged change is lost or partial, whenever the daemon is killed. Method: a host
/// that replaces its key by the next number as fast as it gets answers, and a kill at a random
/// moment. The key found afterwards is the last acknowledged one, or the one in flight.
#[test]
fn no_acknowledged_change_is_lost() {
    let mut rng = seed::announced("no_acknowledged_change_is_lost");
    let place = Place::new();
    let (mut daemon, address) = serve(&place, None);
    let mut a = Host::connect(address, 0xa);
    a.key = 1;
    let set = PersistChange::Set;
    assert_eq!(a.register(RegisterAction::Register, set, 1), Some(OK));
    for _ in 0..6 {
        let after = Duration::from_micros(rng.below(60_000));
        let changes = std::thread::spawn(move || {
            let replace = |a: &mut Host| {
                let next = a.key + 1;
                a.register(RegisterAction::Replace, PersistChange::Keep, next)
            };
            while let Some(status) = replace(&mut a) {
                assert_eq!(status, OK);
            }
            a.key
        });
        std::thread::sleep(after);
        daemon.kill();
        let answered = changes.join().expect("the host");
        daemon = place.start();
        a = Host::connect(address, 0xa);
        let (.., registrants, ptpl, found) = a.report();
        assert_eq!((registrants, ptpl), (1, 1));
        assert!(
            found == answered || found == answered + 1,
            "answered {answered}, found {found}"
        );
        a.key = found;
    }
    daemon.stop();
}
