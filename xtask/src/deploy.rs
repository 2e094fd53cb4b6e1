//! The suite `deploy` of `cargo xtask test`: the manifests for Kubernetes, the Debian package, the
//! container image and the appliance's image. All but the manifests need root, and are skipped
//! without.
//!
//! Each run builds the appliance's image and boots it once. The other tests of the image take an
//! hour. `NACRE_TEST_IMAGE` says when to run them: `1` always, `changed` if its sources have
//! changed since they last passed on this machine; without it, never.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use crate::setup::{Need, need};
use crate::tally::{ScriptTest, Tally};
use crate::{deb, image, process, setup, vm};

/// Environment variable: when to run the long tests of the appliance's image.
const VARIABLE: &str = "NACRE_TEST_IMAGE";

/// Sources of the image and of its tests. The binary and Debian's packages are not among them.
const SOURCES: &[&str] = &[
    "deploy",
    "tests/deploy",
    "xtask/src/deb",
    "xtask/src/deploy.rs",
    "xtask/src/image.rs",
];

/// Time limit of a script: the machine of the appliance's image boots a dozen times.
const LIMIT: Duration = Duration::from_secs(5400);
const LIMIT_OF_PYTHON: Duration = Duration::from_secs(300);
const GIT_LIMIT: Duration = Duration::from_secs(60);

/// The tests of this suite.
const DEB: &str = "deploy-deb";
const CONTAINER: &str = "deploy-container";
const IMAGE: &str = "deploy-image";
const INSTALL: &str = "deploy-install";
/// One boot, in each run.
const BOOT: &str = "deploy-boot";
const ALL: &[&str] = &[DEB, CONTAINER, IMAGE, INSTALL, BOOT, KUBERNETES];
const KUBERNETES: &str = "deploy-kubernetes";
/// The schemas of Kubernetes, from PyPI.
const SCHEMAS: &str = "kubernetes-validate==1.37.0";

const DEB_NEEDS: &[Need] = &[need("ip", "iproute2")];
const CONTAINER_NEEDS: &[Need] = &[
    need("podman", "podman"),
    need("crun", "crun"),
    need("iptables", "iptables"),
    need("mmdebstrap", "mmdebstrap"),
    need("ip", "iproute2"),
    need("strip", "binutils"),
];
/// Packages of [`CONTAINER_NEEDS`] without a program on the search path.
const NETWORK_OF_PODMAN: &[&str] = &["netavark", "aardvark-dns"];

const IMAGE_NEEDS: &[Need] = &[
    need("qemu-system-x86_64", "qemu-system-x86"),
    need("mcopy", "mtools"),
    need("sfdisk", "fdisk"),
    need("ip", "iproute2"),
];
const FIRMWARE: &str = "/usr/share/OVMF/OVMF_CODE_4M.fd";

/// True if a filter selects a test of this suite.
pub(crate) fn matches(filter: &[String]) -> bool {
    ALL.iter().any(|name| selected(filter, name))
}

fn selected(filter: &[String], name: &str) -> bool {
    filter.is_empty() || filter.iter().any(|part| name.contains(part.as_str()))
}

/// False if [`VARIABLE`] is set: its tests keep the processors busy for minutes.
pub(crate) fn mostly_waits() -> bool {
    std::env::var_os(VARIABLE).is_none()
}

/// Runs the suite in parallel with `tests`, which leave a fifth of the time of two processors
/// unused. Returns the results of both.
pub(crate) fn beside(
    root: &Path,
    filter: &[String],
    nacre: Option<&Path>,
    tests: impl FnOnce() -> Result<Tally>,
) -> Result<Tally> {
    std::thread::scope(|scope| {
        let suite = scope.spawn(|| {
            let start = Instant::now();
            let result = run(root, filter, nacre);
            (result, start.elapsed().as_secs_f64())
        });
        let tests = tests();
        let (result, took) = match suite.join() {
            Ok(ended) => ended,
            Err(panic) => std::panic::resume_unwind(panic),
        };
        let mut tally = tests.unwrap_or_else(|error| Tally::of_error("tests", &error));
        match result {
            Ok(deploy) => {
                println!("deploy: {deploy} ({took:.0} s)");
                tally.add(deploy);
            }
            Err(error) => tally.add(Tally::of_error("deploy", &error)),
        }
        Ok(tally)
    })
}

pub(crate) fn run(root: &Path, filter: &[String], nacre: Option<&Path>) -> Result<Tally> {
    let mut tally = Tally::default();
    if selected(filter, KUBERNETES) {
        tally.add(manifests(root, &vm::debug_nacre(root, nacre)?)?);
    }
    if !setup::is_root()? {
        for name in [DEB, CONTAINER, IMAGE, INSTALL, BOOT] {
            tally.skip(format!("{name}: namespaces and dpkg need root"));
        }
        return Ok(tally);
    }
    let nacre = vm::debug_nacre(root, nacre)?;
    tally.add(package_and_container(root, filter, &nacre)?);
    let tests: [(&'static str, Test); 2] = [(IMAGE, appliance), (INSTALL, installer)];
    for (name, test) in tests {
        if selected(filter, name) {
            tally.add(if_changed(root, name, &nacre, test)?);
        }
    }
    if selected(filter, BOOT) {
        tally.add(one_boot(root, &nacre)?);
    }
    Ok(tally)
}

/// Both tests wait much, so they run at the same time.
fn package_and_container(root: &Path, filter: &[String], nacre: &Path) -> Result<Tally> {
    let mut tally = Tally::default();
    if selected(filter, DEB) {
        setup::ensure(DEB_NEEDS)?;
    }
    // The package's test has a view of this machine's root, so nothing is installed beside it.
    let podman = match selected(filter, CONTAINER).then(podman_compose) {
        Some(Err(error)) => {
            tally.skip(format!("{CONTAINER}: {error:#}"));
            None
        }
        Some(Ok(compose)) => Some(compose),
        None => None,
    };
    std::thread::scope(|scope| -> Result<Tally> {
        let container = podman.map(|compose| scope.spawn(|| containers(root, nacre, compose)));
        let package = selected(filter, DEB).then(|| packages(root, nacre));
        let container = container.map(|container| match container.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        });
        for (name, result) in [(DEB, package), (CONTAINER, container)] {
            let Some(result) = result else { continue };
            tally.add(result.unwrap_or_else(|error| Tally::of_error(name, &error)));
        }
        Ok(tally)
    })
}

type Test = fn(&Path, &Path) -> Result<Tally>;

/// Runs the test if [`VARIABLE`] says so. Records the sources of a success.
fn if_changed(root: &Path, name: &'static str, nacre: &Path, test: Test) -> Result<Tally> {
    let record = vm::cache_dir()?.join(format!("{name}-passed"));
    let sources = sources(root)?;
    let mut tally = Tally::default();
    match std::env::var(VARIABLE).as_deref() {
        Ok("1") => {}
        Ok("changed") if std::fs::read_to_string(&record).is_ok_and(|last| last == sources) => {
            tally.skip(format!("{name}: its sources passed on this machine"));
            return Ok(tally);
        }
        Ok("changed") => {}
        _ => {
            tally.skip(format!(
                "{name}: takes minutes; {VARIABLE}=1 or {VARIABLE}=changed runs it"
            ));
            return Ok(tally);
        }
    }
    tally.add(test(root, nacre)?);
    if tally.failed == 0 && tally.skipped.is_empty() {
        std::fs::write(&record, sources)
            .with_context(|| format!("writing {}", record.display()))?;
    }
    Ok(tally)
}

/// Git's identifiers of the contents of [`SOURCES`], changes that are not committed included, and
/// the names of new files.
fn sources(root: &Path) -> Result<String> {
    let mut identifiers = String::new();
    let commands: [&[&str]; 3] = [
        &["ls-tree", "HEAD", "--"],
        &["diff", "HEAD", "--"],
        &["ls-files", "--others", "--exclude-standard", "--"],
    ];
    for arguments in commands {
        let mut git = Command::new("git");
        git.current_dir(root).args(arguments).args(SOURCES);
        identifiers += &process::capture(&mut git, GIT_LIMIT)?;
    }
    Ok(identifiers)
}

/// Goal: the manifests of `deploy/kubernetes` are valid, and fit the driver. Method:
/// `tests/deploy/kubernetes.py`, in an environment of its own.
fn manifests(root: &Path, nacre: &Path) -> Result<Tally> {
    let mut tally = Tally::default();
    let environment = vm::cache_dir()?.join(SCHEMAS);
    let python = environment.join("bin/python");
    let made = || -> Result<()> {
        let mut command = Command::new("python3");
        process::capture(
            command.args(["-m", "venv"]).arg(&environment),
            LIMIT_OF_PYTHON,
        )?;
        let mut command = Command::new(&python);
        command.args(["-m", "pip", "install", "--quiet", SCHEMAS]);
        process::capture(&mut command, LIMIT_OF_PYTHON).map(drop)
    };
    let has_schemas = || {
        let mut command = Command::new(&python);
        command.args(["-c", "import kubernetes_validate"]);
        process::capture(&mut command, LIMIT_OF_PYTHON).is_ok()
    };
    if !has_schemas()
        && let Err(error) = made()
    {
        println!("SKIPPED: {KUBERNETES}: no {SCHEMAS} from PyPI: {error:#}");
        tally.skip(format!("{KUBERNETES}: no {SCHEMAS} from PyPI: {error:#}"));
        return Ok(tally);
    }
    let mut command = Command::new(&python);
    command.arg(root.join("tests/deploy/kubernetes.py"));
    command.arg(root.join("deploy/kubernetes")).arg(nacre);
    let result = process::capture(&mut command, LIMIT_OF_PYTHON);
    match &result {
        Ok(said) => println!("{}", said.trim()),
        Err(error) => println!("{error:#}"),
    }
    tally.check(KUBERNETES, result.is_ok());
    Ok(tally)
}

/// Goal: the package installs, upgrades and is purged, and the same inputs give the same bytes.
/// Method: three packages of one binary; `tests/deploy/deb.sh`.
fn packages(root: &Path, nacre: &Path) -> Result<Tally> {
    let scratch = vm::scratch(root, "deb")?;
    let build = |version: &str, folder: &str| {
        deb::build(
            root,
            &deb::Options {
                nacre: Some(nacre.to_owned()),
                version: Some(version.to_owned()),
                out: Some(scratch.join(folder)),
                fast: true,
            },
        )
    };
    let old = build("0.0.1", "one")?;
    let again = build("0.0.1", "two")?;
    let new = build("0.0.2", "one")?;
    let mut tally = Tally::default();
    tally.check(
        "deploy-deb: two builds of the package differ",
        std::fs::read(&old)? == std::fs::read(&again)?,
    );
    tally.add(script(
        root,
        DEB,
        "deb.sh",
        &["--net"],
        &[old, new, scratch.join("copy")],
    )?);
    remove(&scratch)?;
    Ok(tally)
}

/// Installs what the test of the container needs; returns the program `podman-compose`.
fn podman_compose() -> Result<PathBuf> {
    setup::ensure(CONTAINER_NEEDS)?;
    if !Path::new("/usr/lib/podman/netavark").exists() {
        setup::apt_install(NETWORK_OF_PODMAN)?;
    }
    // Debian 12's podman-compose does not know fixed addresses.
    let programs = setup::ensure_python(&vm::cache_dir()?, "podman-compose", "podman-compose")?;
    Ok(programs.join("podman-compose"))
}

/// Goal: the container image and the compose file behave as documented. Method:
/// `tests/deploy/container.sh`, with podman.
fn containers(root: &Path, nacre: &Path, compose: PathBuf) -> Result<Tally> {
    let cache = vm::cache_dir()?.join("containers");
    setup::create_dir(&cache)?;
    let scratch = vm::scratch(root, "container")?;
    let arguments = [nacre.to_owned(), cache, scratch.clone(), compose];
    // The image is built with the machine's network.
    let tally = script(root, CONTAINER, "container.sh", &[], &arguments)?;
    remove(&scratch)?;
    Ok(tally)
}

/// Goal: the appliance's image has no secret, boots and serves; its daemon runs under systemd with
/// an encrypted credential. Method: `tests/deploy/image.sh` without bundles.
fn one_boot(root: &Path, nacre: &Path) -> Result<Tally> {
    let mut tally = Tally::default();
    if let Err(error) = machine_is_ready() {
        tally.skip(format!("{BOOT}: {error:#}"));
        return Ok(tally);
    }
    let scratch = vm::scratch(root, "boot")?;
    let options = image::Options {
        nacre: Some(nacre.to_owned()),
        out: Some(scratch.join("image")),
        add: Some(root.join("tests/deploy/image-shell")),
        ..image::Options::default()
    };
    let disk = image::build(root, &options)?;
    let list = disk.with_extension("files");
    let arguments = [disk, list, nacre.to_owned(), scratch.clone()];
    tally.add(script(root, BOOT, "image.sh", &["--net"], &arguments)?);
    remove(&scratch)?;
    Ok(tally)
}

/// Goal: two builds of the appliance's image are equal; the image has no secret, boots, serves,
/// takes an update, comes back from a bad one, and loses nothing by power cuts.
/// Method: `tests/deploy/image.sh`.
fn appliance(root: &Path, nacre: &Path) -> Result<Tally> {
    let mut tally = Tally::default();
    if let Err(error) = machine_is_ready() {
        tally.skip(format!("{IMAGE}: {error:#}"));
        return Ok(tally);
    }
    let scratch = vm::scratch(root, "image")?;
    let version = deb::workspace_version(root)?;
    let build = |folder: &str, patch: &str, add: Option<&str>| {
        let options = image::Options {
            nacre: Some(nacre.to_owned()),
            version: Some(format!("{version}{patch}")),
            out: Some(scratch.join(folder)),
            key: None,
            trust: Vec::new(),
            add: add.map(|folder| root.join("tests/deploy").join(folder)),
        };
        image::build(root, &options)
    };
    let disk = build("one", "", None)?;
    let again = build("two", "", None)?;
    let files = |disk: &Path| std::fs::read_to_string(disk.with_extension("files"));
    tally.check(
        "deploy-image: files of two builds differ",
        files(&disk)? == files(&again)?,
    );
    let mut compare = Command::new("cmp");
    let same = process::capture(compare.arg(&disk).arg(&again), LIMIT);
    if let Err(error) = &same {
        println!("{error:#}");
    }
    tally.check("deploy-image: disks of two builds differ", same.is_ok());
    remove(&scratch.join("two"))?;
    // The test runs commands in the first one. The daemon of the second one does not get ready.
    let newer = build("newer", ".1", Some("image-shell"))?.with_extension("tar");
    let bad = build("bad", ".2", Some("image-bad"))?.with_extension("tar");
    let list = disk.with_extension("files");
    let arguments = [disk, list, nacre.to_owned(), scratch.clone(), newer, bad];
    tally.add(script(root, IMAGE, "image.sh", &["--net"], &arguments)?);
    remove(&scratch)?;
    Ok(tally)
}

/// Goal: the image on a USB disk installs itself to a disk that is named by its serial number, and
/// that disk serves. Method: `tests/deploy/install.sh`.
fn installer(root: &Path, nacre: &Path) -> Result<Tally> {
    let mut tally = Tally::default();
    if let Err(error) = machine_is_ready() {
        tally.skip(format!("{INSTALL}: {error:#}"));
        return Ok(tally);
    }
    let scratch = vm::scratch(root, "install")?;
    let options = image::Options {
        nacre: Some(nacre.to_owned()),
        out: Some(scratch.join("image")),
        add: Some(root.join("tests/deploy/image-shell")),
        ..image::Options::default()
    };
    let image = image::build(root, &options)?;
    let arguments = [image, nacre.to_owned(), scratch.clone()];
    tally.add(script(root, INSTALL, "install.sh", &["--net"], &arguments)?);
    remove(&scratch)?;
    Ok(tally)
}

/// Has the programs and the firmware of an emulated machine, or installs them.
fn machine_is_ready() -> Result<()> {
    setup::ensure(IMAGE_NEEDS)?;
    if Path::new(FIRMWARE).exists() {
        return Ok(());
    }
    setup::apt_install(&["ovmf"])
}

fn remove(scratch: &Path) -> Result<()> {
    std::fs::remove_dir_all(scratch).with_context(|| format!("removing {}", scratch.display()))
}

/// Runs a script of `tests/deploy` in namespaces of its own. Other tests may run beside it, so each
/// line has its name.
fn script(
    root: &Path,
    name: &'static str,
    script: &str,
    namespaces: &[&str],
    arguments: &[PathBuf],
) -> Result<Tally> {
    let path = root.join("tests/deploy").join(script);
    ensure!(path.is_file(), "there is no {}", path.display());
    let mut command = Command::new("unshare");
    command
        .args(["--mount", "--pid", "--ipc", "--uts", "--fork"])
        .args(["--kill-child", "--mount-proc"])
        .args(namespaces)
        .arg(path)
        .args(arguments);
    let start = Instant::now();
    let mut reader = ScriptTest::new(name);
    let end = process::lines(&mut command, LIMIT, |line| {
        let seconds = start.elapsed().as_secs_f64();
        println!("{name} {seconds:>3.0} s: {line}");
        reader.line(line);
    })?;
    Ok(reader.finish(end))
}
