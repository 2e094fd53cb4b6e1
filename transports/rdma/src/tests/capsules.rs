//! Tests of listeners whose in-capsule data size differs from the transport's.

use nacre_nvmf::transport::{ListenError, ListenerId, ListenerOptions, Plug};
use nacre_nvmf_wire::opcode::io;
use nacre_nvmf_wire::{Sgl, Sqe, StatusCode};

use super::descriptors::{World, list};
use super::rig::{Options, TARGET};
use super::stack::{Setup, Stack};

const REFUSED: StatusCode = StatusCode::SGL_OFFSET_INVALID.with_dnr();

/// A listener with in-capsule size `own`, on a transport with 4096 whose receive buffers hold
/// `room` bytes.
fn options(own: Option<u32>, room: u32) -> Options {
    Options::with(|options| {
        options.listener.in_capsule_data_size = own;
        options.config.listener_in_capsule_data_size = room;
    })
}

impl World {
    /// The status of a write with `length` bytes of data in its capsule.
    fn carry(&mut self, length: u32) -> StatusCode {
        let data: Vec<u8> = (0..length).map(|at| (at / 7) as u8).collect();
        self.written.clear();
        let sqe = Sqe::for_namespace(io::WRITE, 9, 1);
        let sqe = sqe.with_sgl(Sgl::InCapsule { offset: 0, length });
        let status = self.call(sqe, &data).0;
        let there = if status.is_success() { &data[..] } else { &[] };
        assert!(self.written == there, "{length} bytes");
        status
    }

    fn announced(&self) -> (u32, u8) {
        let caps = self.rig.transport.caps_of(self.conn.unwrap());
        (caps.in_capsule_bytes, caps.max_sgl_descriptors)
    }

    fn listener_size(&self) -> Option<u32> {
        self.rig.plug.in_capsule_data_size(ListenerId(3))
    }
}

/// The target accepts exactly the announced in-capsule size, whatever the size of its buffers, with
/// and without a shared receive queue. Larger data fails its command, and no other.
#[test]
fn the_announced_in_capsule_size_is_accepted() {
    for srq in [256, 0] {
        for (own, room, size) in [
            (None, 0, 4096),
            (None, 8192, 4096),
            (Some(1024), 0, 1024),
            (Some(64), 8192, 64),
            (Some(8192), 8192, 8192),
            // The buffers are too small for this size.
            (Some(8192), 0, 4096),
            (Some(16384), 6144, 6144),
        ] {
            let mut options = options(own, room);
            options.config.srq_size = srq;
            let mut world = World::with(options, 1);
            let descriptors = (size / 16).min(16) as u8;
            assert_eq!(world.announced(), (size, descriptors), "{own:?} {room}");
            assert_eq!(world.listener_size(), Some(size));
            assert_eq!(world.carry(size), StatusCode::SUCCESS);
            // A capsule larger than the buffers would be an error of the queue pair, caused by the
            // host.
            if size + 16 <= room.max(4096) {
                assert_eq!(world.carry(size + 16), REFUSED, "{own:?} {room}");
            }
            assert_eq!(world.carry(16), StatusCode::SUCCESS);
            assert_eq!(world.closed, []);
        }
    }
}

/// Without in-capsule data, the command contains the only descriptor.
#[test]
fn no_in_capsule_data() {
    let mut world = World::with(options(Some(0), 0), 1);
    assert_eq!(world.announced(), (0, 1));
    assert_eq!(world.carry(16), REFUSED);
    assert_eq!(world.call(list(io::WRITE, 0, 16), &[0; 16]).0, REFUSED);
    assert_eq!(world.closed, []);
}

/// Descriptors in a capsule count as in-capsule data; the announced number is accepted.
#[test]
fn descriptors_in_a_capsule() {
    let mut world = World::with(options(Some(64), 0), 1);
    assert_eq!(world.announced(), (64, 4));
    let call = |world: &mut World, offset, length| {
        let status = world.call(list(io::WRITE, offset, length), &[0; 128]);
        status.0
    };
    assert_eq!(call(&mut world, 64, 16), REFUSED);
    let many = StatusCode::INVALID_NUMBER_OF_SGL_DESCRIPTORS.with_dnr();
    assert_eq!(call(&mut world, 0, 80), many);
    // These descriptors are parsed, and are invalid.
    let kind = StatusCode::SGL_DESCRIPTOR_TYPE_INVALID.with_dnr();
    assert_eq!(call(&mut world, 48, 16), kind);
    assert_eq!(world.closed, []);
}

/// IOCCSZ applies to I/O queues: admin queues use the transport's size.
#[test]
fn admin_queues_use_the_transports_size() {
    let mut world = World::with(options(Some(64), 0), 0);
    assert_eq!(world.carry(4096), StatusCode::SUCCESS);
    let mut world = World::with(options(Some(8192), 8192), 0);
    assert_eq!(world.carry(4096), StatusCode::SUCCESS);
    assert_eq!(world.carry(8192), REFUSED);
}

#[test]
fn invalid_in_capsule_sizes() {
    let world = World::with(Options::default(), 1);
    let address = nacre_nvmf::transport::Address::Ip((TARGET, 4421).into());
    for bytes in [100, (1 << 20) + 16] {
        let own = ListenerOptions {
            in_capsule_data_size: Some(bytes),
            ..ListenerOptions::default()
        };
        let refused = world.rig.plug.listen(ListenerId(4), &address, &own);
        let option = match refused {
            Err(ListenError::Option { option, .. }) => option,
            other => panic!("{bytes}: {other:?}"),
        };
        assert_eq!(option, "in_capsule_data_size");
    }
    assert_eq!(world.rig.plug.in_capsule_data_size(ListenerId(4)), None);
    assert_eq!(world.listener_size(), Some(4096));
}

/// Hosts follow Identify: 4 KiB are sent in the capsule to one controller, and fetched by RDMA READ
/// by another.
#[test]
fn hosts_follow_ioccsz() {
    for (own, expected) in [(512, 4), (8192, 2)] {
        let mut setup = Setup::default();
        setup.config.listener_in_capsule_data_size = 8192;
        setup.listener.in_capsule_data_size = Some(own);
        let mut stack = Stack::new(setup);
        stack.connect();
        let id = stack.controller.identify().unwrap();
        assert_eq!(id.in_capsule_bytes(), u64::from(own));
        let before = stack.plug.total().read_ops;
        stack.write_and_read();
        // Of 512, 4096, 4608, 32768 and 131072 bytes, sizes up to `own` need no READ.
        let reads = stack.plug.total().read_ops - before;
        assert_eq!(reads, expected, "{own}");
    }
}
