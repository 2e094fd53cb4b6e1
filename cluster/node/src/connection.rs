//! Makes the async runtime and the etcd client of a thread.

use std::sync::Arc;
use std::time::Duration;

use nacre_cluster_etcd::{Client, Endpoints};
use tokio::runtime::{Builder, Runtime};

use crate::error::Error;

/// Time limit of each request. A renewal that is answered later extends nothing.
const DEADLINE: Duration = Duration::from_secs(2);

/// Makes both. Errors name `key`.
pub(crate) fn connect(endpoints: &Endpoints, key: &str) -> Result<(Runtime, Arc<Client>), Error> {
    let runtime = Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(thread)?;
    let endpoints = Endpoints {
        deadline: DEADLINE,
        ..endpoints.clone()
    };
    let client = {
        let _entered = runtime.enter();
        Client::new(&endpoints).map_err(Error::at(key))?
    };
    Ok((runtime, Arc::new(client)))
}

pub(crate) fn thread(error: std::io::Error) -> Error {
    Error::Thread {
        why: error.to_string(),
    }
}
