//! A peer of a soak test: one performance-test server per direction.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use clap::Args;
use nacre_transport_rdma_perf::{Server, ServerOptions};
use nacre_transport_rdma_verbs::Provider;
use parking_lot::Mutex;

use super::super::perf::{explained, failure, interrupt, listen_addresses, provider};
use super::super::perf_show;
use crate::Failure;
use nacre_engine_doctor::System;
use nacre_engine_values::size;

#[derive(Debug, Args)]
pub(crate) struct SoakServerArgs {
    /// An address of this machine, or name:eth0, rdma:mlx5_0/1, mac:…, subnet:…, with a port after
    /// a comma unless it is 18515; the next port is used too. May be repeated [default: all
    /// addresses]
    #[arg(long, value_name = "WHERE")]
    listen: Vec<String>,
    /// Most memory for each direction
    #[arg(long, value_name = "SIZE", default_value = "512MiB", value_parser = size::parse_bytes)]
    memory: u64,
    /// Type of service of the packets: DSCP times 4
    #[arg(long, value_name = "TOS", default_value_t = 0)]
    tos: u8,
    /// Print a line of JSON for each event
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &SoakServerArgs) -> Result<(), Failure> {
    let system = System::real();
    let provider = provider()?;
    let listen = listen_addresses(&system, &args.listen)?;
    let second = |address: &SocketAddr| {
        let port = address.port().checked_add(1)?;
        Some(SocketAddr::new(address.ip(), port))
    };
    let next: Option<Vec<SocketAddr>> = listen.iter().map(second).collect();
    let next = next.ok_or_else(|| Failure::Usage("--listen: no port follows 65535".into()))?;
    let stop = interrupt();
    let serving = Serving {
        provider: &provider,
        args,
        stop: &stop,
        printed: Mutex::new(Ok(())),
    };
    // A server stays on its thread.
    std::thread::scope(|scope| {
        let serve = |listen| {
            let serving = &serving;
            scope.spawn(move || {
                let served = serving.serve(listen);
                // One direction without the other is no peer.
                serving.stop.store(true, Ordering::Relaxed);
                served
            })
        };
        let threads = [listen, next].map(serve);
        let served = threads.map(|thread| {
            let served = thread.join();
            served.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        });
        served.into_iter().collect::<Result<(), Failure>>()
    })?;
    serving.printed.into_inner()
}

/// Shared by the servers of both directions.
struct Serving<'a> {
    provider: &'a Arc<dyn Provider>,
    args: &'a SoakServerArgs,
    stop: &'a AtomicBool,
    printed: Mutex<Result<(), Failure>>,
}

impl Serving<'_> {
    /// Serves until a signal.
    fn serve(&self, listen: Vec<SocketAddr>) -> Result<(), Failure> {
        let system = System::real();
        let ips: Vec<IpAddr> = listen.iter().map(SocketAddr::ip).collect();
        let options = ServerOptions {
            memory: self.args.memory,
            tos: self.args.tos,
            ..ServerOptions::new(listen)
        };
        let mut server = Server::bind(Arc::clone(self.provider), options)
            .map_err(|error| failure(error, explained(&system, ips)))?;
        let addresses = server.addresses();
        self.print(|| perf_show::listening(&system, &addresses, self.args.json));
        server
            .serve(self.stop, &mut |happened| {
                self.print(|| perf_show::happened(&happened, self.args.json));
            })
            .map_err(|error| failure(error, None))
    }

    /// Prints, one thread at a time; ends the program when that fails.
    fn print(&self, line: impl FnOnce() -> Result<(), Failure>) {
        let mut printed = self.printed.lock();
        if printed.is_ok() {
            *printed = line();
        }
        if printed.is_err() {
            self.stop.store(true, Ordering::Relaxed);
        }
    }
}
