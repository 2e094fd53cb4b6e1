//! The driver's requests to etcd that are in flight. After a restore of etcd, answers to requests
//! from before are dropped.

use tokio::task::{AbortHandle, JoinError, JoinSet};

use super::Done;

#[derive(Default)]
pub(super) struct Jobs {
    running: JoinSet<(u32, Done)>,
    /// Incremented when etcd turns out to have other data.
    store: u32,
}

impl Jobs {
    pub(super) fn spawn(
        &mut self,
        job: impl Future<Output = Done> + Send + 'static,
    ) -> AbortHandle {
        let store = self.store;
        self.running.spawn(async move { (store, job.await) })
    }

    /// The next answer. `None`: no job runs. An answer of a former etcd counts as
    /// [`Done::Nothing`].
    pub(super) async fn next(&mut self) -> Option<Result<Done, JoinError>> {
        let answer = self.running.join_next().await?;
        Some(answer.map(|(store, done)| self.of_this_store(store, done)))
    }

    /// Answers of the jobs that run now count no more.
    pub(super) fn begin_anew(&mut self) {
        self.store += 1;
    }

    pub(super) fn abort_all(&mut self) {
        self.running.abort_all();
    }

    pub(super) fn is_empty(&self) -> bool {
        self.running.is_empty()
    }

    fn of_this_store(&self, store: u32, done: Done) -> Done {
        if store == self.store {
            done
        } else {
            Done::Nothing
        }
    }
}
