//! Exports of an attacker: limits come before memory and disk.

use super::super::*;
use super::Machine;

fn manifest(paths: &[&str], size: u64, host: &str) -> Manifest {
    let listed = |path: &&str| Listed {
        path: (*path).to_owned(),
        mode: 0o600,
        size,
        sha256: Sha256::of(b"aaa"),
    };
    Manifest {
        format: FORMAT,
        host: host.to_owned(),
        version: "0.1.0".into(),
        files: paths.iter().map(listed).collect(),
        left_out: Vec::new(),
    }
}

/// An export up to its first file.
fn first(manifest: &Manifest) -> Vec<u8> {
    let text = serde_json::to_vec(manifest).unwrap();
    with_entry(&[], MANIFEST, b'0', text.len() as u64, &text)
}

fn with_entry(archive: &[u8], name: &str, kind: u8, size: u64, bytes: &[u8]) -> Vec<u8> {
    let mut header = tar::Header::new_ustar();
    header.set_size(size);
    header.as_mut_bytes()[..name.len()].copy_from_slice(name.as_bytes());
    header.as_mut_bytes()[156] = kind;
    header.set_cksum();
    let mut archive = [archive, header.as_bytes(), bytes].concat();
    archive.resize(archive.len().next_multiple_of(512), 0);
    archive
}

/// Changes the first header of an archive.
fn patched(archive: &[u8], at: usize, bytes: &[u8]) -> Vec<u8> {
    let mut header = tar::Header::from_byte_slice(&archive[..512]).clone();
    header.as_mut_bytes()[at..at + bytes.len()].copy_from_slice(bytes);
    header.set_cksum();
    [header.as_bytes(), &archive[512..]].concat()
}

/// Goal: a hostile export is refused before its bytes use memory or disk. Method: one entry or one
/// line of the manifest that no export has, in a file of 64 GiB that must not be read to its end.
#[test]
fn hostile_exports_are_refused() {
    let machine = Machine::new("0.1.0", &[("a", "now")]);
    let file = machine.at("export");
    let attempt = |archive: &[u8]| {
        fs::write(&file, archive).unwrap();
        let sparse = OpenOptions::new().write(true).open(&file).unwrap();
        sparse.set_len(64 << 30).unwrap();
        let outcome = check(&machine.places, &file, false);
        assert_eq!(machine.text("a").as_deref(), Some("now"));
        outcome.map(|checked| checked.restored.files)
    };
    let refused = |archive: &[u8], part: &str, label: &str| {
        let error = attempt(archive).unwrap_err();
        assert!(matches!(error, BackupError::Damaged(_)), "{label}: {error}");
        let text = error.to_string();
        assert!(text.contains(part), "{label}: {text}");
        assert!(!text.contains(char::is_control), "{label}: {text:?}");
        assert_eq!(machine.beside_state(), ["nacre"], "{label}");
    };
    let one = first(&manifest(&["a"], 3, "storage1"));
    let good = with_entry(&one, "files/a", b'0', 3, b"aaa");
    assert_eq!(attempt(&good).unwrap(), 1);
    // Behind the last file of the manifest nothing is read.
    let more = with_entry(&good, "../../etc/passwd", b'0', 1 << 40, b"x");
    assert_eq!(attempt(&more).unwrap(), 1);

    // Links, devices, folders, pipes, long names, extensions, sparse files.
    for kind in *b"1234567LKxgSVMDN" {
        refused(&patched(&one, 156, &[kind]), MANIFEST, "manifest");
        let entry = with_entry(&one, "files/a", kind, 3, b"aaa");
        refused(&entry, "files/a is missing", "kind of a file");
    }
    for name in [
        "/files/a",
        "/etc/passwd",
        "files/../a",
        "./files/a",
        "files//a",
        "files/a/",
        "files/A",
        "a",
        "files/\x1b[2Ja",
    ] {
        let entry = with_entry(&one, name, b'0', 3, b"aaa");
        refused(&entry, "files/a is missing", name);
    }
    for size in [0, 2, 4, MOST_BYTES, 1 << 40, u64::MAX] {
        let entry = with_entry(&one, "files/a", b'0', size, b"aaa");
        refused(&entry, "", &format!("{size} bytes"));
    }
    for size in [MOST_MANIFEST + 1, 1 << 40, u64::MAX] {
        let entry = with_entry(&[], MANIFEST, b'0', size, b"{");
        refused(&entry, "", &format!("manifest of {size} bytes"));
    }
    let no_number = with_entry(&[], "\x1b[2J", b'0', 0, b"");
    refused(&patched(&no_number, 124, b"\x1b[2Jzz"), "", "no number");

    let of = |paths: &[&str]| first(&manifest(paths, 3, "storage1"));
    refused(&of(&["a", "a"]), "not sorted", "a name twice");
    refused(&of(&["a", "a-b", "a/b"]), "a file and a folder", "both");
    let many: Vec<String> = (0..=MOST_FILES).map(|at| format!("{at:06}")).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    refused(&of(&many), "files", "many files");
    let large = first(&manifest(&many[..100], MOST_BYTES, "storage1"));
    refused(&large, "bytes", "a large sum");
    for host in ["a\x1b[2J", "a\nb", &"x".repeat(MOST_HOST + 1)] {
        refused(&first(&manifest(&["a"], 3, host)), "host", host);
    }
    let name = first(&manifest(&["\x1b[2J"], MOST_BYTES + 1, "storage1"));
    refused(&name, "bytes", "a name for the terminal");
}

/// Goal: many small files and folders count with the space that they take.
#[test]
fn a_file_takes_a_block_of_the_disk() {
    // The folders are `a`, `a/b` and the state's own.
    let (_, needed) = check_manifest(&manifest(&["a/b/c", "a/d", "e"], 1, "")).unwrap();
    assert_eq!(needed, 3 + 6 * BLOCK);
}

/// Goal: an export is its owner's alone from its first moment, and the rest of an attempt that was
/// killed ends with the next one.
#[test]
fn an_unfinished_export_is_private() {
    let machine = Machine::new("0.1.0", &[("a", "secret")]);
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    let (_, left) = unfinished(machine.root.path()).unwrap().keep().unwrap();
    assert_eq!(mode(&left), 0o600);
    export(&machine.places, &machine.at("export")).unwrap();
    assert_eq!(mode(&machine.at("export")), 0o600);
    assert!(!left.exists());
    // A failure leaves no file at all.
    fs::remove_dir_all(machine.places.state()).unwrap();
    export(&machine.places, &machine.at("other")).unwrap_err();
    let names = crate::slots::names(machine.root.path()).unwrap();
    assert!(
        !names
            .iter()
            .any(|name| name.starts_with('.') || name == "other"),
        "{names:?}"
    );
}

/// Goal: a link or a pipe that takes a file's name during an export is not read.
#[test]
fn only_files_are_opened() {
    let machine = Machine::new("0.1.0", &[("a", "x")]);
    let at = |name: &str| machine.places.state().join(name);
    assert!(open(&at("a")).is_ok());
    std::os::unix::fs::symlink(at("a"), at("link")).unwrap();
    let (kind, mode) = (rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR);
    rustix::fs::mknodat(CWD, at("pipe"), kind, mode, 0).unwrap();
    for name in ["link", "pipe", "."] {
        assert!(open(&at(name)).is_err(), "{name}");
    }
}
