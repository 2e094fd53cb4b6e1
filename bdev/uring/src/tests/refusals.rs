//! Tests of files that cannot be opened, with the error of each, and of the identity and attributes
//! of a file bdev.

use std::os::unix::fs::FileExt;

use super::*;
use crate::Contents;

fn refusal(config: Config) -> CreateError {
    create(config).expect_err("refused")
}

/// Goal: the error for a missing file names the missing directory, or the target of the link.
/// Method: each, with a size and without.
#[test]
fn the_missing_path_component_is_named() {
    let temp = Temp::new(MIB);
    let dir = temp.dir.path();
    std::os::unix::fs::symlink("nothing", dir.join("link")).expect("a link");
    for size in [None, Some(MIB)] {
        let at = |name: &str| Config {
            size,
            ..Config::new("bad", dir.join(name))
        };
        let e = refusal(at("no/such/file"));
        assert!(
            matches!(&e, CreateError::NoFolder { folder, .. } if *folder == dir.join("no/such")),
            "{e}"
        );
        assert!(!e.to_string().contains("size"), "{e}");
        let e = refusal(at("link"));
        assert!(
            matches!(&e, CreateError::Dangling { to, .. } if to == Path::new("nothing")),
            "{e}"
        );
        assert!(!dir.join("nothing").exists());
        assert_eq!(e.errno(), libc::ENOENT);
    }
}

/// Goal: another file at the path of a device is refused, and no empty file takes the place of a
/// missing one. Method: the file is moved, replaced, missing and emptied between two openings.
#[test]
fn another_file_is_not_taken_for_the_one_before() {
    let temp = Temp::new(MIB);
    let dir = temp.dir.path();
    let identity = create(temp.config()).expect("opened").identity().clone();
    let again = |path: &Path| Config {
        identity: Some(identity.clone()),
        size: Some(MIB),
        ..Config::new("u0", path)
    };
    let moved = dir.join("moved");
    fs::rename(&temp.path, &moved).expect("renamed");
    drop(create(again(&moved)).expect("the same file at another path"));

    let e = refusal(again(&temp.path));
    assert!(
        matches!(
            e,
            CreateError::Gone {
                can_be_made: true,
                ..
            }
        ),
        "{e}"
    );
    assert!(e.to_string().contains("nacre bdev accept u0"), "{e}");
    assert!(!temp.path.exists(), "nothing is made in its place");

    fs::copy(&moved, &temp.path).expect("copied");
    let e = refusal(again(&temp.path));
    assert!(matches!(e, CreateError::Other { .. }), "{e}");
    assert!(e.to_string().contains("another file"), "{e}");
    let accepted = Config {
        identity: None,
        ..again(&temp.path)
    };
    let now = create(accepted).expect("taken on purpose");
    assert_ne!(*now.identity(), identity);

    File::create(&moved).expect("emptied");
    let e = refusal(again(&moved));
    assert!(matches!(e, CreateError::Empty { .. }), "{e}");
    assert_eq!(fs::metadata(&moved).expect("there").len(), 0);
}

/// A block device cannot be made larger with `truncate`: another block size is what helps.
#[test]
fn odd_sectors_suggest_another_block_size() {
    let Some(disk) = Loop::attach(2049 * 512, 512) else {
        return;
    };
    let config = |block_size| Config {
        block_size: Some(block_size),
        ..Config::new("loop", &disk.path)
    };
    let e = refusal(config(4096));
    let said = e.to_string();
    assert!(
        said.contains("`block_size` 512") && !said.contains("truncate"),
        "{said}"
    );
    create(config(512)).expect("as the message says");
}

/// Goal: each kind of bad file is its own error, with a number and a message that name it.
#[test]
fn bad_files_are_named() {
    let temp = Temp::new(MIB);
    let dir = temp.dir.path();
    let at = |name: &str| Config::new("bad", dir.join(name));

    let e = refusal(at("missing"));
    assert!(
        matches!(e, CreateError::NotFound { .. }) && e.errno() == libc::ENOENT,
        "{e}"
    );
    assert!(
        e.to_string().contains("missing") && e.to_string().contains("size"),
        "{e}"
    );
    let e = refusal(Config::new("bad", dir));
    assert!(
        matches!(e, CreateError::IsDirectory { .. }) && e.errno() == libc::EISDIR,
        "{e}"
    );
    let e = refusal(Config::new("bad", "/dev/null"));
    assert!(
        matches!(
            e,
            CreateError::WrongKind {
                kind: "a character device",
                ..
            }
        ),
        "{e}"
    );
    File::create(dir.join("empty")).expect("created");
    let e = refusal(at("empty"));
    assert!(matches!(e, CreateError::Empty { .. }), "{e}");
    fs::write(dir.join("odd"), [0; 1000]).expect("written");
    let e = refusal(at("odd"));
    assert!(
        matches!(e, CreateError::PartialBlock { size: 1000, .. }),
        "{e}"
    );
    assert!(
        e.to_string().contains("truncate -s"),
        "says what helps: {e}"
    );
    fs::write(dir.join("sectors"), [0; 512 * 3]).expect("written");
    let e = refusal(Config {
        block_size: Some(4096),
        ..at("sectors")
    });
    assert!(
        matches!(
            e,
            CreateError::PartialBlock {
                size: 1536,
                block_size: 4096,
                ..
            }
        ),
        "{e}"
    );
    for given in [0, 1, 256, 513, 1 << 17] {
        let e = refusal(Config {
            block_size: Some(given),
            ..temp.config()
        });
        assert!(
            matches!(e, CreateError::BlockSize { given: g } if g == given),
            "{e}"
        );
    }
    for depth in [0, RingOptions::MAX_DEPTH + 1] {
        let ring = RingOptions {
            depth,
            ..RingOptions::default()
        };
        let e = refusal(Config {
            ring,
            ..temp.config()
        });
        assert!(
            matches!(e, CreateError::Depth { given } if given == depth),
            "{e}"
        );
    }
    let e = refusal(Config {
        size: Some(1000),
        ..at("new")
    });
    assert!(
        matches!(e, CreateError::CreateSize { given: 1000, .. }),
        "{e}"
    );
    assert!(!dir.join("new").exists());
    let open = refusal(at("missing")).for_bdev("bad");
    assert_eq!(
        (open.bdev.as_str(), open.source.raw_os_error()),
        ("bad", Some(libc::ENOENT))
    );
}

/// Goal: a file that this user may not write is refused with the user's number, and can still be
/// read-only if that is allowed. Root may open everything, so for root only the message is shown.
#[test]
fn permissions_are_named() {
    use std::os::unix::fs::PermissionsExt;
    let temp = Temp::new(MIB);
    fs::set_permissions(&temp.path, fs::Permissions::from_mode(0o400)).expect("chmod");
    if rustix::process::geteuid().is_root() {
        let e = CreateError::from_io(
            &temp.path,
            "open(O_RDWR)",
            false,
            std::io::Error::from_raw_os_error(libc::EACCES),
        );
        assert!(matches!(&e, CreateError::Permission { uid: 0, .. }), "{e}");
        assert!(e.to_string().contains("read-only"), "{e}");
        eprintln!("SKIPPED in part: root may open every file");
        return;
    }
    let e = refusal(temp.config());
    assert!(
        matches!(e, CreateError::Permission { .. }) && e.errno() == libc::EACCES,
        "{e}"
    );
    assert!(
        create(Config {
            readonly: true,
            ..temp.config()
        })
        .is_ok()
    );
}

/// Goal: one writer at a time, several readers, and the lock is gone with its holder.
#[test]
fn a_file_has_one_writer() {
    let temp = Temp::new(MIB);
    let first = create(temp.config()).expect("opened");
    let e = refusal(temp.config());
    assert!(
        matches!(&e, CreateError::InUse { by, .. } if by.contains("this process")),
        "{e}"
    );
    assert_eq!(e.errno(), libc::EBUSY);
    assert!(matches!(
        refusal(Config {
            readonly: true,
            ..temp.config()
        }),
        CreateError::InUse { .. }
    ));
    drop(first);
    let readers: Vec<_> = (0..2)
        .map(|_| {
            create(Config {
                readonly: true,
                ..temp.config()
            })
            .expect("shared")
        })
        .collect();
    assert!(matches!(refusal(temp.config()), CreateError::InUse { .. }));
    drop(readers);
    create(temp.config()).expect("free again");
}

/// Goal: a lock held by another process is reported with that process.
#[test]
fn another_process_is_named() {
    let temp = Temp::new(MIB);
    let child = Command::new("flock")
        .arg(&temp.path)
        .args(["sleep", "30"])
        .spawn();
    let Ok(mut child) = child else {
        eprintln!("SKIPPED: no flock(1)");
        return;
    };
    let start = Instant::now();
    let e = loop {
        match create(temp.config()) {
            Err(e) => break e,
            // Not locked yet.
            Ok(device) => drop(device),
        }
        assert!(
            start.elapsed() < Duration::from_secs(10),
            "flock(1) never locked"
        );
        std::thread::sleep(Duration::from_millis(20));
    };
    let _ = child.kill();
    let _ = child.wait();
    assert!(
        matches!(&e, CreateError::InUse { by, .. } if by.contains("process")),
        "{e}"
    );
}

/// Goal: the lock of a process that has ended is waited for: the kernel completes its I/O. Method:
/// flock(1) locks an open file and ends; the file stays open for longer than other locks are waited
/// for.
#[test]
fn the_lock_of_an_ended_process_is_waited_for() {
    let temp = Temp::new(MIB);
    let file = File::open(&temp.path).expect("opened");
    let standard_input = file.try_clone().expect("a duplicate");
    let ended = Command::new("flock")
        .args(["-n", "0"])
        .stdin(standard_input)
        .status();
    let Ok(ended) = ended else {
        eprintln!("SKIPPED: no flock(1)");
        return;
    };
    assert!(ended.success());
    let kernel = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_secs(2));
        drop(file);
    });
    create(temp.config()).expect("free in the end");
    kernel.join().expect("it ends");
}

/// Goal: a mounted disk is never opened, and the error says where it is mounted. Read-only, so
/// that nothing could happen if it were.
#[test]
fn mounted_devices_are_refused() {
    let mounts = fs::read_to_string("/proc/self/mounts").expect("mounts");
    let device = mounts
        .lines()
        .filter_map(|l| l.split(' ').next())
        .find(|d| {
            use std::os::unix::fs::FileTypeExt;
            d.starts_with("/dev/") && fs::metadata(d).is_ok_and(|m| m.file_type().is_block_device())
        });
    let Some(device) = device else {
        eprintln!("SKIPPED: no mounted block device");
        return;
    };
    match create(Config {
        readonly: true,
        ..Config::new("root", device)
    }) {
        Err(CreateError::InUse { by, .. }) => assert!(by.contains("mounted on"), "{by}"),
        Err(CreateError::Permission { .. }) => eprintln!("SKIPPED: not allowed to open {device}"),
        other => panic!("{device}: {other:?}"),
    }
}

/// Goal: read-only refuses what writes, and says so beforehand.
#[test]
fn read_only_is_read_only() {
    let temp = Temp::new(MIB);
    let mut rig = Rig::open(Config {
        readonly: true,
        ..temp.config()
    });
    assert!(rig.device.limits().read_only);
    assert_eq!(rig.write(0, 1, 1), Status::WriteProtected);
    for op in [Op::Unmap, Op::WriteZeroes] {
        assert_eq!(rig.status(op, 0, 1), Status::WriteProtected);
        assert_eq!(rig.device.supports(op), Support::No);
    }
    assert_eq!(rig.device.supports(Op::Write), Support::No);
    assert_eq!(rig.status(Op::Flush, 0, 0), Status::Ok);
    assert_eq!(rig.fill_of(0, 8), 0);
}

/// Goal: `size` makes the file, once; an existing one keeps its size; `preallocate` takes space.
#[test]
fn files_are_created() {
    use std::os::unix::fs::MetadataExt;
    let temp = Temp::new(MIB);
    let path = temp.dir.path().join("new");
    let config = Config {
        size: Some(2 * MIB),
        ..Config::new("new", &path)
    };
    let device = create(config.clone()).expect("made");
    assert_eq!(device.geometry().bytes(), 2 * MIB);
    assert_eq!(fs::metadata(&path).expect("stat").blocks(), 0, "sparse");
    drop(device);
    let again = Config {
        size: Some(4 * MIB),
        ..config.clone()
    };
    assert_eq!(create(again).expect("opened").geometry().bytes(), 2 * MIB);
    let full = temp.dir.path().join("full");
    let config = Config {
        filename: full.clone(),
        preallocate: true,
        ..config
    };
    create(config).expect("made");
    assert!(
        fs::metadata(&full).expect("stat").blocks() * 512 >= 2 * MIB,
        "reserved"
    );
}

/// Goal: an identity survives reopening, also through a link; another file has another; a given
/// one is used.
#[test]
fn identity_is_stable() {
    let temp = Temp::new(MIB);
    let id = create(temp.config()).expect("opened").uuid();
    let link = temp.dir.path().join("link");
    std::os::unix::fs::symlink(&temp.path, &link).expect("linked");
    assert_eq!(
        create(Config::new("other", &link)).expect("opened").uuid(),
        id
    );
    assert_eq!(id.get_version_num(), 5);
    let other = Temp::new(MIB);
    assert_ne!(create(other.config()).expect("opened").uuid(), id);
    let given = uuid::Uuid::from_u128(42);
    let config = Config {
        uuid: Some(given),
        ..temp.config()
    };
    assert_eq!(create(config).expect("opened").uuid(), given);
}

/// Goal: a file that changed while it was closed has no block that counts, until its user says that
/// it needs none. Method: the file is left alone, written to, and cut and regrown between two
/// openings.
#[test]
fn a_file_that_changed_while_closed_counts_as_empty() {
    let temp = Temp::new(MIB);
    let blocks = MIB / u64::from(create(temp.config()).expect("opened").geometry().block_size);
    let file = File::options().write(true).open(&temp.path);
    let file = file.expect("its file");
    let leave = |contents: Option<Contents>| {
        let device = create(Config {
            contents,
            ..temp.config()
        });
        let device = device.expect("opened");
        (device.least_blocks(), device.leave().expect("synced"))
    };
    let (least, left) = leave(None);
    assert_eq!(least, blocks);
    if left.is_none() {
        eprintln!("SKIPPED: the times of this file system are no proof");
        return;
    }
    assert_eq!(leave(left), (blocks, left), "nothing changed");
    std::thread::sleep(Duration::from_millis(20));
    file.write_all_at(&[1; 512], 4096).expect("written");
    assert_eq!(leave(left), (0, Some(Contents::Changed)));
    assert_eq!(leave(Some(Contents::Changed)), (0, Some(Contents::Changed)));
    let (_, left) = leave(None);
    std::thread::sleep(Duration::from_millis(20));
    file.set_len(4096).expect("cut");
    file.set_len(MIB).expect("regrown");
    let config = Config {
        contents: left,
        ..temp.config()
    };
    let device = create(config).expect("opened");
    assert_eq!(device.contents(), Some(Contents::Changed));
    device.forget_least();
    assert_eq!((device.contents(), device.least_blocks()), (None, blocks));
}

/// Goal: block size and direct I/O follow the alignment that the file asks for; a block size below
/// it is served through the page cache and says so; insisting on direct I/O then fails.
#[test]
fn block_size_follows_alignment() {
    let Some(disk) = Loop::attach(8 * MIB, 4096) else {
        return;
    };
    // A file system with 4096-byte sectors below it asks for 4096-byte direct I/O.
    let made = Command::new("mkfs.ext4").arg("-q").arg(&disk.path).status();
    let dir = tempfile::tempdir().expect("a directory");
    let mounted = made.is_ok_and(|s| s.success())
        && Command::new("mount")
            .arg(&disk.path)
            .arg(dir.path())
            .status()
            .is_ok_and(|s| s.success());
    if !mounted {
        eprintln!("SKIPPED: no ext4 on 4096-byte sectors here");
        return;
    }
    let result = std::panic::catch_unwind(|| {
        let path = dir.path().join("f");
        let config = Config {
            size: Some(MIB),
            ..Config::new("f", &path)
        };
        let rig = Rig::open(config.clone());
        assert_eq!(rig.block_size(), 4096);
        assert!(rig.device.file.direct.is_ok());
        drop(rig);
        let small = Config {
            block_size: Some(512),
            ..config.clone()
        };
        let mut rig = Rig::open(small.clone());
        assert!(rig.device.file.direct.is_err());
        let facts = rig.device.driver_specific();
        let why = facts["nacre"]["buffered_because"]
            .as_str()
            .expect("a reason");
        assert!(why.contains("4096"), "{why}");
        assert_eq!(rig.write(3, 1, 5), Status::Ok);
        assert_eq!(
            (rig.fill_of(3, 1), rig.fill_of(2, 1), rig.fill_of(4, 1)),
            (5, 0, 0)
        );
        drop(rig);
        let e = refusal(Config {
            direct: Some(true),
            ..small
        });
        assert!(matches!(e, CreateError::NoDirect { .. }), "{e}");
    });
    let _ = Command::new("umount").arg(dir.path()).status();
    result.unwrap_or_else(|e| std::panic::resume_unwind(e));
}

/// Goal: unknown keys are refused, and a device presents itself as the module it was asked for.
#[test]
fn configuration_and_presentation() {
    let text = r#"{"name":"a","filename":"/x","block_size":4096,"product":"aio"}"#;
    let config: Config = serde_json::from_str(text).expect("valid");
    assert_eq!(
        (config.block_size, config.product),
        (Some(4096), Product::Aio)
    );
    assert!(serde_json::from_str::<Config>(r#"{"name":"a","filename":"/x","blocks":1}"#).is_err());
    let back = serde_json::to_string(&config).expect("written");
    assert_eq!(serde_json::from_str::<Config>(&back).expect("read"), config);

    let temp = Temp::new(MIB);
    let path = temp.path.to_string_lossy().into_owned();
    let aio = Config {
        product: Product::Aio,
        block_size: Some(4096),
        ..temp.config()
    };
    let rig = Rig::open(aio);
    assert_eq!(rig.device.product_name(), "AIO disk");
    let expected = serde_json::json!({
        "filename": path, "block_size_override": true, "readonly": false, "fallocate": true,
        "nowait": false
    });
    assert_eq!(rig.device.driver_specific()["aio"], expected);
    drop(rig);
    let no = Config {
        fallocate: Some(false),
        ..temp.config()
    };
    let rig = Rig::open(no);
    assert_eq!(rig.device.product_name(), "URING bdev");
    assert_eq!(
        rig.device.driver_specific()["uring"],
        serde_json::json!({ "filename": path })
    );
    assert_eq!(rig.device.supports(Op::Unmap), Support::No);
    assert_eq!(rig.device.supports(Op::WriteZeroes), Support::No);
    assert!(rig.device.limits().volatile_cache);
    assert!(rig.device.driver_specific()["nacre"]["ring"].is_string());
}
