//! Goal: the store keeps its promises on a real etcd, whose members die, stop and compact. Method:
//! starts members of Debian's etcd on loopback; without the program, the tests are skipped aloud.

mod leases;
mod nodes;
mod owners;
mod users;
mod watches;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nacre_bdev_replica::model::VolumeRecord;
use nacre_bdev_replica::store::suite::{Subject, block_on, record, run};
use nacre_bdev_replica::store::{StoreError, VolumeStore};
use nacre_cluster_etcd::{
    Before, Client, Copies, DaemonIdentity, Endpoints, Error, EtcdStore, Member, Prefix, Txn,
};
use nacre_cluster_etcd_members::{DEADLINE, Members, program};

fn prefix(name: &str) -> Prefix {
    Prefix::new(name).expect("a valid name")
}

/// A runtime for a client of a test.
fn runtime() -> tokio::runtime::Runtime {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    builder.enable_all().build().expect("a runtime")
}

fn client(endpoints: &Endpoints) -> Arc<Client> {
    Arc::new(Client::new(endpoints).expect("endpoints"))
}

/// Waits until members that have just started answer.
async fn settled(endpoints: &Endpoints) {
    let client = client(endpoints);
    client.check_version().await.expect("a member that answers");
    client.get("/nacre/lab/x").await.expect("a leader");
}

struct Etcd {
    endpoints: Endpoints,
    prefix: Prefix,
    /// Owns the prefix.
    owner: Option<DaemonIdentity>,
    store: Option<Arc<EtcdStore>>,
}

impl Etcd {
    fn new(endpoints: &Endpoints, name: &str, owner: Option<DaemonIdentity>) -> Self {
        let mut new = Self {
            endpoints: endpoints.clone(),
            prefix: prefix(name),
            owner,
            store: None,
        };
        new.reopen();
        new
    }
}

impl Subject for Etcd {
    fn store(&self) -> Arc<dyn VolumeStore> {
        Arc::clone(self.store.as_ref().expect("open")) as Arc<dyn VolumeStore>
    }

    fn reopen(&mut self) {
        self.store = None;
        let store = EtcdStore::open(&self.endpoints, self.prefix.clone(), None);
        let store = store.expect("it opens");
        if let Some(owner) = &self.owner {
            let claimed = runtime().block_on(store.claim(owner, Before::default()));
            claimed.expect("its own prefix");
        }
        assert_eq!(store.is_shared(), self.owner.is_none());
        self.store = Some(Arc::new(store));
    }
}

fn conforms(members: usize, owner: Option<&DaemonIdentity>) {
    let Some(program) = program("conformance") else {
        return;
    };
    let members = Members::start(program, members, &[]);
    let mut clusters = 0;
    run(|| {
        clusters += 1;
        Etcd::new(
            &members.endpoints(),
            &format!("c{clusters}"),
            owner.cloned(),
        )
    });
}

#[test]
fn conformance_on_one_member() {
    conforms(1, None);
}

#[test]
fn conformance_on_three_members() {
    conforms(3, None);
}

#[test]
fn conformance_of_an_owner() {
    conforms(1, Some(&owners::node(1, 1)));
}

fn next(record: &VolumeRecord) -> VolumeRecord {
    VolumeRecord {
        revision: record.revision + 1,
        ..record.clone()
    }
}

/// Swaps until `count` succeeded, and returns the longest time without a success. An unknown
/// outcome is looked up, as the control of a volume does.
fn swap_many(store: &EtcdStore, record: &mut VolumeRecord, count: u64) -> Duration {
    let mut longest = Duration::ZERO;
    for _ in 0..count {
        let began = Instant::now();
        let wanted = next(record);
        loop {
            match block_on(store.swap(record.version(), wanted.clone())) {
                Ok(()) => break,
                Err(StoreError::Unavailable { .. }) => match block_on(store.load(record.id)) {
                    Ok(found) if found == wanted => break,
                    Ok(found) => assert_eq!(found, *record, "one holder"),
                    Err(StoreError::Unavailable { .. }) => {}
                    Err(error) => panic!("{error}"),
                },
                Err(error) => panic!("{error}"),
            }
        }
        *record = wanted;
        longest = longest.max(began.elapsed());
    }
    longest
}

/// Each member in turn is killed and started again, the leader among them. No acknowledged change
/// is lost, none is made twice, and a dead member delays others by an election at most.
#[test]
fn members_die_and_return() {
    let Some(program) = program("members_die_and_return") else {
        return;
    };
    let mut members = Members::start(program, 3, &[]);
    let store = EtcdStore::open(&members.endpoints(), prefix("lab"), None).expect("it opens");
    let mut record = record("ant");
    block_on(store.list()).expect("a list");
    block_on(store.create(record.clone())).expect("created");
    for index in 0..3 {
        members.kill(index);
        let longest = swap_many(&store, &mut record, 50);
        println!("member {index} dead: {longest:?} without a success");
        assert!(longest < DEADLINE, "{longest:?}");
        members.run(index);
        swap_many(&store, &mut record, 20);
        // It must be back before the next one dies.
        std::thread::sleep(Duration::from_secs(2));
    }
    assert_eq!(block_on(store.list()), Ok(vec![record]));
}

/// A stopped member keeps its connections and says nothing.
#[test]
fn a_silent_member_delays_one_request() {
    let Some(program) = program("a_silent_member_delays_one_request") else {
        return;
    };
    let members = Members::start(program, 3, &[]);
    let store = EtcdStore::open(&members.endpoints(), prefix("lab"), None).expect("it opens");
    let mut record = record("ant");
    block_on(store.list()).expect("a list");
    block_on(store.create(record.clone())).expect("created");
    for index in 0..3 {
        members.stop(index);
        let longest = swap_many(&store, &mut record, 50);
        println!("member {index} silent: {longest:?} without a success");
        assert!(longest < DEADLINE, "{longest:?}");
        members.go_on(index);
        std::thread::sleep(Duration::from_secs(2));
        swap_many(&store, &mut record, 20);
    }
    // Without a majority, calls end in time with an error.
    members.stop(0);
    members.stop(1);
    let began = Instant::now();
    let wanted = next(&record);
    let answer = block_on(store.swap(record.version(), wanted.clone()));
    assert!(
        matches!(answer, Err(StoreError::Unavailable { .. })),
        "{answer:?}"
    );
    assert!(began.elapsed() < DEADLINE + Duration::from_secs(20));
    members.go_on(0);
    members.go_on(1);
    let found = loop {
        match block_on(store.load(record.id)) {
            Ok(found) => break found,
            Err(StoreError::Unavailable { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    };
    assert!(found == wanted || found == record, "one of both: {found:?}");
}

/// A member that stalls again and again, as one with a slow disk: it runs 50 ms of each 350 ms. No
/// change waits for it longer than for an election.
#[test]
fn a_stalling_member_delays_little() {
    const CHANGES: u64 = 60;
    let Some(program) = program("a_stalling_member_delays_little") else {
        return;
    };
    let members = Members::start(program, 3, &[]);
    let store = EtcdStore::open(&members.endpoints(), prefix("lab"), None).expect("it opens");
    let mut record = record("ant");
    block_on(store.list()).expect("a list");
    block_on(store.create(record.clone())).expect("created");
    let first = record.revision;
    for index in 0..3 {
        let is_done = AtomicBool::new(false);
        let longest = std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_done.load(Ordering::Relaxed) {
                    members.stop(index);
                    std::thread::sleep(Duration::from_millis(300));
                    members.go_on(index);
                    std::thread::sleep(Duration::from_millis(50));
                }
            });
            let longest = swap_many(&store, &mut record, CHANGES);
            is_done.store(true, Ordering::Relaxed);
            longest
        });
        println!("member {index} stalls: {longest:?} without a success");
        assert!(longest < DEADLINE, "{longest:?}");
    }
    assert_eq!(record.revision, first + 3 * CHANGES);
    assert_eq!(block_on(store.list()), Ok(vec![record]));
}

/// Refused by this client, and by an etcd with a lower limit; both are known to be unmade.
#[test]
fn a_request_larger_than_the_limit() {
    let Some(program) = program("a_request_larger_than_the_limit") else {
        return;
    };
    let members = Members::start(program, 1, &["--max-request-bytes", "65536"]);
    let runtime = runtime();
    runtime.block_on(async {
        let client = client(&members.endpoints());
        for bytes in [100_000, 2_000_000] {
            let txn = Txn::default().put("/large", vec![7; bytes]);
            let answer = client.transact(txn, Copies::Several).await;
            assert!(matches!(answer, Err(Error::TooLarge { .. })), "{answer:?}");
        }
        assert_eq!(client.get("/large").await, Ok(None));
    });
}

/// A list of more records than a page has.
#[test]
fn a_list_in_pages() {
    const RECORDS: usize = 1203;
    let Some(program) = program("a_list_in_pages") else {
        return;
    };
    let members = Members::start(program, 1, &["--unsafe-no-fsync"]);
    let runtime = runtime();
    runtime.block_on(async {
        let client = client(&members.endpoints());
        // A member that has just started may need an election.
        assert!(client.check_version().await.is_ok());
        for first in (0..RECORDS).step_by(100) {
            let mut txn = Txn::default();
            for number in first..(first + 100).min(RECORDS) {
                txn = txn.put(&format!("/pages/{number:05}"), vec![1; 1500]);
            }
            let answer = client.transact(txn, Copies::Several).await.expect("made");
            assert!(answer.is_made);
        }
        let page = client.list("/pages/").await.expect("a list");
        let keys: Vec<String> = (0..RECORDS).map(|n| format!("/pages/{n:05}")).collect();
        let found = page.keys.iter().map(|kv| String::from_utf8_lossy(&kv.key));
        assert!(found.eq(keys.iter().map(String::as_str)));
    });
}

/// Only a client with a certificate of the right authority gets an answer.
#[test]
fn certificates() {
    let Some(program) = program("certificates") else {
        return;
    };
    let Some((members, certificates)) = Members::start_with_tls("certificates", program) else {
        return;
    };
    let runtime = runtime();
    runtime.block_on(async {
        let right = client(&members.endpoints());
        assert_eq!(right.get("/x").await, Ok(None));
        let wrong = [
            certificates.tls("other"),
            certificates.tls("none"),
            certificates.tls_of_other_ca(),
        ];
        for tls in wrong {
            let endpoints = Endpoints {
                tls: Some(tls),
                deadline: Duration::from_secs(2),
                ..members.endpoints()
            };
            let answer = client(&endpoints).get("/x").await;
            let Err(Error::Unanswered { said, .. }) = &answer else {
                panic!("{answer:?}");
            };
            println!("{said}");
            assert!(said.to_lowercase().contains("certificate"), "{said}");
        }
        let nonsense = Endpoints {
            tls: Some(nacre_cluster_etcd::Tls {
                ca: b"no certificate".to_vec(),
                identity: None,
            }),
            ..members.endpoints()
        };
        let refused = Client::new(&nonsense).map(drop);
        println!("{refused:?}");
        assert!(refused.is_err(), "{refused:?}");
    });
}

/// Each member says how it is; one that is dead has a reason.
#[test]
fn the_state_of_each_member() {
    let Some(program) = program("the_state_of_each_member") else {
        return;
    };
    let mut members = Members::start(program, 3, &[]);
    runtime().block_on(async {
        let client = client(&members.endpoints());
        client.get("/x").await.expect("a leader");
        members.kill(1);
        let is_refused = |of: &Member| matches!(&of.status, Err(why) if why.contains("refused"));
        // The first question may still use the connection to the process that was killed.
        let end = Instant::now() + DEADLINE;
        let found = loop {
            let found = client.members().await;
            if is_refused(&found[1]) || Instant::now() > end {
                break found;
            }
        };
        let endpoints: Vec<String> = found.iter().map(|member| member.endpoint.clone()).collect();
        assert_eq!(endpoints, members.endpoints().urls);
        for member in [&found[0], &found[2]] {
            let status = member.status.as_ref().expect("it answers");
            assert!(
                !status.loses_data() && status.errors.is_empty(),
                "{status:?}"
            );
            assert!(status.in_use > 0 && status.size >= status.in_use);
        }
        let why = found[1].status.as_ref().expect_err("it is dead");
        assert!(why.contains("refused"), "{why}");
    });
}

#[test]
fn endpoints_are_checked() {
    let runtime = runtime();
    let _entered = runtime.enter();
    for urls in [
        vec![],
        vec!["127.0.0.1:2379"],
        vec!["https://h:1"],
        vec!["ftp://h"],
    ] {
        let endpoints = Endpoints {
            urls: urls.iter().map(|url| (*url).to_owned()).collect(),
            tls: None,
            credentials: None,
            deadline: DEADLINE,
        };
        let refused = Client::new(&endpoints).map(drop);
        assert!(
            matches!(refused, Err(Error::Endpoint { .. })),
            "{refused:?}"
        );
    }
}
