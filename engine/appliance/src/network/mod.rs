//! Changes the network settings of an interface (a file of systemd-networkd). A change that is not
//! confirmed within a minute is undone, so that a mistake does not lock the administrator out.
//!
//! ```text
//!   set      writes a note, starts a timer of systemd, writes the new file, reloads networkd
//!   confirm  removes the note, stops the timer
//!   revert   restores the former file, reloads networkd, removes the note
//! ```
//!
//! The *note* ([`Pending`]) is a file with the former settings. It is on the disk before the
//! settings change. So the change is undone even if the caller ends or the machine loses power: the
//! timer reverts, or the next boot before networkd starts.

mod settings;

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use nacre_engine_values::files;
use serde::{Deserialize, Serialize};

pub use self::settings::{Addressing, HostAddress, Interface, Settings, SettingsError};
use crate::lock::{Lock, LockError};
use crate::place::{Places, create_folder, small_text};
use crate::run::{Run, RunError};
use crate::timer::Timer;

/// Time to confirm a change.
pub const TIME_TO_CONFIRM_S: u32 = 60;

const NOTE: &str = "network-pending.json";
const REVERT: Timer = Timer {
    unit: "nacre-network-revert",
    seconds: TIME_TO_CONFIRM_S,
};

/// An unconfirmed change.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pending {
    pub interface: String,
    /// The former contents of the interface's file; `None`: there was no file.
    former: Option<String>,
    /// The former MTU, to restore it: networkd does not change the MTU if the file has none.
    #[serde(default)]
    former_mtu: Option<u32>,
}

#[derive(Debug, thiserror::Error)]
pub enum NetworkError {
    #[error(transparent)]
    Settings(#[from] SettingsError),
    #[error("interface: this machine has no {name}; it has {present}")]
    NoInterface { name: String, present: String },
    #[error(
        "the change of {interface} is not confirmed yet; `nacre appliance network confirm`, or `revert`, ends it"
    )]
    Pending { interface: String },
    #[error(
        "no change waits for a confirmation: it was confirmed, or undone after {TIME_TO_CONFIRM_S} s"
    )]
    NonePending,
    #[error("{path}: not a note of this program: {cause}; compare {networks} by hand, then remove the note", path = path.display(), networks = networks.display())]
    Note {
        path: PathBuf,
        cause: String,
        networks: PathBuf,
    },
    #[error("{path}: {source}", path = path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error(transparent)]
    Lock(#[from] LockError),
    #[error("nothing was changed: {0}")]
    Timer(#[source] RunError),
    #[error("the former settings are back: {0}")]
    Refused(#[source] RunError),
    #[error("the former file is back, but networkd does not know yet: {0}")]
    Reload(#[source] RunError),
}

/// Changes the settings of an interface. They are undone after [`TIME_TO_CONFIRM_S`] unless
/// [`confirm`] is called. `program` is this program's path, for the timer. If networkd refuses the
/// new settings, restores the former ones at once.
pub fn set(
    places: &Places,
    run: &impl Run,
    program: &str,
    interface: &Interface,
    settings: &Settings,
) -> Result<(), NetworkError> {
    let _lock = Lock::of_network(places)?;
    check(places, interface, settings)?;
    let path = file(places, interface.name());
    let former = match fs::read_to_string(&path) {
        Ok(text) => Some(text),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(source) => return Err(NetworkError::Io { path, source }),
    };
    write_note(
        places,
        &Pending {
            interface: interface.name().to_owned(),
            former,
            former_mtu: mtu(places, interface.name()),
        },
    )?;
    let words = [program, "appliance", "network", "revert", "--not-kept"];
    let timer = REVERT.start(run, &words);
    if let Err(error) = timer {
        remove_note(places)?;
        return Err(NetworkError::Timer(error));
    }
    let text = settings.file(interface);
    let written = create_folder(&places.networks(), 0o755)
        .and_then(|()| replace(&path, &text))
        .map_err(|source| NetworkError::Io { path, source });
    let reloaded =
        written.and_then(|()| reload(run, interface.name()).map_err(NetworkError::Refused));
    if let Err(error) = reloaded {
        take_back(places, run, true)?;
        return Err(error);
    }
    Ok(())
}

/// Fails if [`set`] would fail now: wrong settings, no such interface, or an unconfirmed change.
pub fn check(
    places: &Places,
    interface: &Interface,
    settings: &Settings,
) -> Result<(), NetworkError> {
    settings.check()?;
    let present = interfaces(places)?;
    if !present.iter().any(|name| name == interface.name()) {
        return Err(NetworkError::NoInterface {
            name: interface.name().to_owned(),
            present: present.join(", "),
        });
    }
    match pending(places)? {
        Some(Pending { interface, .. }) => Err(NetworkError::Pending { interface }),
        None => Ok(()),
    }
}

/// Confirms the pending change; returns its interface. Fails if there is none.
pub fn confirm(places: &Places, run: &impl Run) -> Result<String, NetworkError> {
    let _lock = Lock::of_network(places)?;
    let pending = pending(places)?.ok_or(NetworkError::NonePending)?;
    remove_note(places)?;
    REVERT.stop(run);
    Ok(pending.interface)
}

/// Undoes the pending change; returns its interface, `None` if there is none. `has_networkd` is
/// false at boot, before networkd runs: then only the file is restored.
pub fn revert(
    places: &Places,
    run: &impl Run,
    has_networkd: bool,
) -> Result<Option<String>, NetworkError> {
    let _lock = Lock::of_network(places)?;
    take_back(places, run, has_networkd)
}

fn take_back(
    places: &Places,
    run: &impl Run,
    has_networkd: bool,
) -> Result<Option<String>, NetworkError> {
    let Some(pending) = pending(places)? else {
        return Ok(None);
    };
    let Pending {
        interface,
        former,
        former_mtu,
    } = pending;
    let path = file(places, &interface);
    let restored = match &former {
        Some(text) => replace(&path, text),
        // Without a file, too: the attempt before may have ended between removal and sync.
        None => match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ if places.networks().is_dir() => files::sync_folder(&path),
            _ => Ok(()),
        },
    };
    restored.map_err(|source| NetworkError::Io { path, source })?;
    // Without networkd, this is a boot: the interface has its first MTU. The MTU comes first: with
    // less than 1280 bytes the kernel takes no IPv6 address.
    let (mtu_set, reloaded) = if has_networkd {
        let mtu_set = set_mtu(places, &interface, former_mtu);
        (mtu_set, reload(run, &interface))
    } else {
        (Ok(()), Ok(()))
    };
    remove_note(places)?;
    reloaded.map_err(NetworkError::Reload)?;
    mtu_set?;
    Ok(Some(interface))
}

/// The unconfirmed change, if there is one.
pub fn pending(places: &Places) -> Result<Option<Pending>, NetworkError> {
    let path = places.notes().join(NOTE);
    let text = match fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(NetworkError::Io { path, source }),
    };
    let bad = |cause: String| NetworkError::Note {
        path: path.clone(),
        cause,
        networks: places.networks(),
    };
    let pending: Pending = serde_json::from_str(&text).map_err(|error| bad(error.to_string()))?;
    // The name becomes a path.
    pending.interface.parse::<Interface>().map_err(bad)?;
    Ok(Some(pending))
}

/// The names of the machine's network interfaces, without `lo`.
pub fn interfaces(places: &Places) -> Result<Vec<String>, NetworkError> {
    let path = places.interfaces();
    let names = crate::slots::names(&path).map_err(|source| NetworkError::Io { path, source })?;
    // `bonding_masters` is a file of the kernel.
    let is_interface = |name: &String| name != "lo" && places.interfaces().join(name).is_dir();
    Ok(names.into_iter().filter(is_interface).collect())
}

fn mtu(places: &Places, interface: &str) -> Option<u32> {
    small_text(&places.interfaces().join(interface).join("mtu"))?
        .trim()
        .parse()
        .ok()
}

fn set_mtu(places: &Places, interface: &str, wanted: Option<u32>) -> Result<(), NetworkError> {
    let Some(wanted) = wanted.filter(|wanted| mtu(places, interface) != Some(*wanted)) else {
        return Ok(());
    };
    let path = places.interfaces().join(interface).join("mtu");
    fs::write(&path, wanted.to_string()).map_err(|source| NetworkError::Io { path, source })
}

/// The text of an interface's settings file; `None` if there is no readable one.
pub fn show(places: &Places, interface: &str) -> Option<String> {
    small_text(&file(places, interface))
}

fn file(places: &Places, interface: &str) -> PathBuf {
    places.networks().join(format!("10-{interface}.network"))
}

/// Replaces a file atomically and durably, with mode 0644 whatever the umask is: networkd, another
/// user, reads it. The new file gets its mode before its name, so it is readable after a power
/// failure, too.
pub(crate) fn replace(path: &Path, text: &str) -> io::Result<()> {
    let (new, mut file) = files::beside(path)?;
    let replaced = file
        .set_permissions(fs::Permissions::from_mode(0o644))
        .and_then(|()| file.write_all(text.as_bytes()))
        .and_then(|()| file.sync_all())
        .and_then(|()| fs::rename(&new, path));
    if replaced.is_err() {
        let _ = fs::remove_file(&new);
    }
    replaced.and_then(|()| files::sync_folder(path))
}

fn reload(run: &impl Run, interface: &str) -> Result<(), RunError> {
    run.run("networkctl", &["reload"])?;
    run.run("networkctl", &["reconfigure", interface])?;
    Ok(())
}

fn write_note(places: &Places, pending: &Pending) -> Result<(), NetworkError> {
    let path = places.notes().join(NOTE);
    let text = serde_json::to_vec(pending).expect("text serialises");
    files::replace_private(&path, &text).map_err(|source| NetworkError::Io { path, source })
}

fn remove_note(places: &Places) -> Result<(), NetworkError> {
    let path = places.notes().join(NOTE);
    fs::remove_file(&path)
        .and_then(|()| files::sync_folder(&path))
        .map_err(|source| NetworkError::Io { path, source })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::testing::{Cuts, Recorder};

    struct Machine {
        root: tempfile::TempDir,
        places: Places,
        run: Recorder,
        interface: Interface,
    }

    impl Machine {
        fn new(failing: Option<&'static str>) -> Self {
            let root = tempfile::tempdir().unwrap();
            let places = Places::below(root.path());
            for name in ["eth0", "lo"] {
                fs::create_dir_all(places.interfaces().join(name)).unwrap();
            }
            fs::write(places.interfaces().join("bonding_masters"), "").unwrap();
            Self {
                places,
                run: Recorder {
                    failing,
                    ..Recorder::default()
                },
                interface: "eth0".parse().unwrap(),
                root,
            }
        }

        fn set(&self, address: &str) -> Result<(), NetworkError> {
            self.set_by(&self.run, address)
        }

        fn set_by(&self, run: &impl Run, address: &str) -> Result<(), NetworkError> {
            let settings = Settings {
                addressing: Addressing::Static {
                    addresses: vec![address.parse().unwrap()],
                    gateways: Vec::new(),
                },
                dns: Vec::new(),
                mtu: None,
            };
            set(
                &self.places,
                run,
                "/usr/bin/nacre",
                &self.interface,
                &settings,
            )
        }

        fn file(&self) -> Option<String> {
            show(&self.places, "eth0")
        }
    }

    /// Goal: the former MTU returns with the former settings, which have none. Method: a file
    /// stands for networkd, which never resets an MTU.
    #[test]
    fn the_former_mtu_returns() {
        let machine = Machine::new(None);
        let path = machine.places.interfaces().join("eth0/mtu");
        let written = |text: &str| fs::write(&path, text).unwrap();
        let mtu = || mtu(&machine.places, "eth0");
        written("1500\n");
        machine.set("192.0.2.7/24").unwrap();
        written("9000\n");
        revert(&machine.places, &machine.run, true).unwrap();
        assert_eq!(mtu(), Some(1500));
        machine.set("192.0.2.7/24").unwrap();
        written("9000\n");
        confirm(&machine.places, &machine.run).unwrap();
        revert(&machine.places, &machine.run, true).unwrap();
        assert_eq!(mtu(), Some(9000));
        // A boot, before networkd: the kernel has set the MTU.
        machine.set("192.0.2.8/24").unwrap();
        written("1500\n");
        revert(&machine.places, &machine.run, false).unwrap();
        assert_eq!(mtu(), Some(1500));
    }

    #[test]
    fn a_confirmed_change_stays() {
        let machine = Machine::new(None);
        assert_eq!(interfaces(&machine.places).unwrap(), ["eth0"]);
        machine.set("192.0.2.7/24").unwrap();
        assert_eq!(
            machine.run.taken(),
            [
                "systemctl stop nacre-network-revert.timer",
                "systemd-run --unit=nacre-network-revert --on-active=60s --timer-property=AccuracySec=1s --collect \
                 --quiet /usr/bin/nacre appliance network revert --not-kept",
                "networkctl reload",
                "networkctl reconfigure eth0",
            ]
        );
        assert!(machine.file().unwrap().contains("Address=192.0.2.7/24"));
        assert!(matches!(
            machine.set("192.0.2.8/24"),
            Err(NetworkError::Pending { .. })
        ));
        assert_eq!(confirm(&machine.places, &machine.run).unwrap(), "eth0");
        assert!(matches!(
            confirm(&machine.places, &machine.run),
            Err(NetworkError::NonePending)
        ));
        // The timer that fires all the same.
        assert_eq!(revert(&machine.places, &machine.run, true).unwrap(), None);
        assert!(machine.file().unwrap().contains("Address=192.0.2.7/24"));
        machine.set("192.0.2.8/24").unwrap();
    }

    #[test]
    fn a_change_without_confirmation_is_undone() {
        let machine = Machine::new(None);
        machine.set("192.0.2.7/24").unwrap();
        // A boot: networkd does not run yet.
        machine.run.taken();
        assert_eq!(
            revert(&machine.places, &machine.run, false)
                .unwrap()
                .as_deref(),
            Some("eth0")
        );
        assert_eq!((machine.file(), machine.run.taken()), (None, Vec::new()));
        assert!(matches!(
            confirm(&machine.places, &machine.run),
            Err(NetworkError::NonePending)
        ));

        machine.set("192.0.2.7/24").unwrap();
        confirm(&machine.places, &machine.run).unwrap();
        let former = machine.file();
        machine.set("192.0.2.8/24").unwrap();
        machine.run.taken();
        assert_eq!(
            revert(&machine.places, &machine.run, true)
                .unwrap()
                .as_deref(),
            Some("eth0")
        );
        assert_eq!(machine.file(), former);
        assert_eq!(
            machine.run.taken(),
            ["networkctl reload", "networkctl reconfigure eth0"]
        );
    }

    /// Goal: a boot after a power failure has the former settings until the change is confirmed,
    /// and the new ones afterwards. Method: the disk at each command, and at each step of a revert.
    #[test]
    fn a_power_failure_leaves_old_or_new_settings() {
        let boot = |places: &Places, wanted: &Option<String>, label: &str| {
            revert(places, &Recorder::default(), false).unwrap();
            assert_eq!(&show(places, "eth0"), wanted, "{label}");
            assert_eq!(pending(places).unwrap(), None, "{label}");
        };
        for has_former in [false, true] {
            let machine = Machine::new(None);
            if has_former {
                machine.set("192.0.2.6/24").unwrap();
                confirm(&machine.places, &machine.run).unwrap();
            }
            let path = file(&machine.places, "eth0");
            let former = fs::read_to_string(&path).ok();
            let trimmed = machine.file();
            let cuts = Cuts::of(machine.root.path());
            machine.set_by(&cuts, "192.0.2.7/24").unwrap();
            let new = machine.file();
            assert_ne!(new, trimmed);
            for (line, disk) in cuts.taken() {
                boot(&Places::below(disk.path()), &trimmed, &line);
            }
            confirm(&machine.places, &cuts).unwrap();
            for (line, disk) in cuts.taken() {
                boot(&Places::below(disk.path()), &new, &line);
            }
            // A revert that ended before and after it changed the file.
            for is_back in [false, true] {
                let note = Pending {
                    interface: "eth0".into(),
                    former: former.clone(),
                    former_mtu: None,
                };
                write_note(&machine.places, &note).unwrap();
                match &former {
                    Some(text) if is_back => replace(&path, text).unwrap(),
                    _ if is_back => drop(fs::remove_file(&path)),
                    _ => replace(&path, "new").unwrap(),
                }
                boot(&machine.places, &trimmed, "revert");
                let names = crate::slots::names(&machine.places.networks()).unwrap();
                assert_eq!(names.len(), usize::from(has_former), "{names:?}");
            }
        }
    }

    /// Goal: without a way back there is no change, and a change that networkd refuses is undone at
    /// once.
    #[test]
    fn a_failure_leaves_the_former_settings() {
        for (failing, commands) in [("systemd-run", 2), ("networkctl reload", 4)] {
            let machine = Machine::new(Some(failing));
            let error = machine.set("192.0.2.7/24").unwrap_err();
            assert_eq!(machine.file(), None, "{error}");
            assert_eq!(machine.run.taken().len(), commands, "{error}");
            let waits = pending(&machine.places).unwrap();
            assert_eq!(waits, None, "{error}");
        }
        let machine = Machine::new(None);
        let settings = Settings {
            addressing: Addressing::Dhcp,
            dns: Vec::new(),
            mtu: Some(1),
        };
        let other = "eth1".parse().unwrap();
        let attempt = |interface: &Interface, settings: &Settings| {
            set(&machine.places, &machine.run, "nacre", interface, settings)
                .unwrap_err()
                .to_string()
        };
        assert!(attempt(&machine.interface, &settings).contains("mtu"));
        let settings = Settings {
            mtu: None,
            ..settings
        };
        assert_eq!(
            attempt(&other, &settings),
            "interface: this machine has no eth1; it has eth0"
        );
        assert!(machine.run.taken().is_empty());
    }

    /// Goal: networkd can read its files after a command of a careful shell. Method: a umask that
    /// leaves no right to others, for one call.
    #[test]
    fn networkd_can_read_the_file() {
        let machine = Machine::new(None);
        drop(Lock::of_network(&machine.places).unwrap());
        let umask = rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o077));
        let set = machine.set("192.0.2.7/24");
        rustix::process::umask(umask);
        set.unwrap();
        let facts = fs::metadata(file(&machine.places, "eth0")).unwrap();
        assert_eq!(facts.permissions().mode() & 0o777, 0o644);
    }

    #[test]
    fn a_note_that_cannot_be_read_is_an_error() {
        let machine = Machine::new(None);
        drop(Lock::of_network(&machine.places).unwrap());
        for text in [
            "",
            "{}",
            r#"{"interface":"../x","former":null}"#,
            r#"{"interface":"lo","former":""}"#,
        ] {
            fs::write(machine.places.notes().join(NOTE), text).unwrap();
            assert!(
                matches!(machine.set("192.0.2.7/24"), Err(NetworkError::Note { .. })),
                "{text}"
            );
            assert!(matches!(
                revert(&machine.places, &machine.run, false),
                Err(NetworkError::Note { .. })
            ));
        }
    }
}
