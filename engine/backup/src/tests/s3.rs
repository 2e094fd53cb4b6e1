//! Backups in a bucket of a real S3-compatible server: `moto`, of PyPI. Skipped aloud without it.
//! One test has a server of its own, which is busy at first.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::{back_up, removed, restored, some_data};
use crate::{Credentials, Location, S3Options};

/// A server with one bucket, on a port that it chooses.
const SERVER: &str = "
import boto3, sys, threading, time
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address='127.0.0.1', port=0, verbose=False)
server.start()
host, port = server.get_host_and_port()
url = f'http://127.0.0.1:{port}'
boto3.client('s3', endpoint_url=url, region_name='us-east-1', aws_access_key_id='key',
             aws_secret_access_key='secret').create_bucket(Bucket='backups')
print(url, flush=True)
sys.stdin.read()
";

struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn server() -> Option<(Server, String)> {
    let mut command = Command::new("python3");
    command.args(["-c", SERVER]).env("NO_PROXY", "*");
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    let mut server = Server(command.spawn().ok()?);
    let mut line = String::new();
    let output = server.0.stdout.take()?;
    BufReader::new(output).read_line(&mut line).ok()?;
    let url = line.trim().to_owned();
    (!url.is_empty()).then_some((server, url))
}

#[test]
fn a_bucket_has_backups() {
    let Some((_server, url)) = server() else {
        eprintln!("SKIPPED: a_bucket_has_backups: needs python3 with moto[server] and boto3");
        return;
    };
    let text = "aws_access_key_id = key\naws_secret_access_key = secret\n";
    let options = S3Options {
        endpoint: Some(url),
        credentials: Some(Credentials::parse(text).unwrap()),
        ..S3Options::default()
    };
    super::runtime().block_on(async {
        let store = Location::parse("s3://backups/a/b").unwrap();
        let store = store.open(&options).unwrap();
        assert!(store.list(None).await.unwrap().backups.is_empty());
        let mut data = some_data(1);
        back_up(&store, 1, &data).await.unwrap();
        data[0] ^= 1;
        let second = back_up(&store, 2, &data).await.unwrap().header;
        assert!(second.new_bytes < second.stored_bytes);
        assert_eq!(store.list(None).await.unwrap().backups.len(), 2);
        assert_eq!(removed(&store, 1).await.unwrap().objects, 1);
        assert_eq!(restored(&store, 2).await.unwrap(), data);
        assert_eq!(removed(&store, 2).await.unwrap().objects, 3);
        assert!(store.list(None).await.unwrap().backups.is_empty());

        let missing = Location::parse("s3://other")
            .unwrap()
            .open(&options)
            .unwrap();
        let refused = back_up(&missing, 1, &data).await.unwrap_err().to_string();
        assert!(
            refused.contains("the server answers NoSuchBucket: "),
            "{refused}"
        );
        assert!(!refused.contains("secret"), "{refused}");
    });
}

/// A server that restarts within seconds ends no job. Method: it is busy for 2.5 s.
#[test]
fn a_server_may_restart() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let started = Instant::now();
    std::thread::spawn(move || {
        for connection in listener.incoming() {
            let mut connection = connection.unwrap();
            let mut request = BufReader::new(connection.try_clone().unwrap()).lines();
            // The head ends with an empty line.
            while request
                .next()
                .is_some_and(|line| line.is_ok_and(|line| !line.is_empty()))
            {}
            let (status, body) = if started.elapsed() < Duration::from_millis(2500) {
                ("503 Slow Down", "")
            } else {
                ("200 OK", "<ListBucketResult></ListBucketResult>")
            };
            let length = body.len();
            let head = format!("HTTP/1.1 {status}\r\ncontent-length: {length}\r\n");
            let answer = format!("{head}connection: close\r\n\r\n{body}");
            connection.write_all(answer.as_bytes()).unwrap();
        }
    });
    let text = "aws_access_key_id = key\naws_secret_access_key = secret\n";
    let options = S3Options {
        endpoint: Some(url),
        credentials: Some(Credentials::parse(text).unwrap()),
        ..S3Options::default()
    };
    super::runtime().block_on(async {
        let store = Location::parse("s3://backups").unwrap();
        let listed = store.open(&options).unwrap().list(None).await.unwrap();
        assert!(listed.backups.is_empty());
        assert!(started.elapsed() > Duration::from_millis(2500));
    });
}
