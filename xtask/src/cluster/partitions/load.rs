//! The load that sees each node: numbered writes and checked reads on a path of its own to each.
//!
//! `nacre perf` goes through the host's multipath, which asks one node at a time. A former holder
//! that still answers would go unnoticed. Here a writer and a reader are connected to each node all
//! the time, and their answers are one [`History`]. It runs in the host's namespace, as a process
//! of its own, until SIGTERM.

use std::collections::BTreeMap;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use parking_lot::Mutex;
use serde_json::json;

use super::super::demo::{NODES, Network};
use super::history::History;
use super::nvme::{BLOCK, Controller, Failed, Names};
use crate::process;

/// The first block: beyond the range of `nacre perf`.
const FIRST_LBA: u64 = 8192;
const MAGIC: u64 = u64::from_le_bytes(*b"NACREHIS");
/// Between I/Os of a thread.
const PACE: Duration = Duration::from_millis(3);
/// After an I/O that the node does not serve, and between attempts to connect.
const RETRY: Duration = Duration::from_millis(50);

/// Runs until SIGTERM, and prints the result as JSON.
pub(in super::super) fn run(nqn: &str) -> Result<ExitCode> {
    process::catch_interrupts()?;
    let shared = Arc::new(Shared {
        history: Mutex::new(History::new(Instant::now())),
        refused: AtomicU64::new(0),
        losses: Mutex::default(),
        run: RandomState::new().hash_one(std::process::id()),
    });
    for node in NODES {
        let address = format!("{}:4420", Network::Hosts.address_of(node));
        let address: SocketAddr = address.parse().context("the address of a node")?;
        for is_writer in [true, false] {
            let path = Path {
                shared: Arc::clone(&shared),
                node,
                address,
                names: Names {
                    subsystem: nqn.to_owned(),
                    host: "nqn.2026-01.io.nacre:history".to_owned(),
                    host_id: *b"nacre-history-01",
                },
            };
            // The threads end with the process.
            std::thread::spawn(move || path.run(is_writer));
        }
    }
    while !process::interrupted() {
        std::thread::sleep(Duration::from_millis(20));
    }
    let mut history = shared.history.lock();
    history.end(Instant::now());
    let report = json!({
        "writes": history.writes, "reads": history.reads, "unanswered": history.unanswered,
        "refused": shared.refused.load(Ordering::Relaxed),
        "longest_pause_ms": history.longest_pause.as_millis() as u64,
        "findings": history.findings, "losses": *shared.losses.lock(),
    });
    println!("{report}");
    Ok(ExitCode::SUCCESS)
}

struct Shared {
    history: Mutex<History>,
    refused: AtomicU64,
    /// The last reason for which a path was lost, of each node.
    losses: Mutex<BTreeMap<&'static str, String>>,
    /// Distinguishes this run's blocks.
    run: u64,
}

/// A path to one node, of one thread.
struct Path {
    shared: Arc<Shared>,
    node: &'static str,
    address: SocketAddr,
    names: Names,
}

impl Path {
    fn run(&self, is_writer: bool) {
        loop {
            let end = Controller::connect(self.address, &self.names)
                .and_then(|controller| self.serve(controller, is_writer));
            if let Err(failed) = end {
                let mut losses = self.shared.losses.lock();
                losses.insert(self.node, failed.to_string());
            }
            std::thread::sleep(RETRY);
        }
    }

    /// Reads, and writes after a read that succeeded, until the path is lost.
    fn serve(&self, mut controller: Controller, is_writer: bool) -> Result<(), Failed> {
        let mut choice = 0;
        loop {
            choice += 1;
            let mut end = self.read(&mut controller, choice);
            if is_writer && end.is_ok() {
                end = self.write(&mut controller);
            }
            let end = end.and_then(|()| {
                std::thread::sleep(PACE);
                controller.keep_alive()
            });
            match end {
                Ok(()) => {}
                Err(lost @ Failed::Lost(_)) => return Err(lost),
                Err(failed @ Failed::Status(status)) => {
                    if !failed.is_of_path() {
                        let node = self.node;
                        let finding = format!("error: node {node} answered status {status:#x}");
                        self.shared.history.lock().find(finding);
                    }
                    self.shared.refused.fetch_add(1, Ordering::Relaxed);
                    std::thread::sleep(RETRY);
                    controller.keep_alive()?;
                }
            }
        }
    }

    fn read(&self, controller: &mut Controller, choice: usize) -> Result<(), Failed> {
        let read = self.shared.history.lock().begin_read(choice);
        let mut block = [0; BLOCK];
        controller.read(FIRST_LBA + read.register as u64, &mut block)?;
        let mut history = self.shared.history.lock();
        match number_in(&block, self.shared.run, read.register as u64) {
            Ok(number) => history.read(read, number, self.node),
            Err(what) => {
                let (node, register) = (self.node, read.register);
                history.find(format!(
                    "{what}: node {node} answered so for block {register}"
                ));
            }
        }
        Ok(())
    }

    fn write(&self, controller: &mut Controller) -> Result<(), Failed> {
        let Some(write) = self.shared.history.lock().begin_write() else {
            return Ok(());
        };
        let block = block_of(self.shared.run, write.register as u64, write.number);
        let end = controller.write(FIRST_LBA + write.register as u64, &block);
        let mut history = self.shared.history.lock();
        match &end {
            Ok(()) => history.wrote(write, Instant::now()),
            Err(_) => history.unanswered(write),
        }
        end
    }
}

fn block_of(run: u64, register: u64, number: u64) -> [u8; BLOCK] {
    let mut block = [0; BLOCK];
    let words = [MAGIC, run, register, number];
    for (word, out) in words.iter().cycle().zip(block.chunks_exact_mut(8)) {
        out.copy_from_slice(&word.to_le_bytes());
    }
    block
}

/// The number of the write; 0 if the block is of no write of this run.
fn number_in(block: &[u8; BLOCK], run: u64, register: u64) -> Result<u64, &'static str> {
    let mut words = [0u64; 4];
    for (word, bytes) in words.iter_mut().zip(block.chunks_exact(8)) {
        *word = bytes
            .iter()
            .rev()
            .fold(0, |word, byte| word << 8 | u64::from(*byte));
    }
    let [magic, of_run, of_register, number] = words;
    if magic != MAGIC || of_run != run {
        return Ok(0);
    }
    if of_register != register {
        return Err("another block");
    }
    if *block != block_of(run, register, number) {
        return Err("a torn block");
    }
    Ok(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: a block tells its run, register and number, and damage shows.
    #[test]
    fn blocks_tell_their_write() {
        let mut block = block_of(7, 3, 12);
        assert_eq!(number_in(&block, 7, 3), Ok(12));
        assert_eq!(number_in(&block, 8, 3), Ok(0));
        assert_eq!(number_in(&block, 7, 4), Err("another block"));
        assert_eq!(number_in(&[0; BLOCK], 7, 3), Ok(0));
        block[4000] ^= 1;
        assert_eq!(number_in(&block, 7, 3), Err("a torn block"));
    }
}
