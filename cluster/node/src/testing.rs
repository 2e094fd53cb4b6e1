//! A real etcd of one member for a test, and leases as nodes write them.

use std::sync::Arc;

use nacre_cluster_core::{Incarnation, NodeId, Revision};
use nacre_cluster_etcd::{Client, InEffect, LeaseKey, Prefix};
use nacre_cluster_etcd_members::{Members, program};
use uuid::Uuid;

/// The lease of the node with this number, whose incarnation has the same number.
pub(crate) fn lease(number: u128, in_effect: Option<InEffect>) -> LeaseKey {
    LeaseKey {
        node: NodeId(Uuid::from_u128(number)),
        incarnation: Incarnation(number as u64),
        revision: Revision(90),
        number: 1,
        process: Uuid::nil(),
        machine: None,
        in_effect,
        features: Vec::new(),
    }
}

/// Runs `work` with a client and the prefix of cluster "lab". Without etcd the test is skipped, as
/// the output says.
pub(crate) fn on_etcd(test: &str, work: impl AsyncFnOnce(Arc<Client>, Prefix)) {
    let Some(program) = program(test) else { return };
    let members = Members::start(program, 1, &[]);
    let mut builder = tokio::runtime::Builder::new_current_thread();
    let runtime = builder.enable_all().build();
    runtime.expect("a runtime").block_on(async {
        let client = Arc::new(Client::new(&members.endpoints()).expect("endpoints"));
        work(client, Prefix::new("lab").expect("a name")).await;
    });
}
