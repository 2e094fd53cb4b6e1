//! `cargo xtask image`: the disk image of the appliance, by `deploy/image/build.sh`. Needs root for
//! its mounts; everything else comes from Debian by package name.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Result, bail};
use clap::Args;

use crate::setup::{self, Need, need};
use crate::{deb, process, vm};

/// The base trees alone take minutes on a slow mirror.
const LIMIT: Duration = Duration::from_secs(1800);

const NEEDS: &[Need] = &[
    need("mmdebstrap", "mmdebstrap"),
    need("openssl", "openssl"),
    need("python3", "python3"),
];

#[derive(Args, Default)]
pub(crate) struct Options {
    /// Put this `nacre` in the image instead of building one with the profile `dist`.
    #[arg(long)]
    pub nacre: Option<PathBuf>,
    /// The image's version [default: the workspace's].
    #[arg(long)]
    pub version: Option<String>,
    /// The folder for the image [default: `image` in the target folder].
    #[arg(long)]
    pub out: Option<PathBuf>,
    /// Private Ed25519 key (PEM) that signs the update bundle [default: a test key].
    #[arg(long)]
    pub key: Option<PathBuf>,
    /// A further public key in PEM whose bundles the image accepts; several times for several keys.
    #[arg(long)]
    pub trust: Vec<PathBuf>,
    /// A folder whose files are copied over the root file system: additions of your site.
    #[arg(long)]
    pub add: Option<PathBuf>,
}

pub(crate) fn run(root: &Path, options: &Options) -> Result<ExitCode> {
    println!("{}", build(root, options)?.display());
    Ok(ExitCode::SUCCESS)
}

/// Builds the image; returns its path.
pub(crate) fn build(root: &Path, options: &Options) -> Result<PathBuf> {
    if !setup::is_root()? {
        bail!("an image needs root: its files belong to root, and its trees are mounted");
    }
    setup::ensure(NEEDS)?;
    let out = match &options.out {
        Some(out) => out.clone(),
        None => crate::target_dir(root).join("image"),
    };
    setup::create_dir(&out)?;
    let out = out.canonicalize()?;
    let version = match &options.version {
        Some(version) => version.clone(),
        None => deb::workspace_version(root)?,
    };
    let package = deb::build(
        root,
        &deb::Options {
            nacre: options.nacre.clone(),
            version: Some(version.clone()),
            out: Some(out.clone()),
            // The image is compressed as a whole.
            fast: true,
        },
    )?;
    let cache = vm::cache_dir()?.join("image");
    setup::create_dir(&cache)?;
    let mut command = Command::new("unshare");
    command
        .arg("--mount")
        .arg(root.join("deploy/image/build.sh"))
        .arg(&package)
        .args(&options.trust)
        .env("CACHE", &cache)
        .env("OUT", &out)
        .env("VERSION", &version)
        .env("SOURCE_DATE_EPOCH", deb::commit_time(root)?);
    for (variable, path) in [("KEY", &options.key), ("ADD", &options.add)] {
        match path {
            Some(path) => command.env(variable, path),
            None => command.env_remove(variable),
        };
    }
    let end = process::stream(&mut command, LIMIT, |_| {})?;
    if !end.success() {
        bail!("deploy/image/build.sh: {end}");
    }
    std::fs::remove_file(&package)?;
    Ok(out.join(format!("nacre_{version}.raw")))
}
