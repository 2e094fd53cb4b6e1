//! `cargo xtask deb`: the Debian package. The folder `deploy/deb` has its control files; this
//! program adds what the build knows: the binary, its version, libraries, manual pages and
//! completions.
//!
//! ```text
//! nacre (stripped), deploy/*, nacre's own help ── tree ── dpkg-deb ── nacre_VERSION_amd64.deb
//! ```
//!
//! The same inputs give the same bytes: times come from the last commit.

mod manual;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;
use regex::Regex;

use crate::process::{capture, shown};
use crate::setup::{self, Need, need};

const BUILD_LIMIT: Duration = Duration::from_secs(3600);
const LIMIT: Duration = Duration::from_secs(300);

/// Where the package puts `nacre`. The units in `deploy` have the path of an installation by hand.
const INSTALLED: &str = "/usr/bin/nacre";
const BY_HAND: &str = "/usr/local/bin/nacre";

/// The folder of the package's documents.
const DOCUMENTS: &str = "usr/share/doc/nacre";

pub(crate) const NEEDS: &[Need] = &[need("dpkg-deb", "dpkg"), need("objdump", "binutils")];

#[derive(Args)]
pub(crate) struct Options {
    /// Package this `nacre` instead of building one with the profile `dist`.
    #[arg(long)]
    pub nacre: Option<PathBuf>,
    /// The package's version [default: the workspace's].
    #[arg(long)]
    pub version: Option<String>,
    /// The folder for the package [default: `debian` in the target folder].
    #[arg(long)]
    pub out: Option<PathBuf>,
    /// Compress little, which takes a tenth of the time: for tests.
    #[arg(long)]
    pub fast: bool,
}

pub(crate) fn run(root: &Path, options: &Options) -> Result<ExitCode> {
    let package = build(root, options)?;
    println!("{}", package.display());
    Ok(ExitCode::SUCCESS)
}

/// Builds the package; returns its path.
pub(crate) fn build(root: &Path, options: &Options) -> Result<PathBuf> {
    setup::ensure(NEEDS)?;
    let nacre = match &options.nacre {
        Some(path) => path.clone(),
        None => dist(root)?,
    };
    let out = match &options.out {
        Some(out) => out.clone(),
        None => crate::target_dir(root).join("debian"),
    };
    let version = match &options.version {
        Some(version) => version.clone(),
        None => workspace_version(root)?,
    };
    let tree = Tree::create(&out)?;
    let time = commit_time(root)?;
    binary(&tree, &nacre)?;
    units(&tree, root)?;
    documents(&tree, root, &version, &time)?;
    manual::write(&tree, root, &nacre, &version)?;
    completions(&tree, &nacre)?;
    control(&tree, root, &nacre, &version)?;
    pack(&tree, &out, &version, &time, options.fast)
}

fn dist(root: &Path) -> Result<PathBuf> {
    let arguments = ["--profile", "dist", "--locked", "-p", "nacre-engine-cli"];
    setup::cargo_build(root, &arguments, BUILD_LIMIT)?;
    Ok(crate::target_dir(root).join("dist/nacre"))
}

pub(crate) fn workspace_version(root: &Path) -> Result<String> {
    let manifest = fs::read_to_string(root.join("Cargo.toml")).context("reading Cargo.toml")?;
    let version = manifest
        .lines()
        .find_map(|line| line.strip_prefix("version = \"")?.strip_suffix('"'));
    Ok(version.context("Cargo.toml has no version")?.to_owned())
}

/// Seconds of the last commit, or of `SOURCE_DATE_EPOCH`: the time of all files.
pub(crate) fn commit_time(root: &Path) -> Result<String> {
    if let Ok(time) = std::env::var("SOURCE_DATE_EPOCH") {
        return Ok(time);
    }
    let mut git = Command::new("git");
    git.current_dir(root).args(["log", "-1", "--format=%ct"]);
    Ok(capture(&mut git, LIMIT)?.trim().to_owned())
}

/// The package's files before they are packed; removed on drop.
struct Tree {
    root: PathBuf,
}

impl Tree {
    fn create(out: &Path) -> Result<Self> {
        let root = out.join(format!(".tree-{}", std::process::id()));
        setup::create_dir(&root)?;
        fs::set_permissions(&root, fs::Permissions::from_mode(0o755))?;
        Ok(Self { root })
    }

    /// Writes a file whose mode does not depend on the umask; makes its folders.
    fn write(&self, path: &str, bytes: impl AsRef<[u8]>, mode: u32) -> Result<()> {
        let full = self.place(path)?;
        fs::write(&full, bytes).with_context(|| format!("writing {}", full.display()))?;
        fs::set_permissions(&full, fs::Permissions::from_mode(mode))?;
        Ok(())
    }

    /// The path of a file to write; its folders exist afterwards.
    fn place(&self, path: &str) -> Result<PathBuf> {
        let mut dir = self.root.clone();
        let (folders, name) = path.rsplit_once('/').unwrap_or(("", path));
        for folder in folders.split('/').filter(|folder| !folder.is_empty()) {
            dir.push(folder);
            setup::create_dir(&dir)?;
            fs::set_permissions(&dir, fs::Permissions::from_mode(0o755))?;
        }
        Ok(dir.join(name))
    }

    /// Writes a file compressed by gzip, without its time and name.
    fn write_compressed(&self, path: &str, text: &str) -> Result<()> {
        self.write(path, text, 0o644)?;
        let mut gzip = Command::new("gzip");
        gzip.args(["-9", "-n"]).arg(self.root.join(path));
        capture(&mut gzip, LIMIT).map(drop)
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.root) {
            eprintln!("warning: cannot remove {}: {error}", self.root.display());
        }
    }
}

fn binary(tree: &Tree, nacre: &Path) -> Result<()> {
    let place = tree.place("usr/bin/nacre")?;
    let mut strip = Command::new("strip");
    strip.args(["--strip-unneeded", "--remove-section=.comment", "-o"]);
    capture(strip.arg(&place).arg(nacre), LIMIT)?;
    fs::set_permissions(&place, fs::Permissions::from_mode(0o755))?;
    Ok(())
}

fn units(tree: &Tree, root: &Path) -> Result<()> {
    for name in ["nacre.service", "nacre-hugepages.service"] {
        let unit = read(root, &format!("deploy/{name}"))?;
        let placed = unit.replace(BY_HAND, INSTALLED);
        if placed == unit {
            bail!("deploy/{name} does not start {BY_HAND}");
        }
        // Not below /usr: Debian 12 has units here.
        tree.write(&format!("lib/systemd/system/{name}"), placed, 0o644)?;
    }
    for (from, to) in [
        ("deploy/deb/nacre.toml", "etc/nacre/nacre.toml"),
        (
            "deploy/deb/nacre-hugepages.default",
            "etc/default/nacre-hugepages",
        ),
        ("deploy/deb/nacre.sysusers", "usr/lib/sysusers.d/nacre.conf"),
    ] {
        tree.write(to, read(root, from)?, 0o644)?;
    }
    Ok(())
}

fn documents(tree: &Tree, root: &Path, version: &str, time: &str) -> Result<()> {
    for (from, to) in [
        ("deploy/deb/copyright", "copyright"),
        ("nacre.sample.toml", "nacre.sample.toml"),
    ] {
        tree.write(&format!("{DOCUMENTS}/{to}"), read(root, from)?, 0o644)?;
    }
    for name in ["alerts.yml", "grafana-nacre.json"] {
        let text = read(root, &format!("deploy/{name}"))?;
        tree.write(&format!("usr/share/nacre/{name}"), text, 0o644)?;
    }
    let changes = read(root, "CHANGELOG.md")?;
    tree.write_compressed(&format!("{DOCUMENTS}/NEWS"), &changes)?;
    let mut date = Command::new("date");
    date.args(["-u", "-R", "-d", &format!("@{time}")]);
    let date = capture(date.env("LC_ALL", "C"), LIMIT)?;
    let entry = format!(
        "nacre ({version}) unstable; urgency=medium\n\n  * NEWS.gz has the changes.\n\n -- {}  {}\n",
        maintainer(),
        date.trim()
    );
    tree.write_compressed(&format!("{DOCUMENTS}/changelog"), &entry)
}

fn completions(tree: &Tree, nacre: &Path) -> Result<()> {
    for (shell, path) in [
        ("bash", "usr/share/bash-completion/completions/nacre"),
        ("zsh", "usr/share/zsh/vendor-completions/_nacre"),
        ("fish", "usr/share/fish/vendor_completions.d/nacre.fish"),
    ] {
        let script = capture(Command::new(nacre).args(["completions", shell]), LIMIT)?;
        tree.write(path, script, 0o644)?;
    }
    Ok(())
}

/// The packager's name and address: `DEBFULLNAME` and `DEBEMAIL`, as for Debian's own tools.
fn maintainer() -> String {
    let name = std::env::var("DEBFULLNAME").unwrap_or_else(|_| "The Nacre authors".to_owned());
    let address = std::env::var("DEBEMAIL").unwrap_or_else(|_| "nacre@localhost".to_owned());
    format!("{name} <{address}>")
}

fn control(tree: &Tree, root: &Path, nacre: &Path, version: &str) -> Result<()> {
    for script in ["postinst", "prerm", "postrm"] {
        let text = read(root, &format!("deploy/deb/{script}"))?;
        tree.write(&format!("DEBIAN/{script}"), text, 0o755)?;
    }
    let conffiles = read(root, "deploy/deb/conffiles")?;
    tree.write("DEBIAN/conffiles", conffiles, 0o644)?;
    // For `dpkg --verify`. Paths are relative to the root.
    let mut sums = Command::new("find");
    sums.current_dir(&tree.root).args([
        ".", "-path", "./DEBIAN", "-prune", "-o", "-type", "f", "-printf", "%P\\n",
    ]);
    let mut files: Vec<String> = capture(&mut sums, LIMIT)?
        .lines()
        .map(str::to_owned)
        .collect();
    files.sort();
    let mut sums = Command::new("md5sum");
    let sums = capture(sums.current_dir(&tree.root).args(&files), LIMIT)?;
    tree.write("DEBIAN/md5sums", sums, 0o644)?;
    let mut size = 0;
    for file in &files {
        size += fs::metadata(tree.root.join(file))?.len().div_ceil(1024);
    }
    let dynamic = objdump("-p", nacre)?;
    let symbols = objdump("-T", nacre)?;
    let filled = read(root, "deploy/deb/control")?
        .replace("@VERSION@", version)
        .replace("@MAINTAINER@", &maintainer())
        .replace("@ARCHITECTURE@", &architecture()?)
        .replace("@SIZE@", &size.to_string())
        .replace("@DEPENDS@", &depends(&dynamic, &symbols)?);
    tree.write("DEBIAN/control", filled, 0o644)
}

fn architecture() -> Result<String> {
    let mut dpkg = Command::new("dpkg");
    let said = capture(dpkg.arg("--print-architecture"), LIMIT)?;
    Ok(said.trim().to_owned())
}

fn objdump(flag: &str, file: &Path) -> Result<String> {
    capture(Command::new("objdump").arg(flag).arg(file), LIMIT)
}

/// The packages of the libraries that the binary is linked with. The C library's version is that of
/// the newest symbol in use.
fn depends(dynamic: &str, symbols: &str) -> Result<String> {
    let needed = Regex::new(r"NEEDED\s+(\S+)")?;
    let mut packages = Vec::new();
    for found in needed.captures_iter(dynamic) {
        packages.push(match &found[1] {
            "libc.so.6" | "libm.so.6" => format!("libc6 (>= {})", newest_glibc(symbols)?),
            loader if loader.starts_with("ld-linux") => continue,
            "libgcc_s.so.1" => "libgcc-s1 (>= 4.2)".to_owned(),
            other => bail!("nacre is linked with {other}: add its package to `depends` in xtask"),
        });
    }
    packages.sort();
    packages.dedup();
    Ok(packages.join(", "))
}

fn newest_glibc(symbols: &str) -> Result<String> {
    let version = Regex::new(r"GLIBC_(\d+)\.(\d+)")?;
    let newest = version
        .captures_iter(symbols)
        .filter_map(|found| Some((found[1].parse::<u32>().ok()?, found[2].parse::<u32>().ok()?)))
        .max();
    let (major, minor) = newest.context("nacre uses no symbol of the C library")?;
    Ok(format!("{major}.{minor}"))
}

fn pack(tree: &Tree, out: &Path, version: &str, time: &str, fast: bool) -> Result<PathBuf> {
    let name = format!("nacre_{version}_{}.deb", architecture()?);
    let package = out.join(name);
    let mut dpkg = Command::new("dpkg-deb");
    dpkg.env("SOURCE_DATE_EPOCH", time)
        .arg("--root-owner-group");
    if fast {
        dpkg.args(["-Zgzip", "-z1"]);
    } else {
        // The number of threads changes the bytes.
        dpkg.args(["-Zxz", "-z6", "--threads-max=1"]);
    }
    dpkg.arg("--build").arg(&tree.root).arg(&package);
    println!("$ {}", shown(&dpkg));
    capture(&mut dpkg, LIMIT)?;
    Ok(package)
}

fn read(root: &Path, path: &str) -> Result<String> {
    fs::read_to_string(root.join(path)).with_context(|| format!("reading {path}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_become_packages() {
        let dynamic = "  NEEDED               libgcc_s.so.1\n  NEEDED               libm.so.6\n  \
            NEEDED               libc.so.6\n  NEEDED               ld-linux-x86-64.so.2\n";
        let symbols = "(GLIBC_2.9) a\n(GLIBC_2.34) b\n(GLIBC_2.2.5) c\n(GCC_3.0) d\n";
        assert_eq!(
            depends(dynamic, symbols).unwrap(),
            "libc6 (>= 2.34), libgcc-s1 (>= 4.2)"
        );
        let other = depends("  NEEDED               libz.so.1\n", symbols);
        assert!(other.unwrap_err().to_string().contains("libz.so.1"));
    }
}
