//! The load that sees each node: numbered writes and checked reads on a path of its own to each.
//!
//! `nacre perf` goes through the host's multipath, which asks one node at a time. A former holder
//! that still answers would go unnoticed. Here a writer and a reader are connected to each node all
//! the time, and their answers are one [`History`]. A writer reads the block that it writes next.
//! It runs in the host's namespace, as a process of its own, until SIGTERM. After that, a read of
//! each block shows that the last answered write is there.

use std::collections::BTreeMap;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::super::demo::{NODES, Network};
use super::history::{History, Read};
use super::nvme::{BLOCK, Controller, Failed, Names};
use crate::process;

/// The first block: beyond the range of `nacre perf`.
const FIRST_LBA: u64 = 8192;
const MAGIC: u64 = u64::from_le_bytes(*b"NACREHIS");
/// Pause between two I/Os of a thread.
const PACE: Duration = Duration::from_millis(3);
/// Pause after an I/O that the node does not serve, and between attempts to connect.
const RETRY: Duration = Duration::from_millis(50);
/// Longest time of the reads after the last writes.
const LAST_READS: Duration = Duration::from_secs(5);

/// The result of the load, as JSON.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Report {
    pub(super) writes: u64,
    pub(super) reads: u64,
    pub(super) unanswered: u64,
    pub(super) longest_pause_ms: u64,
    /// The time from the last answered write to the end.
    pub(super) idle_ms: u64,
    pub(super) nodes: BTreeMap<String, NodeReport>,
    pub(super) findings: Vec<String>,
}

/// The result of the paths to one node.
#[derive(Debug, Default, Clone, Serialize, Deserialize)]
pub(super) struct NodeReport {
    /// I/Os that succeeded, and those that the node refused, by status.
    pub(super) answers: u64,
    pub(super) refusals: BTreeMap<String, u64>,
    /// The time from the start of the load to the first answer.
    pub(super) first_ms: Option<u64>,
    /// The last reason for which a path was lost.
    pub(super) lost: Option<String>,
}

/// Runs until SIGTERM, and prints a [`Report`].
pub(in super::super) fn run(nqn: &str) -> Result<ExitCode> {
    process::catch_interrupts()?;
    let shared = Arc::new(Shared::new(Instant::now()));
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
    let end = Instant::now();
    shared.is_over.store(true, Ordering::Relaxed);
    while end.elapsed() < LAST_READS && !shared.history.lock().is_complete() {
        std::thread::sleep(Duration::from_millis(20));
    }
    println!("{}", serde_json::to_string(&shared.report(end))?);
    Ok(ExitCode::SUCCESS)
}

struct Shared {
    start: Instant,
    history: Mutex<History>,
    /// No write begins any more, and reads are those after the last writes.
    is_over: AtomicBool,
    nodes: Mutex<BTreeMap<String, NodeReport>>,
    /// Distinguishes this run's blocks.
    run: u64,
}

impl Shared {
    fn new(start: Instant) -> Self {
        Self {
            start,
            history: Mutex::new(History::new(start)),
            is_over: AtomicBool::new(false),
            nodes: Mutex::default(),
            run: RandomState::new().hash_one(std::process::id()),
        }
    }

    fn report(&self, end: Instant) -> Report {
        let nodes = self.nodes.lock().clone();
        let mut history = self.history.lock();
        history.end(end);
        let idle = end.saturating_duration_since(history.last_write);
        Report {
            writes: history.writes,
            reads: history.reads,
            unanswered: history.unanswered,
            longest_pause_ms: history.longest_pause.as_millis() as u64,
            idle_ms: idle.as_millis() as u64,
            nodes,
            findings: history.findings.clone(),
        }
    }
}

/// The blocks behind a path.
trait Blocks {
    fn read_block(&mut self, lba: u64, data: &mut [u8; BLOCK]) -> Result<(), Failed>;
    fn write_block(&mut self, lba: u64, data: &[u8; BLOCK]) -> Result<(), Failed>;
}

impl Blocks for Controller {
    fn read_block(&mut self, lba: u64, data: &mut [u8; BLOCK]) -> Result<(), Failed> {
        self.read(lba, data)
    }

    fn write_block(&mut self, lba: u64, data: &[u8; BLOCK]) -> Result<(), Failed> {
        self.write(lba, data)
    }
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
                let mut nodes = self.shared.nodes.lock();
                nodes.entry(self.node.to_owned()).or_default().lost = Some(failed.to_string());
            }
            std::thread::sleep(RETRY);
        }
    }

    /// Reads or writes until the path is lost.
    fn serve(&self, mut controller: Controller, is_writer: bool) -> Result<(), Failed> {
        let mut choice = 0;
        loop {
            choice += 1;
            let is_over = self.shared.is_over.load(Ordering::Relaxed);
            let end = if is_over {
                self.read_last(&mut controller)
            } else if is_writer {
                self.write(&mut controller)
            } else {
                self.read(&mut controller, choice)
            };
            let end = end.and_then(|()| {
                std::thread::sleep(PACE);
                controller.keep_alive()
            });
            match end {
                Ok(()) => {}
                Err(lost @ Failed::Lost(_)) => return Err(lost),
                Err(Failed::Status(_)) => {
                    std::thread::sleep(RETRY);
                    controller.keep_alive()?;
                }
            }
        }
    }

    /// Counts the answer of the node to an I/O.
    fn counted(&self, end: Result<(), Failed>) -> Result<(), Failed> {
        if let Err(Failed::Lost(_)) = &end {
            return end;
        }
        let mut nodes = self.shared.nodes.lock();
        let node = nodes.entry(self.node.to_owned()).or_default();
        let first = self.shared.start.elapsed().as_millis() as u64;
        node.first_ms.get_or_insert(first);
        match &end {
            Ok(()) => node.answers += 1,
            Err(failed) => {
                *node.refusals.entry(failed.to_string()).or_default() += 1;
                if !failed.is_of_path() {
                    let finding = format!("error: node {} answered {failed}", self.node);
                    self.shared.history.lock().find(finding);
                }
            }
        }
        end
    }

    fn read(&self, blocks: &mut impl Blocks, choice: usize) -> Result<(), Failed> {
        let read = self.shared.history.lock().begin_read(choice);
        self.check(blocks, read)
    }

    fn read_last(&self, blocks: &mut impl Blocks) -> Result<(), Failed> {
        let read = self.shared.history.lock().begin_last_read();
        read.map_or(Ok(()), |read| self.check(blocks, read))
    }

    fn check(&self, blocks: &mut impl Blocks, read: Read) -> Result<(), Failed> {
        let register = read.register as u64;
        let mut block = [0; BLOCK];
        self.counted(blocks.read_block(FIRST_LBA + register, &mut block))?;
        let mut history = self.shared.history.lock();
        match number_in(&block, self.shared.run, register) {
            Ok(number) => history.read(read, number, self.node),
            Err(what) => history.read_wrong(read, what, self.node),
        }
        Ok(())
    }

    /// Reads a block first: a lost write must show before another one replaces it.
    fn write(&self, blocks: &mut impl Blocks) -> Result<(), Failed> {
        let Some(read) = self.shared.history.lock().reserve() else {
            return Ok(());
        };
        if let Err(failed) = self.check(blocks, read) {
            self.shared.history.lock().release(read.register);
            return Err(failed);
        }
        let Some(write) = self.shared.history.lock().begin_write(read.register) else {
            return Ok(());
        };
        let block = block_of(self.shared.run, write.register as u64, write.number);
        let end = self.counted(blocks.write_block(FIRST_LBA + write.register as u64, &block));
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

    /// Blocks in memory that answer one write and lose it.
    #[derive(Default)]
    struct Memory {
        blocks: BTreeMap<u64, [u8; BLOCK]>,
        writes: usize,
        lost: usize,
    }

    impl Blocks for Memory {
        fn read_block(&mut self, lba: u64, data: &mut [u8; BLOCK]) -> Result<(), Failed> {
            *data = self.blocks.get(&lba).copied().unwrap_or([0; BLOCK]);
            Ok(())
        }

        fn write_block(&mut self, lba: u64, data: &[u8; BLOCK]) -> Result<(), Failed> {
            self.writes += 1;
            if self.writes != self.lost {
                self.blocks.insert(lba, *data);
            }
            Ok(())
        }
    }

    fn path() -> Path {
        Path {
            shared: Arc::new(Shared::new(Instant::now())),
            node: "a",
            address: SocketAddr::from(([127, 0, 0, 1], 1)),
            names: Names {
                subsystem: String::new(),
                host: String::new(),
                host_id: [0; 16],
            },
        }
    }

    /// Goal: each single lost answered write is found, whichever it is. Method: a writer without
    /// readers over blocks that lose one write, for each of them, and the reads at the end.
    #[test]
    fn a_lost_answered_write_is_found() {
        const WRITES: usize = 200;
        for lost in 0..=WRITES {
            let path = path();
            let mut memory = Memory {
                lost,
                ..Memory::default()
            };
            for _ in 0..WRITES {
                path.write(&mut memory).unwrap();
            }
            while !path.shared.history.lock().is_complete() {
                path.read_last(&mut memory).unwrap();
            }
            let mut history = path.shared.history.lock();
            history.end(Instant::now());
            let findings = &history.findings;
            assert_eq!(
                findings.len(),
                usize::from(lost > 0),
                "{lost}: {findings:?}"
            );
        }
    }

    /// Goal: the report counts answers and refusals of each node, and an error that is none of the
    /// path is a finding. Method: I/Os with each end.
    #[test]
    fn answers_and_refusals_are_counted() {
        let path = path();
        path.counted(Ok(())).unwrap();
        for status in [0x302, 0x302, 0x281] {
            path.counted(Err(Failed::Status(status))).unwrap_err();
        }
        let lost = std::io::Error::other("gone");
        path.counted(Err(Failed::Lost(lost))).unwrap_err();
        let report = path.shared.report(Instant::now());
        let node = &report.nodes["a"];
        assert_eq!(node.answers, 1);
        let refusals = [
            ("status 0x281".to_owned(), 1),
            ("status 0x302".to_owned(), 2),
        ];
        assert_eq!(node.refusals, BTreeMap::from(refusals));
        assert!(node.first_ms.is_some());
        assert_eq!(report.findings, ["error: node a answered status 0x281"]);
    }

    /// Goal: a failed read before a write leaves its block to other writers.
    #[test]
    fn a_block_whose_read_failed_is_free() {
        struct Refused;
        impl Blocks for Refused {
            fn read_block(&mut self, _: u64, _: &mut [u8; BLOCK]) -> Result<(), Failed> {
                Err(Failed::Status(0x302))
            }

            fn write_block(&mut self, _: u64, _: &[u8; BLOCK]) -> Result<(), Failed> {
                unreachable!("the read was refused")
            }
        }
        let path = path();
        assert!(path.write(&mut Refused).is_err());
        assert!(path.shared.history.lock().is_complete());
    }

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
