//! Tests of exports and restores on a machine in a temporary folder: every file that is not a whole
//! export is refused, and a power failure leaves the old state or the new one.

mod hostile;
use super::*;
use crate::run::testing::{Cuts, Recorder};

pub(super) struct Machine {
    pub(super) root: tempfile::TempDir,
    pub(super) places: Places,
}

impl Machine {
    pub(super) fn new(version: &str, files: &[(&str, &str)]) -> Self {
        let root = tempfile::tempdir().unwrap();
        let places = Places::below(root.path());
        let machine = Self { root, places };
        machine.put(
            &machine.places.os_release(),
            &format!("IMAGE_ID=nacre\nIMAGE_VERSION={version}\n"),
        );
        machine.put(&machine.places.host_name(), "storage1\n");
        fs::create_dir_all(machine.places.state()).unwrap();
        for (path, text) in files {
            machine.put(&machine.places.state().join(path), text);
        }
        machine
    }

    fn put(&self, path: &Path, text: &str) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    pub(super) fn at(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    pub(super) fn text(&self, name: &str) -> Option<String> {
        fs::read_to_string(self.places.state().join(name)).ok()
    }

    /// Everything below the folder of the state, `.nacre-restore-` folders included.
    pub(super) fn beside_state(&self) -> Vec<String> {
        crate::slots::names(self.places.state().parent().unwrap()).unwrap()
    }
}

fn large(machine: &Machine, name: &str) {
    let path = machine.places.state().join(name);
    File::create(path).unwrap().set_len(MOST_BYTES + 1).unwrap();
}

#[test]
fn a_restored_state_is_that_of_the_export() {
    let first = Machine::new(
        "0.1.0",
        &[
            ("nacre.toml", "a = 1"),
            ("web/key", "secret"),
            ("updates/x", "x"),
            (".new", "x"),
        ],
    );
    let private = fs::Permissions::from_mode(0o600);
    fs::set_permissions(first.places.state().join("web/key"), private).unwrap();
    large(&first, "disk.img");
    std::os::unix::fs::symlink("/etc/passwd", first.places.state().join("link")).unwrap();
    let file = first.at("export");
    let exported = export(&first.places, &file).unwrap();
    assert_eq!((exported.files, exported.bytes), (2, 11));
    assert_eq!(exported.left_out, ["disk.img", "link"]);
    assert_eq!(
        fs::metadata(&file).unwrap().permissions().mode() & 0o777,
        0o600
    );
    assert!(matches!(
        export(&first.places, &file),
        Err(BackupError::Exists { .. })
    ));

    let second = Machine::new("0.2.0", &[("nacre.toml", "b = 2"), ("events", "later")]);
    large(&second, "own.img");
    let restored = check(&second.places, &file, false)
        .unwrap()
        .apply(&second.places)
        .unwrap();
    assert_eq!((restored.host.as_str(), restored.files), ("storage1", 2));
    assert_eq!(restored.kept, ["own.img"]);
    assert_eq!(second.text("nacre.toml").as_deref(), Some("a = 1"));
    assert_eq!(second.text("web/key").as_deref(), Some("secret"));
    assert_eq!(second.text("events"), None);
    let mode = fs::metadata(second.places.state().join("web/key"))
        .unwrap()
        .permissions()
        .mode();
    assert_eq!(mode & 0o777, 0o600);
    let image = fs::metadata(second.places.state().join("own.img")).unwrap();
    assert_eq!(image.len(), MOST_BYTES + 1);
    let former = second.places.former_state();
    assert_eq!(
        crate::slots::names(&former).unwrap(),
        ["events", "nacre.toml"]
    );
    assert_eq!(second.beside_state(), ["nacre", "nacre.before-restore"]);
    // Again: the former state of the last restore makes room.
    check(&second.places, &file, false)
        .unwrap()
        .apply(&second.places)
        .unwrap();
    assert_eq!(crate::slots::names(&former).unwrap(), ["nacre.toml", "web"]);
}

/// Goal: no file but a whole export changes the state. Method: an export with one change, of its
/// bytes or of its manifest.
#[test]
fn every_other_file_is_refused_and_changes_nothing() {
    let machine = Machine::new("0.1.0", &[("a", "aaa"), ("b/c", "ccc")]);
    let file = machine.at("export");
    export(&machine.places, &file).unwrap();
    let whole = fs::read(&file).unwrap();
    fs::write(machine.places.state().join("a"), "now").unwrap();
    let refused = |bytes: &[u8], label: &str| {
        fs::write(&file, bytes).unwrap();
        let error = check(&machine.places, &file, false).unwrap_err();
        assert!(matches!(error, BackupError::Damaged(_)), "{label}: {error}");
        assert_eq!(machine.text("a").as_deref(), Some("now"), "{label}");
        assert_eq!(machine.beside_state(), ["nacre"], "{label}");
    };
    // Behind the last file are its padding and two empty blocks.
    for length in (0..whole.len() - 3 * 512).step_by(73) {
        refused(&whole[..length], "cut");
    }
    let at = |part: &str| {
        whole
            .windows(part.len())
            .position(|w| w == part.as_bytes())
            .unwrap()
    };
    let mut damaged = whole.clone();
    damaged[at("aaa\0")] = b'b';
    refused(&damaged, "contents");

    let text = String::from_utf8(whole[512..].to_vec()).unwrap();
    let manifest: serde_json::Value =
        serde_json::from_str(&text[..text.find("}]").unwrap() + 2].to_owned().add_end()).unwrap();
    let with = |change: &dyn Fn(&mut serde_json::Value)| {
        let mut changed = manifest.clone();
        change(&mut changed);
        let text = serde_json::to_vec(&changed).unwrap();
        let mut builder = tar::Builder::new(Vec::new());
        let mut header = tar::Header::new_ustar();
        header.set_path(MANIFEST).unwrap();
        header.set_size(text.len() as u64);
        header.set_cksum();
        builder.append(&header, &text[..]).unwrap();
        let mut bytes = builder.into_inner().unwrap();
        bytes.truncate(bytes.len() - 1024);
        bytes.extend(&whole[at("files/a\0")..]);
        bytes
    };
    fs::write(&file, with(&|_| {})).unwrap();
    check(&machine.places, &file, false).unwrap();
    for path in [
        "../a",
        "/a",
        "",
        ".",
        "./a",
        "a/",
        "a//b",
        "a/../b",
        "b/c",
        "a/b/c/d/e/f/g/h/i",
        ".a",
        "updates/x",
    ] {
        refused(&with(&|m| m["files"][0]["path"] = path.into()), path);
    }
    refused(
        &with(&|m| m["files"][0]["mode"] = 0o4755.into()),
        "set-user-id",
    );
    refused(&with(&|m| m["files"][0]["mode"] = 0o0.into()), "no mode");
    refused(&with(&|m| m["files"][0]["size"] = u64::MAX.into()), "size");
    refused(&with(&|m| m["format"] = 2.into()), "format");
    refused(&with(&|m| m["version"] = "x".into()), "version");
    refused(&with(&|m| m["files"] = serde_json::Value::Null), "files");
    fs::write(&file, with(&|m| m["version"] = "0.2.0".into())).unwrap();
    let newer = check(&machine.places, &file, false);
    assert!(matches!(newer, Err(BackupError::Newer { .. })));
    check(&machine.places, &file, true).unwrap();
    assert_eq!(machine.beside_state(), ["nacre"]);
}

trait AddEnd {
    fn add_end(self) -> String;
}

impl AddEnd for String {
    /// Ends a manifest behind its list of files.
    fn add_end(self) -> String {
        self + r#","left_out":[]}"#
    }
}

#[test]
fn bounds_of_an_export() {
    let long = "x/".repeat(130) + "y";
    assert!(!fits(&long));
    let deep = "d/".repeat(MOST_DEPTH) + "file";
    let machine = Machine::new("0.1.0", &[("a", "a"), (&deep, "deep")]);
    let exported = export(&machine.places, &machine.at("export")).unwrap();
    assert_eq!(exported.files, 1);
    assert_eq!(
        exported.left_out,
        ["d/".repeat(MOST_DEPTH).trim_end_matches('/')]
    );
}

const TIMER: &str = "systemd-run --unit=nacre-restore --on-active=120s --timer-property=AccuracySec=1s \
                     --collect --quiet systemctl start nacre.service";

/// Goal: the daemon runs again after each outcome of a restore, with the state that the answer
/// names. Method: one command of systemd fails in each attempt.
#[test]
fn a_restore_starts_the_daemon_again() {
    let machine = Machine::new("0.1.0", &[("a", "saved")]);
    let file = machine.at("export");
    export(&machine.places, &file).unwrap();
    let attempt = |failing: Option<&'static str>| {
        machine.put(&machine.places.state().join("a"), "now");
        let run = Recorder {
            failing,
            ..Recorder::default()
        };
        let outcome = restore(&machine.places, &run, &file, false);
        (outcome, run.taken(), machine.text("a").unwrap())
    };
    let unset = "systemctl stop nacre-restore.timer";
    let (stop, restart) = (
        "systemctl stop nacre.service",
        "systemctl restart nacre.service",
    );

    let (outcome, lines, text) = attempt(None);
    assert_eq!(outcome.unwrap().files, 1);
    assert_eq!(
        (lines, text.as_str()),
        (
            [unset, TIMER, stop, restart, unset]
                .map(str::to_owned)
                .to_vec(),
            "saved",
        )
    );
    let (outcome, lines, text) = attempt(Some("systemd-run"));
    assert!(matches!(outcome, Err(BackupError::Unchanged(_))));
    assert_eq!((lines.len(), text.as_str()), (2, "now"));
    let (outcome, lines, text) = attempt(Some("stop nacre.service"));
    assert!(matches!(outcome, Err(BackupError::Unchanged(_))));
    assert_eq!((lines[3].as_str(), text.as_str()), (restart, "now"));
    // The timer stays, for one more start.
    let (outcome, lines, text) = attempt(Some("restart"));
    assert!(matches!(outcome, Err(BackupError::NotStarted { .. })));
    assert_eq!((lines.len(), text.as_str()), (4, "saved"));
    let _lock = Lock::of_system(&machine.places).unwrap();
    let (outcome, lines, _) = attempt(None);
    assert!(matches!(outcome, Err(BackupError::Lock(_))));
    assert!(lines.is_empty());
}

/// Goal: a boot after a power failure has the state before the restore or the whole restored one,
/// and the next restore works. Method: the disk at each command, and at each step of the exchange.
#[test]
fn a_power_failure_leaves_the_old_or_the_new_state() {
    let machine = Machine::new("0.1.0", &[("a", "saved"), ("b/c", "saved")]);
    let file = machine.at("export");
    export(&machine.places, &file).unwrap();
    for path in ["a", "b/c"] {
        machine.put(&machine.places.state().join(path), "now");
    }
    large(&machine, "disk.img");
    let state = |places: &Places| {
        let text = |name: &str| fs::read_to_string(places.state().join(name)).unwrap();
        assert!(places.state().join("disk.img").is_file());
        [text("a"), text("b/c")]
    };
    let mut disks = Vec::new();
    // Unpacked with the image under both names, and then under the name of the former state.
    for name in [".nacre-restore-cut", "nacre.before-restore"] {
        let cuts = Cuts::of(machine.root.path());
        cuts.run(name, &[]).unwrap();
        disks.extend(cuts.taken());
        let places = Places::below(disks.last().unwrap().1.path());
        let staging = places.state().with_file_name(name);
        let checked = check(&places, &file, false).unwrap();
        fs::rename(checked.staging.path(), &staging).unwrap();
        fs::hard_link(places.state().join("disk.img"), staging.join("disk.img")).unwrap();
    }
    let cuts = Cuts::of(machine.root.path());
    restore(&machine.places, &cuts, &file, false).unwrap();
    disks.extend(cuts.taken());
    disks.push(("end".into(), machine.root));
    let mut is_new = false;
    for (line, disk) in disks {
        let places = Places::below(disk.path());
        is_new |= line.contains("restart");
        let wanted = if is_new { "saved" } else { "now" };
        assert_eq!(state(&places), [wanted; 2], "{line}");
        restore(
            &places,
            &Recorder::default(),
            &disk.path().join("export"),
            false,
        )
        .unwrap();
        assert_eq!(state(&places), ["saved"; 2], "{line}");
        assert_eq!(
            crate::slots::names(places.state().parent().unwrap()).unwrap(),
            ["nacre", "nacre-appliance", "nacre.before-restore"],
            "{line}"
        );
    }
    assert!(is_new);
}

/// Goal: leftovers of a power failure end with the next restore, and are not restored.
#[test]
fn a_restore_removes_the_rest_of_an_earlier_one() {
    let machine = Machine::new("0.1.0", &[("a/b", "saved")]);
    let file = machine.at("export");
    export(&machine.places, &file).unwrap();
    let beside = machine.places.state().with_file_name(".nacre-restore-cut");
    machine.put(&beside.join("key"), "secret");
    // Between the two renames: the export has the name of the former state already.
    machine.put(&machine.places.former_state().join("a/b"), "saved");
    machine.put(&machine.places.state().join("a/b"), "now");
    restore(&machine.places, &Recorder::default(), &file, false).unwrap();
    assert_eq!(
        machine.beside_state(),
        ["nacre", "nacre-appliance", "nacre.before-restore"]
    );
    let former = fs::read_to_string(machine.places.former_state().join("a/b"));
    assert_eq!(former.unwrap(), "now");
    let folder = fs::metadata(machine.places.state().join("a")).unwrap();
    assert_eq!(folder.permissions().mode() & 0o777, 0o700);
}

/// Goal: an entry larger than its line in the manifest is refused before it is unpacked.
#[test]
fn an_entry_has_the_size_of_the_manifest() {
    let machine = Machine::new("0.1.0", &[("a", "")]);
    let file = machine.at("export");
    export(&machine.places, &file).unwrap();
    let mut bytes = fs::read(&file).unwrap();
    let at = bytes.windows(8).position(|w| w == b"files/a\0").unwrap();
    let mut header = tar::Header::from_byte_slice(&bytes[at..at + 512]).clone();
    header.set_size(MOST_BYTES);
    header.set_cksum();
    bytes[at..at + 512].copy_from_slice(header.as_bytes());
    fs::write(&file, bytes).unwrap();
    let error = check(&machine.places, &file, false).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the export: files/a is missing; it is damaged, or no export"
    );
}
