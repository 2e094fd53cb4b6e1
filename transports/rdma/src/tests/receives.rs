//! Tests of receives: every accepted connection has enough, and a connection that would not is
//! refused with the reason.

use nacre_nvmf::transport::{Closed, ListenerId, Plug};
use nacre_transport_rdma_verbs::sim::attributes;

use super::rig::ENTRIES;
use super::several_devices::{SeveralDevices, config, devices};
use crate::Incident;

impl SeveralDevices {
    /// A command of each host arrives and is answered, all of them at the same time.
    fn all_work(&mut self, clients: &[usize]) {
        for &client in clients {
            self.clients[client].completed.clear();
            self.write(client, 1);
        }
        self.turns(8);
        for &client in clients {
            assert_eq!(self.clients[client].completed, [1], "host {client}");
        }
    }

    /// As many connections as go by a device, up to `most`, and why no more do.
    fn fill(&mut self, device: usize, most: usize) -> (Vec<usize>, Option<Closed>) {
        let mut clients = Vec::new();
        while clients.len() < most {
            match self.connect(device, ENTRIES) {
                Ok(client) => clients.push(client),
                Err(why) => return (clients, Some(why)),
            }
        }
        (clients, None)
    }

    fn is_refused(&mut self, why: &Closed, device: usize) {
        let Closed::Refused(why) = why else {
            panic!("{why:?}");
        };
        assert!(why.contains("refused") && why.contains("06h"), "{why}");
        let counts = self.plug.listener_counts(ListenerId(device as u64));
        assert_eq!(counts.unwrap().refused, 1);
        match &self.plug.incidents()[..] {
            [Incident::Refused { why, .. }] => assert!(why.contains("receives"), "{why}"),
            other => panic!("{other:?}"),
        }
    }
}

/// Goal: as many connections as were asked for, where each has receives of its own.
#[test]
fn receives_per_connection() {
    let mut many = config(0);
    many.max_qpairs = 40;
    let mut all = SeveralDevices::new(many.clone(), &devices(1));
    let (clients, refused) = all.fill(0, 40);
    assert_eq!((clients.len(), refused), (40, None));
    all.all_work(&clients);

    many.srq_size = 256;
    let mut lesser = devices(1);
    lesser[0].max_srq = 0;
    let mut all = SeveralDevices::new(many, &lesser);
    let (clients, refused) = all.fill(0, 40);
    assert_eq!((clients.len(), refused), (40, None));
    all.all_work(&clients);
}

/// Goal: all devices present at start, and one more, have their receives. Hosts of a further device
/// are refused until there is room for it.
#[test]
fn receives_per_device() {
    let mut all = SeveralDevices::new(config(2048), &devices(3));
    let mut clients = Vec::new();
    for device in 0..4 {
        if device >= 3 {
            assert_eq!(all.plug_in(&attributes("sim_late")), device);
        }
        clients.push(all.connect(device, ENTRIES).unwrap());
        let posted = all.fabric.posted_receives();
        assert_eq!(posted, 2048 * (device + 1), "all of them are posted");
    }
    let fifth = all.plug_in(&attributes("sim_last"));
    let why = all.connect(fifth, ENTRIES).unwrap_err();
    all.is_refused(&why, fifth);
    assert_eq!(all.plug.connections(), 4);
    all.all_work(&clients);
    all.fabric.remove_device(all.devices[0]);
    all.turns(20);
    clients[0] = all.connect(fifth, ENTRIES).unwrap();
    all.all_work(&clients);
}

/// Goal: a connection that would have no receives is refused, without effect on others. Method: a
/// device without shared receives that arrives when those of the core are taken.
#[test]
fn receives_of_a_device_added_later() {
    let mut all = SeveralDevices::new(config(256), &devices(1));
    let first = all.connect(0, ENTRIES).unwrap();
    let mut lesser = attributes("sim_late");
    lesser.max_srq = 0;
    let late = all.plug_in(&lesser);
    let (mut clients, refused) = all.fill(late, 30);
    all.is_refused(&refused.expect("no end of receives"), late);
    // 256 for the first device, and 1024 more.
    assert_eq!(clients.len(), 1024 / usize::from(ENTRIES));
    assert_eq!(all.plug.connections(), 1 + clients.len());
    clients.push(first);
    all.all_work(&clients);
    // One that leaves makes room.
    all.leave(clients[0]);
    clients[0] = all.connect(late, ENTRIES).unwrap();
    all.all_work(&clients);
}

/// Goal: a connection that found no free buffers gets some when they come back, without another
/// event.
#[test]
fn returned_buffers_are_posted() {
    let mut all = SeveralDevices::new(config(0), &devices(1));
    let greedy = all.connect(0, ENTRIES).unwrap();
    let other = all.connect(0, ENTRIES).unwrap();
    all.hoard = Some(Vec::new());
    // Its commands are answered, but their data is kept, until nothing can be posted any longer.
    let mut cid = 0;
    let mut before = usize::MAX;
    while before != all.commands.len() {
        before = all.commands.len();
        for _ in 0..ENTRIES {
            all.write(greedy, cid);
            cid += 1;
        }
        all.turns(8);
    }
    let answered = all.clients[greedy].completed.len();
    assert_eq!(answered, all.commands.len());
    assert!(answered < usize::from(cid), "there is no end of buffers");
    all.hoard = None;
    all.turns(8);
    let answered = all.clients[greedy].completed.len();
    assert_eq!(answered, usize::from(cid), "all of them");
    all.all_work(&[greedy, other]);
}
