//! A helper thread for work that would take too long in a reactor's turn.
//!
//! Each owner has a queue of jobs, and the queues are served round-robin, so that an owner with
//! many jobs hardly delays others. The number of waiting jobs of all owners together has a bound.
//! An owner may have at most as many as are free, so one owner alone gets half of them. An
//! owner that submits without end leaves as much room to the others as it takes.
//! The thread runs with a lower priority than the reactors. A thread started by a reactor would
//! inherit the reactor's core, so management starts it with [`Helper::start`].

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;

use parking_lot::{Condvar, Mutex};

/// Added to the nice value of the thread.
const NICER: i32 = 5;

type Job = Box<dyn FnOnce() + Send>;

/// The helper thread with its queue. Dropping this ends the thread after the running job, and waits
/// for that; waiting jobs are dropped without running.
pub struct Helper {
    control: Arc<HelperControl>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// The owner has as many waiting jobs as are free for all owners together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "the helper thread has {own} waiting jobs of this owner, and {waiting} of at most {max} in all"
)]
pub struct HelperFull {
    /// Waiting jobs of the owner.
    pub own: usize,
    /// Waiting jobs of all owners.
    pub waiting: usize,
    pub max: usize,
}

struct HelperControl {
    name: &'static str,
    max: usize,
    /// Jobs run immediately, on the submitting thread.
    at_once: bool,
    state: Mutex<HelperState>,
    changed: Condvar,
}

#[derive(Default)]
struct HelperState {
    stop: bool,
    waiting: usize,
    /// Owners with jobs, in the order of their turns.
    owners: VecDeque<(String, VecDeque<Job>)>,
}

impl Helper {
    /// Creates a helper without a thread yet, for up to `max` waiting jobs. One owner alone gets
    /// half of them.
    pub fn new(name: &'static str, max: usize) -> Self {
        Self::with(name, max, false)
    }

    /// Creates a helper without a thread: each job runs when it is submitted. For tests in virtual
    /// time.
    pub fn at_once() -> Self {
        Self::with("at-once", 0, true)
    }

    fn with(name: &'static str, max: usize, at_once: bool) -> Self {
        Self {
            control: Arc::new(HelperControl {
                name,
                max,
                at_once,
                state: Mutex::default(),
                changed: Condvar::new(),
            }),
            thread: Mutex::new(None),
        }
    }

    /// Starts the thread unless it is running.
    pub fn start(&self) -> std::io::Result<()> {
        let mut thread = self.thread.lock();
        if thread.is_some() || self.control.at_once {
            return Ok(());
        }
        let control = Arc::clone(&self.control);
        let name = self.control.name.to_owned();
        let started = std::thread::Builder::new().name(name);
        *thread = Some(started.spawn(move || work(&control))?);
        Ok(())
    }

    /// Runs a job on the thread, after earlier jobs of `owner`. Jobs wait until [`Helper::start`].
    pub fn submit(
        &self,
        owner: &str,
        job: impl FnOnce() + Send + 'static,
    ) -> Result<(), HelperFull> {
        if self.control.at_once {
            job();
            return Ok(());
        }
        let max = self.control.max;
        let mut state = self.control.state.lock();
        let waiting = state.waiting;
        let own = state.owners.iter_mut().find(|(name, _)| name == owner);
        let own_count = own.as_ref().map_or(0, |(_, jobs)| jobs.len());
        if own_count >= max.saturating_sub(waiting) {
            let own = own_count;
            return Err(HelperFull { own, waiting, max });
        }
        let job: Job = Box::new(job);
        match own {
            Some((_, jobs)) => jobs.push_back(job),
            None => {
                let jobs = VecDeque::from([job]);
                state.owners.push_back((owner.to_owned(), jobs));
            }
        }
        state.waiting += 1;
        drop(state);
        self.control.changed.notify_one();
        Ok(())
    }

    /// Number of waiting jobs.
    pub fn waiting(&self) -> usize {
        self.control.state.lock().waiting
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        self.control.state.lock().stop = true;
        self.control.changed.notify_all();
        // If a job holds the last handle, the thread must not join itself.
        if let Some(thread) = self.thread.lock().take()
            && thread.thread().id() != std::thread::current().id()
        {
            // A panic of a job has been reported already.
            let _ = thread.join();
        }
    }
}

impl std::fmt::Debug for Helper {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Helper")
            .field("name", &self.control.name)
            .field("waiting", &self.waiting())
            .finish()
    }
}

fn work(control: &HelperControl) {
    // On Linux this sets the priority of the calling thread only. If it fails, the thread competes
    // with the reactors.
    let _ = rustix::process::nice(NICER);
    while let Some(job) = next(control) {
        if catch_unwind(AssertUnwindSafe(job)).is_err() {
            tracing::error!(helper = control.name, "a job panicked");
        }
    }
}

/// The next job, of the owner whose turn it is; `None`: the thread must end.
fn next(control: &HelperControl) -> Option<Job> {
    let idle = |state: &mut HelperState| !state.stop && state.waiting == 0;
    let mut state = control.state.lock();
    control.changed.wait_while(&mut state, idle);
    if state.stop {
        return None;
    }
    let (owner, mut jobs) = state.owners.pop_front()?;
    let job = jobs.pop_front();
    if !jobs.is_empty() {
        state.owners.push_back((owner, jobs));
    }
    state.waiting -= 1;
    job
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::{Duration, Instant};

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(20);

    /// Goal: owners take turns. Method: jobs submitted before the start.
    #[test]
    fn owners_take_turns() {
        let helper = Helper::new("test", 9);
        let (done, order) = mpsc::channel();
        for owner in ["a", "a", "a", "a", "b", "c"] {
            let done = done.clone();
            helper
                .submit(owner, move || done.send(owner).expect("the test waits"))
                .unwrap();
        }
        assert_eq!(helper.waiting(), 6);
        helper.start().unwrap();
        helper.start().unwrap();
        let order: Vec<_> = (0..6)
            .map(|_| order.recv_timeout(PATIENCE).unwrap())
            .collect();
        assert_eq!(order, ["a", "b", "c", "a", "a", "a"]);
        assert_eq!(helper.waiting(), 0);
    }

    /// Goal: an owner cannot fill the queue for the others, however many jobs it submits, and a job
    /// that ran makes room. Method: owners submit as many as they can, one after the other.
    #[test]
    fn every_owner_finds_room() {
        const MAX: usize = 64;
        let helper = Helper::new("test", MAX);
        let fill = |owner: &str| {
            let mut count = 0;
            loop {
                match helper.submit(owner, || {}) {
                    Ok(()) => count += 1,
                    Err(full) => {
                        let waiting = helper.waiting();
                        let expected = HelperFull {
                            own: count,
                            waiting,
                            max: MAX,
                        };
                        assert_eq!(full, expected);
                        return count;
                    }
                }
            }
        };
        assert_eq!(["a", "b", "c", "d"].map(fill), [32, 16, 8, 4]);
        // The greedy owner gets nothing, and new ones a job each until the end.
        assert!(helper.submit("a", || {}).is_err());
        assert_eq!(["e", "f", "g"].map(fill), [2, 1, 1]);
        assert_eq!(helper.waiting(), MAX);
        assert!(helper.submit("h", || {}).is_err());
        helper.start().unwrap();
        let deadline = Instant::now() + PATIENCE;
        while helper.waiting() > 0 {
            assert!(Instant::now() < deadline, "the jobs never run");
            std::thread::yield_now();
        }
        helper.submit("a", || {}).unwrap();
    }

    #[test]
    fn a_panic_does_not_end_the_thread() {
        let helper = Helper::new("test", 4);
        let (done, ended) = mpsc::channel();
        helper.submit("a", || panic!("on purpose")).unwrap();
        helper.submit("a", move || done.send(()).unwrap()).unwrap();
        helper.start().unwrap();
        ended.recv_timeout(PATIENCE).unwrap();
    }

    /// The thread ends with the handle, also if a job holds the last one.
    #[test]
    fn the_thread_ends_with_its_handle() {
        let helper = Arc::new(Helper::new("test", 2));
        helper.start().unwrap();
        let (done, ended) = mpsc::channel();
        let own = Arc::clone(&helper);
        helper
            .submit("a", move || {
                std::thread::sleep(Duration::from_millis(20));
                drop(own);
                done.send(()).unwrap();
            })
            .unwrap();
        drop(helper);
        ended.recv_timeout(PATIENCE).unwrap();
        let at_once = Helper::at_once();
        let (done, ended) = mpsc::channel();
        at_once.submit("a", move || done.send(()).unwrap()).unwrap();
        ended.try_recv().unwrap();
    }
}
