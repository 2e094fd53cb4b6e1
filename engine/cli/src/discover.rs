//! `nacre discover`: prints the discovery log of a target, with nvme-cli's field names.

use clap::Args;
use nacre_nvmf::address::DISCOVERY_PORT;
use nacre_nvmf::host::MAX_DISCOVERY_RECORDS;
use nacre_nvmf_wire::Nqn;
use nacre_nvmf_wire::log::discovery::{DiscoveryRecord, adrfam, eflags, subtype, treq, trtype};
use serde_json::{Value, json};

use super::remote::{Needs, RemoteArgs};
use super::{Failure, output};

#[derive(Debug, Args)]
#[command(
    after_help = "Exit codes: 0 done, 1 failed, 2 wrong usage, 3 cannot connect.\n\nExample: nacre discover tcp://192.0.2.1"
)]
pub(crate) struct DiscoverArgs {
    #[command(flatten)]
    remote: RemoteArgs,
    /// Print JSON for programs instead of a table for people
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: DiscoverArgs) -> Result<(), Failure> {
    let target = args.remote.target(Needs {
        subnqn: Some(Nqn::discovery()),
        port: DISCOVERY_PORT,
        entries: 32,
        memory: 0,
    })?;
    let mut session = target.connect()?;
    let log = session.discovery_log();
    session.disconnect();
    let log = log.map_err(anyhow::Error::from)?;
    if let Some(error) = &log.first_error {
        let malformed = log.malformed;
        eprintln!("warning: {malformed} records cannot be read and are left out; first: {error}");
    }
    if log.unread > 0 {
        let (unread, most) = (log.unread, MAX_DISCOVERY_RECORDS);
        eprintln!("warning: {unread} records after the first {most} are left out");
    }
    let value = to_json(log.generation, &log.records);
    if args.json {
        return output::json(&value);
    }
    if log.records.is_empty() {
        return output::line("no subsystem is available to this host");
    }
    output::columns(
        &value["records"],
        &[
            ("transport", "/trtype"),
            ("family", "/adrfam"),
            ("address", "/traddr"),
            ("service", "/trsvcid"),
            ("type", "/subtype"),
            ("subsystem", "/subnqn"),
            ("port", "/portid"),
            ("requires", "/treq"),
            ("flags", "/eflags"),
        ],
    )
}

fn to_json(genctr: u64, records: &[DiscoveryRecord]) -> Value {
    let records: Vec<Value> = records
        .iter()
        .map(|r| {
            json!({
                "trtype": transport(r.trtype),
                "adrfam": family(r.adrfam),
                "subtype": kind(r.subtype),
                "treq": requirement(r.treq),
                "portid": r.portid,
                "cntlid": r.cntlid,
                "asqsz": r.asqsz,
                "trsvcid": r.trsvcid,
                "subnqn": r.subnqn.as_str(),
                "traddr": r.traddr,
                "eflags": flags(r.eflags),
            })
        })
        .collect();
    json!({ "genctr": genctr, "records": records })
}

// The terms are nvme-cli's.

fn transport(value: u8) -> String {
    match value {
        trtype::RDMA => "rdma".into(),
        trtype::FIBRE_CHANNEL => "fc".into(),
        trtype::TCP => "tcp".into(),
        trtype::INTRA_HOST => "loop".into(),
        other => format!("unknown ({other})"),
    }
}

fn family(value: u8) -> String {
    match value {
        adrfam::IPV4 => "ipv4".into(),
        adrfam::IPV6 => "ipv6".into(),
        adrfam::INFINIBAND => "infiniband".into(),
        adrfam::FIBRE_CHANNEL => "fibre-channel".into(),
        adrfam::INTRA_HOST => "loop".into(),
        other => format!("unknown ({other})"),
    }
}

fn kind(value: u8) -> String {
    match value {
        subtype::REFERRAL => "discovery subsystem referral".into(),
        subtype::NVM => "nvme subsystem".into(),
        subtype::CURRENT_DISCOVERY => "current discovery subsystem".into(),
        other => format!("unknown ({other})"),
    }
}

fn requirement(value: u8) -> String {
    let secure = match value & 3 {
        treq::SECURE_CHANNEL_NOT_SPECIFIED => "not specified",
        treq::SECURE_CHANNEL_REQUIRED => "required",
        treq::SECURE_CHANNEL_NOT_REQUIRED => "not required",
        _ => "reserved",
    };
    match value & treq::SQ_FLOW_CONTROL_DISABLE {
        0 => secure.into(),
        _ => format!("{secure}, sq flow control disable supported"),
    }
}

fn flags(value: u16) -> String {
    let names = [
        (eflags::EPCSD, "explicit discovery connections"),
        (eflags::DUPRETINFO, "duplicate discovery information"),
        (eflags::NCC, "no cdc connectivity"),
    ];
    let set = names.into_iter().filter(|(bit, _)| value & bit != 0);
    let set: Vec<&str> = set.map(|(_, name)| name).collect();
    if set.is_empty() {
        "none".into()
    } else {
        set.join(", ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_a_record() {
        let record = DiscoveryRecord {
            trtype: trtype::TCP,
            adrfam: adrfam::IPV6,
            subtype: subtype::CURRENT_DISCOVERY,
            treq: treq::SQ_FLOW_CONTROL_DISABLE | treq::SECURE_CHANNEL_NOT_REQUIRED,
            portid: 2,
            cntlid: 0xffff,
            asqsz: 128,
            eflags: eflags::EPCSD | eflags::DUPRETINFO,
            subnqn: Nqn::discovery(),
            traddr: "::1".into(),
            trsvcid: "8009".into(),
        };
        let value = to_json(7, &[record]);
        assert_eq!(value["genctr"], 7);
        assert_eq!(
            value["records"][0],
            json!({
                "trtype": "tcp", "adrfam": "ipv6", "subtype": "current discovery subsystem",
                "treq": "not required, sq flow control disable supported",
                "portid": 2, "cntlid": 65535, "asqsz": 128, "trsvcid": "8009",
                "subnqn": "nqn.2014-08.org.nvmexpress.discovery", "traddr": "::1",
                "eflags": "explicit discovery connections, duplicate discovery information",
            })
        );
        assert_eq!((kind(9), flags(0)), ("unknown (9)".into(), "none".into()));
    }
}
