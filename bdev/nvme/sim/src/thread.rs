//! What lets a simulated drive go on by itself: a poller on a reactor, or a thread.

use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use nacre_reactor::{Clock, Idle, Nanos, Poller, Work};

use crate::drive::Drive;

/// Ticks a drive with every turn of a reactor: its own, or the very one that the driver is on.
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

    fn wake_fds(&self) -> Vec<RawFd> {
        Vec::new()
    }
}

/// A drive with a thread of its own, for as long as this lives.
pub struct Running {
    drive: Drive,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// Turns without work before it sleeps, and how long it sleeps unless a doorbell is rung.
const IDLE_TURNS: u32 = 64;
const NAP: Duration = Duration::from_micros(200);

impl Drive {
    /// Lets a thread tick it, in real time.
    ///
    /// # Panics
    /// When no thread can be had.
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
        // This turn sees changes before the announcement; later changes wake the thread.
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
