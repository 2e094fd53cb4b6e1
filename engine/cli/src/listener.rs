//! `nacre listener`: lists, adds and removes the listeners of subsystems.

use clap::{Args, Subcommand};
use nacre_nvmf::transport::ListenerOptions;
use nacre_nvmf_wire::log::ana::AnaState;
use serde_json::{Value, json};

use super::address::{self, ListenUrl};
use super::output::done;
use super::reply::{items, subsystems};
use super::{Connection, Failure, output};
use nacre_engine::methods::nvmf::listener::{
    AddListener, AddListenerParams, AnaParams, GetSubsystemListeners, ListenerParams,
    RemoveListener, SetAnaState, SubsystemListenersParams,
};
use nacre_engine::methods::nvmf::listeners::{GetListeners, GetListenersParams};
use nacre_engine::methods::nvmf::transport::{
    CreateTransport, CreateTransportParams, GetTransports, GetTransportsParams,
};
use nacre_engine_rpc::client::{Client, ClientError, to_json};
use nacre_engine_rpc::error::Errno;

#[derive(Debug, Args)]
#[command(mut_args = |arg| arg.global(true))]
pub(crate) struct ListenerArgs {
    #[command(flatten)]
    connection: Connection,
    #[command(subcommand)]
    command: ListenerCommand,
}

#[derive(Debug, Subcommand)]
enum ListenerCommand {
    /// List the listeners
    #[command(visible_alias = "ls")]
    List {
        /// All subsystems unless given
        nqn: Option<String>,
    },
    /// Add a listener to a subsystem, and print the connect command for a Linux host
    Add {
        /// NQN of the subsystem
        nqn: String,
        /// Such as tcp://192.0.2.1:4420 or [2001:db8::1]:4420; port 4420 unless given
        #[arg(required = true)]
        address: Vec<ListenUrl>,
        /// ANA state reported for this path
        #[arg(long, value_name = "STATE")]
        ana_state: Option<AnaState>,
        #[command(flatten)]
        options: ListenerOptions,
    },
    /// Set the ANA state that hosts see for a listener; they move their I/O
    SetAna {
        /// NQN of the subsystem
        nqn: String,
        /// Address of the listener
        address: ListenUrl,
        /// ANA state that hosts see on this listener
        state: AnaState,
        /// Only for this ANA group
        #[arg(long, value_name = "ID")]
        group: Option<u32>,
    },
    /// Stop listening; hosts connected there are disconnected
    #[command(visible_alias = "rm")]
    Remove {
        /// NQN of the subsystem
        nqn: String,
        /// Addresses of the listeners
        #[arg(required = true)]
        address: Vec<ListenUrl>,
    },
}

pub(crate) fn run(args: ListenerArgs) -> Result<(), Failure> {
    let connection = &args.connection;
    match args.command {
        ListenerCommand::List { nqn } => list(connection, nqn.as_deref()),
        ListenerCommand::Add {
            nqn,
            address,
            ana_state,
            options,
        } => {
            let mut client = connection.open()?;
            let mut added = Vec::new();
            for address in &address {
                let params = AddListenerParams {
                    nqn: nqn.clone(),
                    listen_address: address.params(),
                    ana_state,
                    options,
                    ..AddListenerParams::default()
                };
                add(&mut client, &params)?;
                let connect = address.connect_line(&nqn);
                if connection.json {
                    added.push(
                        json!({ "nqn": nqn, "address": address.params(), "connect": connect }),
                    )
                } else {
                    output::line(&connect)?
                }
            }
            done(connection, Value::Array(added))
        }
        ListenerCommand::SetAna {
            nqn,
            address,
            state,
            group,
        } => {
            let params = AnaParams {
                nqn,
                listen_address: address.params(),
                ana_state: state,
                anagrpid: group,
                tgt_name: None,
            };
            connection.call_for_json::<SetAnaState>(&params)?;
            done(connection, to_json(&params))
        }
        ListenerCommand::Remove { nqn, address } => {
            let mut client = connection.open()?;
            for address in &address {
                let params = ListenerParams {
                    nqn: nqn.clone(),
                    listen_address: address.params(),
                    tgt_name: None,
                };
                client.call::<RemoveListener, _>(&params)?;
            }
            let removed: Vec<_> = address.iter().map(ListenUrl::params).collect();
            done(connection, json!({ "nqn": nqn, "removed": removed }))
        }
    }
}

fn list(connection: &Connection, nqn: Option<&str>) -> Result<(), Failure> {
    let mut client = connection.open()?;
    let mut all = Vec::new();
    for subsystem in subsystems(&mut client, nqn)? {
        let params = SubsystemListenersParams {
            nqn: output::cell(subsystem.get("nqn")),
            tgt_name: None,
        };
        let listeners = client.call_for_json::<GetSubsystemListeners, _>(&params)?;
        for listener in items(&listeners) {
            let mut listener = listener.clone();
            listener["nqn"] = subsystem["nqn"].clone();
            all.push(listener);
        }
    }
    let places = client.call_for_json::<GetListeners, _>(&GetListenersParams::default())?;
    let place_of = |address: &Value| {
        items(&places["listeners"])
            .iter()
            .find(|place| place["address"] == *address)
    };
    for listener in &mut all {
        if let Some(place) = place_of(&listener["address"]) {
            for field in ["listener", "iface", "wanted", "actual", "reason"] {
                listener[field] = place[field].clone();
            }
        }
        // For this subsystem: others may be served there.
        if listener["withheld"] == true {
            listener["wanted"] = "withheld".into();
            listener["actual"] = "withheld".into();
            listener["reason"] = listener["withheld_reason"].clone();
        }
    }
    // A configured listener that no host can connect to belongs to no subsystem.
    if nqn.is_none() {
        let shown: Vec<Value> = all.iter().map(|l| l["address"].clone()).collect();
        let absent = items(&places["listeners"]).iter();
        all.extend(
            absent
                .filter(|place| !shown.contains(&place["address"]))
                .cloned(),
        );
    }
    if connection.json {
        return output::json(&Value::Array(all));
    }
    let rows = all.iter().map(|listener| {
        let mut states: Vec<String> = items(&listener["ana_states"])
            .iter()
            .map(|state| output::cell(state.get("ana_state")))
            .collect();
        states.dedup();
        let text = |field: &str| output::cell(listener.get(field).filter(|v| !v.is_null()));
        vec![
            text("nqn"),
            address::describe(&listener["address"]),
            text("iface"),
            states.join(","),
            text("wanted"),
            text("actual"),
            text("reason"),
        ]
    });
    output::table(
        &[
            "subsystem",
            "address",
            "interface",
            "ana",
            "wanted",
            "actual",
            "reason",
        ],
        rows,
    )?;
    for place in items(&places["listeners"]) {
        if let (Some(evidence), Some(remedy)) =
            (place["evidence"].as_str(), place["remedy"].as_str())
        {
            let address = address::describe(&place["address"]);
            output::line(&format!("{address}: {evidence}; {remedy}"))?;
        }
    }
    for listener in &all {
        if let Some(reason) = listener["in_capsule_reason"].as_str() {
            let address = address::describe(&listener["address"]);
            output::line(&format!("{address}: in-capsule data: {reason}"))?;
        }
    }
    for unmatched in items(&places["unmatched"]) {
        output::line(unmatched.as_str().unwrap_or_default())?;
    }
    Ok(())
}

/// Adds a listener, and the transport it needs if that is missing.
pub(crate) fn add(client: &mut Client, params: &AddListenerParams) -> Result<(), Failure> {
    let there = client.call_for_json::<GetTransports, _>(&GetTransportsParams::default())?;
    let trtype = params.listen_address.trtype.as_str();
    let is_ours = |t: &Value| {
        t["trtype"]
            .as_str()
            .is_some_and(|t| t.eq_ignore_ascii_case(trtype))
    };
    if !items(&there).iter().any(is_ours) {
        let made = client.call_for_json::<CreateTransport, _>(&CreateTransportParams {
            trtype: trtype.to_owned(),
            ..CreateTransportParams::default()
        });
        match made {
            // Another client was faster.
            Err(ClientError::Refused { error, .. }) if error.code == -(Errno::EEXIST as i32) => {}
            // SPDK and this daemon report this in the message only.
            Err(refused @ ClientError::Refused { .. }) => {
                let there =
                    client.call_for_json::<GetTransports, _>(&GetTransportsParams::default())?;
                if !items(&there).iter().any(is_ours) {
                    return Err(refused.into());
                }
            }
            made => drop(made?),
        }
    }
    client.call::<AddListener, _>(params)?;
    Ok(())
}
