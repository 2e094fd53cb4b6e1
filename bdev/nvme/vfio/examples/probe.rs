//! Initialises drives up to Identify, through every VFIO call that the driver needs: registers,
//! memory of both kinds, interrupts, bus mastering, reset. The tests in virtual machines use it.
//!
//!    probe [--hold] BDF…
//!
//! `--hold` keeps the drives open until the kernel requests one back.

#![forbid(unsafe_code)]

use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nacre_bdev_nvme::{DmaMemory, Function, GONE};
use nacre_bdev_nvme_vfio::{Vfio, VfioFunction};
use nacre_hugepages::{Arena, ArenaOptions, ClassSpec, HugepagePolicy, Pool};

/// Registers (NVMe 2.0, section 3.1).
const CAP: u32 = 0x00;
const VS: u32 = 0x08;
const CC: u32 = 0x14;
const CSTS: u32 = 0x1c;
const AQA: u32 = 0x24;
const ASQ: u32 = 0x28;
const ACQ: u32 = 0x30;
const SQ0_TAIL: u32 = 0x1000;

const ENTRIES: u32 = 16;
/// An emulated machine is slow, and a busy one slower.
const PATIENCE: Duration = Duration::from_secs(60);

type Outcome<T> = Result<T, Box<dyn Error>>;

fn main() -> Outcome<()> {
    let mut addresses: Vec<String> = std::env::args().skip(1).collect();
    let hold = addresses.first().is_some_and(|word| word == "--hold");
    if hold {
        addresses.remove(0);
    }
    let options = ArenaOptions {
        hugepages: HugepagePolicy::Off,
        ..ArenaOptions::new(1 << 20)
    };
    let arena = Arena::allocate(options)?;
    let vfio = Vfio::new(std::slice::from_ref(&arena));
    let classes = [ClassSpec {
        size: 4096,
        count: 4,
    }];
    let pool = Pool::on_arena(&arena, &classes)?;
    let mut functions: Vec<Arc<VfioFunction>> = Vec::new();
    for address in &addresses {
        let function = vfio.open(address)?;
        identify(&function, &pool)?;
        functions.push(function);
    }
    let slot = functions.first().ok_or("no drive was named")?.slot();
    check("one slot", functions.iter().all(|f| f.slot() == slot))?;
    check("known once", arena.registered(slot).len() == 1)?;
    if hold {
        println!("holding");
        wait("no drive was removed", || {
            functions.iter().any(|function| !function.is_present())
        })?;
        println!("wanted back");
    } else {
        for function in &functions {
            function.reset()?;
            check("not ready after a reset", function.read32(CSTS) & 1 == 0)?;
            check("present after a reset", function.is_present())?;
            identify(function, &pool)?;
        }
    }
    drop(functions);
    check("unknown again", arena.registered(slot).is_empty())
}

fn identify(function: &Arc<VfioFunction>, pool: &Pool) -> Outcome<()> {
    let seam: Arc<dyn Function> = Arc::<VfioFunction>::clone(function);
    let cap = function.read64(CAP);
    check("CAP", cap != u64::MAX && cap & 0xffff != 0)?;
    check("doorbell stride", cap >> 32 & 0xf == 0)?;
    let version = function.read32(VS);
    function.write32(CC, 0);
    ready(function, false)?;
    let queues = DmaMemory::allocate(&seam, 3 * 4096)?;
    let buffer = pool.acquire(4096).ok_or("no buffer")?;
    let key = buffer
        .key(function.slot())
        .ok_or("a buffer without a key")?;
    let data = key + buffer.region_offset() as u64;
    function.write32(AQA, (ENTRIES - 1) << 16 | (ENTRIES - 1));
    function.write64(ASQ, queues.address(0));
    function.write64(ACQ, queues.address(4096));
    check("vectors", function.vectors() >= 1)?;
    function.interrupts(1)?;
    check("a descriptor", function.vector_fd(0).is_some())?;
    check("one vector only", function.vector_fd(1).is_none())?;
    check("not fired", !function.acknowledge(0))?;
    function.set_bus_master(true)?;
    // Entries of 64 and of 16 bytes, and on.
    function.write32(CC, 4 << 20 | 6 << 16 | 1);
    ready(function, true)?;

    // Identify, CNS 01h: the controller; once into a buffer of the arena, once into memory of the
    // queues' kind.
    let mut identify = [[0; 64]; 2];
    for (at, address) in [data, queues.address(8192)].into_iter().enumerate() {
        let at = at as u32;
        let entry = at as usize * 64;
        queues.store(entry, 0x06 | at << 16);
        queues.store(entry + 24, address as u32);
        queues.store(entry + 28, (address >> 32) as u32);
        queues.store(entry + 40, 1);
        function.write32(SQ0_TAIL, at + 1);
        wait("no interrupt came", || function.acknowledge(0))?;
        let status = queues.load(4096 + at as usize * 16 + 12);
        check("phase", status >> 16 & 1 == 1)?;
        check("command", status & 0xffff == at)?;
        check("status", status >> 17 == 0)?;
        // The head of the completion queue: its interrupt may come again.
        function.write32(SQ0_TAIL + 4, at + 1);
    }
    let mut buffer = buffer;
    let bytes = buffer.bytes_mut().ok_or("a shared buffer")?;
    identify[0].copy_from_slice(&bytes[..64]);
    queues.read(8192, &mut identify[1]);
    check("the same twice", identify[0] == identify[1])?;
    let text = |range: std::ops::Range<usize>| {
        String::from_utf8_lossy(&identify[0][range])
            .trim()
            .to_owned()
    };
    println!(
        "{} serial {} model {} version {}.{}",
        function.address(),
        text(4..24),
        text(24..64),
        version >> 16,
        version >> 8 & 0xff
    );
    // Off, before its queues' memory goes.
    function.write32(CC, 0);
    ready(function, false)?;
    function.interrupts(0)?;
    check("no vector", function.vector_fd(0).is_none())?;
    Ok(function.set_bus_master(false)?)
}

fn ready(function: &VfioFunction, wanted: bool) -> Outcome<()> {
    let what = if wanted {
        "never ready"
    } else {
        "ready forever"
    };
    wait(what, || {
        let status = function.read32(CSTS);
        status != GONE && (status & 1 == 1) == wanted
    })
}

fn wait(what: &str, mut is_so: impl FnMut() -> bool) -> Outcome<()> {
    let end = Instant::now() + PATIENCE;
    while !is_so() {
        if Instant::now() > end {
            return Err(what.into());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

fn check(what: &str, is_so: bool) -> Outcome<()> {
    if is_so {
        Ok(())
    } else {
        Err(format!("not as it should be: {what}").into())
    }
}
