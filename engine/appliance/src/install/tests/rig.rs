//! A machine of tests: a small image on a USB disk, and targets that fail on demand.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::FileExt;
use std::rc::Rc;

use fatfs::{FileSystem, FormatVolumeOptions, FsOptions, format_volume};
use gpt::GptConfig;
use gpt::disk::LogicalBlockSize;
use gpt::mbr::ProtectiveMBR;
use gpt::partition::Partition;
use gpt::partition_types;
use serde_json::{Value, json};
use uuid::Uuid;

use super::super::*;

pub(super) const MIB: u64 = 1 << 20;
const ESP: Uuid = Uuid::from_u128(0x1001);
/// Unknown to the crate `gpt`: root-verity of x86-64 (Discoverable Partitions Specification).
const VERITY_TYPE: Uuid = Uuid::from_u128(0x2c7357ed_ebd2_46d9_aec1_23d437ec2bf5);
pub(super) const HASH: &str = "00112233445566778899aabbccddeeff0123456789abcdef0123456789abcdef";
/// Bytes of a target: more than the sum of all partitions of [`Rig`].
pub(super) const TARGET: u64 = 600 * MIB;

/// A machine that was started from a small image, with disks that are sparse files.
pub(super) struct Rig {
    root: tempfile::TempDir,
    pub(super) disks: RefCell<Vec<Value>>,
    pub(super) lines: RefCell<Vec<String>>,
    pub(super) faults: Faults,
    /// `veritysetup` finds a damaged root file system.
    pub(super) damaged: Cell<bool>,
    /// The first two targets exchange their paths while the source is checked.
    pub(super) swaps: Cell<bool>,
}

/// Faults of the target; each write counts.
#[derive(Debug, Clone, Default)]
pub(super) struct Faults(pub(super) Rc<FaultState>);

#[derive(Debug, Default)]
pub(super) struct FaultState {
    pub(super) writes: Cell<u64>,
    /// The power fails at this write: it and all later calls fail.
    pub(super) cut_at: Cell<Option<u64>>,
    pub(super) error: Cell<Option<io::ErrorKind>>,
    /// A write at this offset reaches the medium with one bit changed.
    pub(super) flip_at: Cell<Option<u64>>,
    /// Writes that no sync has followed are lost at the cut.
    pub(super) unsynced: RefCell<Vec<(u64, Vec<u8>)>>,
    /// Opening fails.
    pub(super) gone: Cell<bool>,
}

#[derive(Debug)]
pub(super) struct FaultyDisk {
    file: File,
    faults: Option<Faults>,
}

impl FaultyDisk {
    fn check(&self) -> io::Result<()> {
        let Some(Faults(state)) = &self.faults else {
            return Ok(());
        };
        if state
            .cut_at
            .get()
            .is_some_and(|cut| state.writes.get() >= cut)
        {
            return Err(state.error.get().unwrap_or(io::ErrorKind::Other).into());
        }
        Ok(())
    }
}

impl Read for FaultyDisk {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.check()?;
        self.file.read(buffer)
    }
}

impl Write for FaultyDisk {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        self.check()?;
        let at = self.file.stream_position()?;
        let Some(Faults(state)) = &self.faults else {
            return Err(io::ErrorKind::PermissionDenied.into());
        };
        state.writes.set(state.writes.get() + 1);
        let mut before = vec![0; buffer.len()];
        self.file.read_exact(&mut before)?;
        state.unsynced.borrow_mut().push((at, before));
        self.file.seek(SeekFrom::Start(at))?;
        let mut bytes = buffer.to_vec();
        if let Some(flip) = state.flip_at.get()
            && (at..at + bytes.len() as u64).contains(&flip)
        {
            bytes[usize::try_from(flip - at).unwrap()] ^= 1;
        }
        self.file.write_all(&bytes)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.check()
    }
}

impl Seek for FaultyDisk {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.file.seek(to)
    }
}

impl Device for FaultyDisk {
    fn sync_and_drop_cache(&mut self) -> io::Result<()> {
        self.check()?;
        if let Some(Faults(state)) = &self.faults {
            state.unsynced.borrow_mut().clear();
        }
        Ok(())
    }
}

impl Open for Rig {
    type Device = FaultyDisk;

    fn read(&self, path: &Path) -> io::Result<FaultyDisk> {
        let file = File::open(path)?;
        Ok(FaultyDisk { file, faults: None })
    }

    fn alone(&self, path: &Path) -> io::Result<FaultyDisk> {
        if self.faults.0.gone.get() {
            return Err(io::ErrorKind::NotFound.into());
        }
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        let faults = Some(self.faults.clone());
        Ok(FaultyDisk { file, faults })
    }
}

impl Run for Rig {
    fn run(&self, program: &str, arguments: &[&str]) -> Result<String, RunError> {
        let line = [&[program], arguments].concat().join(" ");
        self.lines.borrow_mut().push(line);
        let damaged = program == "veritysetup" && self.damaged.get();
        if damaged {
            return Err(RunError::Late {
                program: program.into(),
                patience: std::time::Duration::ZERO,
            });
        }
        if program == "veritysetup" && self.swaps.get() {
            let mut disks = self.disks.borrow_mut();
            let (one, two) = (disks[1]["path"].take(), disks[2]["path"].take());
            (disks[1]["path"], disks[2]["path"]) = (two, one);
        }
        match program {
            "lsblk" => Ok(json!({ "blockdevices": *self.disks.borrow() }).to_string()),
            _ => Ok(String::new()),
        }
    }
}

pub(super) fn pattern(seed: u8, bytes: u64) -> Vec<u8> {
    (0..bytes).map(|at| (at / 7) as u8 ^ seed).collect()
}

/// Files of the image's boot partition. The boot menu has counted one try.
const BOOT_FILES: [(&str, &str); 8] = [
    ("EFI/BOOT/BOOTX64.EFI", "loader"),
    ("EFI/Linux/nacre_0.2.0+2-1.efi", "kernel of 0.2.0"),
    ("EFI/Linux/nacre_0.1.0.efi", "kernel of 0.1.0"),
    ("EFI/nacre-install/linux", "installer"),
    ("loader/loader.conf", "timeout 3"),
    ("loader/entries/nacre-install.conf", "title Install"),
    ("loader/random-seed", "seed"),
    ("nacre/nacre.toml", "# configuration"),
];

impl Rig {
    pub(super) fn new() -> Self {
        let rig = Self {
            root: tempfile::tempdir().unwrap(),
            disks: RefCell::default(),
            lines: RefCell::default(),
            faults: Faults::default(),
            damaged: Cell::default(),
            swaps: Cell::default(),
        };
        let places = rig.places();
        let write = |path: PathBuf, bytes: &[u8]| {
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, bytes).unwrap();
        };
        let line = format!("quiet roothash={HASH} nacre.install=ask fstab=no\n");
        write(places.command_line(), line.as_bytes());
        write(
            places.os_release(),
            b"IMAGE_ID=nacre\nIMAGE_VERSION=0.2.0\n",
        );
        let text = format!("{ESP}\0").to_uppercase();
        let mut variable = vec![6, 0, 0, 0];
        variable.extend(text.encode_utf16().flat_map(u16::to_le_bytes));
        write(rig.loader_variable(), &variable);
        rig.make_stick();
        rig
    }

    pub(super) fn loader_variable(&self) -> PathBuf {
        let vendor = "4a67b082-0a4c-41cf-b6c7-440b29bb8c4f";
        self.places().efi_variable("LoaderDevicePartUUID", vendor)
    }

    pub(super) fn places(&self) -> Places {
        Places::below(self.root.path())
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    fn make_stick(&self) {
        let path = self.path("stick");
        let file = File::create_new(&path).unwrap();
        file.set_len(16 * MIB).unwrap();
        let [root, verity] = [&HASH[..32], &HASH[32..]].map(|half| half.parse().unwrap());
        let parts = [
            (ESP, partition_types::EFI, "nacre-esp", 8 * MIB),
            (
                root,
                partition_types::LINUX_ROOT_X64,
                "nacre_0.2.0",
                2 * MIB,
            ),
            (verity, VERITY_TYPE.into(), "nacre_0.2.0_verity", MIB),
        ];
        let mut entries = BTreeMap::new();
        let mut at = MIB;
        for (number, (id, kind, name, bytes)) in (1..).zip(parts) {
            let entry = Partition {
                part_type_guid: kind,
                part_guid: id,
                first_lba: at / 512,
                last_lba: (at + bytes) / 512 - 1,
                flags: 0,
                name: name.into(),
            };
            entries.insert(number, entry);
            at += bytes;
        }
        let mut reopened = OpenOptions::new()
            .read(true)
            .write(true)
            .open(&path)
            .unwrap();
        ProtectiveMBR::with_lb_size(16 * 2048 - 1)
            .overwrite_lba0(&mut reopened)
            .unwrap();
        let mut table = GptConfig::new()
            .writable(true)
            .create_from_device(reopened, None)
            .unwrap();
        table.update_partitions(entries).unwrap();
        let mut file_again = table.write().unwrap();
        file_again.seek(SeekFrom::Start(9 * MIB)).unwrap();
        file_again.write_all(&pattern(1, 2 * MIB)).unwrap();
        file_again.write_all(&pattern(2, MIB)).unwrap();
        let faults = Some(Faults::default());
        let mut device = FaultyDisk {
            file: file_again,
            faults,
        };
        let mut window = Window::new(&mut device, MIB, 8 * MIB);
        let sectors = FormatVolumeOptions::new().total_sectors(8 * 2048);
        format_volume(&mut window, sectors).unwrap();
        window.at = 0;
        let fat = FileSystem::new(window, FsOptions::new()).unwrap();
        for (path, text) in BOOT_FILES {
            for (end, _) in path.match_indices('/') {
                fat.root_dir().create_dir(&path[..end]).unwrap();
            }
            let mut file = fat.root_dir().create_file(path).unwrap();
            file.write_all(text.as_bytes()).unwrap();
        }
        fat.unmount().unwrap();
        file.sync_all().unwrap();
        let child = |name: &str, id: Uuid| {
            let path = self.path(name);
            json!({ "name": name, "path": path, "type": "part", "size": MIB, "partuuid": id.to_string() })
        };
        let children = json!([
            child("stick1", ESP),
            child("stick2", root),
            child("stick3", verity)
        ]);
        self.add(
            json!({ "name": "stick", "serial": "STICK", "size": 16 * MIB, "children": children }),
        );
    }

    /// Adds a disk to the list of `lsblk`.
    pub(super) fn add(&self, mut disk: Value) {
        let defaults = json!({
            "type": "disk", "log-sec": 512, "ro": false, "model": "Model ", "serial": null, "fstype": null,
            "size": TARGET, "path": self.path(disk["name"].as_str().unwrap()), "mountpoints": [null],
        });
        for (field, value) in defaults.as_object().unwrap() {
            let fields = disk.as_object_mut().unwrap();
            fields.entry(field.clone()).or_insert(value.clone());
        }
        self.disks.borrow_mut().push(disk);
    }

    /// Adds an empty disk with this name and serial.
    pub(super) fn target(&self, name: &str, fields: Value) {
        let file = File::create(self.path(name)).unwrap();
        file.set_len(TARGET).unwrap();
        let mut disk = json!({ "name": name, "serial": name.to_uppercase() });
        for (field, value) in fields.as_object().unwrap() {
            disk[field] = value.clone();
        }
        self.add(disk);
    }

    pub(super) fn with<T>(&self, act: impl FnOnce(&Installer<'_, Self, Self>) -> T) -> T {
        let places = self.places();
        act(&Installer {
            places: &places,
            run: self,
            open: self,
        })
    }

    pub(super) fn install(&self, serial: &str, overwrite: bool) -> Result<Installed, InstallError> {
        self.with(|installer| installer.install(serial, overwrite, &mut |_| {}))
    }

    pub(super) fn refusal(&self, serial: &str) -> String {
        self.install(serial, true).unwrap_err().to_string()
    }

    /// The state of a target as the next boot finds it.
    pub(super) fn boots(&self, name: &str, sector: LogicalBlockSize) -> Boots {
        let file = File::open(self.path(name)).unwrap();
        let config = GptConfig::new().logical_block_size(sector);
        let mut boot_record = [0; 512];
        file.read_exact_at(&mut boot_record, 0).unwrap();
        if boot_record[510..] != [0x55, 0xAA] {
            return Boots::Not;
        }
        let Ok(table) = config.open_from_device(file) else {
            return Boots::Not;
        };
        if table.partitions().is_empty() {
            return Boots::Not;
        }
        let parts: Vec<Partition> = table.partitions().values().cloned().collect();
        let mut file = table.take_device();
        let mut bytes_of = |part: &Partition| {
            let size = sector.as_u64();
            let length = (part.last_lba + 1 - part.first_lba) * size;
            let mut bytes = vec![0; usize::try_from(length).unwrap()];
            file.seek(SeekFrom::Start(part.first_lba * size)).unwrap();
            file.read_exact(&mut bytes).unwrap();
            bytes
        };
        let names: Vec<&str> = parts.iter().map(|part| part.name.as_str()).collect();
        assert_eq!(names, ["nacre-esp", "nacre_0.2.0", "nacre_0.2.0_verity"]);
        assert_eq!(parts[2].part_type_guid.guid, VERITY_TYPE);
        assert_ne!(parts[0].part_guid, ESP, "two boot partitions with one name");
        assert_eq!(parts[1].part_guid.simple().to_string(), HASH[..32]);
        assert!(bytes_of(&parts[1]) == pattern(1, 2 * MIB), "root differs");
        assert!(bytes_of(&parts[2]) == pattern(2, MIB), "verity differs");
        let fat = io::Cursor::new(bytes_of(&parts[0]));
        let fat = FileSystem::new(fat, FsOptions::new()).unwrap();
        let mut files = Vec::new();
        walk(&fat.root_dir(), "", &mut files);
        files.sort();
        Boots::Whole(files)
    }
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Boots {
    Not,
    /// Files of the boot partition, with their contents.
    Whole(Vec<(String, String)>),
}

fn walk(
    folder: &fatfs::Dir<'_, io::Cursor<Vec<u8>>>,
    path: &str,
    files: &mut Vec<(String, String)>,
) {
    for entry in folder.iter().map(Result::unwrap) {
        let name = entry.file_name();
        let inner = format!("{path}{name}");
        // Firmware renames no file with an invalid date.
        for date in [entry.modified().date, entry.created().date] {
            assert!((1..=12).contains(&date.month) && date.day > 0, "{inner}");
        }
        if name.starts_with('.') {
        } else if entry.is_dir() {
            walk(&entry.to_dir(), &format!("{inner}/"), files);
        } else {
            let mut text = String::new();
            entry.to_file().read_to_string(&mut text).unwrap();
            files.push((inner, text));
        }
    }
}

/// The boot partition of a target: one version with all tries, and no installer.
pub(super) fn whole() -> Boots {
    let files = [
        ("EFI/BOOT/BOOTX64.EFI", "loader"),
        ("EFI/Linux/nacre_0.2.0+3-0.efi", "kernel of 0.2.0"),
        ("loader/loader.conf", "timeout 3"),
        ("nacre/nacre.toml", "# configuration"),
    ];
    Boots::Whole(
        files
            .map(|(path, text)| (path.into(), text.into()))
            .to_vec(),
    )
}
