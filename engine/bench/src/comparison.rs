//! The results of `nacre bench`: it runs several workloads (*lines*) on several targets or devices
//! (*sides*), in rounds. This module has the measurements, their medians over the rounds, and the
//! ratios between sides.

use serde::Serialize;

use super::median::median;
use super::workload::Workload;

/// Version of the JSON output; incremented when a field changes its meaning or is removed.
pub const SCHEMA: &str = "nacre-bench/1";

const GIB: f64 = (1u64 << 30) as f64;

/// A whole run of `nacre bench`: the machine, the sides, and the results of each line. In each
/// round the sides run a line one after the other.
#[derive(Debug, Clone, Serialize)]
pub struct Comparison {
    pub schema: &'static str,
    /// Version of this program.
    pub version: String,
    /// Seconds since 1970 at the start.
    pub started: u64,
    pub machine: Machine,
    pub rounds: u32,
    /// Duration of each measurement.
    pub seconds: f64,
    /// Duration of the load before each measurement.
    pub warmup_seconds: f64,
    /// Number of I/O queues to each side.
    pub queues: u16,
    /// The cores of this machine's load threads; empty if they are not pinned.
    pub cores: Vec<usize>,
    /// The cores of the target, if the command started it.
    pub target_cores: Option<Vec<usize>>,
    /// Facts that limit the meaning of the figures.
    pub notes: Vec<String>,
    pub sides: Vec<Side>,
    pub lines: Vec<LineResult>,
}

/// The machine that generates the load.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Machine {
    /// The kernel's release.
    pub kernel: String,
    /// Model of the processor; the architecture if that is not known.
    pub processor: String,
    /// Number of processors that this process may use.
    pub processors: usize,
    pub memory_bytes: Option<u64>,
    /// True if a hypervisor runs this machine.
    pub is_virtual: bool,
}

/// A target or device that is compared.
#[derive(Debug, Clone, Serialize)]
pub struct Side {
    pub name: String,
    /// The address, or the path of a device.
    pub target: String,
    pub setting: Setting,
    /// The device and path of its I/O, for people.
    pub description: String,
    /// Speed of the network link to the target; `None` without a network.
    pub link_bits_per_second: Option<u64>,
}

/// The hardware or software that moves the data. Figures of one kind do not apply to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Setting {
    /// A network card.
    Hardware,
    /// RDMA emulated by the kernel: soft-RoCE or soft-iWARP.
    SoftwareRdma,
    /// Both ends on this machine.
    Loopback,
    /// A device of this machine, without a transport.
    Local,
    /// The path is not known.
    Unknown,
}

impl Setting {
    pub fn words(self) -> &'static str {
        match self {
            Self::Hardware => "hardware",
            Self::SoftwareRdma => "RDMA emulated in software",
            Self::Loopback => "loopback, no network",
            Self::Local => "no transport",
            Self::Unknown => "path unknown",
        }
    }
}

/// The results of one line.
#[derive(Debug, Clone, Serialize)]
pub struct LineResult {
    pub name: String,
    #[serde(flatten)]
    pub workload: Workload,
    /// In the order of [`Comparison::sides`].
    pub results: Vec<SideResult>,
    pub ratios: Vec<Ratio>,
}

/// The results of one side in one line.
#[derive(Debug, Clone, Serialize)]
pub struct SideResult {
    pub side: String,
    pub rounds: Vec<Outcome>,
    /// Medians of the rounds that succeeded; `None` if none did.
    pub median: Option<Figures>,
}

/// A round of one line on one side.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    Measured(Measurement),
    Failed(String),
}

/// The result of one run. Processor time is per second of the run: 1.0 is one core, all the time.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Measurement {
    pub seconds: f64,
    pub iops: f64,
    pub bytes_per_second: f64,
    pub read_latency: Option<Latency>,
    pub write_latency: Option<Latency>,
    /// Processor time of the load threads.
    pub host_cores_used: f64,
    /// Processor time of the target's process; `None`: not known.
    pub target_cores_used: Option<f64>,
    /// Processor time of the whole machine, with interrupts and kernel threads.
    pub machine_cores_used: Option<f64>,
}

/// Latencies in microseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Latency {
    pub mean_us: f64,
    pub p50_us: f64,
    pub p99_us: f64,
    #[serde(rename = "p99.9_us")]
    pub p99_9_us: f64,
}

/// Medians over the rounds that succeeded, each figure for itself.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Figures {
    /// I/O per second.
    pub iops: f64,
    /// I/O per second and per core of processor time that the load threads used.
    pub iops_per_host_core: Option<f64>,
    pub iops_per_target_core: Option<f64>,
    /// 10^6 bytes per second.
    pub megabytes_per_second: f64,
    /// Throughput as a fraction of the link's speed; `None` without a link.
    pub link_share: Option<f64>,
    pub read_latency: Option<Latency>,
    pub write_latency: Option<Latency>,
    pub host_cpu_seconds_per_gib: Option<f64>,
    pub target_cpu_seconds_per_gib: Option<f64>,
    pub machine_cpu_seconds_per_gib: Option<f64>,
}

/// A side (`side`) in relation to the first TCP side of the same line (`to`). Each ratio is the
/// median of the ratios of the rounds.
#[derive(Debug, Clone, Serialize)]
pub struct Ratio {
    pub side: String,
    pub to: String,
    /// Ratio of bytes per second: above 1, `side` is faster.
    pub throughput: f64,
    /// Ratio of mean latencies: below 1, `side` is faster. `None` for a mix of reads and writes.
    pub latency: Option<f64>,
    /// Ratio of the target's processor time per byte: below 1, `side` needs less. `None`: not
    /// known.
    pub target_cpu: Option<f64>,
    /// True if `side` uses RDMA, and not over a network card (as far as known): the ratio says
    /// nothing about RDMA hardware.
    pub emulated: bool,
}

impl Measurement {
    fn cpu_per_gib(&self, cores_used: f64) -> Option<f64> {
        (self.bytes_per_second > 0.0).then(|| cores_used / (self.bytes_per_second / GIB))
    }

    fn iops_per_core(&self, cores_used: f64) -> Option<f64> {
        (cores_used > 0.0).then(|| self.iops / cores_used)
    }

    /// The mean latency; `None` for a mix of reads and writes, which has two.
    fn mean_us(&self) -> Option<f64> {
        match (self.read_latency, self.write_latency) {
            (Some(one), None) | (None, Some(one)) => Some(one.mean_us),
            _ => None,
        }
    }
}

impl Outcome {
    fn measured(&self) -> Option<&Measurement> {
        match self {
            Self::Measured(measurement) => Some(measurement),
            Self::Failed(_) => None,
        }
    }
}

impl SideResult {
    pub fn new(side: &Side, rounds: Vec<Outcome>) -> Self {
        let median = Figures::of(&rounds, side.link_bits_per_second);
        Self {
            side: side.name.clone(),
            rounds,
            median,
        }
    }

    /// The number of failed rounds, and the cause of the last one.
    pub fn failures(&self) -> (usize, Option<&str>) {
        let mut failed = self.rounds.iter().filter_map(|outcome| match outcome {
            Outcome::Failed(why) => Some(why.as_str()),
            Outcome::Measured(_) => None,
        });
        (failed.clone().count(), failed.next_back())
    }
}

impl Figures {
    fn of(rounds: &[Outcome], link: Option<u64>) -> Option<Self> {
        let all: Vec<&Measurement> = rounds.iter().filter_map(Outcome::measured).collect();
        let middle = |of: &dyn Fn(&Measurement) -> Option<f64>| {
            median(all.iter().filter_map(|measurement| of(measurement)))
        };
        let latency = |of: &dyn Fn(&Measurement) -> Option<Latency>| {
            Some(Latency {
                mean_us: middle(&|m| Some(of(m)?.mean_us))?,
                p50_us: middle(&|m| Some(of(m)?.p50_us))?,
                p99_us: middle(&|m| Some(of(m)?.p99_us))?,
                p99_9_us: middle(&|m| Some(of(m)?.p99_9_us))?,
            })
        };
        let rate = middle(&|m| Some(m.bytes_per_second))?;
        Some(Self {
            iops: middle(&|m| Some(m.iops))?,
            iops_per_host_core: middle(&|m| m.iops_per_core(m.host_cores_used)),
            iops_per_target_core: middle(&|m| m.iops_per_core(m.target_cores_used?)),
            megabytes_per_second: rate / 1e6,
            link_share: link.map(|bits| rate * 8.0 / bits as f64),
            read_latency: latency(&|m| m.read_latency),
            write_latency: latency(&|m| m.write_latency),
            host_cpu_seconds_per_gib: middle(&|m| m.cpu_per_gib(m.host_cores_used)),
            target_cpu_seconds_per_gib: middle(&|m| m.cpu_per_gib(m.target_cores_used?)),
            machine_cpu_seconds_per_gib: middle(&|m| m.cpu_per_gib(m.machine_cores_used?)),
        })
    }
}

impl LineResult {
    /// `rounds` has the outcomes of each side, in the order of `sides`.
    pub fn new(workload: Workload, sides: &[Side], rounds: Vec<Vec<Outcome>>) -> Self {
        let results: Vec<SideResult> = sides
            .iter()
            .zip(rounds)
            .map(|(side, rounds)| SideResult::new(side, rounds))
            .collect();
        Self {
            name: workload.name(),
            workload,
            ratios: ratios(sides, &results),
            results,
        }
    }
}

impl Side {
    pub fn is_tcp(&self) -> bool {
        self.target.starts_with("tcp://")
    }

    pub fn is_rdma(&self) -> bool {
        self.target.starts_with("rdma://")
    }
}

fn ratios(sides: &[Side], results: &[SideResult]) -> Vec<Ratio> {
    let Some(base) = sides.iter().position(Side::is_tcp) else {
        return Vec::new();
    };
    let others = sides.iter().enumerate().filter(|(at, _)| *at != base);
    others
        .filter_map(|(at, side)| {
            let pairs: Vec<(&Measurement, &Measurement)> = results[at]
                .rounds
                .iter()
                .zip(&results[base].rounds)
                .filter_map(|(ours, base)| Some((ours.measured()?, base.measured()?)))
                .collect();
            let middle = |of: &dyn Fn(&Measurement) -> Option<f64>| {
                let ratio = |(ours, base): &(&Measurement, &Measurement)| {
                    Some(of(ours)? / of(base).filter(|base| *base > 0.0)?)
                };
                median(pairs.iter().filter_map(ratio))
            };
            Some(Ratio {
                side: side.name.clone(),
                to: sides[base].name.clone(),
                throughput: middle(&|m| Some(m.bytes_per_second))?,
                latency: middle(&Measurement::mean_us),
                target_cpu: middle(&|m| m.cpu_per_gib(m.target_cores_used?)),
                emulated: side.is_rdma() && side.setting != Setting::Hardware,
            })
        })
        .collect()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn measurement(iops: f64) -> Measurement {
        let mean_us = 1e6 / iops;
        Measurement {
            seconds: 1.0,
            iops,
            bytes_per_second: iops * 4096.0,
            read_latency: Some(Latency {
                mean_us,
                p50_us: mean_us * 0.9,
                p99_us: mean_us * 2.0,
                p99_9_us: mean_us * 3.0,
            }),
            write_latency: None,
            host_cores_used: 1.0,
            target_cores_used: Some(0.5),
            machine_cores_used: Some(1.75),
        }
    }

    pub(crate) fn side(name: &str, target: &str, setting: Setting) -> Side {
        Side {
            name: name.into(),
            target: target.into(),
            setting,
            description: "lo <both ends>".into(),
            link_bits_per_second: None,
        }
    }

    pub(crate) fn comparison() -> Comparison {
        let sides = vec![
            side("device", "memory", Setting::Local),
            side("tcp", "tcp://127.0.0.1:4420", Setting::Loopback),
            side("rdma", "rdma://10.9.8.1:4420", Setting::SoftwareRdma),
        ];
        let of = |rounds: &[f64]| {
            let rounds = rounds.iter().map(|iops| match iops {
                0.0 => Outcome::Failed("the connection was lost".into()),
                iops => Outcome::Measured(measurement(*iops)),
            });
            rounds.collect::<Vec<_>>()
        };
        let rounds = vec![
            of(&[900.0, 1000.0, 1100.0]),
            of(&[100.0, 200.0, 400.0]),
            of(&[150.0, 0.0, 800.0]),
        ];
        Comparison {
            schema: SCHEMA,
            version: "0.0.0".into(),
            started: 1_700_000_000,
            machine: Machine {
                kernel: "6.1".into(),
                processor: "A & B".into(),
                processors: 2,
                memory_bytes: Some(4 << 30),
                is_virtual: true,
            },
            rounds: 3,
            seconds: 1.0,
            warmup_seconds: 0.3,
            queues: 1,
            cores: vec![1],
            target_cores: Some(vec![0]),
            notes: vec!["a note".into()],
            lines: vec![LineResult::new(Workload::ALL[0], &sides, rounds)],
            sides,
        }
    }

    /// Goal: medians of the rounds that succeeded, and processor time by bytes moved.
    #[test]
    fn medians_of_the_rounds() {
        let comparison = comparison();
        let results = &comparison.lines[0].results;
        let device = results[0].median.unwrap();
        assert_eq!((device.iops, device.megabytes_per_second), (1000.0, 4.096));
        assert_eq!(device.iops_per_host_core, Some(1000.0));
        assert_eq!(device.iops_per_target_core, Some(2000.0));
        let gib_per_second = 1000.0 * 4096.0 / GIB;
        assert_eq!(device.host_cpu_seconds_per_gib, Some(1.0 / gib_per_second));
        assert_eq!(
            device.target_cpu_seconds_per_gib,
            Some(0.5 / gib_per_second)
        );
        assert_eq!(device.read_latency.unwrap().mean_us, 1000.0);
        assert_eq!(device.write_latency, None);
        let rdma = &results[2];
        assert_eq!(rdma.median.unwrap().iops, 150.0);
        assert_eq!(rdma.failures(), (1, Some("the connection was lost")));
    }

    /// Goal: ratios pair the rounds; a failed round has none; emulated RDMA is marked.
    #[test]
    fn ratios_pair_the_rounds() {
        let comparison = comparison();
        let ratios = &comparison.lines[0].ratios;
        let [device, rdma] = ratios.as_slice() else {
            panic!("{ratios:?}")
        };
        assert_eq!((device.side.as_str(), device.throughput), ("device", 5.0));
        assert!(!device.emulated);
        // 150/100 and 800/400.
        assert_eq!((rdma.to.as_str(), rdma.throughput), ("tcp", 1.5));
        assert!(rdma.emulated);
        assert!((rdma.latency.unwrap() - 0.5).abs() < 0.2);
    }

    #[test]
    fn without_a_success_there_is_no_median() {
        let side = side("tcp", "tcp://192.0.2.1", Setting::Hardware);
        let result = SideResult::new(&side, vec![Outcome::Failed("refused".into())]);
        assert!(result.median.is_none());
        assert!(ratios(std::slice::from_ref(&side), &[result]).is_empty());
    }

    #[test]
    fn share_of_the_link() {
        let side = Side {
            link_bits_per_second: Some(32_768),
            ..side("tcp", "tcp://192.0.2.1", Setting::Hardware)
        };
        let result = SideResult::new(&side, vec![Outcome::Measured(measurement(1.0))]);
        assert_eq!(result.median.unwrap().link_share, Some(1.0));
    }
}
