//! Tests of reactors on real threads: messages and replies, bounds, panics, and stopping.

use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::task::{Poll, Waker};
use std::time::Duration;

use nacre_reactor::{
    CallError, Idle, Mode, Nanos, Poller, ReactorConfig, SendError, SpawnError, Work, spawn,
};

mod rig;
use rig::{end, start};

/// Goal: a full mailbox refuses, a stopped reactor refuses, and no caller waits forever.
#[test]
fn mailbox_is_bounded_and_closes() {
    let config = ReactorConfig {
        mailbox_capacity: 4,
        ..Default::default()
    };
    let reactor = spawn(config, |_| {}).unwrap();
    let (release, blocked) = mpsc::channel::<()>();
    let (entered, inside) = mpsc::channel();
    let blocking = reactor.send(Box::new(move |_| {
        entered.send(()).unwrap();
        blocked.recv().unwrap();
    }));
    blocking.unwrap();
    inside.recv().unwrap();
    for _ in 0..4 {
        reactor.send(Box::new(|_| {})).unwrap();
    }
    let full = reactor.send(Box::new(|_| {})).unwrap_err();
    assert!(
        matches!(&full, SendError::Full(full) if full.capacity == 4),
        "{full}"
    );
    let waiting = {
        let reactor = reactor.clone();
        std::thread::spawn(move || {
            loop {
                match reactor.call(|_| ()) {
                    Err(CallError::NotSent(SendError::Full(_))) => std::thread::yield_now(),
                    other => return other,
                }
            }
        })
    };
    reactor.stop();
    release.send(()).unwrap();
    reactor.join().unwrap();
    // Run, dropped unrun or refused: in any case answered.
    let _ = waiting.join().unwrap();
    assert_eq!(
        reactor.send(Box::new(|_| {})),
        Err(SendError::Stopped {
            reactor: "reactor".into()
        })
    );
    assert!(matches!(
        reactor.call(|_| ()),
        Err(CallError::NotSent(SendError::Stopped { .. }))
    ));
}

/// Goal: results and futures come back to a thread that has no runtime; a blocking call from a
/// reactor is refused instead of hanging.
#[test]
fn results_reach_a_plain_thread() {
    let (a, b) = (start("a", Mode::Adaptive, 1), start("b", Mode::Adaptive, 1));
    let answer = block_on(a.run(|core| core.handle().name().to_owned()));
    assert_eq!(answer.unwrap(), "a");
    let answer = block_on(a.run_future(|core| async move {
        // Not Send, and held across an await: the purpose of local futures.
        let local = Rc::new(41);
        core.after(Duration::from_millis(2)).await;
        core.yield_now().await;
        *local + 1
    }));
    assert_eq!(answer.unwrap(), 42);
    // From reactor to reactor, awaited.
    let there = b.clone();
    let answer = a.run_future(move |_| async move { there.run(|core| core.handle().tid()).await });
    assert_eq!(block_on(answer).unwrap().unwrap(), b.tid());
    let there = b.clone();
    let refused = a.call(move |_| there.call(|_| ()));
    assert_eq!(
        refused.unwrap(),
        Err(CallError::OnReactor {
            reactor: "b".into()
        })
    );
    end(&a);
    end(&b);
}

fn block_on<F: Future>(future: F) -> F::Output {
    struct Unpark(std::thread::Thread);
    impl std::task::Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut future = std::pin::pin!(future);
    loop {
        match future
            .as_mut()
            .poll(&mut std::task::Context::from_waker(&waker))
        {
            Poll::Ready(output) => return output,
            Poll::Pending => std::thread::park(),
        }
    }
}

/// Goal: a panic ends that reactor only, is named, and everything is dropped on its own thread.
#[test]
fn a_panic_ends_the_reactor_and_is_named() {
    struct Bomb(Arc<AtomicBool>);
    impl Poller for Bomb {
        fn name(&self) -> &str {
            "bomb"
        }
        fn poll(&mut self, _: Nanos, _: u32) -> Work {
            panic!("tick {}", 3);
        }
        fn arm(&mut self, _: Nanos) -> Idle {
            Idle::Quiet
        }
    }
    impl Drop for Bomb {
        fn drop(&mut self) {
            let there = std::thread::current().name() == Some("fragile");
            self.0.store(there, Ordering::Release);
        }
    }
    let reactor = start("fragile", Mode::Adaptive, 1);
    let dropped = Arc::new(AtomicBool::new(false));
    let bomb = Bomb(Arc::clone(&dropped));
    reactor
        .send(Box::new(move |core| {
            core.add_poller(Box::new(bomb)).unwrap();
        }))
        .unwrap();
    let panicked = reactor.join().unwrap_err();
    assert_eq!(panicked.during, "poller \"bomb\"");
    assert_eq!(panicked.message, "tick 3");
    assert_eq!(
        reactor.join().unwrap_err(),
        panicked,
        "two requests, two replies"
    );
    assert!(
        dropped.load(Ordering::Acquire),
        "dropped on the reactor's thread"
    );
    assert!(!reactor.is_alive());

    let error = spawn(ReactorConfig::default(), |_| panic!("in init")).unwrap_err();
    assert!(matches!(error, SpawnError::Init(panicked) if panicked.message == "in init"));
}

/// Goal: futures end with their reactor, on its thread, while other threads hold their wakers.
/// Method: futures that hand out their wakers; threads that wake throughout the stop.
#[test]
fn futures_end_with_the_reactor_although_threads_hold_wakers() {
    for _ in 0..50 {
        let reactor = start("wakers", Mode::Interrupt, 0);
        let live = Arc::new(AtomicU64::new(0));
        struct Live(Arc<AtomicU64>, std::thread::ThreadId);
        impl Drop for Live {
            fn drop(&mut self) {
                assert_eq!(
                    std::thread::current().id(),
                    self.1,
                    "dropped on another thread"
                );
                self.0.fetch_sub(1, Ordering::Release);
            }
        }
        let (give, wakers) = mpsc::channel::<Waker>();
        let counter = Arc::clone(&live);
        let spawning = reactor.call(move |core| {
            for _ in 0..8 {
                counter.fetch_add(1, Ordering::Release);
                let alive = Live(Arc::clone(&counter), std::thread::current().id());
                let give = give.clone();
                let future = async move {
                    let _alive = alive;
                    let mut given = false;
                    std::future::poll_fn(|context| {
                        if !given {
                            given = true;
                            give.send(context.waker().clone()).unwrap();
                        }
                        Poll::<()>::Pending
                    })
                    .await;
                };
                drop(core.spawn_local(future));
            }
        });
        spawning.unwrap();
        let wakers: Vec<Waker> = wakers.iter().take(8).collect();
        let stop = Arc::new(AtomicBool::new(false));
        let threads: Vec<_> = (0..2)
            .map(|_| {
                let (wakers, stop) = (wakers.clone(), Arc::clone(&stop));
                std::thread::spawn(move || {
                    while !stop.load(Ordering::Relaxed) {
                        wakers.iter().for_each(Waker::wake_by_ref);
                    }
                })
            })
            .collect();
        end(&reactor);
        assert_eq!(live.load(Ordering::Acquire), 0);
        stop.store(true, Ordering::Relaxed);
        threads
            .into_iter()
            .for_each(|thread| thread.join().unwrap());
    }
}
