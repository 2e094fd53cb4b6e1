//! Helpers of this crate's tests.

use zeroize::Zeroizing;

pub(crate) const PASSWORD: &str = "correct horse battery";

pub(crate) fn secret(text: &str) -> Zeroizing<String> {
    Zeroizing::new(text.to_owned())
}

/// Runs a test as the management thread does.
pub(crate) fn run<T>(test: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    tokio::task::LocalSet::new().block_on(&runtime, test)
}
