use ratatui::Terminal;
use ratatui::backend::{Backend, ClearType, TestBackend, WindowSize};
use ratatui::buffer::Cell;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use ratatui::layout::{Position, Rect, Size};
use serde_json::json;
use std::io;

use super::*;
use crate::install::{Disk, Refusal};
use crate::network::Addressing;
use crate::slots::SlotState;

fn facts() -> Facts {
    let fingerprint: Vec<String> = (0..32).map(|at| format!("{at:02X}")).collect();
    Facts {
        host: "storage1".into(),
        version: "0.2.0".into(),
        addresses: vec!["enp0s2 10.0.2.15/24".into(), "enp0s2 fd00::2/64".into()],
        interfaces: vec!["enp0s2".into(), "enp0s3".into()],
        daemon: Daemon::Up(Box::new(Answers {
            volumes: Some(
                json!([{ "name": "a", "state": "healthy" }, { "name": "b", "state": "degraded" }]),
            ),
            web: Some(json!({
                "listen": ["https://0.0.0.0:8443"], "fingerprint": format!("SHA256:{}", fingerprint.join(":")), "setup": true,
                "setup_code": "ABCD2345",
            })),
            listeners: (0..6)
                .map(|at| format!("tcp://0.0.0.0:{} listening", 4420 + at))
                .collect(),
        })),
        other_slot: None,
        trouble: Vec::new(),
        pending: None,
        install: None,
    }
}

fn screen(app: &App, width: u16, height: u16) -> String {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| draw(frame, app)).unwrap();
    let buffer = terminal.backend().buffer().clone();
    let line = |y| -> String { (0..width).map(|x| buffer[(x, y)].symbol()).collect() };
    let lines: Vec<String> = (0..height).map(|y| line(y).trim_end().to_owned()).collect();
    lines.join("\n")
}

fn app(facts: Facts) -> App {
    let mut app = App::default();
    app.on_facts(facts);
    app
}

fn press(app: &mut App, code: KeyCode) -> Option<Action> {
    app.on_key(KeyEvent::new(code, KeyModifiers::NONE))
}

fn type_text(app: &mut App, text: &str) {
    for letter in text.chars() {
        assert_eq!(press(app, KeyCode::Char(letter)), None);
    }
}

#[test]
fn the_overview() {
    insta::assert_snapshot!(screen(&app(facts()), 80, 24), @r#"
    Nacre 0.2.0 on storage1

      service       active
      volumes       b degraded
      listeners     tcp://0.0.0.0:4420 listening
                    tcp://0.0.0.0:4421 listening
                    tcp://0.0.0.0:4422 listening
                    tcp://0.0.0.0:4423 listening
                    and 2 more
      addresses     enp0s2 10.0.2.15/24
                    enp0s2 fd00::2/64
      page          https://10.0.2.15:8443
      certificate   SHA256:00:01:02:03:04:05:06:07:08:09:0A:0B:0C:0D:0E:0F:
                    10:11:12:13:14:15:16:17:18:19:1A:1B:1C:1D:1E:1F
      set-up code   ABCD2345








    n network  m name  r restart  p power off  f factory reset
    "#);
}

#[test]
fn the_screen_without_a_daemon() {
    let away = Facts {
        daemon: Daemon::Away("no daemon at /run/nacre/nacre.sock".into()),
        addresses: Vec::new(),
        other_slot: Some(Slot {
            version: "0.3.0".parse().unwrap(),
            state: SlotState::Failed,
            entry: None,
            tries: None,
            complete: true,
        }),
        trouble: vec!["stay: this version was good before; no restart".into()],
        pending: Some("enp0s2".into()),
        ..facts()
    };
    insta::assert_snapshot!(screen(&app(away), 80, 14), @r#"
    Nacre 0.2.0 on storage1

      service       does not answer: no daemon at /run/nacre/nacre.sock
      trouble       stay: this version was good before; no restart
      addresses     none: is a cable connected, and does DHCP answer?
      update        version 0.3.0 has no tries left; this version runs instead

      network       new settings of enp0s2 end within 60 s unless kept





    k keep the new network  u undo it  r restart  p power off
    "#);
}

#[test]
fn a_small_or_absent_screen_is_no_panic() {
    for (width, height) in [(0, 0), (1, 1), (10, 3), (80, 4), (300, 100)] {
        let mut app = app(facts());
        screen(&app, width, height);
        for key in "nrpf".chars() {
            press(&mut app, KeyCode::Char(key));
            screen(&app, width, height);
            press(&mut app, KeyCode::Esc);
        }
    }
}

#[test]
fn the_form_of_the_network() {
    let mut app = app(facts());
    press(&mut app, KeyCode::Char('n'));
    press(&mut app, KeyCode::Char('3'));
    press(&mut app, KeyCode::Char('0'));
    insta::assert_snapshot!(screen(&app, 80, 8), @r#"
    Nacre 0.2.0 on storage1

      1  enp0s2
      2  enp0s3



    1-9 choose  Esc back
    "#);
    press(&mut app, KeyCode::Char('2'));
    for text in ["192.0.2.7/24", "192.0.3.1", "192.0.2.2,192.0.2.3"] {
        type_text(&mut app, text);
        press(&mut app, KeyCode::Enter);
    }
    assert_eq!(press(&mut app, KeyCode::Enter), None);
    insta::assert_snapshot!(screen(&app, 80, 16), @r#"
    Nacre 0.2.0 on storage1

      Network settings of enp0s3

    > address       192.0.2.7/24_
                    (address/prefix, several with commas; empty: DHCP)
      gateway       192.0.3.1
                    (one per family)
      dns           192.0.2.2,192.0.2.3
                    (up to three servers)
      mtu
                    (empty: as the interface has it)

    gateway: 192.0.3.1 is in the network of no address; check the prefix

    Enter next, at the end apply  Tab up down move  Esc back
    "#);
    press(&mut app, KeyCode::Down);
    for _ in "3.1".chars() {
        press(&mut app, KeyCode::Backspace);
    }
    type_text(&mut app, "2.1");
    press(&mut app, KeyCode::Tab);
    press(&mut app, KeyCode::Tab);
    let Some(Action::SetNetwork {
        interface,
        settings,
    }) = press(&mut app, KeyCode::Enter)
    else {
        panic!("{}", screen(&app, 80, 16));
    };
    assert_eq!(interface.name(), "enp0s3");
    assert!(
        settings
            .file(&interface)
            .contains("Gateway=192.0.2.1\nDNS=192.0.2.2\nDNS=192.0.2.3\n")
    );
}

#[test]
fn an_empty_form_is_dhcp() {
    let mut app = app(facts());
    press(&mut app, KeyCode::Char('n'));
    press(&mut app, KeyCode::Char('1'));
    press(&mut app, KeyCode::Up);
    let Some(Action::SetNetwork { settings, .. }) = press(&mut app, KeyCode::Enter) else {
        panic!("{}", screen(&app, 80, 16));
    };
    assert_eq!(settings.addressing, Addressing::Dhcp);
}

/// Goal: the screen gives the machine another name, and says why it takes no bad one.
#[test]
fn the_machine_gets_a_name() {
    let mut app = app(facts());
    press(&mut app, KeyCode::Char('m'));
    type_text(&mut app, "Storage_");
    assert_eq!(press(&mut app, KeyCode::Enter), None);
    insta::assert_snapshot!(screen(&app, 80, 12), @r#"
    Nacre 0.2.0 on storage1

      This machine has the name storage1.
      The page's own certificate is made again for a new name.

      The new name: letters, digits, '-', and '.' between parts

      > Storage__

    the label "Storage_" needs letters, digits and '-', and no '-' at its ends

    Enter apply  Esc back
    "#);
    press(&mut app, KeyCode::Backspace);
    type_text(&mut app, "-7");
    let name = "storage-7".parse().unwrap();
    let action = press(&mut app, KeyCode::Enter);
    assert_eq!(action, Some(Action::SetName { name }));
    app.on_done("done".into());
    // Not while settings of the network wait: the screen has no room for both keys.
    let waiting = Facts {
        pending: Some("eth0".into()),
        ..facts()
    };
    app.on_facts(waiting);
    press(&mut app, KeyCode::Char('m'));
    assert_eq!(press(&mut app, KeyCode::Enter), None);
    assert!(screen(&app, 80, 24).contains("k keep the new network"));
}

/// Goal: one key never ends the machine, and while an action runs no other starts.
#[test]
fn dangerous_keys_ask_first() {
    let mut app = app(facts());
    for (key, action) in [('r', Action::Restart), ('p', Action::PowerOff)] {
        assert_eq!(press(&mut app, KeyCode::Char(key)), None);
        assert_eq!(press(&mut app, KeyCode::Enter), None);
        assert_eq!(press(&mut app, KeyCode::Char('y')), None);
        press(&mut app, KeyCode::Char(key));
        assert_eq!(press(&mut app, KeyCode::Char('y')), Some(action));
        press(&mut app, KeyCode::Char(key));
        assert_eq!(press(&mut app, KeyCode::Char('y')), None);
        app.on_done("refused".into());
        assert!(screen(&app, 80, 24).contains("refused"));
    }
    press(&mut app, KeyCode::Char('f'));
    type_text(&mut app, "storagf");
    press(&mut app, KeyCode::Backspace);
    type_text(&mut app, "e1");
    insta::assert_snapshot!(screen(&app, 80, 12), @r#"
    Nacre 0.2.0 on storage1

      A factory reset erases configuration, accounts, keys, the record of volumes,
      logs and network settings. Data on other drives stays. The machine restarts.

      Type the name of this machine, storage1, to go on:

      > storage1_



    Enter erase  Esc leave all as it is
    "#);
    let typed = "storage1".to_owned();
    assert_eq!(
        press(&mut app, KeyCode::Enter),
        Some(Action::FactoryReset { typed })
    );
    app.on_done(String::new());
    press(&mut app, KeyCode::Char('f'));
    type_text(&mut app, &"x".repeat(500));
    let Some(Action::FactoryReset { typed }) = press(&mut app, KeyCode::Enter) else {
        panic!("the reset page ends with Enter");
    };
    assert_eq!(typed.len(), 64);
}

#[test]
fn a_pending_change_is_kept_or_undone() {
    let pending = Facts {
        pending: Some("enp0s2".into()),
        ..facts()
    };
    for (key, action) in [('k', Action::ConfirmNetwork), ('u', Action::RevertNetwork)] {
        assert_eq!(press(&mut app(facts()), KeyCode::Char(key)), None);
        assert_eq!(
            press(&mut app(pending.clone()), KeyCode::Char(key)),
            Some(action)
        );
    }
    let mut app = app(pending);
    press(&mut app, KeyCode::Char('n'));
    assert!(screen(&app, 80, 24).contains("k keep"));
}

/// A serial line without a terminal: it takes everything and answers nothing.
struct SerialLine<'a> {
    screen: &'a mut TestBackend,
    cells: &'a mut usize,
}

fn well<T>(outcome: Result<T, std::convert::Infallible>) -> io::Result<T> {
    outcome.map_err(|never| match never {})
}

impl Backend for SerialLine<'_> {
    type Error = io::Error;

    fn draw<'c, I: Iterator<Item = (u16, u16, &'c Cell)>>(&mut self, content: I) -> io::Result<()> {
        let cells: Vec<_> = content.collect();
        *self.cells += cells.len();
        well(self.screen.draw(cells.into_iter()))
    }

    fn hide_cursor(&mut self) -> io::Result<()> {
        well(self.screen.hide_cursor())
    }

    fn show_cursor(&mut self) -> io::Result<()> {
        well(self.screen.show_cursor())
    }

    fn get_cursor_position(&mut self) -> io::Result<Position> {
        Err(io::ErrorKind::TimedOut.into())
    }

    fn set_cursor_position<P: Into<Position>>(&mut self, position: P) -> io::Result<()> {
        well(self.screen.set_cursor_position(position))
    }

    fn clear(&mut self) -> io::Result<()> {
        well(self.screen.clear())
    }

    fn clear_region(&mut self, region: ClearType) -> io::Result<()> {
        well(self.screen.clear_region(region))
    }

    fn size(&self) -> io::Result<Size> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn window_size(&mut self) -> io::Result<WindowSize> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Goal: the screen works on a serial line without a terminal, and covers messages of the kernel.
/// Method: a terminal that fails each question, with other letters on it.
#[test]
fn the_screen_needs_no_answer_of_its_terminal() {
    const AREA: Rect = Rect::new(0, 0, 80, 24);
    let app = app(facts());
    let expected = screen(&app, AREA.width, AREA.height);
    let mut backend = TestBackend::with_lines(["kernel: a message"; AREA.height as usize]);
    backend.resize(AREA.width, AREA.height);
    // The second time over the screen of the first one.
    for _ in 0..2 {
        let mut cells = 0;
        let line = SerialLine {
            screen: &mut backend,
            cells: &mut cells,
        };
        let mut terminal = cleared(line, AREA).unwrap();
        terminal.draw(|frame| draw(frame, &app)).unwrap();
        let whole = *terminal.backend().cells;
        // An unchanged screen costs no letter of a slow line.
        terminal.draw(|frame| draw(frame, &app)).unwrap();
        assert_eq!(*terminal.backend().cells, whole);
        drop(terminal);
        assert!(cells > 100);
        let buffer = backend.buffer();
        let text = |y| -> String { (0..AREA.width).map(|x| buffer[(x, y)].symbol()).collect() };
        let lines: Vec<String> = (0..AREA.height)
            .map(|y| text(y).trim_end().to_owned())
            .collect();
        assert_eq!(lines.join("\n"), expected);
    }
}

fn installer() -> Facts {
    let disk = |name: &str, serial: &str| Disk {
        path: format!("/dev/{name}").into(),
        model: "Model".into(),
        serial: serial.into(),
        bytes: 6 << 30,
        sector_bytes: 512,
        contents: Vec::new(),
        refusal: None,
    };
    let disks = vec![
        Disk {
            refusal: Some(Refusal::BootDisk),
            ..disk("sda", "STICK")
        },
        disk("nvme0n1", "EMPTY"),
        Disk {
            contents: vec!["gpt partition table".into(), "data (ext4)".into()],
            ..disk("nvme1n1", "FULL")
        },
    ];
    Facts {
        daemon: Daemon::Away("no daemon".into()),
        install: Some(Ok(disks)),
        ..facts()
    }
}

/// Goal: an operator sees each disk, and why one cannot be chosen. Method: a picture.
#[test]
fn the_installer_lists_disks() {
    insta::assert_snapshot!(screen(&app(installer()), 80, 14), @r"
    Nacre 0.2.0 on storage1

      Install the system of this USB disk to a disk of the machine

      EMPTY                   nvme0n1, Model, 6.0 GiB
        empty
      FULL                    nvme1n1, Model, 6.0 GiB
        holds gpt partition table, data (ext4)
      STICK                   sda, Model, 6.0 GiB
        cannot be chosen: this machine was started from it



    i install  r restart  p power off
    ");
}

/// Goal: only a typed serial number installs, and data needs a second word. Method: keys.
#[test]
fn a_disk_is_chosen_by_its_serial_number() {
    let mut app = app(installer());
    for (typed, said) in [
        ("", "no disk has the serial number"),
        ("EMPT", "no disk has the serial number"),
        ("empty", "no disk has the serial number"),
        ("STICK", "this machine was started from it"),
    ] {
        press(&mut app, KeyCode::Char('i'));
        type_text(&mut app, typed);
        assert_eq!(press(&mut app, KeyCode::Enter), None, "{typed}");
        assert!(screen(&app, 80, 24).contains(said), "{typed}");
        press(&mut app, KeyCode::Esc);
    }
    press(&mut app, KeyCode::Char('i'));
    type_text(&mut app, "FULL");
    assert_eq!(press(&mut app, KeyCode::Enter), None);
    assert!(screen(&app, 80, 24).contains("data (ext4)"));
    type_text(&mut app, "eras");
    assert_eq!(press(&mut app, KeyCode::Enter), None);
    type_text(&mut app, "e");
    let install = |serial: &str, overwrite| Action::Install {
        serial: serial.into(),
        overwrite,
    };
    assert_eq!(press(&mut app, KeyCode::Enter), Some(install("FULL", true)));
    app.on_progress("copying: 12 %".into());
    assert!(screen(&app, 80, 24).contains("copying: 12 %"));
    assert_eq!(press(&mut app, KeyCode::Char('i')), None);
    assert!(!screen(&app, 80, 24).contains("Type the serial"));
    app.on_done("done".into());
    press(&mut app, KeyCode::Char('i'));
    type_text(&mut app, "EMPTY");
    assert_eq!(
        press(&mut app, KeyCode::Enter),
        Some(install("EMPTY", false))
    );
}

/// Goal: keys of the appliance do nothing in the installer. Method: each key.
#[test]
fn the_installer_has_no_other_keys() {
    let mut app = app(installer());
    for key in "nfku".chars() {
        assert_eq!(press(&mut app, KeyCode::Char(key)), None);
        assert!(screen(&app, 80, 24).contains("i install"), "{key}");
    }
    for (key, action) in [('r', Action::Restart), ('p', Action::PowerOff)] {
        press(&mut app, KeyCode::Char(key));
        assert!(screen(&app, 80, 24).contains("Remove the USB disk"));
        assert_eq!(press(&mut app, KeyCode::Char('y')), Some(action));
        app.on_done(String::new());
    }
    let failed = Facts {
        install: Some(Err("no lsblk".into())),
        ..facts()
    };
    app.on_facts(failed);
    assert!(screen(&app, 80, 24).contains("no lsblk"));
    let mut small = installer();
    let Some(Ok(disks)) = &mut small.install else {
        panic!("no disks");
    };
    disks[0].model.clear();
    disks[0].refusal = Some(Refusal::TooSmall {
        bytes: 1 << 30,
        needed: 4 << 30,
    });
    app.on_facts(small);
    let text = screen(&app, 80, 24);
    assert!(
        text.contains("larger disk") && text.contains("sda, 6.0 GiB"),
        "{text}"
    );
}
