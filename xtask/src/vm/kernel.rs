//! The stock Debian kernel, unpacked with its modules in a cache folder; nothing is installed on
//! this machine.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::{process, setup};

/// Debian's newest 6.12 for bookworm: the unsigned package, because it contains the image itself.
const PACKAGE_PATTERN: &str = r"^linux-image-6\.12\..*deb12-amd64-unsigned$";
const UNPACK_LIMIT: Duration = Duration::from_secs(300);

/// An unpacked kernel: `<dir>/boot/vmlinuz-<version>` and `<dir>/lib/modules/<version>`.
pub(super) struct Kernel {
    pub version: String,
    pub image: PathBuf,
}

/// The newest kernel in the cache, downloaded if there is none.
pub(super) fn ensure(cache: &Path) -> Result<Kernel> {
    let kernels = cache.join("kernels");
    match newest(&kernels)? {
        Some(kernel) => Ok(kernel),
        None => fetch(&kernels),
    }
}

/// Downloads the newest kernel of Debian, unless the cache has it.
pub(super) fn fetch(kernels: &Path) -> Result<Kernel> {
    setup::ensure(setup::VM)?;
    if search()?.is_empty() {
        setup::apt_update()?;
    }
    let found = search()?;
    let package = found
        .iter()
        .max_by_key(|name| version_key(name))
        .with_context(|| {
            format!(
                "no package matches {PACKAGE_PATTERN}: is this Debian 12 with its security updates?"
            )
        })?;
    let dir = kernels.join(package);
    if let Some(kernel) = open(&dir)? {
        return Ok(kernel);
    }
    println!("fetching {package}");
    let partial = super::partial(&dir)?;
    let fetched = unpack(package, &partial);
    super::finish(&partial, &dir, fetched)?;
    open(&dir)?.with_context(|| format!("{package} holds no kernel image with its modules"))
}

fn search() -> Result<Vec<String>> {
    let out = process::capture(
        Command::new("apt-cache").args(["search", "--names-only", PACKAGE_PATTERN]),
        Duration::from_secs(60),
    )?;
    Ok(out
        .lines()
        .filter_map(|line| line.split_whitespace().next())
        .map(str::to_owned)
        .collect())
}

fn unpack(package: &str, dir: &Path) -> Result<()> {
    setup::unpack(package, dir, UNPACK_LIMIT)?;
    let version = module_version(dir)?.context("the package holds no modules")?;
    process::capture(
        Command::new(process::find("depmod").context("depmod is missing")?)
            .arg("-b")
            .arg(dir)
            .arg(&version),
        UNPACK_LIMIT,
    )?;
    Ok(())
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
    let image = dir.join("boot").join(format!("vmlinuz-{version}"));
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

    #[test]
    fn versions_compare_as_numbers() {
        let old = version_key("linux-image-6.12.99+deb12-amd64-unsigned");
        let new = version_key("linux-image-6.12.117+deb12-amd64-unsigned");
        assert!(old < new);
    }
}
