//! Opens a file or block device, locks it, and detects its features: direct I/O, alignment, hole
//! punching, sysfs attributes. Control plane only.

use std::fs::{self, File, Metadata, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nacre_bdev::{BLOCK_SIZES, is_block_size};
use rustix::fs::{
    AtFlags, FallocateFlags, FlockOperation, OFlags, SeekFrom, StatxFlags, Timespec, Timestamps,
    UTIME_OMIT,
};
use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};
use uuid::Uuid;

use crate::error::CreateError;
use crate::identity::{self, Identity, sys_dir};
use crate::{Config, RingOptions};

/// Longest wait for a file in use.
const PATIENCE: Duration = Duration::from_secs(1);
/// The same if its user has ended. Shorter than the time limit of an RPC call, whose error would
/// not name the user.
const PATIENCE_WITH_ENDED: Duration = Duration::from_secs(12);

/// The alignment that direct I/O requires.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Direct {
    /// Alignment of buffer addresses, in bytes.
    pub memory: u32,
    /// Alignment of offsets and lengths, in bytes.
    pub offset: u32,
}

/// The block layer's attributes in sysfs. Sizes in bytes; `chunk_sectors` in sectors of 512 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BlockFacts {
    pub write_cache: bool,
    pub max_discard: u64,
    pub discard_granularity: u64,
    pub chunk_sectors: u64,
}

#[derive(Debug)]
pub(crate) struct Opened {
    pub file: File,
    /// Canonical path: no symbolic links and no relative parts.
    pub path: PathBuf,
    /// Block layer attributes of a block device; `None`: a regular file.
    pub block: Option<BlockFacts>,
    /// Alignment for direct I/O, or why I/O goes through the page cache.
    pub direct: Result<Direct, String>,
    pub block_size: u32,
    pub physical_block_size: u32,
    pub size: u64,
    /// Holes can be punched (files) or ranges zeroed by the kernel (block devices).
    pub punch: bool,
    pub uuid: Uuid,
    pub identity: Identity,
    /// The file changed while it was closed.
    pub changed: bool,
    /// Device and inode numbers of a regular file, valid until the machine restarts.
    pub inode: Option<(u64, u64)>,
}

pub(crate) fn open(config: &Config) -> Result<Opened, CreateError> {
    if let Some(given) = config.block_size
        && !is_block_size(given.into())
    {
        return Err(CreateError::BlockSize { given });
    }
    if !(1..=RingOptions::MAX_DEPTH).contains(&config.ring.depth) {
        return Err(CreateError::Depth {
            given: config.ring.depth,
        });
    }
    let wanted = &config.filename;
    let io = |what: &str, e: io::Error| CreateError::from_io(wanted, what, config.readonly, e);
    create_if_missing(config)?;
    let path = fs::canonicalize(wanted).map_err(|e| match e.kind() {
        io::ErrorKind::NotFound => CreateError::missing(config),
        _ => io("realpath()", e),
    })?;
    let meta = fs::metadata(&path).map_err(|e| io("stat()", e))?;
    let kind = meta.file_type();
    if kind.is_dir() {
        return Err(CreateError::IsDirectory { path });
    }
    if !kind.is_file() && !kind.is_block_device() {
        return Err(CreateError::WrongKind {
            path,
            kind: kind_name(&kind),
        });
    }
    let is_block = kind.is_block_device();
    let (file, refused) = open_file(config, &path, is_block)?;
    // Read the metadata of the open file: the path may lead to another file by now.
    let meta = file.metadata().map_err(|e| io("fstat()", e))?;
    if !is_block {
        lock(config, &file, &path, &meta)?;
    }
    let identity = Identity::of(&file, &meta);
    match &config.identity {
        Some(expected) => {
            if let Some(found) = expected.difference(&identity) {
                let bdev = config.name.clone();
                return Err(CreateError::Other { path, bdev, found });
            }
        }
        None => {
            if let (false, 0, Some(size), false) =
                (is_block, meta.len(), config.size, config.readonly)
            {
                give_size(config, &file, size)?;
            }
        }
    }

    let size = rustix::fs::seek(&file, SeekFrom::End(0)).map_err(|e| io("lseek()", e.into()))?;
    if size == 0 {
        return Err(CreateError::Empty { path, is_block });
    }
    let sector = if is_block {
        rustix::fs::ioctl_blksszget(&file).map_err(|e| io("ioctl(BLKSSZGET)", e.into()))?
    } else {
        512
    };
    let alignment = match refused {
        Some(why) => Err(why),
        None => direct_alignment(&file, sector, size),
    };
    let natural = alignment.as_ref().map_or(sector, |d| d.offset);
    let block_size = config
        .block_size
        .unwrap_or_else(|| natural.clamp(*BLOCK_SIZES.start(), *BLOCK_SIZES.end()));
    if block_size < sector {
        return Err(CreateError::BelowSector {
            path,
            block_size,
            sector,
        });
    }
    if !size.is_multiple_of(u64::from(block_size)) {
        return Err(CreateError::PartialBlock {
            path,
            size,
            block_size,
            is_block,
        });
    }
    let direct = alignment.and_then(|d| suits(&file, d, block_size));
    if let Err(why) = &direct {
        if config.direct == Some(true) {
            return Err(CreateError::NoDirect {
                path,
                why: why.clone(),
            });
        }
        clear_direct(&file).map_err(|e| io("fcntl(F_SETFL)", e))?;
        if config.direct.is_none() {
            tracing::warn!(bdev = config.name, path = %path.display(), why, "page cache in use");
        }
    }

    let block = is_block.then(|| block_facts(meta.rdev()));
    let physical = if is_block {
        rustix::fs::ioctl_blkpbszget(&file).unwrap_or(sector)
    } else {
        u32::try_from(meta.blksize())
            .unwrap_or(4096)
            .min(*BLOCK_SIZES.end())
    };
    let punch = !config.readonly && (is_block || can_punch(&file, size));
    if punch && !is_block {
        keep_times(&file, &meta);
    }
    let uuid = config.uuid.unwrap_or_else(|| identity::uuid(&path, &meta));
    Ok(Opened {
        file,
        path,
        block,
        direct,
        block_size,
        physical_block_size: physical.max(block_size).next_power_of_two(),
        size,
        punch,
        uuid,
        identity,
        changed: config.contents.is_some_and(|left| left.are_gone(&meta)),
        inode: (!is_block).then_some((meta.dev(), meta.ino())),
    })
}

/// Present size of the file or device in bytes.
pub(crate) fn size_of(file: &File) -> io::Result<u64> {
    Ok(rustix::fs::seek(file, SeekFrom::End(0))?)
}

fn create_if_missing(config: &Config) -> Result<(), CreateError> {
    // Do not replace a missing file of a known device by an empty one.
    let (Some(size), false, None) = (config.size, config.readonly, &config.identity) else {
        return Ok(());
    };
    let path = &config.filename;
    let io = |what: &str, e: io::Error| CreateError::from_io(path, what, false, e);
    let mut options = OpenOptions::new();
    let file = match options
        .read(true)
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
    {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => return Ok(()),
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Err(CreateError::missing(config)),
        Err(e) => return Err(io("open(O_CREAT|O_EXCL)", e)),
    };
    let made = give_size(config, &file, size).and_then(|()| {
        // Make the name durable before any caller relies on it.
        let parent = path.parent().filter(|p| !p.as_os_str().is_empty());
        let parent = parent.unwrap_or_else(|| Path::new("."));
        File::open(parent)
            .and_then(|d| d.sync_all())
            .map_err(|e| io("fsync(directory)", e))
    });
    match &made {
        Ok(()) => tracing::info!(bdev = config.name, path = %path.display(), size, "made the file"),
        Err(_) => drop(fs::remove_file(path)),
    }
    made
}

fn give_size(config: &Config, file: &File, size: u64) -> Result<(), CreateError> {
    let path = &config.filename;
    let block_size = config.block_size.unwrap_or(512);
    if size == 0 || !size.is_multiple_of(u64::from(block_size)) || size > i64::MAX as u64 {
        return Err(CreateError::CreateSize {
            path: path.clone(),
            given: size,
            block_size,
        });
    }
    let sort = |what: &str, e: io::Error| match e.raw_os_error() {
        Some(libc::ENOSPC | libc::EFBIG | libc::EDQUOT) => CreateError::NoSpace {
            path: path.clone(),
            size,
        },
        _ => CreateError::from_io(path, what, false, e),
    };
    file.set_len(size).map_err(|e| sort("ftruncate()", e))?;
    if config.preallocate {
        rustix::fs::fallocate(file, FallocateFlags::empty(), 0, size)
            .map_err(|e| sort("fallocate()", e.into()))?;
    }
    file.sync_all().map_err(|e| sort("fsync()", e))
}

/// Opens the file with O_DIRECT, or without it; then also returns the reason.
fn open_file(
    config: &Config,
    path: &Path,
    is_block: bool,
) -> Result<(File, Option<String>), CreateError> {
    // O_EXCL without O_CREAT claims a block device: no mount, no other claim. std adds O_CLOEXEC.
    let claim = if is_block { libc::O_EXCL } else { 0 };
    let try_open = |extra: i32| {
        let mut options = OpenOptions::new();
        options
            .read(true)
            .write(!config.readonly)
            .custom_flags(claim | extra);
        patiently(
            || options.open(path),
            |e| is_block && e.raw_os_error() == Some(libc::EBUSY),
            || fs::metadata(path).is_ok_and(|meta| is_left_over(meta.rdev())),
        )
    };
    let access = if config.readonly {
        "O_RDONLY"
    } else {
        "O_RDWR"
    };
    let sort = |e: io::Error| match e.raw_os_error() {
        Some(libc::EBUSY | libc::ETXTBSY) => {
            let rdev = fs::metadata(path).map_or(0, |m| m.rdev());
            CreateError::InUse {
                path: path.to_owned(),
                by: block_user(rdev)
                    .unwrap_or_else(|| "a partition in use or another process".to_owned()),
                remedy: "; unmount or release it first",
            }
        }
        _ => CreateError::from_io(path, &format!("open({access})"), config.readonly, e),
    };
    if config.direct == Some(false) {
        return Ok((
            try_open(0).map_err(sort)?,
            Some("switched off by configuration".to_owned()),
        ));
    }
    match try_open(libc::O_DIRECT) {
        Ok(file) => Ok((file, None)),
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {
            let why = "the file system refuses O_DIRECT".to_owned();
            Ok((try_open(0).map_err(sort)?, Some(why)))
        }
        Err(e) => Err(sort(e)),
    }
}

/// Locks the file (`flock`): exclusively, or shared for read-only use.
fn lock(config: &Config, file: &File, path: &Path, meta: &Metadata) -> Result<(), CreateError> {
    let how = if config.readonly {
        FlockOperation::NonBlockingLockShared
    } else {
        FlockOperation::NonBlockingLockExclusive
    };
    let wouldblock = |e: &Errno| *e == Errno::WOULDBLOCK;
    let has_ended = || lock_pid(meta.dev(), meta.ino()).is_some_and(has_ended);
    match patiently(|| rustix::fs::flock(file, how), wouldblock, has_ended) {
        Ok(()) => Ok(()),
        Err(Errno::WOULDBLOCK) => {
            let by =
                lock_holder(meta.dev(), meta.ino()).unwrap_or_else(|| "another process".to_owned());
            Err(CreateError::InUse {
                path: path.to_owned(),
                by,
                remedy: " (flock)",
            })
        }
        Err(error) => {
            // Some network file systems have no locks.
            tracing::warn!(bdev = config.name, path = %path.display(), %error, "not locked");
            Ok(())
        }
    }
}

/// Retries `attempt` for a second while it fails with "in use", and longer while its user has
/// ended: the kernel completes the I/O of a killed process and destroys its ring, and has its files
/// open until then. A slow disk delays that. The user may also vanish between the attempt and the
/// look, or be missing in a list that changes while it is read: two looks in a row decide.
fn patiently<T, E>(
    attempt: impl Fn() -> Result<T, E>,
    in_use: impl Fn(&E) -> bool,
    has_ended: impl Fn() -> bool,
) -> Result<T, E> {
    let began = Instant::now();
    let mut looks = 0;
    loop {
        let error = match attempt() {
            Err(error) if in_use(&error) => error,
            other => return other,
        };
        let waited = began.elapsed();
        if waited >= PATIENCE {
            looks = if has_ended() { 0 } else { looks + 1 };
            if looks == 2 || waited >= PATIENCE_WITH_ENDED {
                return Err(error);
            }
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// True if no process has the id, or the process is a zombie.
fn has_ended(pid: u32) -> bool {
    // 0: a process of another namespace.
    let Some(id) = i32::try_from(pid).ok().and_then(Pid::from_raw) else {
        return false;
    };
    if test_kill_process(id) == Err(Errno::SRCH) {
        return true;
    }
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // `712 (name) S …`; a name may have parentheses.
    let state = stat.rsplit_once(')').map(|(_, rest)| rest.trim_start());
    state.is_some_and(|state| state.starts_with(['Z', 'X']))
}

/// True if a block device in use has no mount, no device on top, and no process that has it open.
fn is_left_over(rdev: u64) -> bool {
    let Ok(processes) = fs::read_dir("/proc") else {
        return false;
    };
    let is_user = |link: &Path| {
        // Other files may be on a server that does not answer.
        let device = fs::read_link(link).is_ok_and(|path| path.starts_with("/dev"));
        device && fs::metadata(link).is_ok_and(|meta| meta.rdev() == rdev)
    };
    let has_it_open = |process: PathBuf| match fs::read_dir(process.join("fd")) {
        Ok(files) => files.flatten().any(|file| is_user(&file.path())),
        // The files of another user's process are not known.
        Err(error) => error.kind() == io::ErrorKind::PermissionDenied,
    };
    let mut processes = processes.flatten().map(|process| process.path());
    block_user(rdev).is_none() && !processes.any(has_it_open)
}

/// The process with a flock on the inode, from /proc/locks (`1: FLOCK  ADVISORY  WRITE 712
/// fe:00:1234 0 EOF`).
fn lock_pid(dev: u64, ino: u64) -> Option<u32> {
    let device = format!(
        "{:02x}:{:02x}:{ino}",
        rustix::fs::major(dev),
        rustix::fs::minor(dev)
    );
    let locks = fs::read_to_string("/proc/locks").ok()?;
    let fields = |line: &str| {
        line.split_whitespace()
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    let held = locks
        .lines()
        .map(fields)
        .find(|f| f.len() > 5 && f[5] == device)?;
    held[4].parse().ok()
}

fn lock_holder(dev: u64, ino: u64) -> Option<String> {
    let pid = lock_pid(dev, ino)?;
    if pid == std::process::id() {
        return Some("this process (another bdev on the same file?)".to_owned());
    }
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    Some(format!("process {pid} ({})", name.trim()))
}

/// The known user of a block device: its mount point, swap, or the device stacked on it.
fn block_user(rdev: u64) -> Option<String> {
    let number = format!("{}:{}", rustix::fs::major(rdev), rustix::fs::minor(rdev));
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    for line in mounts.lines() {
        let mut fields = line.split(' ');
        if fields.nth(2) == Some(&number) {
            let on = fields.nth(1).unwrap_or("?");
            return Some(format!("the file system mounted on {on}"));
        }
    }
    let swaps = fs::read_to_string("/proc/swaps").unwrap_or_default();
    let mut swaps = swaps.lines().filter_map(|line| line.split(' ').next());
    if swaps.any(|path| fs::metadata(path).is_ok_and(|meta| meta.rdev() == rdev)) {
        return Some("swap".to_owned());
    }
    let holders = fs::read_dir(format!("/sys/dev/block/{number}/holders"));
    let mut names = holders
        .into_iter()
        .flatten()
        .flatten()
        .map(|e| e.file_name());
    let name = names.next()?;
    Some(format!(
        "the device {} on top of it",
        name.to_string_lossy()
    ))
}

/// The alignment of direct I/O, or the reason why direct I/O is not possible.
fn direct_alignment(file: &File, sector: u32, size: u64) -> Result<Direct, String> {
    let wanted = StatxFlags::DIOALIGN;
    if let Ok(facts) = rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, wanted)
        && facts.stx_mask & wanted.bits() != 0
    {
        let (memory, offset) = (facts.stx_dio_mem_align, facts.stx_dio_offset_align);
        if memory == 0 || offset == 0 {
            return Err("the file system cannot do direct I/O on this file".to_owned());
        }
        return Ok(Direct { memory, offset });
    }
    // Before Linux 6.1, or a file system that does not report its alignment: try sizes.
    let guess = [sector, 512, 4096]
        .into_iter()
        .filter(|g| *g >= sector && u64::from(*g) <= size);
    for align in guess {
        if read_one(file, align, align).is_ok() {
            return Ok(Direct {
                memory: align,
                offset: align,
            });
        }
    }
    Err("direct reads fail".to_owned())
}

/// Verifies by a read that direct I/O works at this block size.
fn suits(file: &File, direct: Direct, block_size: u32) -> Result<Direct, String> {
    let Direct { memory, offset } = direct;
    if !block_size.is_multiple_of(offset) {
        return Err(format!(
            "direct I/O asks for {offset} bytes, the block size is {block_size}"
        ));
    }
    if !memory.is_power_of_two() || !offset.is_power_of_two() {
        return Err(format!(
            "direct I/O asks for odd alignments ({memory} and {offset} bytes)"
        ));
    }
    read_one(file, block_size, memory)
        .map(|()| direct)
        .map_err(|e| format!("a direct read of {block_size} bytes fails: {e}"))
}

fn read_one(file: &File, len: u32, align: u32) -> io::Result<()> {
    let mut memory = vec![0; (len + align) as usize];
    let skew = memory.as_ptr().align_offset(align as usize);
    rustix::io::pread(file, &mut memory[skew..skew + len as usize], 0)?;
    Ok(())
}

fn clear_direct(file: &File) -> io::Result<()> {
    let flags = rustix::fs::fcntl_getfl(file)?;
    Ok(rustix::fs::fcntl_setfl(file, flags - OFlags::DIRECT)?)
}

/// True if the file system can punch holes. Punches one behind the end of the file, without effect.
fn can_punch(file: &File, size: u64) -> bool {
    let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    let behind = size.next_multiple_of(1 << 16);
    rustix::fs::fallocate(file.as_fd(), how, behind, 4096).is_ok()
}

/// Restores the modification time after the test hole, because [`crate::Contents`] compares it. If
/// this fails (the file has another owner) and the daemon crashes now, the file counts as changed.
fn keep_times(file: &File, before: &Metadata) {
    let modified = Timespec {
        tv_sec: before.mtime(),
        tv_nsec: before.mtime_nsec(),
    };
    let accessed = Timespec {
        tv_sec: 0,
        tv_nsec: UTIME_OMIT,
    };
    let times = Timestamps {
        last_access: accessed,
        last_modification: modified,
    };
    let _ = rustix::fs::futimens(file, &times);
}

fn block_facts(rdev: u64) -> BlockFacts {
    let number = |name: &str| {
        queue_attribute(rdev, name)
            .and_then(|v| v.parse().ok())
            .unwrap_or(0)
    };
    BlockFacts {
        // A device that is not known to be write-through counts as cached.
        write_cache: queue_attribute(rdev, "write_cache").as_deref() != Some("write through"),
        max_discard: number("discard_max_bytes"),
        discard_granularity: number("discard_granularity"),
        chunk_sectors: number("chunk_sectors"),
    }
}

/// An attribute of the device's request queue in sysfs; for a partition, that of its disk.
fn queue_attribute(rdev: u64, name: &str) -> Option<String> {
    let dir = sys_dir(rdev);
    let text = fs::read_to_string(dir.join("queue").join(name))
        .or_else(|_| fs::read_to_string(dir.join("../queue").join(name)));
    text.ok().map(|t| t.trim().to_owned())
}

fn kind_name(kind: &fs::FileType) -> &'static str {
    if kind.is_char_device() {
        "a character device"
    } else if kind.is_fifo() {
        "a pipe"
    } else if kind.is_socket() {
        "a socket"
    } else {
        "something else"
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// Goal: a file whose user vanishes just before the look for it is opened; one whose user lives
    /// is refused. Method: the look itself ends the use, or each second look misses the user.
    #[test]
    fn a_user_that_vanishes_is_not_alive() {
        let in_use = Cell::new(true);
        let attempt = || if in_use.get() { Err(()) } else { Ok(()) };
        let vanishes = || {
            in_use.set(false);
            false
        };
        assert_eq!(patiently(attempt, |()| true, vanishes), Ok(()));

        let looks = Cell::new(0);
        let attempt = || if looks.get() < 6 { Err(()) } else { Ok(()) };
        let is_missed = || {
            looks.set(looks.get() + 1);
            looks.get() % 2 == 0
        };
        assert_eq!(patiently(attempt, |()| true, is_missed), Ok(()));

        assert_eq!(patiently(|| Err::<(), _>(()), |()| true, || false), Err(()));
    }
}
