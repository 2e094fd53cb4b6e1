//! A server on loopback, a backend that echoes, and clients that send bytes, for tests.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::{Duration, SystemTime};

use nacre_engine_rpc::access::{Caller, Class, Identity};
use nacre_engine_rpc::error::Errno;
use nacre_engine_rpc::method::CallFuture;
use nacre_engine_rpc::secret::SecretJson;
use nacre_engine_rpc::server::Dispatch;
use nacre_engine_rpc::{Role, RpcError};
use nacre_reactor::VirtualClock;
use serde_json::value::RawValue;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::acts::{Act, Trail};
use crate::certificate::Certificate;
use crate::live::Source;
use crate::logins::Logins;
use crate::passwords::CHEAP;
use crate::server::Listener;
use crate::testing::{PASSWORD, secret};
use crate::upload::UploadPlace;
use crate::web::{About, Limits, Web};

/// Executes `echo` for everyone and `change` for admins; makes samples and events.
pub(crate) struct Fake {
    pub(crate) samples: Cell<u64>,
    pub(crate) watched: Cell<bool>,
    pub(crate) events: Cell<u64>,
    pub(crate) phase: Cell<&'static str>,
    /// Bytes of padding in each sample.
    pub(crate) padding: Cell<usize>,
    pub(crate) changed: RefCell<Vec<&'static str>>,
    pub(crate) acts: RefCell<Vec<Act>>,
}

impl Dispatch for Fake {
    fn admit(&self, _: &Caller) -> Result<(), RpcError> {
        Ok(())
    }

    fn call(
        self: Rc<Self>,
        caller: Rc<Caller>,
        method: String,
        params: Option<SecretJson>,
    ) -> CallFuture {
        let (name, role) = match &caller.identity {
            Identity::Account { name, role, .. } => (name.clone(), role),
            Identity::ApiToken { name, role, .. } => (format!("token {name}"), role),
            _ => panic!("{caller:?}"),
        };
        let class = if method == "change" {
            Class::Admin
        } else {
            Class::Read
        };
        let outcome = if *role < class.role() {
            Err(RpcError::errno(Errno::EACCES, "the role").remedy("ask"))
        } else {
            let params = params.map(|params| params.get().to_owned());
            Ok(json!({ "method": method, "name": name, "params": params }).to_string())
        };
        Box::pin(async move { Ok(RawValue::from_string(outcome?).unwrap()) })
    }
}

impl Trail for Fake {
    async fn note(&self, act: Act) {
        self.acts.borrow_mut().push(act);
    }
}

impl Source for Fake {
    fn phase(&self) -> &'static str {
        self.phase.get()
    }

    fn watch(&self, watched: bool) {
        self.watched.set(watched);
    }

    async fn metrics(&self) -> Option<Value> {
        let sample = self.samples.get() + 1;
        self.samples.set(sample);
        Some(json!({ "sample": sample, "padding": "x".repeat(self.padding.get()) }))
    }

    fn next_event(&self) -> u64 {
        self.events.get()
    }

    fn events(&self, from: u64, before: u64) -> Vec<(u64, String)> {
        (from..before)
            .map(|id| (id, json!({ "id": id }).to_string()))
            .collect()
    }

    fn take_changed(&self) -> Vec<&'static str> {
        self.changed.take()
    }
}

pub(crate) struct Rig {
    pub(crate) fake: Rc<Fake>,
    pub(crate) web: Rc<Web<Fake>>,
    pub(crate) clock: VirtualClock,
    /// `127.0.0.1:PORT`, in clear.
    pub(crate) host: String,
    /// As `host`, for HTTPS.
    pub(crate) secure: String,
    pub(crate) certificate: Rc<RefCell<Option<Certificate>>>,
    pub(crate) uploads: tempfile::TempDir,
}

pub(crate) struct Got {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: String,
}

impl Got {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.body))
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let mut lines = self.head.lines().filter_map(|line| line.split_once(": "));
        lines
            .find(|(key, _)| key.eq_ignore_ascii_case(name))
            .map(|(_, value)| value)
    }

    /// The session's cookie, as the browser sends it.
    pub(crate) fn cookie(&self) -> String {
        let cookie = self.header("set-cookie").expect("a cookie");
        cookie.split(';').next().unwrap().to_owned()
    }
}

impl Rig {
    pub(crate) async fn new() -> Self {
        Self::with(Limits {
            tick: Duration::from_millis(5),
            ..Limits::default()
        })
        .await
    }

    pub(crate) async fn with(limits: Limits) -> Self {
        let fake = Rc::new(Fake {
            samples: Cell::new(0),
            watched: Cell::new(false),
            events: Cell::new(0),
            phase: Cell::new("running"),
            padding: Cell::new(0),
            acts: RefCell::default(),
            changed: RefCell::default(),
        });
        let clock = VirtualClock::new();
        let logins = Logins::open(None, CHEAP, clock.clock()).unwrap();
        let names = ["localhost".to_owned(), "127.0.0.1".to_owned()];
        let certificate = Certificate::own(None, &names, SystemTime::now()).unwrap();
        let certificate = Rc::new(RefCell::new(Some(certificate)));
        let uploads = tempfile::tempdir().unwrap();
        let about = About {
            version: "1.2.3".into(),
            host: Rc::new(RefCell::new("store1".into())),
            uploads: Some(UploadPlace {
                file: uploads.path().join("upload/bundle.tar"),
                most: 1 << 20,
                free_bytes: |_| Ok(1 << 40),
            }),
        };
        let of = Rc::clone(&certificate);
        let web = Web::new(Rc::clone(&fake), logins, of, about, limits);
        let mut hosts = Vec::new();
        for endpoint in ["http://127.0.0.1:0", "https://127.0.0.1:0"] {
            let listener = Listener::bind(endpoint.parse().unwrap()).await.unwrap();
            hosts.push(listener.endpoint().unwrap().address.to_string());
            tokio::task::spawn_local(Rc::clone(&web).serve(listener));
        }
        let secure = hosts.pop().unwrap();
        let host = hosts.pop().unwrap();
        Self {
            fake,
            web,
            clock,
            host,
            secure,
            certificate,
            uploads,
        }
    }

    /// With the accounts ann (admin) and bob (viewer).
    pub(crate) async fn with_accounts() -> Self {
        let rig = Self::new().await;
        rig.add_accounts().await;
        rig
    }

    pub(crate) async fn add_accounts(&self) {
        let logins = &self.web.logins;
        logins
            .add("ann", Role::Admin, secret(PASSWORD))
            .await
            .unwrap();
        logins
            .add("bob", Role::Viewer, secret(PASSWORD))
            .await
            .unwrap();
    }

    pub(crate) async fn connect(&self) -> TcpStream {
        TcpStream::connect(&self.host).await.unwrap()
    }

    /// Sends these bytes; the answer up to its end.
    pub(crate) async fn raw(&self, request: &str) -> Got {
        exchange(self.connect().await, request).await
    }

    pub(crate) async fn get(&self, path: &str, headers: &str) -> Got {
        let host = &self.host;
        self.raw(&format!(
            "GET {path} HTTP/1.1\r\nHost: {host}\r\n{headers}Connection: close\r\n\r\n"
        ))
        .await
    }

    pub(crate) async fn post(&self, path: &str, cookie: &str, body: &Value) -> Got {
        let host = &self.host;
        let headers = format!(
            "Content-Type: application/json\r\nX-Nacre: 1\r\nOrigin: http://{host}\r\nCookie: a=b; {cookie}\r\n"
        );
        self.post_with(path, &headers, &body.to_string()).await
    }

    pub(crate) async fn post_with(&self, path: &str, headers: &str, body: &str) -> Got {
        let (host, length) = (&self.host, body.len());
        self.raw(&format!(
            "POST {path} HTTP/1.1\r\nHost: {host}\r\n{headers}Content-Length: {length}\r\nConnection: close\r\n\r\n{body}"
        ))
        .await
    }

    pub(crate) async fn login(&self, name: &str) -> String {
        let body = json!({ "name": name, "password": PASSWORD });
        let got = self.post("/api/login", "", &body).await;
        assert_eq!(got.status, 200, "{}", got.body);
        got.cookie()
    }

    /// Opens a stream of live data.
    pub(crate) async fn stream(&self, cookie: &str, headers: &str) -> Stream {
        let mut stream = self.connect().await;
        let host = &self.host;
        let request =
            format!("GET /api/live HTTP/1.1\r\nHost: {host}\r\nCookie: {cookie}\r\n{headers}\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        Stream {
            stream,
            text: String::new(),
        }
    }
}

pub(crate) async fn exchange(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    request: &str,
) -> Got {
    let _ = stream.write_all(request.as_bytes()).await;
    let mut text = Vec::new();
    let _ = stream.read_to_end(&mut text).await;
    let text = String::from_utf8_lossy(&text).into_owned();
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
    let status = head.split(' ').nth(1).and_then(|code| code.parse().ok());
    Got {
        status: status.unwrap_or(0),
        head: head.to_owned(),
        body: body.to_owned(),
    }
}

pub(crate) struct Stream {
    pub(crate) stream: TcpStream,
    pub(crate) text: String,
}

impl Stream {
    /// Reads until the text appears; false: the stream has ended.
    pub(crate) async fn until(&mut self, wanted: &str) -> bool {
        let mut chunk = vec![0; 65536];
        while !self.text.contains(wanted) {
            match self.stream.read(&mut chunk).await {
                Ok(0) | Err(_) => return false,
                Ok(n) => self.text.push_str(&String::from_utf8_lossy(&chunk[..n])),
            }
        }
        true
    }

    pub(crate) async fn ends(&mut self) {
        assert!(!self.until("\u{1}never\u{1}").await);
    }
}
