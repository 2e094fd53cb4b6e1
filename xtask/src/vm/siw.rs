//! Builds the kernel's soft-iWARP driver, which Debian leaves out of its kernels, from Debian's
//! package of their source.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use super::dcbsim::make;
use super::kernel::Kernel;
use crate::setup;
use crate::{process, vm};

const FOLDER: &str = "drivers/infiniband/sw/siw";
/// The package has the source of the whole kernel.
const UNPACK_LIMIT: Duration = Duration::from_secs(300);

/// Returns the module's file. Fails if the mirror no longer has the source of this kernel.
pub(super) fn build(kernel: &Kernel, cache: &Path) -> Result<PathBuf> {
    let dir = cache.join("siw").join(&kernel.version);
    if !dir.is_dir() {
        let partial = vm::partial(&dir)?;
        let fetched = fetch(&kernel.version, &partial);
        vm::finish(&partial, &dir, fetched)?;
    }
    make(kernel, cache, &dir, "siw.ko", &["CONFIG_RDMA_SIW=m"])
}

/// Puts the driver's source into `dir`.
fn fetch(version: &str, dir: &Path) -> Result<()> {
    let (package, number) =
        source_of(version).with_context(|| format!("kernel {version} is not Debian's"))?;
    let known = process::capture(
        Command::new("apt-cache").args(["madison", &package]),
        Duration::from_secs(60),
    )?;
    let exact = known
        .split('|')
        .map(str::trim)
        .find(|field| field.strip_prefix(&number).is_some_and(|rest| rest.starts_with('-')))
        .with_context(|| {
            format!("no {package} of version {number}; `cargo xtask vm update` gets a kernel whose source the mirror has")
        })?;
    setup::unpack(&format!("{package}={exact}"), dir, UNPACK_LIMIT)?;
    let archive = dir.join("usr/src").join(format!("{package}.tar.xz"));
    let mut command = Command::new("tar");
    command.arg("-xJf").arg(&archive).arg("-C").arg(dir);
    command.args(["--strip-components=5", &format!("{package}/{FOLDER}")]);
    process::capture(&mut command, UNPACK_LIMIT)?;
    std::fs::remove_dir_all(dir.join("usr")).with_context(|| format!("removing {}", dir.display()))
}

/// The source package of `6.12.117+deb12-amd64`, and the start of its version.
fn source_of(version: &str) -> Option<(String, String)> {
    let number: String = version
        .chars()
        .take_while(|c| c.is_ascii_digit() || *c == '.')
        .collect();
    let (series, _) = number.rsplit_once('.')?;
    series
        .contains('.')
        .then(|| (format!("linux-source-{series}"), number.clone()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_are_those_of_the_kernel() {
        let expected = ("linux-source-6.12".to_owned(), "6.12.117".to_owned());
        assert_eq!(source_of("6.12.117+deb12-amd64"), Some(expected));
        assert_eq!(source_of("6.12"), None);
        assert_eq!(source_of("next"), None);
    }
}
