//! The screens of the appliance's installer, as lines of text: the disks of the machine, the
//! question which disk to install to, and the last question before its data is lost.

use ratatui::text::Line;

use super::Facts;
use super::app::OVERWRITE;
use super::rows::row;
use crate::install::Disk;

/// Most disks on the screen, each with two lines. Others can be named all the same.
const MOST_DISKS: usize = 8;

/// The disks with their serial numbers, those that can be chosen first.
pub(super) fn disks(disks: &Result<Vec<Disk>, String>) -> Vec<Line<'static>> {
    let mut lines = vec![
        Line::from("  Install the system of this USB disk to a disk of the machine"),
        Line::default(),
    ];
    let disks = match disks {
        Ok(disks) => disks,
        Err(cause) => {
            lines.push(row("disks", cause.clone()));
            return lines;
        }
    };
    let (offered, refused): (Vec<&Disk>, Vec<&Disk>) =
        disks.iter().partition(|disk| disk.refusal.is_none());
    if offered.is_empty() {
        lines.push(Line::from("  No disk can be chosen."));
    }
    for disk in offered.iter().chain(&refused).take(MOST_DISKS) {
        let serial = if disk.serial.is_empty() {
            "(no serial)"
        } else {
            &disk.serial
        };
        lines.push(Line::from(format!("  {serial:24}{disk}")));
        let state = match &disk.refusal {
            Some(refusal) => format!("cannot be chosen: {refusal}"),
            None if disk.contents.is_empty() => "empty".into(),
            None => format!("holds {}", disk.contents.join(", ")),
        };
        lines.push(Line::from(format!("    {state}")));
    }
    if disks.len() > MOST_DISKS {
        let more = disks.len() - MOST_DISKS;
        lines.push(Line::from(format!("  and {more} more")));
    }
    lines
}

/// Asks for the serial number of the disk; `typed` is the input so far.
pub(super) fn target(typed: &str) -> Vec<Line<'static>> {
    vec![
        Line::from("  The installation replaces everything on the disk."),
        Line::default(),
        Line::from("  Type the serial number of the disk:"),
        Line::default(),
        Line::from(format!("  > {typed}_")),
    ]
}

/// Asks for the word that confirms the loss of the data on the disk with this serial number.
pub(super) fn overwrite(facts: &Facts, serial: &str, typed: &str) -> Vec<Line<'static>> {
    let disks = facts.install.as_ref().and_then(|disks| disks.as_ref().ok());
    let disk = disks
        .into_iter()
        .flatten()
        .find(|disk| disk.serial == serial);
    let contents = disk.map(|disk| disk.contents.join(", "));
    vec![
        Line::from(format!("  Disk {serial} holds data, which is lost:")),
        Line::from(format!("  {}", contents.unwrap_or_default())),
        Line::default(),
        Line::from(format!("  Type {OVERWRITE} to go on:")),
        Line::default(),
        Line::from(format!("  > {typed}_")),
    ]
}
