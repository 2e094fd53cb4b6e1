//! The effect of each signal on the daemon.
//!
//! ```text
//!   SIGTERM, SIGINT, SIGQUIT   orderly stop; a second one ends the drain
//!   SIGHUP                     reopen the log file, reread the configuration (reload.rs)
//!   the others                 none
//! ```
//!
//! The default action of most signals ends the process. Log rotation sends SIGUSR1, a timer of the
//! starting shell SIGALRM, a file size limit SIGXFSZ.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::Poll;

use signal_hook::consts::signal::{
    SIGALRM, SIGHUP, SIGIO, SIGPROF, SIGUSR1, SIGUSR2, SIGVTALRM, SIGXCPU, SIGXFSZ,
};
use tokio::signal::unix::{Signal, SignalKind, signal};

/// SIGPIPE is missing: the standard library ignores it.
const WITHOUT_EFFECT: [i32; 10] = [
    SIGUSR1, SIGUSR2, SIGALRM, SIGVTALRM, SIGPROF, SIGXCPU, SIGXFSZ, SIGIO, SIGSTKFLT, SIGPWR,
];
const SIGSTKFLT: i32 = 16;
const SIGPWR: i32 = 30;
/// The C library reserves the lowest ones.
const REAL_TIME: std::ops::RangeInclusive<i32> = 32..=64;

/// Set by SIGHUP before the daemon handles it.
static HANGUP: OnceLock<Arc<AtomicBool>> = OnceLock::new();

/// Replaces the default action of these signals. Call it first: a signal may arrive at any time.
pub fn shield() -> std::io::Result<()> {
    let hangup = HANGUP.get_or_init(Arc::default);
    signal_hook::flag::register(SIGHUP, Arc::clone(hangup))?;
    for number in WITHOUT_EFFECT {
        signal_hook::flag::register(number, Arc::default())?;
    }
    for number in REAL_TIME {
        // Fails for those of the C library, which has handlers for them.
        let _ = signal_hook::flag::register(number, Arc::default());
    }
    Ok(())
}

/// The signals that stop the daemon.
pub struct Stops(RefCell<[Signal; 3]>);

impl Stops {
    pub fn new() -> std::io::Result<Self> {
        Ok(Self(RefCell::new([
            signal(SignalKind::terminate())?,
            signal(SignalKind::interrupt())?,
            signal(SignalKind::quit())?,
        ])))
    }

    pub async fn next(&self) {
        std::future::poll_fn(|cx| {
            let mut signals = self.0.borrow_mut();
            if signals.iter_mut().any(|s| s.poll_recv(cx).is_ready()) {
                Poll::Ready(())
            } else {
                Poll::Pending
            }
        })
        .await;
    }
}

/// SIGHUP, from the start of the process.
pub struct Hangups(Signal);

impl Hangups {
    pub fn new() -> std::io::Result<Self> {
        Ok(Self(signal(SignalKind::hangup())?))
    }

    pub async fn next(&mut self) {
        let early = HANGUP
            .get()
            .is_some_and(|flag| flag.swap(false, Ordering::Relaxed));
        if !early {
            self.0.recv().await;
        }
        // Signals that arrive here set the flag as well.
        if let Some(flag) = HANGUP.get() {
            flag.store(false, Ordering::Relaxed);
        }
    }
}
