//! The stock Debian kernels, unpacked with their modules in a cache folder; nothing is installed on
//! this machine.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::ValueEnum;

use crate::setup::{Suite, Unavailable};
use crate::{process, setup};

const UNPACK_LIMIT: Duration = Duration::from_secs(300);

/// A series of Debian's kernels. A guest boots the newest one of it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Series {
    /// 6.12 of Debian 12.
    #[default]
    Usual,
    /// 6.18 of Debian 13's backports, for hosts with secure channel concatenation.
    Newer,
}

impl Series {
    /// Names of packages; the first pattern with a match counts.
    fn patterns(self) -> &'static [&'static str] {
        match self {
            // The unsigned package, because it contains the image itself.
            Self::Usual => &[r"^linux-image-6\.12\..*deb12-amd64-unsigned$"],
            // Backports may drop a series: then the newest kernel that they have.
            Self::Newer => &[
                r"^linux-image-6\.18\.[0-9.]+\+deb13-amd64$",
                r"^linux-image-[0-9.]+\+deb13-amd64$",
            ],
        }
    }

    /// The folder of its kernels in the cache.
    fn folder(self, cache: &Path) -> PathBuf {
        cache.join(match self {
            Self::Usual => "kernels",
            Self::Newer => "kernels-newer",
        })
    }

    /// What to ask if no package matches.
    fn question(self) -> &'static str {
        match self {
            Self::Usual => "is this Debian 12 with its security updates?",
            Self::Newer => "has the mirror trixie-backports?",
        }
    }

    fn suite(self, cache: &Path) -> Result<Suite> {
        match self {
            Self::Usual => Ok(Suite::of_this_machine()),
            Self::Newer => Suite::open("trixie-backports", &cache.join("lists-newer")),
        }
    }
}

/// An unpacked kernel: `<dir>/boot/vmlinuz-<version>` and `<dir>/lib/modules/<version>`.
pub(super) struct Kernel {
    pub version: String,
    pub image: PathBuf,
}

/// The newest kernel of the series in the cache, downloaded if there is none. The error of an
/// archive that lacks it has [`Unavailable`].
pub(super) fn ensure(series: Series, cache: &Path) -> Result<Kernel> {
    match newest(&series.folder(cache))? {
        Some(kernel) => Ok(kernel),
        // Old lists in the cache name packages that the mirror has dropped.
        None => fetch(series, cache, series == Series::Newer),
    }
}

/// Downloads the newest kernel of the series that the archive has now, unless the cache has it.
pub(super) fn update(series: Series, cache: &Path) -> Result<Kernel> {
    let may_refresh = series == Series::Newer || setup::is_root()?;
    if !may_refresh {
        println!(
            "only root refreshes the package lists of this machine: as root, type: apt-get update"
        );
    }
    fetch(series, cache, may_refresh)
}

fn fetch(series: Series, cache: &Path, refreshes: bool) -> Result<Kernel> {
    setup::ensure(setup::VM)?;
    let suite = series.suite(cache)?;
    let package = latest(series, &suite, refreshes)?;
    let dir = series.folder(cache).join(&package);
    if let Some(kernel) = open(&dir)? {
        return Ok(kernel);
    }
    println!("fetching {package}");
    let partial = super::partial(&dir)?;
    let fetched = unpack(&suite, &package, &partial);
    super::finish(&partial, &dir, fetched)?;
    open(&dir)?.with_context(|| format!("{package} holds no kernel image with its modules"))
}

/// The newest package of the series. `refreshes`: the lists are refreshed first, and not only if
/// they have none.
fn latest(series: Series, suite: &Suite, refreshes: bool) -> Result<String> {
    if !refreshes && let Some(package) = search(series, suite)? {
        return Ok(package);
    }
    suite.update()?;
    search(series, suite)?
        .with_context(|| {
            let pattern = series.patterns()[0];
            format!("no package matches {pattern}: {}", series.question())
        })
        .context(Unavailable)
}

fn search(series: Series, suite: &Suite) -> Result<Option<String>> {
    for pattern in series.patterns() {
        let found = suite.search(pattern)?;
        let newest = found.into_iter().max_by_key(|name| version_key(name));
        if newest.is_some() {
            return Ok(newest);
        }
    }
    Ok(None)
}

fn unpack(suite: &Suite, package: &str, dir: &Path) -> Result<()> {
    suite.unpack(package, dir, UNPACK_LIMIT)?;
    // From 7.2 on image and modules have packages of their own.
    let version = package.trim_start_matches("linux-image-");
    for part in ["binary", "modules"] {
        let part = format!("linux-{part}-{version}");
        if !suite.search(&exactly(&part))?.is_empty() {
            suite.unpack(&part, dir, UNPACK_LIMIT)?;
        }
    }
    // Debian 13 has no /lib of its own, and from 7.2 on the image is beside the modules.
    rename_if_there(&dir.join("usr/lib/modules"), &dir.join("lib/modules"))?;
    let version = module_version(dir)?.context("the package holds no modules")?;
    let beside = dir.join("lib/modules").join(&version).join("vmlinuz");
    rename_if_there(&beside, &image(dir, &version))?;
    process::capture(
        Command::new(process::find("depmod").context("depmod is missing")?)
            .arg("-b")
            .arg(dir)
            .arg(&version),
        UNPACK_LIMIT,
    )?;
    Ok(())
}

fn rename_if_there(from: &Path, to: &Path) -> Result<()> {
    if !from.exists() {
        return Ok(());
    }
    if let Some(parent) = to.parent() {
        setup::create_dir(parent)?;
    }
    std::fs::rename(from, to).with_context(|| format!("moving {}", from.display()))
}

fn image(dir: &Path, version: &str) -> PathBuf {
    dir.join("boot").join(format!("vmlinuz-{version}"))
}

/// A pattern that matches this name of a package.
fn exactly(name: &str) -> String {
    format!("^{}$", name.replace('.', r"\.").replace('+', r"\+"))
}

fn newest(kernels: &Path) -> Result<Option<Kernel>> {
    let Ok(entries) = std::fs::read_dir(kernels) else {
        return Ok(None);
    };
    let mut names: Vec<String> = entries
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| !name.starts_with('.'))
        .collect();
    names.sort_by_key(|name| std::cmp::Reverse(version_key(name)));
    for name in names {
        if let Some(kernel) = open(&kernels.join(name))? {
            return Ok(Some(kernel));
        }
    }
    Ok(None)
}

fn open(dir: &Path) -> Result<Option<Kernel>> {
    let Some(version) = module_version(dir)? else {
        return Ok(None);
    };
    let image = image(dir, &version);
    let indexed = dir
        .join("lib/modules")
        .join(&version)
        .join("modules.dep.bin");
    if !image.is_file() || !indexed.is_file() {
        return Ok(None);
    }
    Ok(Some(Kernel { version, image }))
}

fn module_version(dir: &Path) -> Result<Option<String>> {
    let Ok(mut entries) = std::fs::read_dir(dir.join("lib/modules")) else {
        return Ok(None);
    };
    match entries.next() {
        Some(entry) => match entry?.file_name().into_string() {
            Ok(name) => Ok(Some(name)),
            Err(name) => bail!("a kernel version that is no text: {name:?}"),
        },
        None => Ok(None),
    }
}

/// The numbers in a package name, so that 6.12.117 counts as newer than 6.12.99.
fn version_key(name: &str) -> Vec<u64> {
    name.split(|c: char| !c.is_ascii_digit())
        .filter_map(|digits| digits.parse().ok())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An archive of packages with these names, without the packages.
    fn publish(archive: &Path, names: &[&str]) {
        let packages = names.iter().map(|name| {
            format!(
                "Package: {name}\nVersion: 1\nArchitecture: amd64\nFilename: ./none.deb\nSize: 5\n\
                 SHA256: {}\nDescription: a kernel\n\n",
                "0".repeat(64)
            )
        });
        std::fs::create_dir_all(archive).unwrap();
        std::fs::write(archive.join("Packages"), packages.collect::<String>()).unwrap();
    }

    fn is_skipped(name: &str) -> bool {
        let is_skipped = process::find("apt-get").is_none();
        if is_skipped {
            use std::io::Write;
            let _ = writeln!(std::io::stderr(), "SKIPPED: {name}: no apt-get");
        }
        is_skipped
    }

    /// Goal: an update finds a kernel that is newer than the lists in the cache. Method: an archive
    /// of files gets a second kernel after the first search.
    #[test]
    fn an_update_refreshes_the_lists() {
        if is_skipped("an_update_refreshes_the_lists") {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let archive = dir.path().join("archive");
        let source = format!("deb [trusted=yes arch=amd64] file:{} ./", archive.display());
        let suite = Suite::of_source(&source, &dir.path().join("lists")).unwrap();
        let latest = |refreshes| latest(Series::Newer, &suite, refreshes);
        let (old, new) = (
            "linux-image-6.18.9+deb13-amd64",
            "linux-image-6.18.10+deb13-amd64",
        );
        publish(&archive, &[old, "linux-image-6.18.11+deb13-cloud-amd64"]);
        assert_eq!(latest(false).unwrap(), old, "no lists yet");
        publish(&archive, &[old, new]);
        assert_eq!(latest(false).unwrap(), old, "the lists in the cache");
        assert_eq!(latest(true).unwrap(), new);
        publish(&archive, &["linux-image-amd64"]);
        let error = latest(true).unwrap_err();
        assert!(error.is::<Unavailable>(), "{error:#}");
        let unpacked = suite.unpack("linux-image-amd64", dir.path(), UNPACK_LIMIT);
        let error = unpacked.unwrap_err();
        assert!(error.is::<Unavailable>(), "{error:#}");
    }

    /// Goal: lists without a signature are no absence of a kernel. Method: an archive of files that
    /// is not trusted; and one that is not there.
    #[test]
    fn an_unsigned_archive_is_an_error() {
        if is_skipped("an_unsigned_archive_is_an_error") {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let archive = dir.path().join("archive");
        publish(&archive, &["linux-image-6.18.9+deb13-amd64"]);
        std::fs::write(archive.join("Release"), "Suite: test\n").unwrap();
        for (options, place, is_unavailable) in [
            ("arch=amd64", "archive", false),
            ("trusted=yes arch=amd64", "none", true),
        ] {
            let place = dir.path().join(place);
            let source = format!("deb [{options}] file:{} ./", place.display());
            let suite = Suite::of_source(&source, &dir.path().join("lists")).unwrap();
            let error = latest(Series::Newer, &suite, true).unwrap_err();
            assert_eq!(error.is::<Unavailable>(), is_unavailable, "{error:#}");
        }
    }

    #[test]
    fn versions_compare_as_numbers() {
        let old = version_key("linux-image-6.12.99+deb12-amd64-unsigned");
        let new = version_key("linux-image-6.12.117+deb12-amd64-unsigned");
        assert!(old < new);
    }

    #[test]
    fn a_pattern_matches_one_name() {
        let pattern = exactly("linux-modules-7.3.4+deb13-amd64");
        assert_eq!(pattern, r"^linux-modules-7\.3\.4\+deb13-amd64$");
    }
}
