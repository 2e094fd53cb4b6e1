//! A machine in a directory: a kernel that connects to one target, and programs with the effects
//! of the real ones on files and mounts.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use nacre_cluster_csi::node::{Host, Ran};
use parking_lot::Mutex;
use uuid::Uuid;

pub(crate) const NQN: &str = "nqn.2025-01.io.nacre:v";
pub(crate) const SIZE: u64 = 8 << 20;

#[derive(Debug)]
struct Mount {
    number: String,
    root: String,
    target: PathBuf,
    options: String,
}

#[derive(Debug, Default)]
struct State {
    /// Addresses that refuse a connection.
    down: BTreeSet<String>,
    /// Addresses and controllers for which the kernel hangs.
    silent: BTreeMap<String, Silence>,
    /// Calls that hang.
    hanging: usize,
    mounts: Vec<Mount>,
    ran: Vec<String>,
    controllers: usize,
    /// The number that the next device gets.
    minor: u32,
    /// A program that ends in the middle of its work.
    broken: Option<&'static str>,
    /// How opening the device alone ends.
    claims: Claims,
    /// The start of the machine.
    boot: usize,
}

/// The device, for a program that wants to have it alone.
#[derive(Debug, Default, Clone)]
pub(crate) enum Claims {
    #[default]
    Free,
    /// Another program has it.
    Busy,
    /// It does not answer until the sender is dropped.
    Silent(Silence),
}

type Silence = Arc<Mutex<mpsc::Receiver<()>>>;

#[derive(Debug)]
pub(crate) struct Directory {
    dir: tempfile::TempDir,
    sys: PathBuf,
    dev: PathBuf,
    uuid: Uuid,
    state: Mutex<State>,
}

impl Directory {
    pub(crate) fn new(uuid: Uuid) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let (sys, dev) = (dir.path().join("sys"), dir.path().join("dev"));
        for path in [
            sys.join("class/nvme"),
            sys.join("class/block"),
            sys.join("dev/block"),
            dev.clone(),
        ] {
            fs::create_dir_all(path).expect("made");
        }
        let disk = fs::File::create(dev.join("nvme0n1")).expect("a disk");
        disk.set_len(SIZE).expect("its size");
        fs::write(dev.join("nvme-fabrics"), "").expect("made");
        Self {
            dir,
            sys,
            dev,
            uuid,
            state: Mutex::default(),
        }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Refuses connections to this address, and drops a connection to it.
    pub(crate) fn set_down(&self, address: &str, is_down: bool) {
        let mut state = self.state.lock();
        if is_down {
            state.down.insert(address.to_owned());
        } else {
            state.down.remove(address);
        }
    }

    /// The kernel hangs when it connects this address, or deletes this controller, until the
    /// result is dropped.
    pub(crate) fn silence(&self, name: &str) -> mpsc::Sender<()> {
        let (end, silence) = mpsc::channel();
        let silence = Arc::new(Mutex::new(silence));
        self.state.lock().silent.insert(name.to_owned(), silence);
        end
    }

    fn hang(&self, name: &str) {
        let silence = {
            let mut state = self.state.lock();
            let silence = state.silent.get(name).cloned();
            state.hanging += usize::from(silence.is_some());
            silence
        };
        if let Some(silence) = silence {
            let _ = silence.lock().recv();
            let mut state = self.state.lock();
            state.hanging -= 1;
            state.silent.remove(name);
        }
    }

    /// Waits until so many calls hang.
    pub(crate) fn until_hanging(&self, count: usize) {
        let end = Instant::now() + Duration::from_secs(20);
        while self.state.lock().hanging != count {
            assert!(Instant::now() < end, "not {count} calls hang");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    pub(crate) fn break_program(&self, program: Option<&'static str>) {
        self.state.lock().broken = program;
    }

    pub(crate) fn set_claims(&self, claims: Claims) {
        self.state.lock().claims = claims;
    }

    /// Loses connections and mounts, and starts again.
    pub(crate) fn reboot(&self) {
        self.lose_all_paths();
        let mut state = self.state.lock();
        state.mounts.clear();
        state.boot += 1;
    }

    /// Paths to this address, and to no other, are there.
    pub(crate) fn set_addresses(&self, address: &str) {
        for controller in self.controllers() {
            let path = self.sys.join("class/nvme").join(controller).join("address");
            fs::write(path, format!("traddr={address},trsvcid=4420")).expect("written");
        }
    }

    /// A file of the volume's block device in sysfs.
    pub(crate) fn set_block(&self, file: &str, text: &str) {
        fs::write(self.sys.join("class/block/nvme0n1").join(file), text).expect("written");
    }

    /// Another block device with the volume's UUID.
    pub(crate) fn add_copy(&self, name: &str, nqn: &str) {
        self.add_device(name, nqn, self.uuid);
    }

    pub(crate) fn add_device(&self, name: &str, nqn: &str, uuid: Uuid) {
        let at = self.sys.join("class/block").join(name);
        fs::create_dir_all(at.join("device")).expect("made");
        for (file, text) in [
            ("uuid", &*uuid.to_string()),
            ("size", "8"),
            ("dev", "259:99"),
            ("device/subsysnqn", nqn),
        ] {
            fs::write(at.join(file), text).expect("written");
        }
        fs::write(self.dev.join(name), "").expect("a disk");
    }

    pub(crate) fn remove_device(&self, name: &str) {
        fs::remove_dir_all(self.sys.join("class/block").join(name)).expect("removed");
    }

    /// A file system that has nothing to do with the volume is mounted. Those with major number 0
    /// have no block device.
    pub(crate) fn mount_other(&self, number: &str, target: &Path) {
        if !number.starts_with("0:") {
            fs::write(self.sys.join("dev/block").join(number), "").expect("written");
        }
        self.state.lock().mounts.push(Mount {
            number: number.to_owned(),
            root: "/".to_owned(),
            target: target.to_owned(),
            options: "rw".to_owned(),
        });
    }

    pub(crate) fn controllers(&self) -> Vec<String> {
        let entries = fs::read_dir(self.sys.join("class/nvme")).expect("a directory");
        let names = entries.map(|entry| entry.expect("one").file_name());
        let mut names: Vec<String> = names.map(|n| n.into_string().expect("text")).collect();
        names.sort();
        names
    }

    pub(crate) fn options_at(&self, target: &Path) -> Option<String> {
        let state = self.state.lock();
        let mut of_this = state.mounts.iter().rev().filter(|one| one.target == target);
        of_this.next().map(|mount| mount.options.clone())
    }

    pub(crate) fn mount_count(&self) -> usize {
        self.state.lock().mounts.len()
    }

    pub(crate) fn has_run(&self, line: &str) -> bool {
        self.state.lock().ran.iter().any(|one| one.contains(line))
    }

    /// How often a program ran.
    pub(crate) fn runs(&self, program: &str) -> usize {
        let state = self.state.lock();
        state
            .ran
            .iter()
            .filter(|one| one.starts_with(program))
            .count()
    }

    pub(crate) fn disk(&self) -> PathBuf {
        self.dev.join("nvme0n1")
    }

    pub(crate) fn set_size(&self, bytes: u64) {
        fs::write(
            self.sys.join("class/block/nvme0n1/size"),
            (bytes / 512).to_string(),
        )
        .expect("written");
    }

    /// All controllers go, as when the kernel gives up all paths. Mounts stay, and are dead.
    pub(crate) fn lose_all_paths(&self) {
        for controller in self.controllers() {
            self.disconnect(&controller)
                .expect("the controller disconnects");
        }
    }

    fn number(&self) -> String {
        let path = self.sys.join("class/block/nvme0n1/dev");
        fs::read_to_string(path).expect("a device")
    }
}

fn done(code: i32, output: &str, errors: &str) -> io::Result<Ran> {
    Ok(Ran {
        code: Some(code),
        output: output.to_owned(),
        errors: errors.to_owned(),
    })
}

impl Host for Directory {
    fn sys(&self) -> &Path {
        &self.sys
    }

    fn dev(&self) -> &Path {
        &self.dev
    }

    fn boot_id(&self) -> io::Result<String> {
        Ok(format!("boot {}", self.state.lock().boot))
    }

    fn claim(&self, device: &Path) -> io::Result<fs::File> {
        let claims = self.state.lock().claims.clone();
        match claims {
            Claims::Free => fs::File::open(device),
            Claims::Busy => Err(io::Error::from_raw_os_error(16)),
            Claims::Silent(end) => {
                let _ = end.lock().recv();
                fs::File::open(device)
            }
        }
    }

    fn mounts(&self) -> io::Result<String> {
        let state = self.state.lock();
        let line = |mount: &Mount| {
            let target = mount.target.to_string_lossy().replace(' ', r"\040");
            let Mount {
                number,
                root,
                options,
                ..
            } = mount;
            format!("36 35 {number} {root} {target} {options} shared:1 - ext4 /dev/x rw\n")
        };
        Ok(state.mounts.iter().map(line).collect())
    }

    fn connect(&self, options: &str) -> io::Result<()> {
        let of = |key: &str| {
            let mut all = options.split(',').filter_map(|one| one.split_once('='));
            all.find(|(name, _)| *name == key)
                .map(|(_, value)| value.to_owned())
        };
        assert_eq!(of("nqn").as_deref(), Some(NQN), "{options}");
        assert_eq!(of("ctrl_loss_tmo").as_deref(), Some("-1"), "{options}");
        assert_eq!(of("keep_alive_tmo").as_deref(), Some("1"), "{options}");
        let address = format!(
            "traddr={},trsvcid={}",
            of("traddr").expect("one"),
            of("trsvcid").expect("one")
        );
        self.hang(&of("traddr").expect("one"));
        let mut state = self.state.lock();
        if state.down.contains(&of("traddr").expect("one")) {
            return Err(io::Error::from_raw_os_error(111));
        }
        let is_same = |name: &String| {
            let path = self.sys.join("class/nvme").join(name).join("address");
            fs::read_to_string(path).is_ok_and(|found| found.trim() == address)
        };
        if self.controllers().iter().any(is_same) {
            return Err(io::Error::from_raw_os_error(114));
        }
        let at = self
            .sys
            .join(format!("class/nvme/nvme{}", state.controllers));
        state.controllers += 1;
        fs::create_dir_all(&at)?;
        for (file, text) in [
            ("subsysnqn", NQN.to_owned()),
            ("hostnqn", of("hostnqn").expect("one")),
            ("transport", of("transport").expect("one")),
            ("address", address),
            ("state", "live".to_owned()),
        ] {
            fs::write(at.join(file), format!("{text}\n"))?;
        }
        let block = self.sys.join("class/block/nvme0n1");
        if !block.exists() {
            state.minor += 1;
            fs::create_dir_all(block.join("device"))?;
            fs::write(block.join("uuid"), self.uuid.to_string())?;
            fs::write(block.join("size"), (SIZE / 512).to_string())?;
            let number = format!("259:{}", state.minor);
            fs::write(block.join("dev"), &number)?;
            fs::write(block.join("ro"), "0")?;
            fs::write(block.join("device/subsysnqn"), NQN)?;
            fs::write(self.sys.join("dev/block").join(number), "")?;
        }
        Ok(())
    }

    fn disconnect(&self, controller: &str) -> io::Result<()> {
        self.hang(controller);
        fs::remove_dir_all(self.sys.join("class/nvme").join(controller))?;
        if self.controllers().is_empty() {
            fs::remove_file(self.sys.join("dev/block").join(self.number()))?;
            fs::remove_dir_all(self.sys.join("class/block/nvme0n1"))?;
        }
        Ok(())
    }

    fn run(&self, program: &str, arguments: &[&str]) -> io::Result<Ran> {
        let mut state = self.state.lock();
        state.ran.push(format!("{program} {}", arguments.join(" ")));
        let is_broken = state.broken == Some(program);
        let last = PathBuf::from(arguments.last().expect("an argument"));
        let root_of = |from: &Path| {
            let name = from.strip_prefix(&self.dev).ok()?;
            Some(format!("/{}", name.display()))
        };
        match program {
            "blkid" => {
                let text = fs::read(&last)?;
                if let Some(rest) = text.strip_prefix(b"FS:") {
                    let kind = String::from_utf8_lossy(&rest[..4]);
                    let kind = kind.trim_end_matches('\0');
                    done(0, &format!("DEVNAME=x\nTYPE={kind}\nUSAGE=filesystem"), "")
                } else if text.starts_with(b"GPT") {
                    done(0, "PTTYPE=gpt", "")
                } else if text.starts_with(b"AMBIGUOUS") {
                    done(8, "", "ambivalent result")
                } else {
                    done(2, "", "")
                }
            }
            "mkfs.ext4" | "mkfs.xfs" => {
                let mut disk = fs::OpenOptions::new().write(true).open(&last)?;
                let kind = program.trim_start_matches("mkfs.");
                if is_broken && kind == "xfs" {
                    // Its superblock is there from the beginning, with a mark.
                    let mut half = vec![0; 127];
                    half[..6].copy_from_slice(b"FS:xfs");
                    half[126] = 1;
                    disk.write_all(&half)?;
                    return Err(io::ErrorKind::TimedOut.into());
                }
                if is_broken {
                    disk.write_all(b"half of it")?;
                    return Err(io::ErrorKind::TimedOut.into());
                }
                let mut whole = vec![0; 127];
                whole[..3 + kind.len()].copy_from_slice(format!("FS:{kind}").as_bytes());
                disk.write_all(&whole)?;
                done(0, "", "")
            }
            "mount" if is_broken => done(32, "", "mount: wrong fs type"),
            "mount" if arguments.first() == Some(&"--bind") => {
                let from = PathBuf::from(arguments[1]);
                let of = state.mounts.iter().rev().find(|one| one.target == from);
                let (number, root, options) = match of {
                    Some(one) => (one.number.clone(), one.root.clone(), one.options.clone()),
                    // A file of devtmpfs.
                    None => (
                        "0:5".to_owned(),
                        root_of(&from).expect("a device"),
                        "rw".to_owned(),
                    ),
                };
                assert!(last.exists(), "mount needs its target {}", last.display());
                state.mounts.push(Mount {
                    number,
                    root,
                    target: last,
                    options,
                });
                done(0, "", "")
            }
            "mount" if arguments[1].starts_with("remount") => {
                assert_ne!(state.broken, Some("die at the remount"), "the driver dies");
                if state.broken != Some("remount") {
                    let of = state.mounts.iter_mut().rev().find(|one| one.target == last);
                    of.expect("a mount").options = "ro".to_owned();
                }
                done(0, "", "")
            }
            "mount" => {
                let options = match arguments.iter().position(|one| *one == "-o") {
                    Some(at) => format!("rw,{}", arguments[at + 1]),
                    None => "rw".to_owned(),
                };
                let options = if options.split(',').any(|one| one == "ro") {
                    "ro".to_owned()
                } else {
                    options
                };
                let number = self.number();
                state.mounts.push(Mount {
                    number,
                    root: "/".to_owned(),
                    target: last,
                    options,
                });
                done(0, "", "")
            }
            "umount" if is_broken => Err(io::ErrorKind::TimedOut.into()),
            "umount" => match state.mounts.iter().rposition(|one| one.target == last) {
                Some(at) => {
                    state.mounts.remove(at);
                    done(0, "", "")
                }
                None => done(32, "", "not mounted"),
            },
            "resize2fs" | "xfs_growfs" => done(0, "", ""),
            "blockdev" if is_broken => done(1, "", "blockdev: ioctl failed"),
            "blockdev" => {
                let is_read_only = match arguments[0] {
                    "--setro" => "1",
                    "--setrw" => "0",
                    other => panic!("{other}"),
                };
                fs::write(self.sys.join("class/block/nvme0n1/ro"), is_read_only)?;
                done(0, "", "")
            }
            other => Err(io::Error::new(io::ErrorKind::NotFound, other.to_owned())),
        }
    }
}
