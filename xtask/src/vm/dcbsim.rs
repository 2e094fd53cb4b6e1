//! Builds `tests/vm/dcbsim`, the kernel module with DCB for tests, against the guests' kernel.
//!
//! No driver with DCB in a Debian kernel works without its card, and `netdevsim` is not built.
//! Debian's headers are unpacked into the cache, never installed.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use super::kernel::Kernel;
use crate::setup::{self, Need};
use crate::{process, vm};

/// Debian 12's kernels are built by this compiler, and modules should be too.
const COMPILER: &str = "gcc-12";
const TOOLS: &[Need] = &[
    Need {
        program: "make",
        package: "make",
    },
    Need {
        program: COMPILER,
        package: COMPILER,
    },
];
const BUILD_LIMIT: Duration = Duration::from_secs(300);

/// Returns the module's file. Fails if the mirror no longer has the headers of this kernel.
pub(super) fn build(root: &Path, kernel: &Kernel, cache: &Path) -> Result<PathBuf> {
    let source = root.join("tests/vm/dcbsim");
    let folder = crate::target_dir(root)
        .join("vm/dcbsim")
        .join(&kernel.version);
    setup::create_dir(&folder)?;
    let folder = folder.canonicalize()?;
    for name in ["dcbsim.c", "Kbuild"] {
        let text = std::fs::read(source.join(name)).with_context(|| format!("reading {name}"))?;
        let copy = folder.join(name);
        // An unchanged file keeps its time, so that make has nothing to do.
        if std::fs::read(&copy).ok().as_ref() != Some(&text) {
            std::fs::write(&copy, text).with_context(|| format!("writing {}", copy.display()))?;
        }
    }
    make(kernel, cache, &folder, "dcbsim.ko", &[])
}

/// Builds the module whose source is in `folder`. `settings`: further arguments of make.
pub(super) fn make(
    kernel: &Kernel,
    cache: &Path,
    folder: &Path,
    module: &str,
    settings: &[&str],
) -> Result<PathBuf> {
    setup::ensure(TOOLS)?;
    let headers = headers(&kernel.version, cache)?;
    let mut command = Command::new("make");
    command.arg("-C").arg(&headers);
    command.arg(format!("M={}", folder.display()));
    // Without pahole, make would delete the module after building it.
    command.args([
        &format!("CC={COMPILER}"),
        "CONFIG_DEBUG_INFO_BTF_MODULES=",
        "modules",
    ]);
    process::capture(command.args(settings), BUILD_LIMIT)?;
    let module = folder.join(module);
    module
        .canonicalize()
        .with_context(|| format!("make has made no {}", module.display()))
}

/// The folder of the kernel's headers, for `make -C`.
fn headers(version: &str, cache: &Path) -> Result<PathBuf> {
    let dir = cache.join("headers").join(version);
    let inside = dir.join("usr/src").join(format!("linux-headers-{version}"));
    if inside.is_dir() {
        return Ok(inside);
    }
    let packages =
        packages(version).with_context(|| format!("kernel {version} is not Debian's"))?;
    let partial = vm::partial(&dir)?;
    let fetched = packages
        .iter()
        .try_for_each(|package| setup::unpack(package, &partial, BUILD_LIMIT))
        .and_then(|()| {
            let makefile = partial
                .join("usr/src")
                .join(format!("linux-headers-{version}"))
                .join("Makefile");
            let text = std::fs::read_to_string(&makefile)
                .with_context(|| format!("reading {}", makefile.display()))?;
            // The one absolute path in the packages.
            let text = text.replace(
                "include /usr/src/",
                &format!("include {}/usr/src/", dir.display()),
            );
            std::fs::write(&makefile, text)
                .with_context(|| format!("writing {}", makefile.display()))
        });
    vm::finish(&partial, &dir, fetched).with_context(|| {
        format!("headers of kernel {version}; `cargo xtask vm update` gets a kernel whose headers the mirror has")
    })?;
    Ok(inside)
}

/// The packages of the headers of `6.12.117+deb12-amd64`.
fn packages(version: &str) -> Option<[String; 3]> {
    let (base, _) = version.rsplit_once('-')?;
    Some([
        format!("linux-headers-{version}"),
        format!("linux-headers-{base}-common"),
        format!("linux-kbuild-{base}"),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_of_the_kernels_version() {
        let packages = packages("6.12.117+deb12-amd64").unwrap();
        assert_eq!(
            packages,
            [
                "linux-headers-6.12.117+deb12-amd64",
                "linux-headers-6.12.117+deb12-common",
                "linux-kbuild-6.12.117+deb12",
            ]
        );
        assert_eq!(super::packages("6.12.117"), None);
    }
}
