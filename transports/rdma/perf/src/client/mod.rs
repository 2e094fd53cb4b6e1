//! The client of the RDMA performance test: connects, measures each message size, and ends the
//! session.

mod connect;
mod upkeep;

use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nacre_transport_rdma_verbs::{CmId, ConnectionManager, Lane, Provider};

use crate::completion::{Causes, Rank};
use crate::dial::Found;
use crate::endpoint::{End, Turns, Waiter};
use crate::error::PerfError;
use crate::flow::{Flow, Load};
use crate::params::{Length, Test};
use crate::report::{Latencies, LatencyOf, Report, SCHEMA, SizeReport};
use crate::wire::{Ending, MAX_PEER_TIMEOUT_MS, Message, SessionParameters};

#[derive(Debug, Clone)]
pub struct ClientOptions {
    pub server: SocketAddr,
    /// A local address, which selects device, port and GID. `None`: the route selects them.
    pub source: Option<IpAddr>,
    /// Time limit for address resolution, route resolution and connect of one connection together.
    pub cm_timeout: Duration,
    /// How long to retry a server that serves another client.
    pub wait: Duration,
    /// Time without a message from the other end after which either end closes the session: 1 ms to
    /// 10 minutes.
    pub peer_timeout: Duration,
    /// Limit for the test's memory on this machine, in bytes.
    pub memory: u64,
    /// Type of service (DSCP << 2); 0: the default of the system.
    pub tos: u8,
    /// How long to poll for completions before sleeping.
    pub spin: Duration,
    /// Post requests in bursts. `None`: all the time.
    pub bursts: Option<Bursts>,
    pub test: Test,
}

/// Requests are posted for the time `on`, then none for the time `off`, and so on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bursts {
    pub on: Duration,
    pub off: Duration,
}

impl Bursts {
    /// True if requests are posted at this time after the start.
    fn is_on(self, elapsed: Duration) -> bool {
        let cycle = (self.on + self.off).as_nanos().max(1);
        elapsed.as_nanos() % cycle < self.on.as_nanos()
    }
}

impl ClientOptions {
    pub fn new(server: SocketAddr, test: Test) -> Self {
        Self {
            server,
            source: None,
            cm_timeout: Duration::from_secs(5),
            wait: Duration::from_secs(10),
            peer_timeout: Duration::from_secs(10),
            memory: 1 << 30,
            tos: 0,
            spin: Duration::from_millis(1),
            bursts: None,
            test,
        }
    }
}

/// Progress of the measurement of one message size, reported every 200 ms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    pub size: u32,
    pub messages: u64,
    pub elapsed: Duration,
    /// 99th percentile of the latencies since the previous report, in nanoseconds.
    pub recent_p99_ns: u64,
}

/// Interval between reports of progress.
const TELL: Duration = Duration::from_millis(200);
/// Interval between attempts to connect to a busy server.
const AGAIN: Duration = Duration::from_millis(100);
/// Keep-alive messages sent during one `peer_timeout`.
const SIGNS: u32 = 4;
/// Time limit for sending the last message.
const FAREWELL: Duration = Duration::from_millis(200);
/// Interval at which a busy client checks the connection manager and the clock.
const TICK: Duration = Duration::from_millis(5);

/// Runs a test. Setting `stop` ends it early, with the results so far, or
/// [`PerfError::Interrupted`] without any.
pub fn measure(
    provider: &dyn Provider,
    options: &ClientOptions,
    stop: &AtomicBool,
    on_progress: &mut dyn FnMut(Progress),
) -> Result<Report, PerfError> {
    options.test.check()?;
    let cm = provider.connection_manager()?;
    let waiter = Waiter::new(cm.fd())?;
    let now = Instant::now();
    let mut client = Client {
        provider,
        options,
        terms: terms(options),
        stop,
        on_progress,
        last_report: now,
        cm,
        waiter,
        turns: Turns::new(options.spin),
        end: None,
        load: None,
        control: None,
        flows: Vec::new(),
        causes: Causes::default(),
        last_reply: now,
        signed: now,
        looked: now,
        ended: false,
        during: "connecting",
    };
    let outcome = client.run();
    if let Err(error) = &outcome {
        client.farewell(error);
    }
    client.close();
    outcome
}

fn terms(options: &ClientOptions) -> SessionParameters {
    let test = &options.test;
    let timeout = options
        .peer_timeout
        .as_millis()
        .clamp(1, MAX_PEER_TIMEOUT_MS.into());
    SessionParameters {
        op: test.op,
        measure: test.measure,
        verify: test.verify,
        queue_pairs: test.queue_pairs,
        depth: test.under_way(),
        message_bytes: test.largest(),
        seed: test.seed,
        peer_timeout_ms: timeout as u32,
    }
}

struct Control {
    id: CmId,
    lane: Lane,
    found: Found,
    session: u32,
}

struct Client<'a> {
    provider: &'a dyn Provider,
    options: &'a ClientOptions,
    terms: SessionParameters,
    stop: &'a AtomicBool,
    on_progress: &'a mut dyn FnMut(Progress),
    last_report: Instant,
    cm: Box<dyn ConnectionManager>,
    waiter: Waiter,
    turns: Turns,
    // Fields drop in order: lanes before their memory and queues.
    control: Option<Control>,
    flows: Vec<Flow>,
    load: Option<Load>,
    end: Option<End>,
    causes: Causes,
    /// When the last message from the server arrived, and when this side last sent one.
    last_reply: Instant,
    signed: Instant,
    looked: Instant,
    /// The last message of the server has arrived.
    ended: bool,
    during: &'static str,
}

/// The measurement of one size.
struct Stage {
    size: u32,
    length: Length,
    started: Instant,
    posted: u64,
    done: u64,
    last: Instant,
    latencies: Latencies,
    /// Latencies since the previous report of progress.
    recent: Latencies,
    bursts: Option<Bursts>,
}

impl Client<'_> {
    fn run(&mut self) -> Result<Report, PerfError> {
        self.open()?;
        self.during = "measuring";
        let (mut results, mut messages, mut bytes) = (Vec::new(), 0, 0);
        let of = LatencyOf::of(self.terms.op, self.terms.measure);
        for size in self.options.test.sizes.clone() {
            if self.options.test.warmup > 0 {
                let warm = self.stage(size, Length::Messages(self.options.test.warmup))?;
                messages += warm.done;
                bytes += warm.done * u64::from(size);
            }
            let stage = self.stage(size, self.options.test.length)?;
            messages += stage.done;
            bytes += stage.done * u64::from(size);
            if stage.done > 0 {
                let time = stage.last.saturating_duration_since(stage.started);
                results.push(SizeReport::new(
                    size,
                    stage.done,
                    time,
                    of,
                    &stage.latencies,
                ));
            }
            if self.is_stopped() {
                break;
            }
        }
        self.during = "ending";
        self.finish(messages, bytes)?;
        if results.is_empty() {
            return Err(PerfError::Interrupted);
        }
        Ok(self.report(results))
    }

    fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    fn peer(&self) -> SocketAddr {
        self.options.server
    }

    fn stage(&mut self, size: u32, length: Length) -> Result<Stage, PerfError> {
        let now = Instant::now();
        let mut stage = Stage {
            size,
            length,
            started: now,
            posted: 0,
            done: 0,
            last: now,
            latencies: Latencies::default(),
            recent: Latencies::default(),
            bursts: self.options.bursts,
        };
        let mut now = now;
        loop {
            let more = !self.causes.any() && !self.is_stopped() && stage.wants_more(now);
            if more && stage.is_on(now) {
                self.fill(&mut stage, now)?;
            }
            let idle = self.flows.iter().all(|flow| flow.is_idle(&self.terms));
            if idle && !(more && stage.wants_more(now)) && !self.causes.any() {
                return Ok(stage);
            }
            now = self.turn(Some(&mut stage))?;
        }
    }

    /// Posts as many requests as may be in flight.
    fn fill(&mut self, stage: &mut Stage, now: Instant) -> Result<(), PerfError> {
        let load = self.load.as_ref().expect("the load exists while measuring");
        for flow in &mut self.flows {
            while stage.wants_more(now) && flow.queue(load, stage.size, now)? {
                stage.posted += 1;
            }
            if let Err(error) = flow.post(load.peer) {
                // The reason is usually in a completion.
                self.causes.add(Rank::Ended, error, now);
            }
        }
        Ok(())
    }

    /// Exchanges the last messages with the server.
    fn finish(&mut self, messages: u64, bytes: u64) -> Result<(), PerfError> {
        self.send_control(Message::End {
            ending: Ending::Done,
            status: 0,
            messages,
            bytes,
        })?;
        // The peer timeout limits the wait.
        while !self.ended {
            self.turn(None)?;
        }
        Ok(())
    }

    /// Sends the server the reason for the end, if the connection still works.
    fn farewell(&mut self, error: &PerfError) {
        let last = error.final_message();
        if self.control.is_none() || self.send_control(last).is_err() {
            return;
        }
        let until = Instant::now() + FAREWELL;
        while self
            .control
            .as_ref()
            .is_some_and(|control| control.lane.sends() > 0)
            && Instant::now() < until
        {
            if self.turn(None).is_err() {
                // The cause is already known. New failures here only show whether the last message
                // was sent.
                self.causes = Causes::default();
            }
        }
    }

    fn close(&mut self) {
        let ids = self.flows.iter().map(|flow| flow.id);
        let ids: Vec<CmId> = ids
            .chain(self.control.iter().map(|control| control.id))
            .collect();
        ids.into_iter().for_each(|id| self.cm.destroy(id));
        self.flows.clear();
        self.control = None;
    }

    fn report(&self, results: Vec<SizeReport>) -> Report {
        let control = self
            .control
            .as_ref()
            .expect("the control connection is open");
        let attributes = self
            .end
            .as_ref()
            .expect("the end exists")
            .device
            .attributes();
        let limit = self.flows.iter().map(Flow::limit).min().unwrap_or(1);
        Report {
            schema: SCHEMA,
            server: self.options.server.to_string(),
            local: control.found.local.ip().to_string(),
            device: attributes.name.clone(),
            port: control.found.port,
            software: attributes.software,
            op: self.terms.op,
            measure: self.terms.measure,
            queue_pairs: self.terms.queue_pairs,
            depth: limit as u16,
            verify: self.terms.verify,
            interrupted: self.is_stopped(),
            results,
        }
    }
}

impl Stage {
    /// False between two bursts.
    fn is_on(&self, now: Instant) -> bool {
        let elapsed = now.saturating_duration_since(self.started);
        self.bursts.is_none_or(|bursts| bursts.is_on(elapsed))
    }

    fn wants_more(&self, now: Instant) -> bool {
        match self.length {
            Length::Messages(count) => self.posted < count,
            // Send at least one message, even if the time has passed already.
            Length::Time(time) => self.posted == 0 || now < self.started + time,
        }
    }
}
