use std::process::Command;

use aws_lc_rs::signature::{Ed25519KeyPair, KeyPair};

use super::*;

/// The name and contents of an entry.
type NamedBytes = (String, Vec<u8>);

/// A signer and the folder of its public key.
pub(crate) struct Signer {
    pair: Ed25519KeyPair,
    folder: tempfile::TempDir,
}

impl Signer {
    pub(crate) fn new(seed: u8) -> Self {
        let pair = Ed25519KeyPair::from_seed_unchecked(&[seed; 32]).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let mut der = b"\x30\x2a\x30\x05\x06\x03\x2b\x65\x70\x03\x21\x00".to_vec();
        der.extend(pair.public_key().as_ref());
        fs::write(folder.path().join("maker.pem"), pem(&der)).unwrap();
        fs::write(folder.path().join("README"), "no key").unwrap();
        Self { pair, folder }
    }

    /// Puts the public key in a folder of keys.
    pub(crate) fn put(&self, keys: &Path) {
        fs::create_dir_all(keys).unwrap();
        fs::copy(self.folder.path().join("maker.pem"), keys.join("maker.pem")).unwrap();
    }

    pub(crate) fn keys(&self) -> Keys {
        Keys::read(self.folder.path()).unwrap()
    }
}

fn pem(der: &[u8]) -> String {
    const DIGITS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for chunk in der.chunks(3) {
        let mut bytes = [0; 4];
        bytes[1..=chunk.len()].copy_from_slice(chunk);
        let word = u32::from_be_bytes(bytes);
        for at in 0..4 {
            let digit = DIGITS[(word >> (18 - 6 * at)) as usize & 63];
            text.push(if at <= chunk.len() {
                digit as char
            } else {
                '='
            });
        }
    }
    format!("-----BEGIN PUBLIC KEY-----\n{text}\n-----END PUBLIC KEY-----\n")
}

const UUID: &str = "01234567-89ab-cdef-0123-456789abcdef";

/// The entries of a bundle, for tests that change them.
pub(crate) fn entries(signer: &Signer, version: &str) -> Vec<NamedBytes> {
    let release =
        format!("IMAGE_ID=nacre\nIMAGE_VERSION={version}\nARCHITECTURE=x86-64\nBUILT=x\n");
    let files = vec![
        ("RELEASE".to_owned(), release.into_bytes()),
        (
            format!("nacre_{version}_{UUID}.root.raw.gz"),
            vec![1; 300_000],
        ),
        (
            format!("nacre_{version}_{UUID}.verity.raw.gz"),
            vec![2; 3000],
        ),
        (format!("nacre_{version}.efi"), vec![3; 70_000]),
    ];
    signed(signer, files)
}

fn signed(signer: &Signer, files: Vec<NamedBytes>) -> Vec<NamedBytes> {
    let sums: String = files
        .iter()
        .map(|(name, bytes)| format!("{}  {name}\n", Sha256::of(bytes)))
        .collect();
    let signature = signer.pair.sign(sums.as_bytes()).as_ref().to_vec();
    let mut entries = vec![
        ("SHA256SUMS".to_owned(), sums.into_bytes()),
        ("SHA256SUMS.sig".to_owned(), signature),
    ];
    entries.extend(files);
    entries
}

pub(crate) fn archive(entries: &[NamedBytes]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    for (name, bytes) in entries {
        let mut header = tar::Header::new_ustar();
        header.set_size(bytes.len() as u64);
        header.set_mode(0o644);
        // Names that the builder itself would refuse are among the tests.
        header.as_mut_bytes()[..name.len()].copy_from_slice(name.as_bytes());
        header.set_cksum();
        builder.append(&header, &bytes[..]).unwrap();
    }
    builder.into_inner().unwrap()
}

fn wanted() -> TargetMachine {
    TargetMachine {
        image: "nacre".into(),
        architecture: "x86-64".into(),
        running: "0.1.0".parse().unwrap(),
        allow_older: false,
        slots: Vec::new(),
    }
}

/// A folder with an earlier update in it.
fn updates() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let updates = folder.path().join("updates");
    fs::create_dir(&updates).unwrap();
    fs::write(updates.join("before"), "x").unwrap();
    (folder, updates)
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn a_signed_bundle_replaces_the_folder_of_updates() {
    let signer = Signer::new(1);
    let bundle = archive(&entries(&signer, "0.2.0"));
    let (folder, updates) = updates();
    // An attempt that a power failure ended.
    fs::create_dir(folder.path().join(".update-old")).unwrap();
    let unpacked = unpack(&bundle[..], &signer.keys(), &wanted(), &updates).unwrap();
    assert_eq!(unpacked.version, "0.2.0".parse().unwrap());
    assert_eq!((unpacked.key.as_str(), unpacked.bytes), ("maker", 373_000));
    let expected = [
        "nacre_0.2.0.efi".to_owned(),
        format!("nacre_0.2.0_{UUID}.root.raw.gz"),
        format!("nacre_0.2.0_{UUID}.verity.raw.gz"),
    ];
    assert_eq!(names(&updates), expected);
    assert_eq!(names(folder.path()), ["updates"]);
    let again = folder.path().join("elsewhere/updates");
    unpack(&bundle[..], &signer.keys(), &wanted(), &again).unwrap();
    assert_eq!(names(&again), expected);
}

/// Goal: each bundle that is not exactly as its owner made it leaves the folder as it was. Method:
/// one change per bundle, of the entries or of the finished archive.
#[test]
fn every_other_bundle_is_refused_and_changes_nothing() {
    let signer = Signer::new(1);
    let stranger = Signer::new(2);
    let good = entries(&signer, "0.2.0");
    let refused = |bundle: &[u8], wanted: &TargetMachine, part: &str| {
        let (folder, updates) = updates();
        let error = unpack(bundle, &signer.keys(), wanted, &updates).unwrap_err();
        assert!(error.to_string().contains(part), "{part}: {error}");
        assert_eq!(names(&updates), ["before"], "{part}");
        assert_eq!(names(folder.path()), ["updates"], "{part}");
    };
    let changed = |change: &dyn Fn(&mut Vec<NamedBytes>), part: &str| {
        let mut entries = good.clone();
        change(&mut entries);
        refused(&archive(&entries), &wanted(), part);
    };
    refused(
        &archive(&entries(&stranger, "0.2.0")),
        &wanted(),
        "none of the keys",
    );
    changed(&|e| e[0].1[0] ^= 1, "none of the keys");
    changed(&|e| e[1].1[5] ^= 1, "none of the keys");
    changed(&|e| e[1].1.truncate(63), "none of the keys");
    changed(&|e| e[1].1.push(0), "at most 64");
    changed(&|e| e[2].1[0] ^= 1, "RELEASE: its SHA-256");
    for at in 3..6 {
        changed(&|e| *e[at].1.last_mut().unwrap() ^= 1, "its SHA-256");
    }
    changed(&|e| e.swap(0, 1), "instead of SHA256SUMS");
    changed(&|e| drop(e.remove(1)), "instead of SHA256SUMS.sig");
    changed(&|e| drop(e.remove(2)), "instead of RELEASE");
    changed(&|e| drop(e.pop()), "the end instead of");
    changed(&|e| e[4] = e[3].clone(), "root.raw.gz instead of");
    changed(&|e| e[0].1 = vec![b'x'; 5000], "at most 4096");
    for name in [
        "../x",
        "/etc/x",
        "a/b",
        "nacre_0.2.0.efi/",
        "nacre_0.2.0.EFI",
        ".",
        "x",
    ] {
        changed(
            &|e| e[3].0 = name.to_owned(),
            "instead of a file of a version",
        );
    }
    // Signed, and still wrong.
    let resigned = |change: &dyn Fn(&mut Vec<NamedBytes>), part: &str| {
        let mut files = good[2..].to_vec();
        change(&mut files);
        refused(&archive(&signed(&signer, files)), &wanted(), part);
    };
    resigned(
        &|f| f[3].0 = "nacre_0.3.0.efi".into(),
        "not of version 0.2.0",
    );
    resigned(&|f| f[3].0 = "other".into(), "no place in a bundle");
    resigned(&|f| drop(f.pop()), "0 files for the part Kernel");
    resigned(&|f| f[2] = f[1].clone(), "twice");
    resigned(
        &|f| f[0].1 = b"IMAGE_ID=nacre\n".to_vec(),
        "IMAGE_VERSION is missing",
    );
    let release = |text: &str| {
        signed(&signer, {
            let mut files = good[2..].to_vec();
            files[0].1 = text.as_bytes().to_vec();
            files
        })
    };
    refused(
        &archive(&release(
            "IMAGE_ID=other\nIMAGE_VERSION=0.2.0\nARCHITECTURE=x86-64\n",
        )),
        &wanted(),
        "IMAGE_ID is \"other\"",
    );
    refused(
        &archive(&release(
            "IMAGE_ID=nacre\nIMAGE_VERSION=0.2.0\nARCHITECTURE=arm64\n",
        )),
        &wanted(),
        "ARCHITECTURE is \"arm64\"",
    );
    // Cut and damaged archives.
    let whole = archive(&good);
    for length in [0, 100, 512, 700, 2000, 5000, 200_000, whole.len() - 70_000] {
        refused(&whole[..length], &wanted(), "");
    }
    let mut damaged = whole.clone();
    damaged[148] ^= 1;
    refused(&damaged, &wanted(), "");
}

#[test]
fn an_entry_is_a_plain_file() {
    let signer = Signer::new(1);
    let whole = archive(&entries(&signer, "0.2.0"));
    for kind in [b'1', b'2', b'3', b'5', b'L', b'x', b'g', b'S', b'9'] {
        let mut bundle = whole.clone();
        let mut header = tar::Header::from_byte_slice(&bundle[..512]).clone();
        header.as_mut_bytes()[156] = kind;
        header.set_cksum();
        bundle[..512].copy_from_slice(header.as_bytes());
        let (_folder, updates) = updates();
        let error = unpack(&bundle[..], &signer.keys(), &wanted(), &updates).unwrap_err();
        assert!(
            error.to_string().contains("which is no file"),
            "{kind}: {error}"
        );
    }
}

/// A stream without an end. A reader that follows it further than a bundle's parser may is wrong.
struct Endless<'a> {
    start: &'a [u8],
    fill: u8,
    left: usize,
}

impl Read for Endless<'_> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        if !self.start.is_empty() {
            return self.start.read(to);
        }
        self.left = self.left.checked_sub(to.len()).expect("a bound of bytes");
        to.fill(self.fill);
        Ok(to.len())
    }
}

/// Goal: sizes and streams of an attacker use neither memory nor disk. Method: each header of a
/// bundle with sizes above the part's limit, before bytes that never end.
#[test]
fn sizes_are_checked_before_bytes_are_read() {
    let signer = Signer::new(1);
    let whole = archive(&entries(&signer, "0.2.0"));
    let attempt = |start: &[u8], fill| {
        let (folder, updates) = updates();
        let stream = Endless {
            start,
            fill,
            left: 4096,
        };
        let outcome = unpack(stream, &signer.keys(), &wanted(), &updates);
        assert_eq!(names(folder.path()), ["updates"]);
        outcome.map_err(|error| {
            assert_eq!(names(&updates), ["before"]);
            error.to_string()
        })
    };
    let refused = |start: &[u8], fill, part: &str| {
        let text = attempt(start, fill).unwrap_err();
        assert!(text.contains(part), "{part}: {text}");
        assert!(!text.contains(char::is_control), "{text:?}");
    };
    refused(&[], 0, "the end instead of SHA256SUMS");
    refused(&[], b'x', "the bundle: ");
    // Bytes after the last file are not read.
    attempt(&whole[..whole.len() - 1024], b'x').unwrap();

    let mut at = 0;
    for (name, bytes) in entries(&signer, "0.2.0") {
        let most = Part::of_name(&name).unwrap().0.most_bytes();
        let with = |change: &dyn Fn(&mut tar::Header)| {
            let mut header = tar::Header::from_byte_slice(&whole[at..at + 512]).clone();
            change(&mut header);
            header.set_cksum();
            [&whole[..at], header.as_bytes()].concat()
        };
        for size in [most + 1, 8 << 30, 1 << 60] {
            let start = with(&|header| header.set_size(size));
            refused(&start, 0, &format!("{name}: {size} bytes; at most {most}"));
        }
        refused(&with(&|header| header.set_size(u64::MAX)), 0, "");
        for kind in *b"1234567LKxgSVMDN" {
            let start = with(&|header| header.as_mut_bytes()[156] = kind);
            refused(&start, 0, "which is no file");
        }
        for other in ["/etc/passwd", "../../etc/passwd", "\x1b[2J", ""] {
            let start = with(&|header| {
                header.as_mut_bytes()[..100].fill(0);
                header.as_mut_bytes()[..other.len()].copy_from_slice(other.as_bytes());
            });
            refused(&start, 0, "instead of");
        }
        // A size that is no number, in the words of the archive's reader.
        let start = with(&|header| header.as_mut_bytes()[124..129].copy_from_slice(b"\x1b[2Jz"));
        refused(&start, 0, "the bundle: ");
        at += 512 + bytes.len().next_multiple_of(512);
    }
}

#[test]
fn older_versions_need_a_flag() {
    let signer = Signer::new(1);
    let (_folder, updates) = updates();
    let unpack = |version: &str, running: &str, allow_older| {
        let wanted = TargetMachine {
            running: running.parse().unwrap(),
            allow_older,
            ..wanted()
        };
        unpack(
            &archive(&entries(&signer, version))[..],
            &signer.keys(),
            &wanted,
            &updates,
        )
    };
    assert!(matches!(
        unpack("0.9.0", "0.10.0", false),
        Err(BundleError::Older { .. })
    ));
    assert!(matches!(
        unpack("0.9.0", "0.9.0", true),
        Err(BundleError::Runs { .. })
    ));
    unpack("0.9.0", "0.10.0", true).unwrap();
}

#[test]
fn a_folder_of_keys_is_read_whole_or_refused() {
    let folder = tempfile::tempdir().unwrap();
    let read = || Keys::read(folder.path());
    assert!(matches!(read(), Err(KeyError::None { .. })));
    let missing = Keys::read(&folder.path().join("missing"));
    assert!(matches!(missing, Err(KeyError::None { .. })));
    let good = fs::read(Signer::new(1).folder.path().join("maker.pem")).unwrap();
    for at in 0..17 {
        fs::write(folder.path().join(format!("{at:02}.pem")), &good).unwrap();
        assert_eq!(read().is_ok(), at < 16);
    }
    fs::remove_file(folder.path().join("16.pem")).unwrap();
    for bad in [
        "",
        "no key",
        &pem(&[0; 44]),
        &pem(b"\x30\x2a\x30\x05\x06\x03\x2b\x65\x70\x03\x21\x00abc"),
    ] {
        fs::write(folder.path().join("00.pem"), bad).unwrap();
        assert!(matches!(read(), Err(KeyError::Format { .. })), "{bad}");
    }
}

/// Goal: the build's own tools make bundles that are accepted. Method: `deploy/image/bundle.sh` on
/// small files, with a key of openssl(1).
#[test]
fn the_script_of_the_image_makes_such_bundles() {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/image/bundle.sh");
    for tool in [
        ["openssl", "version"],
        ["tar", "--version"],
        ["gzip", "--version"],
    ] {
        if Command::new(tool[0]).arg(tool[1]).output().is_err() {
            eprintln!(
                "SKIPPED: the_script_of_the_image_makes_such_bundles: no {}",
                tool[0]
            );
            return;
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    fs::create_dir(at("keys")).unwrap();
    for name in ["root", "verity", "kernel"] {
        fs::write(at(name), name.repeat(10_000)).unwrap();
    }
    let run = |command: &mut Command| {
        let output = command.current_dir(folder.path()).output().unwrap();
        assert!(output.status.success(), "{output:?}");
    };
    run(Command::new("openssl").args(["genpkey", "-algorithm", "ed25519", "-out", "key.pem"]));
    run(Command::new("openssl").args([
        "pkey",
        "-in",
        "key.pem",
        "-pubout",
        "-out",
        "keys/own.pem",
    ]));
    run(Command::new("bash")
        .arg(&script)
        .args(["0.2.0", "x86-64", "key.pem", "out.tar"])
        .args(["root", UUID, "verity", UUID, "kernel"]));
    let bundle = File::open(at("out.tar")).unwrap();
    let keys = Keys::read(&at("keys")).unwrap();
    let unpacked = unpack(bundle, &keys, &wanted(), &at("updates")).unwrap();
    assert_eq!(unpacked.key, "own");
    assert_eq!(names(&at("updates")).len(), 3);
}

/// Goal: a power failure during a boot leaves a whole configuration, and a boot removes leftovers
/// of an update or a restore. Method: the image's script, with commands that note themselves, and
/// with one that fails as a full disk does.
#[test]
fn a_boot_takes_the_configuration_at_once() {
    let script = "../../deploy/image/root/usr/lib/nacre/appliance";
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join(script);
    let text = fs::read_to_string(script).unwrap();
    for (failing, wanted, commands) in [
        ("none", "new", &["install", "sync", "mv", "sync"][..]),
        ("install", "old", &["install"]),
        ("sync", "old", &["install", "sync"]),
        ("mv", "old", &["install", "sync", "mv"]),
    ] {
        let root = tempfile::tempdir().unwrap();
        let at = |name: &str| root.path().join(name);
        for (path, contents) in [
            ("from/nacre.toml", "new"),
            ("var/nacre/nacre.toml", "old"),
            ("var/nacre/.nacre.toml", "cut"),
            ("var/nacre/updates/x", "x"),
            ("var/nacre/.update-x/x", "x"),
            ("var/.nacre-restore-x/key", "secret"),
        ] {
            fs::create_dir_all(at(path).parent().unwrap()).unwrap();
            fs::write(at(path), contents).unwrap();
        }
        let own = text
            .replace("/run/systemd", at("run").to_str().unwrap())
            .replace(
                "FROM=/boot/nacre",
                &format!("FROM={}", at("from").display()),
            )
            .replace(
                "STATE=/var/lib/nacre",
                &format!("STATE={}", at("var/nacre").display()),
            )
            .replace(
                "\nset -u\n",
                &format!(
                    "\nset -u\nnacre() {{ :; }}\nstty() {{ false; }}\n\
                     note() {{ echo \"$1\" >>{}; [ $1 != {failing} ] && command \"$@\"; }}\n\
                     install() {{ note install \"$@\"; }}\n\
                     sync() {{ note sync \"$@\"; }}\nmv() {{ note mv \"$@\"; }}\n",
                    at("commands").display()
                ),
            );
        let mut run = Command::new("sh");
        let status = run.args(["-c", &own, "appliance", "import"]).status();
        assert!(status.unwrap().code().is_some(), "{failing}");
        let now = fs::read_to_string(at("var/nacre/nacre.toml")).unwrap();
        assert_eq!(now, wanted, "{failing}");
        let noted = fs::read_to_string(at("commands")).unwrap();
        assert_eq!(noted.lines().collect::<Vec<_>>(), commands, "{failing}");
        assert_eq!(names(&at("var")), ["nacre"], "{failing}");
        let visible = names(&at("var/nacre"));
        let visible: Vec<_> = visible.iter().filter(|n| !n.starts_with('.')).collect();
        assert_eq!(visible, ["nacre.toml"], "{failing}");
    }
}

/// Goal: a bundle of the boot partition is kept while the update may succeed later. Method: the
/// image's script, with a `nacre` that ends with each exit code.
#[test]
fn a_delayed_bundle_stays_on_the_boot_partition() {
    let script = "../../deploy/image/root/usr/lib/nacre/appliance";
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join(script);
    let text = fs::read_to_string(script).unwrap();
    for (code, is_good, left) in [
        (0, true, &[][..]),
        (1, true, &["nacre_0.2.0.tar.refused"][..]),
        (3, false, &["nacre_0.2.0.tar"]),
        (75, false, &["nacre_0.2.0.tar"]),
    ] {
        let folder = tempfile::tempdir().unwrap();
        // The rest of an earlier attempt makes room.
        for name in ["nacre_0.2.0.tar", "nacre_0.1.5.tar.refused"] {
            fs::write(folder.path().join(name), "").unwrap();
        }
        let from = format!("FROM={}", folder.path().display());
        let own = text.replace(
            "FROM=/boot/nacre",
            &format!("{from}\nnacre() {{ return {code}; }}"),
        );
        let mut run = Command::new("sh");
        let run = run.args(["-c", &own, "appliance", "update"]);
        let status = run.status().unwrap();
        assert_eq!(
            (status.success(), names(folder.path())),
            (is_good, left.iter().map(|n| (*n).to_owned()).collect()),
            "{code}"
        );
    }
}
