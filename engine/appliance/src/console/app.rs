//! The state of the screen, and the effect of keys on it. Independent of terminal and daemon.

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

use super::{Action, Facts};
use crate::network::{Addressing, Settings};

/// Most characters of a typed value.
const MOST_TYPED: usize = 64;
/// Interfaces that a key can choose.
pub(super) const MOST_CHOICES: usize = 9;

#[derive(Debug, Default)]
pub struct App {
    pub(super) facts: Facts,
    pub(super) page: Page,
    /// The result of the last action.
    pub(super) message: String,
    busy: bool,
}

#[derive(Debug, Default)]
pub(super) enum Page {
    #[default]
    Overview,
    Ask(Question),
    /// The machine's name, as typed so far.
    Reset(String),
    /// The machine's new name, as typed so far.
    Name(String),
    Interfaces(Vec<String>),
    Network(Form),
    /// The serial number of the installer's target, as typed so far.
    Target(String),
    /// A target that holds data, and the confirmation as typed so far.
    Overwrite {
        serial: String,
        typed: String,
    },
}

/// Confirms that the data on a disk is lost.
pub(super) const OVERWRITE: &str = "erase";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Question {
    Restart,
    PowerOff,
}

/// Settings of an interface, as typed so far.
#[derive(Debug, Default)]
pub(super) struct Form {
    pub(super) interface: String,
    pub(super) values: [String; FIELDS.len()],
    pub(super) at: usize,
}

pub(super) const FIELDS: [(&str, &str); 4] = [
    (
        "address",
        "address/prefix, several with commas; empty: DHCP",
    ),
    ("gateway", "one per family"),
    ("dns", "up to three servers"),
    ("mtu", "empty: as the interface has it"),
];

impl App {
    pub fn on_facts(&mut self, facts: Facts) {
        self.facts = facts;
    }

    /// The result of the action that [`App::on_key`] returned last.
    pub fn on_done(&mut self, message: String) {
        self.busy = false;
        self.message = message;
    }

    /// A report of the action that [`App::on_key`] returned last.
    pub fn on_progress(&mut self, message: String) {
        self.message = message;
    }

    /// Handles a key. Returns the action that it completes, which the caller must perform and then
    /// report to [`App::on_done`]. Keys are ignored until then.
    pub fn on_key(&mut self, key: KeyEvent) -> Option<Action> {
        if key.kind == KeyEventKind::Release || self.busy {
            return None;
        }
        let code = match key.code {
            // The screen has no shell to return to.
            KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => KeyCode::Esc,
            code => code,
        };
        let page = std::mem::take(&mut self.page);
        let action = match (code, page) {
            (KeyCode::Esc, _) => {
                self.message.clear();
                None
            }
            (code, Page::Overview) if self.facts.install.is_some() => {
                self.on_disks(code);
                None
            }
            (code, Page::Overview) => self.on_overview(code),
            (KeyCode::Char('y' | 'Y'), Page::Ask(question)) => Some(match question {
                Question::Restart => Action::Restart,
                Question::PowerOff => Action::PowerOff,
            }),
            (_, Page::Ask(_)) => None,
            (KeyCode::Enter, Page::Reset(typed)) => Some(Action::FactoryReset { typed }),
            (code, Page::Reset(mut typed)) => {
                edit(&mut typed, code);
                self.page = Page::Reset(typed);
                None
            }
            (KeyCode::Enter, Page::Name(typed)) => self.on_name(typed),
            (code, Page::Name(mut typed)) => {
                edit(&mut typed, code);
                self.page = Page::Name(typed);
                None
            }
            (code, Page::Interfaces(names)) => {
                self.page = choose(code, names);
                None
            }
            (code, Page::Network(form)) => self.on_form(code, form),
            (KeyCode::Enter, Page::Target(serial)) => self.on_target(serial),
            (code, Page::Target(mut serial)) => {
                edit(&mut serial, code);
                self.page = Page::Target(serial);
                None
            }
            (KeyCode::Enter, Page::Overwrite { serial, typed }) if typed == OVERWRITE => {
                let overwrite = true;
                Some(Action::Install { serial, overwrite })
            }
            (code, Page::Overwrite { serial, mut typed }) => {
                edit(&mut typed, code);
                self.page = Page::Overwrite { serial, typed };
                None
            }
        };
        if action.is_some() {
            self.busy = true;
            self.message = "...".into();
        }
        action
    }

    fn on_overview(&mut self, code: KeyCode) -> Option<Action> {
        let waits = self.facts.pending.is_some();
        match code {
            KeyCode::Char('k') if waits => return Some(Action::ConfirmNetwork),
            KeyCode::Char('u') if waits => return Some(Action::RevertNetwork),
            KeyCode::Char('n') if !waits => {
                let mut names = self.facts.interfaces.clone();
                names.truncate(MOST_CHOICES);
                self.page = Page::Interfaces(names);
            }
            KeyCode::Char('r') => self.page = Page::Ask(Question::Restart),
            KeyCode::Char('p') => self.page = Page::Ask(Question::PowerOff),
            KeyCode::Char('m') if !waits => self.page = Page::Name(String::new()),
            KeyCode::Char('f') => self.page = Page::Reset(String::new()),
            _ => return None,
        }
        self.message.clear();
        None
    }

    /// The overview of the installer.
    fn on_disks(&mut self, code: KeyCode) {
        self.page = match code {
            KeyCode::Char('i') => Page::Target(String::new()),
            KeyCode::Char('r') => Page::Ask(Question::Restart),
            KeyCode::Char('p') => Page::Ask(Question::PowerOff),
            _ => return,
        };
        self.message.clear();
    }

    fn on_name(&mut self, typed: String) -> Option<Action> {
        match typed.trim().parse() {
            Ok(name) => return Some(Action::SetName { name }),
            Err(error) => self.message = error.to_string(),
        }
        self.page = Page::Name(typed);
        None
    }

    fn on_target(&mut self, serial: String) -> Option<Action> {
        let serial = serial.trim().to_owned();
        let disks = self.facts.install.as_ref();
        let disks = disks.and_then(|disks| disks.as_ref().ok());
        let mut disks = disks.into_iter().flatten();
        let disk = disks.find(|disk| !serial.is_empty() && disk.serial == serial);
        let refusal = disk.and_then(|disk| disk.refusal.as_ref());
        match (disk, refusal) {
            (Some(_), Some(refusal)) => self.message = format!("disk {serial}: {refusal}"),
            (Some(disk), None) if disk.contents.is_empty() => {
                let overwrite = false;
                return Some(Action::Install { serial, overwrite });
            }
            (Some(_), None) => {
                let typed = String::new();
                self.page = Page::Overwrite { serial, typed };
                return None;
            }
            (None, _) => self.message = format!("no disk has the serial number {serial:?}"),
        }
        self.page = Page::Target(serial);
        None
    }

    fn on_form(&mut self, code: KeyCode, mut form: Form) -> Option<Action> {
        match code {
            KeyCode::Enter if form.at + 1 == FIELDS.len() => match form.settings() {
                Ok(action) => return Some(action),
                Err(cause) => {
                    self.message = cause;
                    form.at = 0;
                }
            },
            KeyCode::Enter | KeyCode::Down | KeyCode::Tab => form.at = (form.at + 1) % FIELDS.len(),
            KeyCode::Up | KeyCode::BackTab => form.at = (form.at + FIELDS.len() - 1) % FIELDS.len(),
            code => edit(&mut form.values[form.at], code),
        }
        self.page = Page::Network(form);
        None
    }
}

impl Form {
    fn settings(&self) -> Result<Action, String> {
        let [addresses, gateways, dns, mtu] = &self.values;
        let addressing = if addresses.trim().is_empty() {
            if !gateways.trim().is_empty() {
                return Err("gateway: DHCP gives it; leave it empty, or name an address".into());
            }
            Addressing::Dhcp
        } else {
            Addressing::Static {
                addresses: parse_list("address", addresses)?,
                gateways: parse_list("gateway", gateways)?,
            }
        };
        let mut mtu = parse_list("mtu", mtu)?;
        let settings = Settings {
            addressing,
            dns: parse_list("dns", dns)?,
            mtu: mtu.pop(),
        };
        settings.check()?;
        Ok(Action::SetNetwork {
            interface: self.interface.parse()?,
            settings,
        })
    }
}

fn parse_list<T: std::str::FromStr>(field: &str, text: &str) -> Result<Vec<T>, String>
where
    T::Err: std::fmt::Display,
{
    let words = text.split([',', ' ']).filter(|word| !word.is_empty());
    words
        .map(|word| {
            word.parse()
                .map_err(|error| format!("{field}: {word}: {error}"))
        })
        .collect()
}

fn choose(code: KeyCode, names: Vec<String>) -> Page {
    let digit = match code {
        KeyCode::Char(letter) => letter.to_digit(10).map(|digit| digit as usize),
        _ => None,
    };
    match digit.and_then(|digit| names.get(digit.checked_sub(1)?)) {
        Some(name) => Page::Network(Form {
            interface: name.clone(),
            ..Form::default()
        }),
        None => Page::Interfaces(names),
    }
}

fn edit(text: &mut String, code: KeyCode) {
    match code {
        KeyCode::Backspace => drop(text.pop()),
        KeyCode::Char(letter) if text.len() < MOST_TYPED && !letter.is_control() => {
            text.push(letter);
        }
        _ => {}
    }
}
