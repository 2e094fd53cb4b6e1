//! The owner of a prefix, and the compaction of the history.

use std::time::Duration;

use nacre_bdev_replica::store::suite::{block_on, record};
use nacre_bdev_replica::store::{StoreError, VolumeStore};
use nacre_cluster_etcd::{
    Before, Compaction, Copies, DaemonIdentity, Endpoints, Error, EtcdStore, Health, Owner, Txn,
};
use uuid::Uuid;

use crate::{client, next, prefix, runtime, settled};
use nacre_cluster_etcd_members::{DEADLINE, Members, program};

pub(crate) fn node(id: u128, machine: u128) -> DaemonIdentity {
    DaemonIdentity {
        id: Uuid::from_u128(id),
        machine: Some(Uuid::from_u128(machine)),
        host: format!("host{machine}"),
    }
}

fn taking(take_over: Option<Uuid>) -> Before {
    Before {
        take_over,
        ..Before::default()
    }
}

/// A second daemon is refused by name, on the same machine and with a copied data directory. Once
/// it has taken over, each change of the first one is refused.
#[test]
fn a_prefix_has_one_owner() {
    let Some(program) = program("a_prefix_has_one_owner") else {
        return;
    };
    let members = Members::start(program, 1, &[]);
    let open = || EtcdStore::open(&members.endpoints(), prefix("lab"), None).expect("it opens");
    let runtime = runtime();
    let first = open();
    runtime
        .block_on(first.claim(&node(1, 1), Before::default()))
        .expect("free");
    let mut ant = record("ant");
    block_on(first.create(ant.clone())).expect("created");

    let second = open();
    let claim = Uuid::from_u128(9);
    for (other, permission) in [
        (node(2, 1), None),
        (node(1, 2), None),
        (node(2, 2), Some(claim)),
    ] {
        let refused = runtime.block_on(second.claim(&other, taking(permission)));
        let Err(error @ Error::Owned { .. }) = refused else {
            panic!("{refused:?}");
        };
        println!("{error}");
        assert!(error.to_string().contains("host \"host1\""), "{error}");
        assert!(!error.is_passing());
    }
    // A store without a claim changes nothing either.
    let refused = block_on(second.create(record("bee")));
    assert!(
        matches!(refused, Err(StoreError::Owned { .. })),
        "{refused:?}"
    );
    assert_eq!(block_on(first.list()), Ok(vec![ant.clone()]));

    // As after kill -9: the same node on the same machine.
    let again = open();
    runtime
        .block_on(again.claim(&node(1, 1), Before::default()))
        .expect("its own");
    let wanted = next(&ant);
    block_on(again.swap(ant.version(), wanted.clone())).expect("swapped");
    ant = wanted;

    let owner = runtime.block_on(async {
        let client = client(&members.endpoints());
        Owner::read(&client, &prefix("lab")).await
    });
    let owner = owner.expect("an answer").expect("an owner");
    assert_eq!(owner.node, node(1, 1));
    runtime
        .block_on(second.claim(&node(2, 2), taking(Some(owner.claim))))
        .expect("taken over");
    for store in [&first, &again] {
        let refused = block_on(store.swap(ant.version(), next(&ant)));
        let Err(StoreError::Owned { owner, .. }) = &refused else {
            panic!("{refused:?}");
        };
        assert!(owner.contains("host2"), "{owner}");
        let refused = block_on(store.delete(ant.id, ant.version()));
        assert!(matches!(refused, Err(StoreError::Owned { .. })));
        let refused = block_on(store.create(record("cat")));
        assert!(matches!(refused, Err(StoreError::Owned { .. })));
    }
    block_on(second.swap(ant.version(), next(&ant))).expect("swapped");
    // The permission was for one start: it does not take the prefix back.
    let refused = runtime.block_on(again.claim(&node(1, 1), taking(Some(owner.claim))));
    assert!(matches!(refused, Err(Error::Owned { .. })), "{refused:?}");
}

/// Without any change, the owner notices that etcd is away, is back, and that it lost the prefix.
#[test]
fn the_health_of_an_idle_store() {
    let Some(program) = program("the_health_of_an_idle_store") else {
        return;
    };
    let mut members = Members::start(program, 1, &[]);
    let endpoints = Endpoints {
        deadline: Duration::from_secs(2),
        ..members.endpoints()
    };
    let open = || EtcdStore::open(&endpoints, prefix("lab"), None).expect("it opens");
    let (store, other) = (open(), open());
    runtime().block_on(async {
        settled(&endpoints).await;
        let mut health = store
            .claim(&node(1, 1), Before::default())
            .await
            .expect("free");
        assert!(matches!(*health.borrow(), Health::Answers(_)));
        let mut next = async || {
            let changed = tokio::time::timeout(3 * DEADLINE, health.changed());
            changed.await.expect("in time").expect("it asks");
            health.borrow_and_update().clone()
        };
        members.kill(0);
        while !matches!(next().await, Health::Silent { .. }) {}
        members.run(0);
        while !matches!(next().await, Health::Answers(_)) {}
        let owner = Owner::read(&client(&endpoints), &prefix("lab")).await;
        let claim = owner.expect("an answer").expect("an owner").claim;
        other
            .claim(&node(2, 2), taking(Some(claim)))
            .await
            .expect("taken");
        loop {
            match next().await {
                Health::Taken { owner } => {
                    assert!(owner.contains("host2"), "{owner}");
                    break;
                }
                other => assert!(matches!(other, Health::Answers(_)), "{other:?}"),
            }
        }
    });
}

/// A deleted owner key: the changes end with an error that names the key.
#[test]
fn a_deleted_owner_key() {
    let Some(program) = program("a_deleted_owner_key") else {
        return;
    };
    let members = Members::start(program, 1, &[]);
    let store = EtcdStore::open(&members.endpoints(), prefix("lab"), None).expect("it opens");
    let runtime = runtime();
    runtime
        .block_on(store.claim(&node(1, 1), Before::default()))
        .expect("free");
    runtime.block_on(async {
        let client = client(&members.endpoints());
        let delete = Txn::default().delete("/nacre/lab/owner");
        client.transact(delete, Copies::One).await.expect("deleted");
    });
    let refused = block_on(store.create(record("ant")));
    let Err(StoreError::Damaged { what }) = &refused else {
        panic!("{refused:?}");
    };
    assert!(what.contains("/nacre/lab/owner"), "{what}");
}

/// An etcd without the claim that a daemon made there: its volumes are not there either.
#[test]
fn an_etcd_that_lost_its_data() {
    let Some(program) = program("an_etcd_that_lost_its_data") else {
        return;
    };
    let members = Members::start(program, 1, &[]);
    let store = EtcdStore::open(&members.endpoints(), prefix("lab"), None).expect("it opens");
    let before = Before {
        is_claimed: true,
        ..Before::default()
    };
    let runtime = runtime();
    let refused = runtime.block_on(store.claim(&node(1, 1), before));
    assert!(
        matches!(refused, Err(Error::Forgotten { .. })),
        "{refused:?}"
    );
    for before in [Before::default(), before] {
        let claimed = runtime.block_on(store.claim(&node(1, 1), before));
        claimed.expect("its own");
    }
}

/// A prefix with a cluster is not for one daemon.
#[test]
fn a_cluster_is_no_store() {
    let Some(program) = program("a_cluster_is_no_store") else {
        return;
    };
    let members = Members::start(program, 1, &[]);
    let key = prefix("lab").meta();
    let runtime = runtime();
    runtime.block_on(async {
        let put = Txn::default().put(&key, b"{}".to_vec());
        let client = client(&members.endpoints());
        let answer = client.transact(put, Copies::Several).await;
        answer.expect("it is put");
    });
    let store = EtcdStore::open(&members.endpoints(), prefix("lab"), None).expect("it opens");
    let refused = runtime.block_on(store.claim(&node(1, 1), Before::default()));
    let Err(error @ Error::OfCluster { .. }) = refused else {
        panic!("{refused:?}");
    };
    assert!(error.to_string().contains("choose another prefix"));
}

/// Old revisions go, recent ones stay.
#[test]
fn own_changes_lead_to_a_compaction() {
    let Some(program) = program("own_changes_lead_to_a_compaction") else {
        return;
    };
    let members = Members::start(program, 1, &[]);
    let how = Compaction {
        every: Duration::from_millis(200),
        keep: Duration::from_secs(1),
    };
    let store = EtcdStore::open(&members.endpoints(), prefix("lab"), Some(how)).expect("it opens");
    let mut ant = record("ant");
    block_on(store.create(ant.clone())).expect("created");
    runtime().block_on(async {
        let client = client(&members.endpoints());
        let first = client.list("/nacre/lab/").await.expect("keys").revision;
        assert_eq!(
            client
                .list_at("/nacre/lab/", first)
                .await
                .expect("keys")
                .keys
                .len(),
            2
        );
        let mut last = first;
        loop {
            let wanted = next(&ant);
            block_on(store.swap(ant.version(), wanted.clone())).expect("swapped");
            ant = wanted;
            match client.list_at("/nacre/lab/", first).await {
                Ok(_) => tokio::time::sleep(Duration::from_millis(100)).await,
                Err(Error::Compacted { .. }) => break,
                Err(error) => panic!("{error}"),
            }
            last = client.list("/nacre/lab/").await.expect("keys").revision;
        }
        assert!(last > first);
        assert!(client.list_at("/nacre/lab/", last).await.is_ok());
    });
}
