//! A real etcd of one member for a test.

use std::sync::Arc;

use nacre_cluster_etcd::{Client, Prefix};
use nacre_cluster_etcd_members::{Members, program};

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
