//! `nacre bdev attach`: attaches a namespace of another target or a drive of this machine, by its
//! URI.

use clap::Args;
use nacre_nvmf::address::Grammar;
use nacre_nvmf::host::ControllerId;
use serde_json::Value;

use nacre_engine::attach::ReconnectTimes;
use nacre_engine::methods::bdev::nvme::AttachController;
use nacre_engine::methods::bdev::nvme::list::{GetNvmeControllers, NvmeControllersParams};
use nacre_engine::services::drives::{DriveUri, DriveUriError};
use nacre_engine::services::nvme::AttachParams;
use nacre_engine::services::remotes::attach_params;

use super::super::remote::parse_cntlid;
use super::super::{Connection, Failure, output};

#[derive(Debug, Args)]
#[command(
    after_help = "pcie:// (or vfio://) is a drive of this machine that was given to userspace: \
        nacre nvme bind. auto:// (or nvmf://) is connected as [replication] says, tcp:// by TCP, \
        rdma:// by RDMA, rdma+tcp:// by RDMA and, while that fails, by \
        TCP.\n\nExamples:\n  nacre bdev attach \
        auto://192.0.2.1:4420/nqn.2025-01.io.example:volume\n  nacre bdev attach \
        'tcp://[fd00::1]/nqn.2025-01.io.example:volume?nsid=1' --name replica1\n  nacre bdev \
        attach pcie://0000:5e:00.0 --name Nvme0"
)]
pub(super) struct AttachArgs {
    /// auto://ADDRESS[:PORT]/NQN[?nsid=N|uuid=UUID&hostnqn=NQN], or tcp://, rdma://, rdma+tcp://,
    /// or pcie://BDF
    #[arg(value_name = "URI")]
    uri: String,
    /// Name of the controller; its devices get this name, with n and the namespace identifier
    /// [default: the end of the subsystem's name, or Nvme and the first free number]
    #[arg(long)]
    name: Option<String>,
    /// How long I/O waits for an unreachable target, in seconds; 0: without limit [default: as
    /// configured]
    #[arg(long, value_name = "SECONDS")]
    fast_fail: Option<u64>,
    /// How long to try to reconnect, in seconds; -1: without limit [default: without limit]
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true)]
    loss_timeout: Option<i64>,
    /// Connect from this address of this machine [default: as configured, or as the route requires]
    #[arg(long, value_name = "ADDRESS")]
    host_traddr: Option<String>,
    /// Id of the controller to connect to, where controllers are static, or "any" [default: a
    /// dynamic one]
    #[arg(long, value_name = "ID", value_parser = parse_cntlid)]
    cntlid: Option<ControllerId>,
}

pub(super) fn run(connection: &Connection, args: &AttachArgs) -> Result<(), Failure> {
    let params = if DriveUri::is_one(&args.uri) {
        drive(connection, args)?
    } else {
        params(args).map_err(Failure::Usage)?
    };
    let devices = connection.call_for_json::<AttachController>(&params)?;
    if connection.json {
        return output::json(&devices);
    }
    let names = devices.as_array().into_iter().flatten();
    for name in names.filter_map(Value::as_str) {
        output::line(name)?;
    }
    Ok(())
}

fn drive(connection: &Connection, args: &AttachArgs) -> Result<AttachParams, Failure> {
    let usage = |what: String| Failure::Usage(what);
    let uri: DriveUri = args
        .uri
        .parse()
        .map_err(|e: DriveUriError| usage(e.to_string()))?;
    if uri.nsid.is_some() {
        return Err(usage(
            "a drive is attached with all its namespaces: leave nsid out".into(),
        ));
    }
    let remote = args.fast_fail.is_some() || args.loss_timeout.is_some();
    if remote || args.host_traddr.is_some() || args.cntlid.is_some() {
        return Err(usage(
            "a drive of this machine has no connection: leave the connection options out".into(),
        ));
    }
    let name = match &args.name {
        Some(name) => name.clone(),
        None => {
            let attached =
                connection.call_for_json::<GetNvmeControllers>(&NvmeControllersParams::default())?;
            let attached = attached.as_array().into_iter().flatten();
            let taken: Vec<&str> = attached.filter_map(|one| one["name"].as_str()).collect();
            let mut names = (0..).map(|n: u32| format!("{}{n}", DriveUri::NAME));
            let free = names.find(|name| !taken.contains(&name.as_str()));
            free.expect("names do not end")
        }
    };
    Ok(uri.attach_params(name))
}

fn params(args: &AttachArgs) -> Result<AttachParams, String> {
    let uri = Grammar::NAMESPACE
        .parse(&args.uri)
        .map_err(|e| e.to_string())?;
    Ok(AttachParams {
        hostaddr: args.host_traddr.clone(),
        cntlid: args.cntlid.map(|controller| controller.asked()),
        times: ReconnectTimes {
            fast_io_fail_timeout_sec: args.fast_fail,
            ctrlr_loss_timeout_sec: args.loss_timeout,
            ..ReconnectTimes::default()
        },
        ..attach_params(&uri, args.name.clone())
    })
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use serde_json::json;

    use nacre_engine_rpc::client::to_json;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: AttachArgs,
    }

    fn of(line: &[&str]) -> Result<Value, String> {
        let words = ["attach"].iter().chain(line);
        params(&Line::try_parse_from(words).unwrap().args).map(|params| to_json(&params))
    }

    #[test]
    fn a_uri_becomes_a_call() {
        assert_eq!(
            of(&["nvmf://192.0.2.1/nqn.2025-01.io.example:volume"]).unwrap(),
            json!({
                "name": "volume", "trtype": "AUTO", "traddr": "192.0.2.1", "trsvcid": "4420",
                "subnqn": "nqn.2025-01.io.example:volume",
            })
        );
        let uri = "rdma+tcp://[fd00::1]:1/nqn.2025-01.io.example:v?nsid=7&hostnqn=nqn.2025-01.io.example:h";
        let line = [
            uri,
            "--name",
            "r",
            "--fast-fail",
            "3",
            "--loss-timeout",
            "-1",
            "--host-traddr",
            "fd00::2",
            "--cntlid",
            "any",
        ];
        assert_eq!(
            of(&line).unwrap(),
            json!({
                "name": "r", "trtype": "RDMA", "fallback": "tcp", "traddr": "fd00::1", "trsvcid": "1",
                "subnqn": "nqn.2025-01.io.example:v", "nsid": 7, "hostnqn": "nqn.2025-01.io.example:h",
                "hostaddr": "fd00::2", "cntlid": 65534, "fast_io_fail_timeout_sec": 3, "ctrlr_loss_timeout_sec": -1,
            })
        );
        let only = of(&["nvmf+rdma://h/nqn.2025-01.io.example:v"]).unwrap();
        assert_eq!(only["fallback"], "none");
        let refused = of(&["fc://192.0.2.1/nqn.2025-01.io.example:v"]).unwrap_err();
        assert!(refused.contains("write tcp, rdma, rdma+tcp"), "{refused}");
    }
}
