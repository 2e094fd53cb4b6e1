//! `nacre serve`: starts the daemon. Also installed under the name `nvmf_tgt`.
//!
//! All options of SPDK's application framework are accepted, so that scripts and units written for
//! `nvmf_tgt` work unchanged. The help lists the options without an effect here, most of them
//! DPDK's.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::{ArgAction, Args, CommandFactory, FromArgMatches, Parser};
use nacre_reactor::CoreSet;
use serde_json::{Value, json};

use super::{Failure, absolute, lcores};
use nacre_engine::config::Personality;
use nacre_engine::config::{self, Flag, Loaded, Problem};
use nacre_engine::daemon::ServeOptions;
use nacre_engine::daemon::reload::Source;

#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    /// Configuration: TOML, or SPDK's JSON (its calls are carried out at start)
    #[arg(
        short = 'c',
        long,
        visible_alias = "json",
        value_name = "FILE",
        env = "NACRE_CONFIG"
    )]
    config: Option<PathBuf>,
    /// Cores of the reactors: auto, auto:2 (two of them), auto-numa (near cards and disks), a list
    /// (0,2-5) or a mask (0x3)
    #[arg(long, value_name = "CORES")]
    cores: Option<String>,
    /// Cores as SPDK writes them: a mask (0x3) or a list ([0,2-5])
    #[arg(short = 'm', long, value_name = "MASK", conflicts_with = "cores")]
    cpumask: Option<String>,
    /// Cores as DPDK writes them: threads and where they run (0-2, or 0@4,1@6)
    #[arg(long, value_name = "LIST", conflicts_with_all = ["cores", "cpumask"])]
    lcores: Option<String>,
    /// Sleep instead of polling while idle
    #[arg(long)]
    interrupt_mode: bool,
    /// The management socket
    #[arg(short = 'r', long, value_name = "PATH")]
    rpc_socket: Option<PathBuf>,
    /// No management socket
    #[arg(long)]
    no_rpc_server: bool,
    /// Wait for framework_start_init before starting the data plane
    #[arg(long)]
    wait_for_rpc: bool,
    /// The only methods that may be called, separated by commas
    #[arg(long, value_name = "METHODS", value_delimiter = ',')]
    rpcs_allowed: Vec<String>,
    /// Continue when an entry of the JSON configuration is refused
    #[arg(long)]
    json_ignore_init_errors: bool,
    /// Folder for state; "none": do not store state
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
    /// DMA memory for all reactors together, in MiB or with a unit (2G)
    #[arg(short = 's', long, value_name = "MB", value_parser = nacre_engine_values::size::parse_mebibytes)]
    mem_size: Option<u64>,
    /// Use ordinary pages
    #[arg(long)]
    no_huge: bool,
    /// Address where Prometheus may scrape
    #[arg(long, value_name = "ADDRESS:PORT")]
    metrics_listen: Option<String>,
    /// RDMA on every listener: off, prefer or require, whatever the configuration says
    #[arg(long, value_name = "MODE", value_parser = ["off", "prefer", "require"])]
    rdma: Option<String>,
    /// Additional listeners of the configuration's subsystems: tcp://ADDRESS:PORT or
    /// rdma://ADDRESS:PORT (may be repeated)
    #[arg(long, value_name = "URL")]
    listen: Vec<String>,
    /// error, warning, notice, info or debug
    #[arg(long, value_name = "LEVEL")]
    log_level: Option<String>,
    /// text or json
    #[arg(long, value_name = "FORMAT")]
    log_format: Option<String>,
    /// Write the log to this file instead of standard error; SIGHUP reopens it
    #[arg(long, value_name = "FILE")]
    log_file: Option<PathBuf>,
    /// Log a part of the program at debug level (may be repeated; "all")
    #[arg(short = 'L', long = "logflag", value_name = "FLAG")]
    log_flags: Vec<String>,
    /// Log warnings and errors only
    #[arg(long)]
    silence_noticelog: bool,
    /// Write the process id here
    #[arg(long, value_name = "FILE")]
    pid_file: Option<PathBuf>,
    #[command(flatten)]
    ignored: IgnoredArgs,
}

/// SPDK's flags without a meaning here: accepted, so that its command lines work.
#[derive(Debug, Args)]
#[command(next_help_heading = "Accepted for SPDK's command lines, without effect")]
struct IgnoredArgs {
    #[arg(short = 'i', long, value_name = "ID", allow_hyphen_values = true)]
    shm_id: Option<String>,
    #[arg(short = 'e', long, value_name = "GROUP")]
    tpoint_group: Vec<String>,
    #[arg(long, value_name = "N")]
    num_trace_entries: Option<u64>,
    #[arg(short = 'g', long)]
    single_file_segments: bool,
    #[arg(short = 'n', long, value_name = "N")]
    mem_channels: Option<String>,
    #[arg(short = 'p', long, value_name = "CORE")]
    main_core: Option<String>,
    #[arg(short = 'u', long)]
    no_pci: bool,
    #[arg(short = 'd', long)]
    limit_coredump: bool,
    #[arg(short = 'A', long, value_name = "BDF")]
    pci_allowed: Vec<String>,
    #[arg(short = 'B', long, value_name = "BDF")]
    pci_blocked: Vec<String>,
    #[arg(short = 'R', long)]
    huge_unlink: bool,
    #[arg(long, value_name = "DIR")]
    huge_dir: Option<String>,
    #[arg(long, value_name = "MODE")]
    iova_mode: Option<String>,
    #[arg(long, value_name = "ADDRESS")]
    base_virtaddr: Option<String>,
    #[arg(long, value_name = "N")]
    msg_mempool_size: Option<String>,
    #[arg(long, value_name = "OPTIONS")]
    env_context: Option<String>,
    #[arg(long, value_name = "TOKEN")]
    vfio_vf_token: Option<String>,
    #[arg(long)]
    disable_cpumask_locks: bool,
    #[arg(long)]
    enforce_numa: bool,
}

/// NVMe-oF target.
#[derive(Debug, Parser)]
#[command(name = "nvmf_tgt", disable_version_flag = true)]
struct NvmfTgt {
    #[command(flatten)]
    serve: ServeArgs,
    /// Print the version
    #[arg(short = 'v', long, action = ArgAction::SetTrue)]
    version: bool,
}

pub(crate) fn run(args: ServeArgs, personality: Personality) -> Result<(), Failure> {
    let loaded = args.load()?;
    let json_config = match args.config_file() {
        Some(path) => read_json(&path)?.map(|config| (path, config)),
        None => None,
    };
    let options = ServeOptions {
        personality,
        loaded,
        json_config,
        ignore_json_errors: args.json_ignore_init_errors,
        wait_for_rpc: args.wait_for_rpc,
        pid_file: args.pid_file.clone(),
        source: Source::new(move || Ok(args.load()?)),
    };
    nacre_engine::daemon::serve(options, nacre_engine::methods::all()).map_err(Failure::Failed)
}

pub(crate) fn run_nvmf_tgt(args: Vec<OsString>) -> Result<(), Failure> {
    let matches = NvmfTgt::command().get_matches_from(args);
    let tgt = NvmfTgt::from_arg_matches(&matches).unwrap_or_else(|e| e.exit());
    if tgt.version {
        return super::output::line(concat!(
            "SPDK v26.09-pre (Nacre ",
            env!("CARGO_PKG_VERSION"),
            ")"
        ));
    }
    run(tgt.serve, Personality::NvmfTgt)
}

impl ServeArgs {
    /// The settings from these arguments, the environment and the file.
    pub(crate) fn load(&self) -> Result<Loaded, Failure> {
        let file = match self.config_file() {
            Some(path) if read_json(&path)?.is_some() => None,
            file => file,
        };
        let flags = self.flags()?;
        Ok(config::load(file.as_deref(), std::env::vars_os(), &flags)
            .map_err(anyhow::Error::from)?)
    }

    /// The file named, or the system's if there is one.
    fn config_file(&self) -> Option<PathBuf> {
        self.config.clone().or_else(config::system_file)
    }

    fn flags(&self) -> Result<Vec<Flag>, Failure> {
        let mut flags = Vec::new();
        let mut set = |flag, key, value: Value| flags.push(Flag { key, value, flag });
        if let Some(cores) = &self.cores {
            set("--cores", "reactor.cores", json!(cores));
        }
        if let Some(mask) = &self.cpumask {
            let cores = CoreSet::parse_mask(mask).map_err(|cause| {
                let remedy = "write a mask such as 0x3 or a list such as [0,2-5]";
                bad_cores("--cpumask", cause.to_string(), remedy)
            })?;
            set("--cpumask", "reactor.cores", json!(format!("[{cores}]")));
        }
        if let Some(list) = &self.lcores {
            let cores = lcores::processors(list).map_err(|cause| {
                let remedy =
                    "write cores such as 0-2, or threads and where they run such as 0@4,1@6";
                bad_cores("--lcores", cause, remedy)
            })?;
            set("--lcores", "reactor.cores", json!(format!("[{cores}]")));
        }
        if self.interrupt_mode {
            set("--interrupt-mode", "reactor.mode", json!("interrupt"));
        }
        if let Some(socket) = &self.rpc_socket {
            set("--rpc-socket", "rpc.socket", json!(absolute(socket)?));
        }
        if self.no_rpc_server {
            set("--no-rpc-server", "rpc.enabled", json!(false));
        }
        if !self.rpcs_allowed.is_empty() {
            set("--rpcs-allowed", "rpc.allowed", json!(self.rpcs_allowed));
        }
        if let Some(dir) = &self.data_dir {
            let dir = match dir.to_str() {
                Some("auto" | "none") => dir.clone(),
                _ => absolute(dir)?,
            };
            set("--data-dir", "data.dir", json!(dir));
        }
        if let Some(size) = self.mem_size {
            set("--mem-size", "memory.size_mb", json!(size));
        }
        if self.no_huge {
            set("--no-huge", "memory.hugepages", json!("off"));
        }
        if let Some(address) = &self.metrics_listen {
            set("--metrics-listen", "metrics.listen", json!(address));
        }
        if let Some(wish) = &self.rdma {
            set("--rdma", "nvmf.rdma", json!(wish));
        }
        if !self.listen.is_empty() {
            set("--listen", "nvmf.listen", json!(self.listen));
        }
        if self.silence_noticelog {
            set("--silence-noticelog", "log.level", json!("warning"));
        }
        if let Some(level) = &self.log_level {
            set("--log-level", "log.level", json!(level.to_lowercase()));
        }
        if let Some(format) = &self.log_format {
            set("--log-format", "log.format", json!(format));
        }
        if let Some(file) = &self.log_file {
            set("--log-file", "log.file", json!(absolute(file)?));
        }
        if !self.log_flags.is_empty() {
            set("--logflag", "log.flags", json!(self.log_flags));
        }
        Ok(flags)
    }
}

fn bad_cores(flag: &str, cause: String, remedy: &str) -> Failure {
    let problem = Problem::new(flag, "reactor.cores", cause);
    Failure::Usage(problem.remedy(remedy).to_string())
}

/// The file as JSON if it is JSON.
fn read_json(path: &Path) -> Result<Option<Value>, Failure> {
    use anyhow::Context;
    let text =
        std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let read = nacre_engine::daemon::spdk_file::read(path, &text).transpose();
    Ok(read.with_context(|| format!("{} is not JSON", path.display()))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> ServeArgs {
        NvmfTgt::try_parse_from(line.split(' '))
            .unwrap_or_else(|e| panic!("{line}: {e}"))
            .serve
    }

    #[test]
    fn spdks_command_lines_are_accepted() {
        let args = parse(
            "nvmf_tgt -m 0x6 -s 1024 -r /tmp/x.sock -i 0 -e 0xFFFF --no-huge --wait-for-rpc -L nvmf -L bdev -g -u -d -n 4 -p 1 -R --interrupt-mode --iova-mode va",
        );
        let flags = args.flags().unwrap();
        let value = |key| flags.iter().find(|f| f.key == key).map(|f| f.value.clone());
        assert_eq!(value("reactor.cores"), Some(json!("[1-2]")));
        assert_eq!(value("reactor.mode"), Some(json!("interrupt")));
        assert_eq!(value("memory.size_mb"), Some(json!(1024)));
        assert_eq!(value("memory.hugepages"), Some(json!("off")));
        assert_eq!(value("rpc.socket"), Some(json!("/tmp/x.sock")));
        assert_eq!(value("log.flags"), Some(json!(["nvmf", "bdev"])));
        assert!(args.wait_for_rpc);
        parse(
            "nvmf_tgt -m [0,2] --json /dev/null --rpcs-allowed a,b --json-ignore-init-errors --num-trace-entries 0 -A 0000:00:1f.0 --silence-noticelog",
        );
    }

    /// SPDK takes `-s 2G` as well as `-s 2048`.
    #[test]
    fn memory_with_and_without_a_unit() {
        for (text, mebibytes) in [("2048", 2048), ("2G", 2048), ("64MiB", 64), ("0", 0)] {
            let args = parse(&format!("nvmf_tgt -s {text}"));
            assert_eq!(args.mem_size, Some(mebibytes), "{text}");
        }
        for text in ["", "-1", "2X", "1e3"] {
            let line = ["nvmf_tgt", "-s", text];
            assert!(NvmfTgt::try_parse_from(line).is_err(), "{text}");
        }
    }

    #[test]
    fn a_wrong_mask_names_the_flag() {
        let error = parse("nvmf_tgt -m 0xzz").flags().unwrap_err().to_string();
        assert!(
            error.starts_with("--cpumask: ") && error.contains("[0,2-5]"),
            "{error}"
        );
        let error = parse("nvmf_tgt --lcores 0@").flags().unwrap_err();
        let error = error.to_string();
        assert!(
            error.starts_with("--lcores: ") && error.contains("0@4,1@6"),
            "{error}"
        );
    }

    /// The reactors run on the processors of DPDK's threads.
    #[test]
    fn lcores_are_cores() {
        let flags = parse("nvmf_tgt --lcores 0@4,1@6").flags().unwrap();
        let [Flag { key, value, .. }] = &flags[..] else {
            panic!("{} flags", flags.len());
        };
        assert_eq!((*key, value), ("reactor.cores", &json!("[4,6]")));
        for twice in ["-m 0x1 --lcores 0", "--cores 0 --lcores 0"] {
            let line = format!("nvmf_tgt {twice}");
            assert!(NvmfTgt::try_parse_from(line.split(' ')).is_err(), "{line}");
        }
    }
}
