//! Goal: the view shows the daemon's replies, on every size of terminal, through every change of
//! the daemon. Method: a scripted daemon on a socket, the real poller, and ratatui's backend in
//! memory.

use std::io::{BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;

use parking_lot::Mutex;
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use serde_json::{Value, json};

use super::super::Connection;
use super::app::{App, Flow, Link, Panel};
use super::histogram::tests::answer as histogram;
use super::poll::{Order, Poller, Sample, Source, Update, WATCHED_MAX};
use super::snapshot::{Snapshot, Sort};
use super::{TopArgs, once, report, view};

/// A daemon that lives as long as this value.
struct Daemon {
    path: PathBuf,
    open: Arc<Mutex<Vec<UnixStream>>>,
    stopping: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
    asked: Arc<Mutex<Vec<String>>>,
}

type Answer = Result<Value, Value>;

impl Daemon {
    fn start(path: &Path, mut script: impl FnMut(&str, &Value) -> Answer + Send + 'static) -> Self {
        let listener = UnixListener::bind(path).unwrap();
        let open: Arc<Mutex<Vec<UnixStream>>> = Arc::default();
        let asked: Arc<Mutex<Vec<String>>> = Arc::default();
        let stopping = Arc::new(AtomicBool::new(false));
        let (streams, stop, heard) = (Arc::clone(&open), Arc::clone(&stopping), Arc::clone(&asked));
        let thread = std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                if stop.load(Ordering::SeqCst) {
                    return;
                }
                streams.lock().push(stream.try_clone().unwrap());
                serve(stream, &mut script, &heard);
            }
        });
        Self {
            path: path.to_owned(),
            open,
            stopping,
            thread: Some(thread),
            asked,
        }
    }

    fn asked(&self) -> Vec<String> {
        self.asked.lock().clone()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.stopping.store(true, Ordering::SeqCst);
        for stream in self.open.lock().iter() {
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
        // Wakes it from waiting for the next client.
        let _ = UnixStream::connect(&self.path);
        self.thread.take().unwrap().join().unwrap();
        std::fs::remove_file(&self.path).unwrap();
    }
}

fn serve(
    stream: UnixStream,
    script: &mut dyn FnMut(&str, &Value) -> Answer,
    heard: &Mutex<Vec<String>>,
) {
    let mut writer = stream.try_clone().unwrap();
    let requests =
        serde_json::Deserializer::from_reader(BufReader::new(stream)).into_iter::<Value>();
    for request in requests.map_while(Result::ok) {
        let (method, params) = (request["method"].as_str().unwrap(), &request["params"]);
        heard.lock().push(match method {
            "bdev_enable_histogram" => format!("{method} {} {}", params["name"], params["enable"]),
            _ => method.to_owned(),
        });
        let mut answer = json!({ "jsonrpc": "2.0", "id": request["id"] });
        match script(method, params) {
            Ok(result) => answer["result"] = result,
            Err(error) => answer["error"] = error,
        }
        if writeln!(writer, "{answer}").is_err() {
            return;
        }
    }
}

const SECOND: u64 = 1_000_000_000;

fn address(port: u16) -> Value {
    json!({ "trtype": "TCP", "adrfam": "IPv4", "traddr": "192.0.2.1", "trsvcid": port.to_string() })
}

/// Two reactors, three namespaces of which the second is the busiest, two hosts. Each look finds it
/// a second older.
fn nacre(pid: u64) -> impl FnMut(&str, &Value) -> Answer + Send {
    let mut looks = 0;
    let mut enabled = std::collections::BTreeSet::new();
    move |method, params| {
        let name = params["name"].as_str().unwrap_or_default().to_owned();
        if method == "framework_get_reactors" {
            looks += 1;
        }
        let reactor = |core: u64, busy: u64, idle: u64, sleep: u64| {
            json!({
                "lcore": core, "busy": looks * busy, "idle": looks * (idle + sleep), "sleep": looks * sleep,
                "in_interrupt": false, "mode": "adaptive", "lw_threads": [{ "name": format!("reactor_{core}") }],
            })
        };
        let device = |name: &str, reads: u64, writes: u64, errors: u64| {
            json!({
                "name": name,
                "num_read_ops": looks * reads, "bytes_read": looks * reads * 4096, "read_latency_ticks": looks * reads * 25_000,
                "num_write_ops": looks * writes, "bytes_written": looks * writes * 4096, "write_latency_ticks": looks * writes * 150_000,
                "io_error": { "failed": looks * errors },
            })
        };
        let qpair = |cntlid: u64, qid: u64, host: &str, core: u64| {
            json!({
                "cntlid": cntlid, "qid": qid, "state": "enabled", "thread": format!("reactor_{core}"), "hostnqn": host,
                "listen_address": address(4420), "peer_address": { "trtype": "TCP", "traddr": "192.0.2.9", "trsvcid": "999" },
            })
        };
        let subsystem = |name: &str, namespaces: &[(u64, &str)]| {
            json!({
                "nqn": format!("nqn.2026-01.io.nacre:{name}"), "subtype": "NVMe",
                "listen_addresses": [address(4420), address(4421)],
                "namespaces": namespaces.iter().map(|(nsid, bdev)| json!({ "nsid": nsid, "bdev_name": bdev })).collect::<Vec<_>>(),
            })
        };
        let path = |port: u16, current: bool, ios: u64| {
            json!({
                "bdev": "far0n1", "controller": "far0", "trid": address(port), "cntlid": 1, "state": "enabled",
                "ana_state": if current { "optimized" } else { "non_optimized" }, "current": current,
                "reads": ios, "read_bytes": ios * 4096, "writes": ios, "write_bytes": ios * 4096, "resent": 7,
            })
        };
        Ok(match method {
            "spdk_get_version" => json!({ "version": "SPDK v26.09-pre", "nacre": "0.1.0" }),
            "framework_get_reactors" => json!({
                "tick_rate": SECOND, "pid": pid,
                "reactors": [reactor(1, SECOND * 7 / 10, SECOND / 5, SECOND / 10), reactor(2, SECOND / 100, 0, SECOND * 99 / 100)],
            }),
            "bdev_get_iostat" => json!({
                "tick_rate": SECOND, "ticks": looks * SECOND,
                "bdevs": [device("ram0", 100, 0, 0), device("disk", 12_345, 678, 0), device("bad", 10, 0, 3), device("spare", 0, 0, 0)],
            }),
            "nvmf_get_subsystems" => json!([
                { "nqn": "nqn.2014-08.org.nvmexpress.discovery", "subtype": "Discovery", "listen_addresses": [] },
                subsystem("a", &[(1, "ram0"), (2, "disk")]),
                subsystem("b", &[(1, "bad")]),
            ]),
            "nvmf_get_stats" => json!({ "poll_groups": [
                { "name": "reactor_1", "current_admin_qpairs": 2, "current_io_qpairs": 2, "completed_nvme_io": looks * 13_133 },
                { "name": "reactor_2", "current_admin_qpairs": 0, "current_io_qpairs": 1, "completed_nvme_io": 0 },
            ]}),
            "nvmf_subsystem_get_qpairs" => match params["nqn"].as_str().unwrap() {
                "nqn.2026-01.io.nacre:a" => json!([
                    qpair(1, 0, "nqn.host-a", 1),
                    qpair(1, 1, "nqn.host-a", 1),
                    qpair(1, 2, "nqn.host-a", 2),
                    qpair(2, 0, "nqn.host-b", 1),
                    qpair(2, 1, "nqn.host-b", 1),
                ]),
                _ => json!([]),
            },
            "pool_list" => json!([
                {
                    "name": "pool0", "state": "online", "total_bytes": 4u64 << 40, "free_bytes": 1u64 << 40,
                    "reserved_bytes": 42u64 << 30, "lvols": 12, "waiting_writes": 0,
                    "disks": [{ "name": "disk" }, { "name": "spare" }],
                },
                {
                    "name": "pool1", "state": "held", "total_bytes": 1u64 << 30, "free_bytes": 0,
                    "reserved_bytes": 0, "lvols": 1, "waiting_writes": 7, "disks": [{ "name": "bad" }],
                },
            ]),
            "remote_get_paths" => json!([path(4420, true, looks * 200), path(4421, false, 0),]),
            "bdev_get_histogram" if enabled.contains(&name) => histogram(
                4,
                2,
                SECOND,
                &[(20_000, looks * 980), (900_000, looks * 20)],
            ),
            "bdev_get_histogram" => {
                return Err(json!({ "code": -32603, "message": "Bad address" }));
            }
            "bdev_enable_histogram" => {
                if params["enable"] == true {
                    enabled.insert(name)
                } else {
                    enabled.remove(&name)
                };
                json!(true)
            }
            other => return Err(json!({ "code": -32601, "message": format!("no {other} here") })),
        })
    }
}

/// The poller on its thread, and an app that receives its updates.
struct TestTop {
    app: App,
    orders: Option<Sender<Order>>,
    updates: Receiver<Update>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl TestTop {
    fn watching(path: &Path, histograms: bool) -> Self {
        let connection = Connection {
            socket: Some(path.to_owned()),
            timeout: Duration::from_secs(10),
            json: false,
        };
        let interval = Duration::from_millis(1);
        let (orders, ordered) = mpsc::channel();
        let (tell, updates) = mpsc::channel();
        let mut poller = Poller::new(Source::new(connection, histograms), interval);
        let thread = std::thread::spawn(move || poller.run(&ordered, &tell));
        let app = App::new(Duration::from_secs(1), Sort::Iops, false, histograms);
        Self {
            app,
            orders: Some(orders),
            updates,
            thread: Some(thread),
        }
    }

    fn update(&mut self) {
        let update = self
            .updates
            .recv_timeout(Duration::from_secs(10))
            .expect("the poller sends an update");
        self.app.on_update(update);
        for order in self.app.orders() {
            self.orders.as_ref().unwrap().send(order).unwrap();
        }
    }

    fn update_until(&mut self, enough: impl Fn(&App) -> bool) {
        for _ in 0..10_000 {
            if enough(&self.app) {
                return;
            }
            self.update();
        }
        panic!("it never came about: {:?}", self.app.link);
    }

    fn rates_are_there(&mut self) {
        self.update_until(|app| app.snapshot.as_ref().is_some_and(|s| s.seconds.is_some()));
    }

    fn leave(&mut self) {
        self.orders = None;
        self.thread.take().unwrap().join().unwrap();
    }
}

fn screen(app: &mut App, width: u16, height: u16) -> String {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| view::draw(frame, app)).unwrap();
    let buffer = terminal.backend().buffer();
    let line = |y| {
        (0..width)
            .map(|x| buffer[(x, y)].symbol())
            .collect::<String>()
            .trim_end()
            .to_owned()
    };
    (0..height).map(line).collect::<Vec<_>>().join("\n")
}

fn key(code: KeyCode) -> KeyEvent {
    KeyEvent::new(code, KeyModifiers::NONE)
}

fn press(app: &mut App, keys: &str) {
    for c in keys.chars() {
        assert_eq!(app.on_key(key(KeyCode::Char(c))), Flow::Stay);
    }
}

fn socket() -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("rpc.sock");
    (directory, path)
}

#[test]
fn a_daemon_at_work() {
    let (_directory, path) = socket();
    let daemon = Daemon::start(&path, nacre(4711));
    let mut top = TestTop::watching(&path, true);
    let has_p99 = |app: &App| {
        let snapshot = app.snapshot.as_ref();
        snapshot.is_some_and(|s| {
            !s.namespaces.is_empty() && s.namespaces.iter().all(|n| n.device.p99_s.is_some())
        })
    };
    top.update_until(has_p99);
    insta::assert_snapshot!("wide", screen(&mut top.app, 140, 24));
    insta::assert_snapshot!("usual", screen(&mut top.app, 80, 24));
    insta::assert_snapshot!("small", screen(&mut top.app, 40, 10));
    press(&mut top.app, "n");
    top.app.on_key(key(KeyCode::Tab));
    insta::assert_snapshot!("devices", screen(&mut top.app, 100, 20));
    top.app.on_key(key(KeyCode::Tab));
    insta::assert_snapshot!("connections", screen(&mut top.app, 140, 20));
    top.app.on_key(key(KeyCode::Tab));
    insta::assert_snapshot!("paths", screen(&mut top.app, 140, 20));
    top.app.on_key(key(KeyCode::Tab));
    insta::assert_snapshot!("pools", screen(&mut top.app, 100, 20));
    top.app.on_key(key(KeyCode::BackTab));
    assert_eq!(top.app.panel, Panel::Paths);

    let mut json = report::json(top.app.snapshot.as_ref().unwrap());
    assert_eq!(json["namespaces"][0]["bdev_name"], "ram0");
    json["seconds"].take();
    insta::assert_json_snapshot!("document", json);

    // The histograms were ours to enable, and are ours to disable.
    top.leave();
    let mut asked = daemon.asked();
    asked.retain(|call| call.starts_with("bdev_enable_histogram"));
    asked.sort();
    let expect = ["bad", "disk", "ram0", "spare"]
        .map(|name| [false, true].map(|on| format!("bdev_enable_histogram \"{name}\" {on}")))
        .concat();
    assert_eq!(asked, expect);
}

/// No size is too small, and the headline is the last thing to go.
#[test]
fn every_terminal() {
    let (_directory, path) = socket();
    let _daemon = Daemon::start(&path, nacre(1));
    let mut top = TestTop::watching(&path, false);
    top.rates_are_there();
    for panel in [
        Panel::Namespaces,
        Panel::Devices,
        Panel::Connections,
        Panel::Paths,
        Panel::Pools,
    ] {
        top.app.panel = panel;
        for width in [1, 2, 3, 5, 10, 20, 39, 61, 62, 63, 80, 200] {
            // Its last update must not be old.
            top.update();
            for height in [1, 2, 3, 4, 5, 6, 7, 10, 13, 24, 60] {
                top.app.scroll = usize::MAX / 2;
                let text = screen(&mut top.app, width, height);
                assert!(
                    text.starts_with("Nacre 0.1.0"[..usize::from(width).min(11)].trim_end()),
                    "{width}x{height}\n{text}"
                );
                let lines = usize::from(height);
                if height >= 4 && width >= 20 && panel == Panel::Namespaces {
                    assert!(
                        text.contains('a') && text.lines().count() <= lines,
                        "{width}x{height}\n{text}"
                    );
                }
            }
        }
    }
}

/// A daemon that ends is reported as gone, its last data stays readable, and its successor's
/// counters are not compared with its own.
#[test]
fn a_daemon_goes_and_another_comes() {
    let (_directory, path) = socket();
    let daemon = Daemon::start(&path, nacre(1));
    let mut top = TestTop::watching(&path, true);
    top.rates_are_there();
    drop(daemon);
    top.update_until(|app| matches!(app.link, Link::Gone(_)));
    // The first update may report the broken connection; then that there is no daemon.
    top.update_until(
        |app| matches!(&app.link, Link::Gone(why) if why.starts_with("no daemon answers at ")),
    );
    let text = screen(&mut top.app, 200, 24);
    let first = text.lines().next().unwrap();
    assert!(
        first.starts_with("no daemon answers at ") && first.ends_with("(retrying)"),
        "{first}"
    );
    assert!(text.contains("disk"), "{text}");

    let _daemon = Daemon::start(&path, nacre(2));
    top.update_until(|app| app.link == Link::Up);
    let snapshot = top.app.snapshot.clone().unwrap();
    assert_eq!(
        (snapshot.pid, snapshot.seconds, snapshot.total().iops()),
        (Some(2), None, 0.0)
    );
    top.rates_are_there();
    let total = top.app.snapshot.as_ref().unwrap().total();
    assert_eq!(total.iops().round(), 13_133.0);
    assert!(
        screen(&mut top.app, 100, 24).starts_with("Nacre 0.1.0 (2): 2 hosts, 5 queues, 13.1k IOPS")
    );
}

/// Keys take effect without waiting for the daemon.
#[test]
fn keys() {
    let (_directory, path) = socket();
    let _daemon = Daemon::start(&path, nacre(1));
    let mut top = TestTop::watching(&path, false);
    top.rates_are_there();
    let app = &mut top.app;
    let first = |app: &App| {
        app.snapshot.as_ref().unwrap().namespaces[0]
            .device
            .name
            .clone()
    };
    assert_eq!(first(app), "disk");
    for (keys, expect) in [
        ("n", "ram0"),
        ("nr", "bad"),
        ("e", "bad"),
        ("b", "disk"),
        ("br", "bad"),
        ("l", "disk"),
        ("i", "disk"),
    ] {
        press(app, keys);
        assert_eq!(first(app), expect, "{keys}");
    }
    app.orders();
    press(app, "+");
    assert_eq!(app.orders(), [Order::Interval(Duration::from_millis(500))]);
    press(app, "++++++++");
    assert_eq!(app.interval, Duration::from_millis(100));
    press(app, "---------");
    assert_eq!(
        app.interval,
        Duration::from_secs(51) + Duration::from_millis(200)
    );
    press(app, "-");
    assert_eq!(app.interval, Duration::from_secs(60));
    app.orders();
    press(app, "h");
    assert_eq!(app.orders()[0], Order::Histograms(true));
    // Scrolling ends where the lines end.
    for code in [KeyCode::End, KeyCode::PageDown, KeyCode::Down] {
        app.on_key(key(code));
        screen(app, 80, 3);
        assert_eq!(app.scroll, 2, "{code:?}");
    }
    assert!(screen(app, 80, 3).contains(":b"), "{}", screen(app, 80, 3));
    app.on_key(key(KeyCode::Home));
    assert!(screen(app, 80, 3).contains(":a"));

    press(app, " ");
    assert!(screen(app, 80, 24).contains("PAUSED"));
    // Whatever is shown then stays.
    app.snapshot = Some(Snapshot::default());
    top.update();
    let app = &mut top.app;
    assert!(app.snapshot.as_ref().unwrap().namespaces.is_empty());
    for code in [KeyCode::Char('q'), KeyCode::Esc] {
        assert_eq!(app.on_key(key(code)), Flow::Quit);
    }
    let interrupt = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
    assert_eq!(app.on_key(interrupt), Flow::Quit);
}

/// Data that a daemon refuses is missing and explained; the rest is shown.
#[test]
fn a_daemon_that_refuses() {
    let (_directory, path) = socket();
    let mut inner = nacre(1);
    let _daemon = Daemon::start(&path, move |method, params| match method {
        "nvmf_get_stats" | "bdev_get_iostat" => Err(json!({ "code": -1, "message": "not yet" })),
        _ => inner(method, params),
    });
    let mut top = TestTop::watching(&path, true);
    top.rates_are_there();
    let text = screen(&mut top.app, 160, 24);
    assert!(
        text.contains("refused: bdev_get_iostat: not yet and 1 more"),
        "{text}"
    );
    assert!(
        text.contains("reactor_1") && text.contains("disk"),
        "{text}"
    );
}

fn sample(reactors: Value, nvmf: Value) -> Sample {
    Sample {
        at: std::time::Instant::now(),
        daemon: "SPDK".into(),
        reactors,
        iostat: json!({ "tick_rate": 10, "ticks": 0, "bdevs": [] }),
        subsystems: Value::Null,
        qpairs: Default::default(),
        nvmf,
        paths: Value::Null,
        pools: Value::Null,
        histograms: Default::default(),
        refused: Default::default(),
    }
}

/// SPDK's reactors report neither sleep nor mode, and run several threads.
#[test]
fn spdks_reactors() {
    let look = |n: u64| {
        let threads = json!([{ "name": "app_thread" }, { "name": "nvmf_tgt_poll_group_000" }]);
        let mut sample = sample(
            json!({ "tick_rate": 10, "pid": 1, "reactors": [
                { "lcore": 0, "busy": n * 6, "idle": n * 4, "in_interrupt": false, "lw_threads": threads },
                { "lcore": 1, "busy": n, "idle": n, "in_interrupt": true, "lw_threads": [] },
            ]}),
            json!({ "poll_groups": [{ "name": "nvmf_tgt_poll_group_000", "completed_nvme_io": n * 50 }] }),
        );
        sample.iostat["ticks"] = json!(n * 10);
        let qpairs =
            json!([{ "cntlid": 1, "qid": 0, "thread": "nvmf_tgt_poll_group_000", "hostnqn": "h" }]);
        sample.qpairs.insert("s".into(), qpairs);
        sample
    };
    let snapshot = Snapshot::between(Some(&look(1)), &look(2));
    let cells: Vec<Vec<String>> = snapshot.reactors.iter().map(report::reactor).collect();
    assert_eq!(
        cells,
        [
            [
                "reactor_0",
                "0",
                "poll",
                "60.0%",
                "40.0%",
                "0.0%",
                "1",
                "50"
            ],
            [
                "reactor_1",
                "1",
                "interrupt",
                "10.0%",
                "10.0%",
                "80.0%",
                "0",
                "-"
            ],
        ]
    );
    // Another process under the same name is not compared with.
    let mut other = look(2);
    other.reactors["pid"] = json!(2);
    assert_eq!(Snapshot::between(Some(&look(1)), &other).seconds, None);
}

/// Goal: with more devices than can be asked for one by one, a table printed once has the
/// percentiles of the busiest ones. It says that others have none.
#[test]
fn many_devices_once() {
    let (_directory, path) = socket();
    let mut inner = nacre(7);
    let mut looks = 0;
    let count = WATCHED_MAX as u64 + 72;
    let _daemon = Daemon::start(&path, move |method: &str, params: &Value| {
        let answer = inner(method, params);
        if method != "bdev_get_iostat" {
            return answer;
        }
        looks += 1;
        // The busiest ones are the last by name.
        let device = |n: u64| {
            json!({
                "name": format!("d{n:04}"), "num_read_ops": looks * n, "bytes_read": looks * n * 4096,
                "read_latency_ticks": looks * n * 1000,
            })
        };
        Ok(json!({
            "tick_rate": SECOND, "ticks": looks * SECOND,
            "bdevs": (0..count).map(device).collect::<Vec<_>>(),
        }))
    });
    let connection = Connection {
        socket: Some(path.clone()),
        timeout: Duration::from_secs(10),
        json: false,
    };
    let args = TopArgs {
        connection: connection.clone(),
        interval: Duration::from_millis(1),
        sort: Sort::Iops,
        reverse: false,
        once: true,
        no_histograms: false,
    };
    let snapshot = once(&mut Source::new(connection.clone(), true), &args).unwrap();
    let with = snapshot.devices.iter().filter(|d| d.p99_s.is_some());
    let with: Vec<&str> = with.map(|device| device.name.as_str()).collect();
    // The three exported devices are unknown to this daemon's statistics, and count as watched.
    assert!(with.len() > WATCHED_MAX - 4, "{}", with.len());
    assert_eq!(with[0], format!("d{:04}", count - 1));
    assert_eq!(snapshot.not_watched, 72);
    let note = report::notes(&snapshot).pop().unwrap();
    assert!(
        note.contains("128 devices") && note.contains("72 others"),
        "{note}"
    );
    assert_eq!(report::json(&snapshot)["devices_without_p99"], 72);
    let args = TopArgs {
        no_histograms: true,
        ..args
    };
    let snapshot = once(&mut Source::new(connection, false), &args).unwrap();
    assert_eq!(
        (snapshot.not_watched, report::notes(&snapshot).len()),
        (0, 0)
    );
}

/// With more devices than can be asked for one by one, those in view are.
#[test]
fn a_thousand_devices() {
    let many: Vec<Value> = (0..1000u64)
        .map(|n| json!({ "name": format!("d{n:04}"), "num_read_ops": n, "bytes_read": n, "read_latency_ticks": n }))
        .collect();
    let mut app = App::new(Duration::from_secs(1), Sort::Name, false, true);
    let mut now = sample(Value::Null, Value::Null);
    now.iostat["bdevs"] = json!(many);
    app.on_update(Update::Sample(Box::new(now)));
    let watched = |app: &mut App| match &app.orders()[..] {
        [Order::Watch(names)] => (names[0].clone(), names.len()),
        other => panic!("{other:?}"),
    };
    assert_eq!(watched(&mut app), ("d0000".into(), WATCHED_MAX));
    press(&mut app, "r");
    assert_eq!(
        watched(&mut app),
        (format!("d{:04}", 1000 - WATCHED_MAX), WATCHED_MAX)
    );
}
