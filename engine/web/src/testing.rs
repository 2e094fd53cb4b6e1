//! Helpers of this crate's tests.

use std::time::Duration;

use zeroize::Zeroizing;

pub(crate) const PASSWORD: &str = "correct horse battery";

pub(crate) fn secret(text: &str) -> Zeroizing<String> {
    Zeroizing::new(text.to_owned())
}

/// The longest time that a test may take, on the busiest machine.
const LIMIT: Duration = Duration::from_secs(120);

/// Runs a test as the management thread does.
pub(crate) fn run<T>(test: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    tokio::task::LocalSet::new().block_on(&runtime, async {
        let ended = tokio::time::timeout(LIMIT, test).await;
        ended.unwrap_or_else(|_| panic!("the test did not end within {} s", LIMIT.as_secs()))
    })
}
