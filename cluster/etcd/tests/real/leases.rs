//! Leases of nodes in a real etcd, decided by the shipped machines.

use std::sync::Arc;
use std::time::Instant;

use nacre_cluster_core::join::{Found, JoinStep};
use nacre_cluster_core::observer::ObserverRole;
use nacre_cluster_core::{
    BootTime, Effect, Incarnation, Join, Lease, NodeId, Observer, Record, Timing, Transaction,
};
use nacre_cluster_etcd::{KeyValue, NodeLeases, Outcome};
use uuid::Uuid;

use crate::{client, prefix, runtime};
use nacre_cluster_etcd_members::{Members, program};

fn node(number: u128) -> NodeId {
    NodeId(Uuid::from_u128(number))
}

fn no_record(_: &Record) -> Vec<u8> {
    unreachable!("no commits here")
}

/// A clock for the machines.
struct Clock(Instant);

impl Clock {
    fn now(&self) -> BootTime {
        BootTime(self.0.elapsed().as_nanos() as u64)
    }
}

async fn join(leases: &NodeLeases, of: NodeId, timing: Timing, clock: &Clock) -> Lease {
    let mut join = Join::new(of, timing);
    loop {
        match join.poll(clock.now()) {
            Some(JoinStep::Look) => {
                let key = leases.read(of).await.expect("an answer");
                let found = key.map(|key| Found {
                    revision: key.revision,
                    is_ours: true,
                });
                join.found(found, clock.now()).expect("its own");
            }
            Some(JoinStep::Create(create)) => match leases.execute(&create, no_record).await {
                Ok(Outcome::Made(at)) => {
                    let incarnation = Incarnation(at.0);
                    return join.created(incarnation, clock.now()).expect("sent");
                }
                other => panic!("{other:?}"),
            },
            Some(JoinStep::Replace(replace)) => {
                leases
                    .execute(&replace, no_record)
                    .await
                    .expect("an answer");
                join.again(clock.now());
            }
            None => tokio::time::sleep(timing.renewal() / 4).await,
        }
    }
}

async fn renew(leases: &NodeLeases, lease: &mut Lease, clock: &Clock) -> bool {
    let Some(renewal) = lease.poll(clock.now()) else {
        return true;
    };
    let Effect::Renew { number, .. } = renewal.effect else {
        panic!("{renewal:?}");
    };
    let of = lease.holder().incarnation;
    match leases
        .execute(&renewal, no_record)
        .await
        .expect("an answer")
    {
        Outcome::Made(_) => {
            lease.renewed(of, number, clock.now());
            true
        }
        Outcome::Refused { is_gone, .. } => {
            assert!(is_gone);
            lease.end(of);
            false
        }
    }
}

/// A node that stops renewing is fenced by its observer, after a lease and no earlier. Its later
/// transactions are refused. It joins again, as another incarnation.
#[test]
fn a_lease_runs_out() {
    let Some(program) = program("a_lease_runs_out") else {
        return;
    };
    let members = Members::start(program, 1, &[]);
    runtime().block_on(async {
        let client = client(&members.endpoints());
        let timing = Timing::default();
        let clock = Clock(Instant::now());
        let [first, second] = [0, 1].map(|_| NodeLeases::new(Arc::clone(&client), prefix("lab")));
        let mut a = join(&first, node(1), timing, &clock).await;
        let mut b = join(&second, node(2), timing, &clock).await;
        let (keys, mut watch) = second.list_and_watch().await.expect("a list");
        assert_eq!(keys.len(), 2);
        let mut observer = Observer::new(node(1), ObserverRole::Observer(0), timing);
        // Node 1 renews for a while, and stops.
        let silent_from = clock.now() + timing.lease();
        let mut last_renewal = clock.now();
        let fenced_at = loop {
            if clock.now() < silent_from {
                assert!(renew(&first, &mut a, &clock).await);
            }
            assert!(renew(&second, &mut b, &clock).await);
            let update = tokio::time::timeout(timing.renewal() / 8, watch.next()).await;
            if let Ok(update) = update {
                match second.changed(update).expect("a lease") {
                    Some((of, Some(key))) if of == node(1) => {
                        assert_eq!(key.process, first.process());
                        last_renewal = clock.now();
                        observer.observe(key.revision, last_renewal);
                    }
                    Some((of, None)) => {
                        assert_eq!(of, node(1));
                        break clock.now();
                    }
                    _ => {}
                }
            }
            if let Some(fence) = observer.poll(clock.now(), &b) {
                assert!(!a.is_good(clock.now()), "its own clock ends it first");
                let made = second.execute(&fence, no_record).await;
                assert!(matches!(made, Ok(Outcome::Made(_))), "{made:?}");
            }
        };
        let waited = fenced_at.since(last_renewal);
        println!("fenced {waited:?} after the last renewal that was seen");
        assert!(
            waited >= timing.lease() && waited < 2 * timing.lease(),
            "{waited:?}"
        );
        assert_eq!(first.read(node(1)).await, Ok(None));
        let late = Transaction::renew(a.holder(), 99);
        let refused = first.execute(&late, no_record).await;
        let gone = Outcome::Refused {
            is_gone: true,
            record: None,
        };
        assert_eq!(refused, Ok(gone));
        assert!(
            !renew(&first, &mut a, &clock).await,
            "the incarnation is gone"
        );
        let again = join(&first, node(1), timing, &clock).await;
        assert!(again.holder().incarnation > a.holder().incarnation);
        // Its own key, of a dead process, is replaced at once.
        let third = join(&first, node(1), timing, &clock).await;
        assert!(third.holder().incarnation > again.holder().incarnation);
        let release = Transaction::release(third.holder());
        let made = first.execute(&release, no_record).await;
        assert!(matches!(made, Ok(Outcome::Made(_))), "{made:?}");
        let log = client.list(&prefix("lab").logs()).await;
        let log = log.expect("a list").keys;
        let what = |kv: &KeyValue| -> serde_json::Value {
            serde_json::from_slice(&kv.value).expect("JSON")
        };
        let mut ends: Vec<String> = log.iter().map(|kv| what(kv)["what"].to_string()).collect();
        ends.sort();
        assert_eq!(ends, ["\"fence\"", "\"release\"", "\"replace\""]);
    });
}
