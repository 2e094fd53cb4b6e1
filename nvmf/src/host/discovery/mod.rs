//! Reads the discovery log page (Base 5.16.1.23) in pieces, and starts again if it changes
//! meanwhile. [`DiscoveryWatch`] follows the log of a discovery controller.

use nacre_nvmf_wire::commands::admin::GetLogPage;
use nacre_nvmf_wire::log::discovery::{
    DiscoveryEntry, DiscoveryError, DiscoveryHeader, DiscoveryRecord, parse_page,
};
use nacre_nvmf_wire::log::lid;
use zerocopy::FromBytes;

use super::error::HostError;

mod log_watch;

pub use log_watch::DiscoveryWatch;

/// Bytes per Get Log Page command; a multiple of four.
const PIECE: usize = 4096;
/// Most records of a discovery log that are read, so that a target cannot cause endless requests.
/// A host that follows a log attaches at most this many paths.
pub const MAX_DISCOVERY_RECORDS: usize = 1024;

/// A discovery log of one generation.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DiscoveryLog {
    /// GENCTR.
    pub generation: u64,
    pub records: Vec<DiscoveryRecord>,
    /// Number of records that were skipped because they cannot be parsed, and the first error.
    pub malformed: usize,
    pub first_error: Option<DiscoveryError>,
    /// Number of records after the first [`MAX_DISCOVERY_RECORDS`], which were not read.
    pub unread: u64,
}

/// Reads a discovery log. `read` executes one Get Log Page command. If the log changes meanwhile
/// (GENCTR differs), reads it again, at most `attempts` times in all.
pub fn fetch_discovery_log(
    mut read: impl FnMut(GetLogPage) -> Result<Vec<u8>, HostError>,
    attempts: u32,
) -> Result<DiscoveryLog, HostError> {
    let mut reading = LogReading::new(attempts);
    loop {
        let data = read(reading.command())?;
        if let Some(log) = reading.accept(&data)? {
            return Ok(log);
        }
    }
}

/// The reading of a discovery log, one command at a time: header, records, header.
///
/// Only the last command clears the event (RAE 0), so that a change during the reading causes an
/// event.
struct LogReading {
    attempts: u32,
    failed: u32,
    /// GENCTR and NUMREC before the records were read.
    before: Option<(u64, u64)>,
    log: Vec<u8>,
}

impl LogReading {
    fn new(attempts: u32) -> Self {
        Self {
            attempts: attempts.max(1),
            failed: 0,
            before: None,
            log: Vec::new(),
        }
    }

    /// Bytes of the page with the records that are read.
    fn total(&self) -> usize {
        let numrec = self.before.map_or(0, |(_, numrec)| records_to_read(numrec));
        size_of::<DiscoveryHeader>() + numrec * size_of::<DiscoveryEntry>()
    }

    /// The next command.
    fn command(&self) -> GetLogPage {
        let left = self.total() - self.log.len();
        let (bytes, offset, retain_event) = match self.before {
            Some(_) if left > 0 => (left.min(PIECE) as u32, self.log.len() as u64, true),
            before => (size_of::<DiscoveryHeader>() as u32, 0, before.is_none()),
        };
        GetLogPage {
            retain_event,
            ..GetLogPage::new(lid::DISCOVERY, bytes, offset)
        }
    }

    /// Takes the data of the command. Returns the log at the end.
    fn accept(&mut self, data: &[u8]) -> Result<Option<DiscoveryLog>, HostError> {
        let wanted = self.command().bytes() as usize;
        if data.len() != wanted {
            return Err(short(data.len(), wanted));
        }
        let Some(before) = self.before else {
            self.before = Some(header(data)?);
            return Ok(None);
        };
        if self.log.len() < self.total() {
            self.log.extend_from_slice(data);
            return Ok(None);
        }
        let after = header(data)?;
        if after != before {
            self.failed += 1;
            if self.failed == self.attempts {
                let attempts = self.attempts;
                return Err(HostError::Misbehaved {
                    what: format!("the discovery log changed during each of {attempts} readings"),
                });
            }
            (self.before, self.log) = (Some(after), Vec::new());
            return Ok(None);
        }
        let (generation, numrec) = before;
        let read = records_to_read(numrec);
        // NUMREC of the part that was read.
        if let Some(field) = self.log.get_mut(8..16) {
            field.copy_from_slice(&(read as u64).to_le_bytes());
        }
        let (_, entries) = parse_page(&self.log).map_err(misbehaved)?;
        let mut log = DiscoveryLog {
            generation,
            unread: numrec - read as u64,
            ..DiscoveryLog::default()
        };
        for entry in entries {
            match entry.parse() {
                Ok(record) => log.records.push(record),
                Err(error) => {
                    log.malformed += 1;
                    log.first_error.get_or_insert(error);
                }
            }
        }
        Ok(Some(log))
    }
}

fn records_to_read(numrec: u64) -> usize {
    usize::try_from(numrec).map_or(MAX_DISCOVERY_RECORDS, |all| all.min(MAX_DISCOVERY_RECORDS))
}

/// GENCTR and NUMREC.
fn header(data: &[u8]) -> Result<(u64, u64), HostError> {
    let bytes = size_of::<DiscoveryHeader>();
    let (header, _) =
        DiscoveryHeader::ref_from_prefix(data).map_err(|_| short(data.len(), bytes))?;
    Ok((header.genctr.get(), header.numrec.get()))
}

fn short(got: usize, wanted: usize) -> HostError {
    HostError::Misbehaved {
        what: format!("{got} bytes of a discovery log instead of {wanted}"),
    }
}

fn misbehaved(error: impl std::fmt::Display) -> HostError {
    HostError::Misbehaved {
        what: error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use nacre_nvmf_wire::Nqn;
    use nacre_nvmf_wire::log::discovery::{adrfam, subtype, trtype};
    use zerocopy::IntoBytes;

    use super::*;

    fn page(genctr: u64, records: usize) -> Vec<u8> {
        let mut page = DiscoveryHeader::new(genctr, records as u64)
            .as_bytes()
            .to_vec();
        for at in 0..records {
            let record = DiscoveryRecord {
                trtype: trtype::TCP,
                adrfam: adrfam::IPV4,
                subtype: subtype::NVM,
                treq: 0,
                portid: at as u16,
                cntlid: 0xffff,
                asqsz: 32,
                eflags: 0,
                subnqn: Nqn::new(&format!("nqn.2025-01.io.nacre:{genctr}-{at}")).unwrap(),
                traddr: "192.0.2.1".into(),
                trsvcid: "4420".into(),
            };
            page.extend_from_slice(DiscoveryEntry::new(&record).unwrap().as_bytes());
        }
        page
    }

    fn part(page: &[u8], command: &GetLogPage) -> Vec<u8> {
        let mut part = page[page.len().min(command.offset as usize)..].to_vec();
        part.resize(command.bytes() as usize, 0);
        part
    }

    #[test]
    fn logs_of_all_sizes() {
        for records in [0, 1, 3, 4, 50] {
            let page = page(9, records);
            let mut cleared = 0;
            let read = |command: GetLogPage| {
                cleared += u32::from(!command.retain_event);
                Ok(part(&page, &command))
            };
            let log = fetch_discovery_log(read, 1).unwrap();
            assert_eq!((log.generation, log.records.len()), (9, records));
            assert_eq!((cleared, log.malformed, log.unread), (1, 0, 0));
            for (at, record) in log.records.iter().enumerate() {
                assert_eq!(usize::from(record.portid), at);
            }
        }
    }

    /// Records of two generations are never mixed.
    #[test]
    fn a_log_that_changes_is_read_again() {
        for change_at in 1..10 {
            let mut reads = 0;
            let read = |command: GetLogPage| {
                reads += 1;
                let page = if reads < change_at {
                    page(1, 10)
                } else {
                    page(2, 5)
                };
                Ok(part(&page, &command))
            };
            let log = fetch_discovery_log(read, 2).unwrap();
            let of_generation = format!("nqn.2025-01.io.nacre:{}-", log.generation);
            assert_eq!(log.records.len(), if log.generation == 1 { 10 } else { 5 });
            assert!(
                log.records
                    .iter()
                    .all(|r| r.subnqn.as_str().starts_with(&of_generation))
            );
        }
    }

    /// Goal: a record that cannot be parsed does not hide the others, and a long log is read up to
    /// the limit.
    #[test]
    fn records_that_are_left_out() {
        let mut garbage = page(1, 3);
        garbage[2048 + 256..2048 + 512].fill(0xff);
        let log = fetch_discovery_log(|c| Ok(part(&garbage, &c)), 3).unwrap();
        let ports: Vec<u16> = log.records.iter().map(|record| record.portid).collect();
        assert_eq!((ports, log.malformed), (vec![0, 2], 1));
        assert!(log.first_error.is_some());

        let long = page(1, MAX_DISCOVERY_RECORDS + 2);
        let log = fetch_discovery_log(|c| Ok(part(&long, &c)), 3).unwrap();
        assert_eq!(log.records.len(), MAX_DISCOVERY_RECORDS);
        assert_eq!(log.unread, 2);
    }

    #[test]
    fn refusals() {
        let mut genctr = 0;
        let never_the_same = |command: GetLogPage| {
            genctr += 1;
            Ok(part(&page(genctr, 2), &command))
        };
        let what = |result: Result<_, HostError>| result.map(|_: DiscoveryLog| ()).unwrap_err();
        let error = what(fetch_discovery_log(never_the_same, 3));
        assert!(error.to_string().contains("each of 3 readings"), "{error}");

        let nothing = |_: GetLogPage| Ok(Vec::new());
        let error = what(fetch_discovery_log(nothing, 3));
        assert!(error.to_string().contains("0 bytes"), "{error}");

        let mut other_format = page(1, 1);
        other_format[16] = 1;
        let error = what(fetch_discovery_log(|c| Ok(part(&other_format, &c)), 3));
        assert!(matches!(error, HostError::Misbehaved { .. }));
    }
}
