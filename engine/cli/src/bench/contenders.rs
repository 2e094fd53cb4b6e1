//! The targets and devices of a comparison: those that the user names, or those of a private
//! daemon.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use nacre_bdev::{Bdev, malloc};
use nacre_engine_bench::{Measurement, Setting, Side};
use nacre_engine_doctor::System;
use nacre_engine_load::{Job, JobOptions, Limit, Rw, Sizes};
use nacre_nvmf::address::{Endpoint, NVME_PORT, Scheme};
use nacre_reactor::CoreSet;

use super::super::remote::{RemoteArgs, usage};
use super::super::{Failure, absolute};
use super::BenchArgs;
use super::facts::{self, Route};
use super::side::{BlockSource, MeasuredSide, RunError};
use super::target::{PrivateTarget, Served};
use nacre_engine::services::drives::DriveUri;
use nacre_engine_values::address::socket_of;

/// Bytes of each write that fills a device, and how many are in flight.
const FILL_BYTES: u32 = 128 << 10;
const FILL_DEPTH: u16 = 16;

pub(super) struct Contenders {
    pub measured: Vec<MeasuredSide>,
    pub queues: u16,
    pub cores: Vec<usize>,
    pub target_cores: Option<Vec<usize>>,
    pub notes: Vec<String>,
    pub may_write: bool,
    /// Bytes to fill before the first measurement: devices that this command made.
    fill_bytes: Option<u64>,
    private: Option<PrivateTarget>,
}

impl Contenders {
    pub(super) fn new(args: &BenchArgs) -> Result<Self, Failure> {
        let mut contenders = Self {
            measured: Vec::new(),
            queues: 1,
            cores: args.cores.iter().flat_map(CoreSet::iter).collect(),
            target_cores: None,
            notes: Vec::new(),
            may_write: args.overwrite,
            fill_bytes: None,
            private: None,
        };
        if args.uris.is_empty() {
            contenders.start_private(args)?;
        } else {
            contenders.add_named(args)?;
        }
        let threads = contenders.cores.len().max(1);
        contenders.queues = args
            .queues
            .unwrap_or_else(|| u16::try_from(threads).unwrap_or(u16::MAX));
        Ok(contenders)
    }

    pub(super) fn descriptions(&self) -> Vec<Side> {
        self.measured.iter().map(|c| c.side.clone()).collect()
    }

    pub(super) fn name(&self, at: usize) -> &str {
        &self.measured[at].side.name
    }

    pub(super) fn measure(
        &mut self,
        at: usize,
        job: &Job,
        stop: &AtomicBool,
    ) -> Result<Measurement, RunError> {
        self.measured[at].measure(job, self.private.as_mut(), stop)
    }

    /// Writes each device that this command made once: blocks that were never written are read
    /// faster than any others.
    pub(super) fn fill(&mut self, like: &Job, stop: &AtomicBool) -> Result<(), Failure> {
        let Some(bytes) = self.fill_bytes else {
            return Ok(());
        };
        let job = Job {
            options: JobOptions {
                rw: Rw::Write,
                depth: FILL_DEPTH,
                warmup: std::time::Duration::ZERO,
                ..like.options.clone()
            },
            sizes: Sizes {
                min: FILL_BYTES,
                max: FILL_BYTES,
            },
            queues: 1,
            limit: Limit::Ios(bytes.div_ceil(FILL_BYTES.into())),
            ..like.clone()
        };
        // The device in memory, and the daemon's over TCP.
        for at in 0..self.measured.len() {
            let contender = &self.measured[at];
            if !matches!(contender.way, BlockSource::Memory(_)) && !contender.side.is_tcp() {
                continue;
            }
            match self.measure(at, &job, stop) {
                Ok(_) | Err(RunError::Interrupted) => {}
                Err(error) => {
                    let name = self.name(at);
                    let context = format!("cannot fill the device by {name}");
                    return Err(anyhow::Error::from(error).context(context).into());
                }
            }
        }
        Ok(())
    }

    fn start_private(&mut self, args: &BenchArgs) -> Result<(), Failure> {
        let device = private_device(args)?;
        let exists = matches!(&device, Served::Path { size: None, .. });
        if args.volume && exists && !args.overwrite {
            let hint = "--volume writes its label to the device: --overwrite allows it, and \
                destroys the data";
            return Err(Failure::Usage(hint.into()));
        }
        self.may_write = args.overwrite || !exists;
        self.fill_bytes = (!exists).then_some(args.range.unwrap_or(args.size).min(args.size));
        let target_cores = self.share_cores(args)?;
        let start = PrivateTarget::start(device.clone(), args.volume, &target_cores);
        let mut target = start.map_err(anyhow::Error::from)?;
        self.target_cores = Some(target_cores.iter().collect());
        let alone = match &device {
            Served::Memory { bytes } => {
                let memory = memory(*bytes)?;
                let way = BlockSource::Memory(memory);
                Some(("memory".to_owned(), "memory of this process", way))
            }
            Served::Path { .. } if args.volume => {
                let note = "the device alone is not measured: the volume has it";
                self.notes.push(note.into());
                None
            }
            Served::Path {
                path, read_only, ..
            } => Some(opened(path, *read_only)),
        };
        if let Some(alone) = alone {
            self.add_local("device", alone);
        }
        let system = System::real();
        let uri = target.listen_tcp().map_err(anyhow::Error::from)?;
        self.add_private(&uri, &target, args, &system)?;
        let rdma = facts::rdma_address(&system)
            .and_then(|ip| target.listen_rdma(ip).map_err(|error| error.to_string()));
        match rdma {
            Ok(uri) => self.add_private(&uri, &target, args, &system)?,
            Err(why) => self.notes.push(format!("no RDMA on this machine: {why}")),
        }
        if self.measured.iter().all(|c| !c.side.is_rdma()) {
            let note = "this run compares no transports; on two machines, name a tcp:// and an \
                rdma:// target";
            self.notes.push(note.into());
        }
        self.private = Some(target);
        Ok(())
    }

    /// Divides the cores that this process may use. Returns the target's.
    fn share_cores(&mut self, args: &BenchArgs) -> Result<CoreSet, Failure> {
        let allowed = CoreSet::allowed().map_err(anyhow::Error::from)?;
        let ours = self.cores.clone();
        let chosen = args.target_cores.clone();
        let target = match chosen {
            Some(target) => target,
            None => {
                let free = allowed.iter().find(|core| !ours.contains(core));
                let first = free.or_else(|| allowed.iter().next());
                first.into_iter().collect()
            }
        };
        if ours.is_empty() {
            let free = allowed
                .iter()
                .find(|core| !target.iter().any(|taken| taken == *core));
            self.cores.extend(free);
        }
        let shares = self.cores.is_empty() || target.iter().any(|core| self.cores.contains(&core));
        if shares {
            let note = "load and target share a core: each waits for the other";
            self.notes.push(note.into());
        }
        Ok(target)
    }

    fn add_private(
        &mut self,
        uri: &str,
        target: &PrivateTarget,
        args: &BenchArgs,
        system: &System,
    ) -> Result<(), Failure> {
        let (nqn, id) = (target.hostnqn(), target.hostid().to_string());
        let own = ["--hostnqn", &nqn, "--hostid", &id].map(str::to_owned);
        self.add_remote(uri, own.to_vec(), args, (system, Some(target.pid())))
    }

    fn add_named(&mut self, args: &BenchArgs) -> Result<(), Failure> {
        let system = System::real();
        for uri in &args.uris {
            if DriveUri::is_one(uri) {
                let drive: DriveUri = uri.parse().map_err(usage)?;
                let description = "the driver of this program, by VFIO";
                self.add_local(
                    "drive",
                    (uri.clone(), description, BlockSource::Drive(drive)),
                );
            } else if !uri.contains("://") {
                let path = absolute(Path::new(uri))?;
                self.add_local("device", opened(&path, !args.overwrite));
            } else {
                let more = named_options(args);
                self.add_remote(uri, more, args, (&system, args.target_pid))?;
            }
        }
        if args.target_pid.is_none() && self.measured.iter().any(|c| is_remote(&c.way)) {
            let note = "processor time of the target is not known; for a process of this machine, \
                --target-pid";
            self.notes.push(note.into());
        }
        Ok(())
    }

    fn add_local(&mut self, name: &str, (target, description, way): (String, &str, BlockSource)) {
        let side = Side {
            name: self.unique(name),
            target,
            setting: Setting::Local,
            description: description.into(),
            link_bits_per_second: None,
        };
        let pid = None;
        self.measured.push(MeasuredSide { side, way, pid });
    }

    fn add_remote(
        &mut self,
        uri: &str,
        more: Vec<String>,
        args: &BenchArgs,
        (system, pid): (&System, Option<u32>),
    ) -> Result<(), Failure> {
        let timeout = format!("{}ms", args.connect_timeout.as_millis());
        let words = [
            "--retries",
            "1",
            "--cm-timeout",
            &timeout,
            "--connect-timeout",
            &timeout,
        ];
        let words = [uri].into_iter().chain(words).map(str::to_owned);
        let remote = RemoteArgs::typed(words.chain(more))?;
        let endpoint = remote.remote()?;
        let rdma = match endpoint.scheme {
            Some(Scheme::Tcp) => false,
            Some(Scheme::Rdma) => true,
            _ => {
                let hint = format!("{uri}: a comparison needs one transport: tcp:// or rdma://");
                return Err(Failure::Usage(hint));
            }
        };
        if endpoint.subnqn.is_none() {
            let hint = format!(
                "{uri}: no subsystem: add its name behind a slash; `nacre discover` lists them"
            );
            return Err(Failure::Usage(hint));
        }
        let route = route(system, &endpoint, rdma)?;
        let side = Side {
            name: self.unique(if rdma { "rdma" } else { "tcp" }),
            target: uri.to_owned(),
            setting: route.setting,
            description: route.description,
            link_bits_per_second: route.link_bits_per_second,
        };
        let way = BlockSource::Remote(Box::new(remote));
        self.measured.push(MeasuredSide { side, way, pid });
        Ok(())
    }

    /// The name, with a number if an earlier side has it.
    fn unique(&self, name: &str) -> String {
        let is_free = |name: &String| self.measured.iter().all(|c| c.side.name != *name);
        let numbered = (2..).map(|number| format!("{name}-{number}"));
        let mut names = std::iter::once(name.to_owned()).chain(numbered);
        names.find(is_free).expect("numbers do not end")
    }
}

fn is_remote(way: &BlockSource) -> bool {
    matches!(way, BlockSource::Remote(_))
}

fn route(system: &System, endpoint: &Endpoint, rdma: bool) -> Result<Route, Failure> {
    let address = socket_of(endpoint, NVME_PORT).map_err(usage)?;
    Ok(Route::to(system, address.ip(), rdma))
}

/// The options of [`RemoteArgs`] that this command has, too.
fn named_options(args: &BenchArgs) -> Vec<String> {
    let path = |path: &PathBuf| path.to_string_lossy().into_owned();
    let options = [
        ("--hostnqn", args.hostnqn.clone()),
        ("--dhchap-key", args.dhchap_key.as_ref().map(path)),
        (
            "--dhchap-ctrlr-key",
            args.dhchap_ctrlr_key.as_ref().map(path),
        ),
    ];
    let given = options
        .into_iter()
        .filter_map(|(name, value)| Some([name.to_owned(), value?]));
    given.flatten().collect()
}

fn private_device(args: &BenchArgs) -> Result<Served, Failure> {
    let Some(path) = &args.file else {
        return Ok(Served::Memory { bytes: args.size });
    };
    let path = absolute(path)?;
    let exists = path.try_exists()?;
    Ok(Served::Path {
        read_only: exists && !args.overwrite,
        size: (!exists).then_some(args.size),
        path,
    })
}

fn memory(bytes: u64) -> Result<Arc<dyn Bdev>, Failure> {
    const BLOCK_SIZE: u32 = 4096;
    let device = malloc::create(malloc::Config {
        name: "memory".into(),
        block_size: BLOCK_SIZE,
        num_blocks: bytes / u64::from(BLOCK_SIZE),
        physical_block_size: None,
        uuid: None,
        optimal_io_boundary: None,
        numa_id: None,
    });
    Ok(device.map_err(usage)?)
}

fn opened(path: &Path, read_only: bool) -> (String, &'static str, BlockSource) {
    let target = path.display().to_string();
    let path = path.to_owned();
    (target, "io_uring", BlockSource::Path { path, read_only })
}
