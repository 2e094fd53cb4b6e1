//! A store in memory that fails at its n-th operation, before or after the effect, and later ones.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use async_trait::async_trait;
use futures_util::StreamExt;
use futures_util::stream::BoxStream;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    /// The operation has no effect, and all later ones fail too: the daemon ends here.
    Before,
    /// The operation has its effect, and its answer is an error. Later ones fail.
    After,
    /// Only this operation fails, without effect.
    Once,
}

#[derive(Debug)]
pub(super) struct Faulty {
    pub(super) inner: Arc<InMemory>,
    fault: Fault,
    left: AtomicU32,
}

impl fmt::Display for Faulty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("faulty")
    }
}

fn failed() -> Error {
    Error::Generic {
        store: "faulty",
        source: "planted".into(),
    }
}

impl Faulty {
    /// Fails when `at` operations were done.
    pub(super) fn new(inner: Arc<InMemory>, fault: Fault, at: u32) -> Self {
        let left = AtomicU32::new(at + 1);
        Self { inner, fault, left }
    }

    /// True if no operation failed so far.
    pub(super) fn is_unused(&self) -> bool {
        self.left.load(Ordering::Relaxed) > 0
    }

    /// True if the operation has its effect, and true if it fails.
    fn next(&self) -> (bool, bool) {
        let left = self.left.load(Ordering::Relaxed);
        self.left.store(left.saturating_sub(1), Ordering::Relaxed);
        match (left, self.fault) {
            (2.., _) => (true, false),
            (1, Fault::After) => (true, true),
            (0, Fault::Once) => (true, false),
            _ => (false, true),
        }
    }

    async fn one<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        let (has_effect, fails) = self.next();
        let done = if has_effect {
            work.await
        } else {
            Err(failed())
        };
        if fails { Err(failed()) } else { done }
    }
}

#[async_trait]
impl ObjectStore for Faulty {
    async fn put_opts(&self, to: &Path, data: PutPayload, with: PutOptions) -> Result<PutResult> {
        self.one(self.inner.put_opts(to, data, with)).await
    }

    async fn put_multipart_opts(
        &self,
        to: &Path,
        with: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.inner.put_multipart_opts(to, with).await
    }

    async fn get_opts(&self, from: &Path, with: GetOptions) -> Result<GetResult> {
        self.one(self.inner.get_opts(from, with)).await
    }

    fn delete_stream(
        &self,
        paths: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        let (has_effect, fails) = self.next();
        let done = if has_effect {
            self.inner.delete_stream(paths)
        } else {
            futures_util::stream::empty().boxed()
        };
        if !fails {
            return done;
        }
        done.filter(|_| std::future::ready(false))
            .chain(futures_util::stream::once(async { Err(failed()) }))
            .boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        match self.next() {
            (_, false) => self.inner.list(prefix),
            _ => futures_util::stream::once(async { Err(failed()) }).boxed(),
        }
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.one(self.inner.list_with_delimiter(prefix)).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, with: CopyOptions) -> Result<()> {
        self.one(self.inner.copy_opts(from, to, with)).await
    }
}
