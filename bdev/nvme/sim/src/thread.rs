//! Runs a simulated drive in real time: as a poller of a reactor, or on its own thread.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use nacre_reactor::{Clock, Idle, Nanos, Poller, Work};

use crate::drive::Drive;

/// A poller that ticks the drive once per turn of its reactor. The driver may run on the same
/// reactor or on another.
pub struct Ticker(pub Drive);

impl Poller for Ticker {
    fn name(&self) -> &str {
        "simulated drive"
    }

    fn poll(&mut self, now: Nanos, _budget: u32) -> Work {
        if self.0.tick(now) {
            Work::Did(1)
        } else {
            Work::None
        }
    }

    fn arm(&mut self, _now: Nanos) -> Idle {
        match self.0.next() {
            Some(at) => Idle::Until(at),
            None => Idle::Quiet,
        }
    }
}

/// A drive with its own thread. Dropping this handle stops the thread, and passes on its panic.
pub struct Running {
    drive: Drive,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// Turns without work before the thread sleeps, and its longest sleep. A register write ends the
/// sleep.
const IDLE_TURNS: u32 = 64;
const NAP: Duration = Duration::from_micros(200);

impl Drive {
    /// Starts a thread that ticks the drive in real time.
    ///
    /// # Panics
    /// If the system cannot create a thread.
    pub fn spawn(&self) -> Running {
        let stop = Arc::new(AtomicBool::new(false));
        let (drive, stopped) = (self.clone(), Arc::clone(&stop));
        let thread = std::thread::Builder::new()
            .name("simulated drive".to_owned())
            .spawn(move || run(&drive, &stopped))
            .expect("a thread for a simulated drive");
        *self.shared.thread.lock() = Some(thread.thread().clone());
        Running {
            drive: self.clone(),
            stop,
            thread: Some(thread),
        }
    }
}

fn run(drive: &Drive, stop: &AtomicBool) {
    let clock = Clock::real();
    let mut idle = 0;
    while !stop.load(Ordering::Acquire) {
        if drive.tick(clock.now()) {
            idle = 0;
            continue;
        }
        idle += 1;
        if idle < IDLE_TURNS {
            std::thread::yield_now();
            continue;
        }
        drive.shared.asleep.store(true, Ordering::Release);
        // This tick sees changes from before `asleep` was set; later changes wake the
        // thread.
        if !drive.tick(clock.now()) {
            std::thread::park_timeout(NAP);
        }
        drive.shared.asleep.store(false, Ordering::Release);
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        let thread = &self.drive.shared.thread;
        *thread.lock() = None;
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            if let Err(panic) = thread.join()
                && !std::thread::panicking()
            {
                std::panic::resume_unwind(panic);
            }
        }
    }
}
