//! `cargo xtask cluster --scale`: many nodes and volumes on one member of etcd, without daemons.
//!
//! The nodes are those of the test `scale` of `nacre-cluster-node`: the product's leases and store,
//! with engines that open volumes at once.

use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Result, bail};

use crate::process::{self, Group};

const BUILD_LIMIT: Duration = Duration::from_secs(1800);
/// Time limit of the test, without its build. The test gives up its start after 15 minutes.
const LIMIT: Duration = Duration::from_secs(1500);
const TEST: [&str; 5] = [
    "--locked",
    "--package",
    "nacre-cluster-node",
    "--test",
    "scale",
];

/// A value of `--scale`, within the designed limits of a cluster.
pub(super) fn nodes_and_volumes(text: &str) -> Result<String, String> {
    let is_good = text.split_once(',').is_some_and(|(nodes, volumes)| {
        let nodes = nodes
            .parse()
            .is_ok_and(|nodes: u64| (4..=128).contains(&nodes));
        let volumes = volumes
            .parse()
            .is_ok_and(|one: u64| (1..=16_384).contains(&one));
        nodes && volumes
    });
    if is_good {
        return Ok(text.to_owned());
    }
    Err("name 4 to 128 nodes and 1 to 16384 volumes, as in 100,10000".to_owned())
}

/// Runs the test at this size.
pub(super) fn measure(root: &Path, scale: &str, etcd: &Path) -> Result<ExitCode> {
    process::catch_interrupts()?;
    let cargo = |more: &[&str]| {
        let mut command = Command::new(env!("CARGO"));
        command.current_dir(root).arg("test").args(TEST).args(more);
        command
    };
    let built = Group::spawn(&mut cargo(&["--no-run"]))?.wait(BUILD_LIMIT)?;
    if !built.success() {
        bail!("building the test: {built}");
    }
    let mut run = cargo(&[
        "--",
        "--exact",
        "a_cluster_of_the_designed_size",
        "--nocapture",
    ]);
    run.env("NACRE_TEST_SCALE", scale)
        .env("NACRE_TEST_ETCD", etcd);
    let ended = Group::spawn(&mut run)?.wait(LIMIT)?;
    if !ended.success() {
        eprintln!("cluster --scale {scale}: {ended}");
    }
    Ok(ExitCode::from(u8::from(!ended.success())))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: a size is refused before a build, with the limits.
    #[test]
    fn sizes_have_limits() {
        for good in ["100,10000", "4,1", "128,16384"] {
            assert!(nodes_and_volumes(good).is_ok(), "{good}");
        }
        for bad in [
            "", "100", "3,10", "129,10", "10,0", "10,16385", "a,b", "10,10,10",
        ] {
            assert!(nodes_and_volumes(bad).is_err(), "{bad}");
        }
    }
}
