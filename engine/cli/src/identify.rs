//! `nacre identify`: prints the Identify data of a remote controller and its namespaces.

use clap::{Args, Subcommand};
use nacre_nvmf::address::NVME_PORT;
use nacre_nvmf::host::NamespaceInfo;
use nacre_nvmf_wire::commands::admin::Identify;
use nacre_nvmf_wire::identify::controller::{
    Anacap, Cmic, Ctratt, FUSES_COMPARE_AND_WRITE, Lpa, Oacs, Oncs, cntrltype, vwc,
};
use nacre_nvmf_wire::identify::{IdentifyController, IdentifyNamespace, cns};
use nacre_nvmf_wire::registers::Version;
use nacre_nvmf_wire::zerocopy::FromBytes;
use serde_json::{Map, Value, json};

use super::remote::{Needs, RemoteArgs};
use super::{Failure, output};
use nacre_transport_connect::Session;

#[derive(Debug, Args)]
#[command(
    after_help = "Exit codes: 0 done, 1 failed, 2 wrong usage, 3 cannot connect.\n\nExample: nacre identify controller tcp://192.0.2.1/nqn.2025-01.io.example:v"
)]
pub(crate) struct IdentifyArgs {
    #[command(subcommand)]
    what: IdentifyCommand,
}

#[derive(Debug, Subcommand)]
enum IdentifyCommand {
    /// The controller
    Controller(Common),
    /// One namespace
    Namespace(Common),
    /// All namespaces, a line each
    List(Common),
}

#[derive(Debug, Args)]
struct Common {
    #[command(flatten)]
    remote: RemoteArgs,
    /// Print JSON for programs instead of a table for people
    #[arg(long)]
    json: bool,
}

/// Queries a connected controller, for one namespace if named.
type Ask = fn(&mut Session, Option<u32>) -> Result<Value, Failure>;

pub(crate) fn run(args: IdentifyArgs) -> Result<(), Failure> {
    let (common, ask): (_, Ask) = match &args.what {
        IdentifyCommand::Controller(common) => (common, |session, _| controller(session)),
        IdentifyCommand::Namespace(common) => (common, namespace),
        IdentifyCommand::List(common) => (common, |session, _| Ok(list(session))),
    };
    let target = common.remote.target(Needs {
        port: NVME_PORT,
        entries: 32,
        ..Needs::default()
    })?;
    let mut session = target.connect()?;
    let value = ask(&mut session, target.nsid);
    session.disconnect();
    let value = value?;
    match (common.json, &args.what) {
        (true, _) => output::json(&value),
        (false, IdentifyCommand::List(_)) => output::columns(
            &value,
            &[
                ("nsid", "/nsid"),
                ("bytes", "/bytes"),
                ("blocks", "/blocks"),
                ("block size", "/block_size"),
                ("uuid", "/uuid"),
                ("nguid", "/nguid"),
                ("eui64", "/eui64"),
            ],
        ),
        (false, _) => {
            let facts = value.as_object().into_iter().flatten();
            let rows = facts.map(|(key, value)| vec![key.clone(), output::cell(Some(value))]);
            output::table(&["field", "value"], rows)
        }
    }
}

fn controller(session: &mut Session) -> Result<Value, Failure> {
    let data = session
        .identify(Identify::new(cns::CONTROLLER), 0)
        .map_err(anyhow::Error::from)?;
    let (id, _) = IdentifyController::ref_from_prefix(&data)
        .map_err(|_| anyhow::anyhow!("short Identify Controller data"))?;
    Ok(controller_json(
        id,
        session.controller().cap().page_bytes_min(),
    ))
}

/// Flags by name, those without one as a number.
macro_rules! names {
    ($flags:ty, $bits:expr) => {{
        let flags = <$flags>::from_bits_retain($bits);
        let names = flags
            .iter_names()
            .map(|(name, _)| name.to_ascii_lowercase());
        let unknown = flags.difference(<$flags>::all()).bits();
        names
            .chain((unknown != 0).then(|| format!("{unknown:#x}")))
            .collect::<Vec<String>>()
    }};
}
fn controller_json(id: &IdentifyController, page: u64) -> Value {
    let version = Version(id.ver.get());
    let kind = match id.cntrltype {
        cntrltype::IO => "I/O",
        cntrltype::DISCOVERY => "discovery",
        cntrltype::ADMINISTRATIVE => "administrative",
        _ => "not reported",
    };
    let facts = [
        ("vid", json!(id.vid.get())),
        ("ssvid", json!(id.ssvid.get())),
        ("sn", json!(ascii(&id.sn))),
        ("mn", json!(ascii(&id.mn))),
        ("fr", json!(ascii(&id.fr))),
        ("subnqn", json!(until_nul(&id.subnqn))),
        ("cntlid", json!(id.cntlid.get())),
        ("cntrltype", json!(kind)),
        ("ver", json!(version.to_string())),
        ("cmic", json!(names!(Cmic, id.cmic))),
        ("mdts", json!(id.mdts)),
        ("max_transfer_bytes", json!(id.max_transfer_bytes(page))),
        ("oaes", json!(id.oaes.get())),
        ("ctratt", json!(names!(Ctratt, id.ctratt.get()))),
        ("oacs", json!(names!(Oacs, id.oacs.get()))),
        ("lpa", json!(names!(Lpa, id.lpa))),
        ("oncs", json!(names!(Oncs, id.oncs.get()))),
        (
            "crdt",
            json!([id.crdt1.get(), id.crdt2.get(), id.crdt3.get()]),
        ),
        ("acl", json!(id.acl)),
        ("aerl", json!(id.aerl)),
        ("elpe", json!(id.elpe)),
        ("kas", json!(id.kas.get())),
        ("maxcmd", json!(id.maxcmd.get())),
        ("nn", json!(id.nn.get())),
        ("mnan", json!(id.mnan.get())),
        (
            "fuses_compare_and_write",
            json!(id.fuses.get() & FUSES_COMPARE_AND_WRITE != 0),
        ),
        ("vwc_present", json!(id.vwc & vwc::PRESENT != 0)),
        ("awun", json!(id.awun.get())),
        ("awupf", json!(id.awupf.get())),
        ("acwu", json!(id.acwu.get())),
        ("ocfs", json!(id.ocfs.get())),
        ("sgls", json!(id.sgls.get())),
        ("anacap", json!(names!(Anacap, id.anacap))),
        ("anatt", json!(id.anatt)),
        ("anagrpmax", json!(id.anagrpmax.get())),
        ("nanagrpid", json!(id.nanagrpid.get())),
        ("ioccsz", json!(id.ioccsz.get())),
        ("iorcsz", json!(id.iorcsz.get())),
        ("in_capsule_bytes", json!(id.in_capsule_bytes())),
        ("icdoff", json!(id.icdoff.get())),
        ("fcatt", json!(id.fcatt)),
        ("msdbd", json!(id.msdbd)),
        ("ofcs", json!(id.ofcs.get())),
    ];
    facts
        .into_iter()
        .map(|(name, value)| (name.to_owned(), value))
        .collect()
}

fn namespace(session: &mut Session, nsid: Option<u32>) -> Result<Value, Failure> {
    let state = session.controller().link().state();
    let nsid = match (nsid, state.namespaces.len()) {
        (Some(nsid), _) => nsid,
        (None, 1) => *state.namespaces.keys().next().expect("one namespace"),
        (None, count) => {
            let hint = format!("there are {count} namespaces: choose one with --nsid");
            return Err(Failure::Usage(hint));
        }
    };
    let data = session
        .identify(Identify::new(cns::NAMESPACE), nsid)
        .map_err(anyhow::Error::from)?;
    let (id, _) = IdentifyNamespace::ref_from_prefix(&data)
        .map_err(|_| anyhow::anyhow!("short Identify Namespace data"))?;
    let Some(info) = state.namespaces.get(&nsid) else {
        return Err(anyhow::anyhow!("there is no namespace {nsid} for this host").into());
    };
    let mut value = info_json(info);
    let more = json!({
        "nsze": id.nsze.get(),
        "ncap": id.ncap.get(),
        "nuse": id.nuse.get(),
        "nsfeat": id.nsfeat,
        "nmic": id.nmic,
        "rescap": id.rescap,
        "dlfeat": id.dlfeat,
        "nawun": id.nawun.get(),
        "nawupf": id.nawupf.get(),
        "nacwu": id.nacwu.get(),
        "noiob": id.noiob.get(),
        "npwg": id.npwg.get(),
        "npwa": id.npwa.get(),
        "npdg": id.npdg.get(),
        "npda": id.npda.get(),
        "mssrl": id.mssrl.get(),
        "mcl": id.mcl.get(),
        "msrc": id.msrc,
        "nsattr": id.nsattr,
    });
    if let (Value::Object(into), Value::Object(more)) = (&mut value, more) {
        into.extend(more);
    }
    Ok(value)
}

fn list(session: &mut Session) -> Value {
    let state = session.controller().link().state();
    state.namespaces.values().map(info_json).collect()
}

fn info_json(info: &NamespaceInfo) -> Value {
    let mut facts = Map::new();
    let hex = |bytes: &[u8]| {
        if bytes.iter().all(|b| *b == 0) {
            Value::Null
        } else {
            Value::String(bytes.iter().map(|b| format!("{b:02x}")).collect())
        }
    };
    facts.insert("nsid".into(), info.nsid.into());
    facts.insert("blocks".into(), info.blocks.into());
    facts.insert("block_size".into(), info.block_size.into());
    let bytes = info.blocks.saturating_mul(info.block_size.into());
    facts.insert("bytes".into(), bytes.into());
    facts.insert("uuid".into(), info.uuid.map(|u| u.to_string()).into());
    facts.insert("nguid".into(), hex(&info.nguid));
    facts.insert("eui64".into(), hex(&info.eui64));
    facts.insert("anagrpid".into(), info.ana_group.into());
    facts.insert("read_only".into(), info.read_only.into());
    Value::Object(facts)
}

fn ascii(field: &[u8]) -> String {
    until_nul(field).trim_end().to_owned()
}

fn until_nul(field: &[u8]) -> String {
    let end = field.iter().position(|b| *b == 0).unwrap_or(field.len());
    String::from_utf8_lossy(&field[..end]).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_controller_in_words() {
        let mut id = IdentifyController::zeroed();
        id.sn.copy_from_slice(b"SERIAL              ");
        id.mn[..5].copy_from_slice(b"Nacre");
        id.cntrltype = cntrltype::IO;
        id.mdts = 5;
        id.oncs = (Oncs::COMPARE | Oncs::COPY).bits().into();
        id.cmic = 0x80 | Cmic::ANA_REPORTING.bits();
        id.set_in_capsule_bytes(4096);
        let value = controller_json(&id, 4096);
        assert_eq!(
            (&value["sn"], &value["mn"]),
            (&json!("SERIAL"), &json!("Nacre"))
        );
        assert_eq!(value["max_transfer_bytes"], 131_072);
        assert_eq!(value["oncs"], json!(["compare", "copy"]));
        assert_eq!(value["cmic"], json!(["ana_reporting", "0x80"]));
        assert_eq!(value["in_capsule_bytes"], 4096);
    }

    #[test]
    fn a_namespace_without_identifiers() {
        let info = NamespaceInfo {
            nsid: 2,
            blocks: 8,
            block_size: 4096,
            uuid: None,
            nguid: [0; 16],
            eui64: [0, 0, 0, 0, 0, 0, 0, 1],
            ana_group: 1,
            zeroes_deallocate: true,
            read_only: false,
            optimal_boundary_blocks: 0,
            atomic_blocks: 1,
            compare_and_write_blocks: 1,
            rescap: 0,
        };
        let value = info_json(&info);
        assert_eq!(value["bytes"], 32_768);
        assert_eq!(
            (&value["nguid"], &value["eui64"]),
            (&Value::Null, &json!("0000000000000001"))
        );
    }
}
