//! `appliance_*`, Nacre extensions: the operating system of a machine that runs from the Nacre
//! image.
//!
//! The daemon reads the system slots, but does not write them: it leaves a request, for which
//! systemd starts `nacre appliance obey`.

mod drives;

use std::fmt::Display;
use std::path::PathBuf;
use std::rc::Rc;
use std::str::FromStr;

use nacre_bdev_nvme_vfio::pci::System;
use nacre_engine_appliance::acts::{self, Request, RequestError, UPLOAD};
use nacre_engine_appliance::network::{self, Addressing, NetworkError, Settings};
use nacre_engine_appliance::place::Places;
use nacre_engine_appliance::status::{self, StatusError};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use self::drives::{TakenDriveReply, listed};
use crate::rpc::error::Errno;
use crate::rpc::method::NoParams;
use crate::rpc::{Class, Method, Order, Registry, RpcError};
use crate::services::Engine;

pub fn register(registry: &mut Registry<Engine>) {
    registry
        .add::<GetAppliance>()
        .add::<Update>()
        .add::<Rollback>()
        .add::<Restart>()
        .add::<PowerOff>()
        .add::<SetNetwork>()
        .add::<KeepNetwork>()
        .add::<RevertNetwork>()
        .add::<SetName>();
    drives::register(registry);
}

struct GetAppliance;

#[derive(Debug, Default, Serialize, JsonSchema)]
struct ApplianceReply {
    /// False: the machine does not run from the image, and all other fields are empty.
    appliance: bool,
    /// The name of the machine.
    host: Option<String>,
    /// The version that runs.
    version: Option<String>,
    /// Versions on the disk: version, state, boot entry, tries left and failed.
    slots: Vec<Value>,
    /// The entry that the boot menu starts whatever the tries say.
    pinned_entry: Option<String>,
    /// Free bytes of the partition for state.
    free_bytes: Option<u64>,
    /// The uploaded bundle.
    upload: Option<PathBuf>,
    /// The request that waits for its turn.
    request: Option<Value>,
    /// Updates, rollbacks, restarts, changes of the network, of the name and of drives, the newest
    /// first: act, state, the version that ran, file, text, percent, begin and end in milliseconds
    /// since 1970.
    acts: Vec<Value>,
    /// The interface whose new settings return to the former ones, unless they are kept.
    pending_network: Option<String>,
    /// Why the state of a change is not known, if it is not.
    network_problem: Option<String>,
    /// Each interface with the lines of its settings; none: the interface uses DHCP.
    networks: Vec<InterfaceSettings>,
    /// NVMe drives that each start binds to vfio-pci for the daemon.
    drives: Vec<TakenDriveReply>,
    /// Error of reading the list of drives.
    drives_problem: Option<String>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct InterfaceSettings {
    interface: String,
    settings: Vec<String>,
}

impl Method<Engine> for GetAppliance {
    const NAME: &'static str = "appliance_get";
    const ABOUT: &'static str = "Shows the system of an appliance: both slots with their tries, the running act with its \
         progress, and the last acts.";
    const CLASS: Class = Class::Read;
    const ORDER: Order = Order::Free;
    type Params = NoParams;
    type Reply = ApplianceReply;

    async fn apply(_: NoParams, _: Rc<Engine>) -> Result<ApplianceReply, RpcError> {
        blocking(|| reply(&Places::system(), &System::real())).await
    }
}

fn reply(places: &Places, system: &System) -> Result<ApplianceReply, RpcError> {
    let status = match status::status(places) {
        Ok(status) => status,
        Err(StatusError::NoAppliance { .. }) => return Ok(ApplianceReply::default()),
        Err(error) => return Err(RpcError::errno(Errno::EIO, error.to_string())),
    };
    let upload = places.uploads().join(UPLOAD);
    let settings = |interface: String| {
        let text = network::show(places, &interface).unwrap_or_default();
        let lines = text
            .lines()
            .filter(|line| !line.is_empty() && !line.starts_with('#'));
        InterfaceSettings {
            settings: lines.map(str::to_owned).collect(),
            interface,
        }
    };
    // A damaged note does not hide the rest of the machine.
    let (interfaces, pending) = (network::interfaces(places), network::pending(places));
    let (taken, drives_problem) = listed(places, system);
    let problem = interfaces.as_ref().err().or_else(|| pending.as_ref().err());
    Ok(ApplianceReply {
        appliance: true,
        host: Some(status.host),
        version: Some(status.version.to_string()),
        slots: status.slots.iter().map(value).collect(),
        pinned_entry: status.pinned_entry,
        free_bytes: Some(status.free_bytes),
        upload: upload.is_file().then_some(upload),
        request: acts::waiting(places).as_ref().map(value),
        acts: acts::history(places).iter().map(value).collect(),
        network_problem: problem.map(ToString::to_string),
        pending_network: pending.ok().flatten().map(|pending| pending.interface),
        networks: interfaces
            .unwrap_or_default()
            .into_iter()
            .map(settings)
            .collect(),
        drives: taken,
        drives_problem,
    })
}

fn value(of: &impl Serialize) -> Value {
    serde_json::to_value(of).unwrap_or_default()
}

struct Update;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct UpdateParams {
    /// The bundle, as an absolute path on this machine; default: the uploaded one.
    file: Option<PathBuf>,
    /// Install a version older than the one that runs.
    #[serde(default)]
    allow_older: bool,
    /// Also while volumes depend on this node.
    #[serde(default)]
    force: bool,
}

impl Method<Engine> for Update {
    const NAME: &'static str = "appliance_update";
    const ABOUT: &'static str = "Has the appliance check a signed update bundle and write it to the other slot; the next \
         restart boots it. The call returns at once: `appliance_get` shows progress and result.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Exclusive;
    type Params = UpdateParams;
    type Reply = bool;

    async fn apply(params: UpdateParams, _: Rc<Engine>) -> Result<bool, RpcError> {
        let UpdateParams {
            file,
            allow_older,
            force,
        } = params;
        ask(move |places| Request::Update {
            file: file.unwrap_or_else(|| places.uploads().join(UPLOAD)),
            allow_older,
            force,
        })
        .await
    }
}

struct Rollback;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct RollbackParams {
    /// Also if the other version failed in all its tries.
    #[serde(default)]
    force: bool,
}

impl Method<Engine> for Rollback {
    const NAME: &'static str = "appliance_rollback";
    const ABOUT: &'static str =
        "Has the appliance boot the other version from the next restart on.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Exclusive;
    type Params = RollbackParams;
    type Reply = bool;

    async fn apply(params: RollbackParams, _: Rc<Engine>) -> Result<bool, RpcError> {
        ask(move |_| Request::Rollback {
            force: params.force,
        })
        .await
    }
}

struct Restart;

/// How the machine stops.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct StopParams {
    /// Stop even during a resync, or while this node has the last replicas in sync of a volume.
    #[serde(default)]
    force: bool,
}

impl Method<Engine> for Restart {
    const NAME: &'static str = "appliance_restart";
    const ABOUT: &'static str =
        "Restarts the appliance. Hosts lose their connections until it serves again.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Exclusive;
    type Params = StopParams;
    type Reply = bool;

    async fn apply(params: StopParams, _: Rc<Engine>) -> Result<bool, RpcError> {
        let StopParams { force } = params;
        ask(move |_| Request::Restart { force }).await
    }
}

struct PowerOff;

impl Method<Engine> for PowerOff {
    const NAME: &'static str = "appliance_power_off";
    const ABOUT: &'static str = "Powers the appliance off. It serves again once it is switched on.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Exclusive;
    type Params = StopParams;
    type Reply = bool;

    async fn apply(params: StopParams, _: Rc<Engine>) -> Result<bool, RpcError> {
        let StopParams { force } = params;
        ask(move |_| Request::PowerOff { force }).await
    }
}

struct SetNetwork;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct SetNetworkParams {
    /// The interface.
    interface: String,
    /// Take addresses, routes and name servers from the network.
    #[serde(default)]
    dhcp: bool,
    /// Up to 8 addresses, each with the length of its prefix, such as 192.0.2.7/24.
    #[serde(default)]
    addresses: Vec<String>,
    /// The default gateway, one for IPv4 and one for IPv6. Not with `dhcp`.
    #[serde(default)]
    gateways: Vec<String>,
    /// Up to 3 name servers.
    #[serde(default)]
    dns: Vec<String>,
    /// Largest packet in bytes, such as 9000.
    mtu: Option<u32>,
}

impl SetNetworkParams {
    fn request(self) -> Result<Request, RpcError> {
        let interface = parse("interface", &self.interface)?;
        let addresses = parse_all("addresses", &self.addresses)?;
        let gateways = parse_all("gateways", &self.gateways)?;
        let refuse = |field, cause: &str| Err(RpcError::invalid_params(cause).field(field));
        let addressing = match (self.dhcp, addresses.is_empty()) {
            (true, false) => return refuse("addresses", "DHCP gives the addresses"),
            (true, true) if !gateways.is_empty() => {
                return refuse("gateways", "DHCP gives the gateway");
            }
            (true, true) => Addressing::Dhcp,
            (false, true) => return refuse("addresses", "give an address, or `dhcp`"),
            (false, false) => Addressing::Static {
                addresses,
                gateways,
            },
        };
        let settings = Settings {
            addressing,
            dns: parse_all("dns", &self.dns)?,
            mtu: self.mtu,
        };
        Ok(Request::SetNetwork {
            interface,
            settings,
        })
    }
}

fn parse<T: FromStr<Err: Display>>(field: &'static str, text: &str) -> Result<T, RpcError> {
    let refuse =
        |cause: T::Err| RpcError::invalid_params(format!("{text:?}: {cause}")).field(field);
    text.parse().map_err(refuse)
}

fn parse_all<T: FromStr<Err: Display>>(
    field: &'static str,
    all: &[String],
) -> Result<Vec<T>, RpcError> {
    all.iter().map(|text| parse(field, text)).collect()
}

impl Method<Engine> for SetNetwork {
    const NAME: &'static str = "appliance_set_network";
    const ABOUT: &'static str = "Changes the addresses, the gateways, the name servers or the MTU of an interface of the appliance. The former settings return after 60 s, or at the next start, unless `appliance_keep_network` is called.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Exclusive;
    type Params = SetNetworkParams;
    type Reply = bool;

    async fn apply(params: SetNetworkParams, _: Rc<Engine>) -> Result<bool, RpcError> {
        let request = params.request()?;
        ask(|_| request).await
    }
}

struct KeepNetwork;

impl Method<Engine> for KeepNetwork {
    const NAME: &'static str = "appliance_keep_network";
    const ABOUT: &'static str = "Keeps the new settings of an interface of the appliance.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Exclusive;
    type Params = NoParams;
    type Reply = bool;

    async fn apply(_: NoParams, _: Rc<Engine>) -> Result<bool, RpcError> {
        ask(|_| Request::KeepNetwork).await
    }
}

struct RevertNetwork;

impl Method<Engine> for RevertNetwork {
    const NAME: &'static str = "appliance_revert_network";
    const ABOUT: &'static str =
        "Restores the former settings of an interface of the appliance now.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Exclusive;
    type Params = NoParams;
    type Reply = bool;

    async fn apply(_: NoParams, _: Rc<Engine>) -> Result<bool, RpcError> {
        ask(|_| Request::RevertNetwork).await
    }
}

struct SetName;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct SetNameParams {
    /// Labels of letters, digits and `-`, with dots between them; at most 63 characters.
    name: String,
}

impl Method<Engine> for SetName {
    const NAME: &'static str = "appliance_set_name";
    const ABOUT: &'static str = "Names the appliance, now and after each start. The page's own certificate is made again for the new name.";
    const CLASS: Class = Class::Admin;
    const ORDER: Order = Order::Exclusive;
    type Params = SetNameParams;
    type Reply = bool;

    async fn apply(params: SetNameParams, _: Rc<Engine>) -> Result<bool, RpcError> {
        let name = parse("name", &params.name)?;
        ask(|_| Request::SetName { name }).await
    }
}

async fn ask(request: impl FnOnce(&Places) -> Request + Send + 'static) -> Result<bool, RpcError> {
    blocking(|| {
        let places = Places::system();
        let request = request(&places);
        acts::ask(&places, &request).map_err(refusal)?;
        Ok(true)
    })
    .await
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, RpcError> + Send + 'static,
) -> Result<T, RpcError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|error| RpcError::internal(error.to_string()))?
}

fn refusal(error: RequestError) -> RpcError {
    let cause = error.to_string();
    match error {
        RequestError::Status(StatusError::NoAppliance { .. }) => {
            RpcError::errno(Errno::ENOTSUP, cause)
                .remedy("update the package of this machine: docs/operate/upgrade.md")
        }
        RequestError::Waiting | RequestError::Running { .. } => {
            RpcError::errno(Errno::EBUSY, cause).remedy("`appliance_get` shows its progress")
        }
        RequestError::File { .. } => RpcError::errno(Errno::ENOENT, cause)
            .field("file")
            .remedy("upload a bundle, or name one on this machine"),
        RequestError::Network(NetworkError::NoInterface { .. }) => {
            RpcError::errno(Errno::ENODEV, cause).field("interface")
        }
        RequestError::Network(NetworkError::Settings(refused)) => {
            let field = match refused.field {
                "address" => "addresses",
                "gateway" => "gateways",
                field => field,
            };
            RpcError::invalid_params(refused.cause).field(field)
        }
        RequestError::Network(NetworkError::Pending { .. }) => RpcError::errno(Errno::EBUSY, cause)
            .remedy("`appliance_keep_network` or `appliance_revert_network` ends it"),
        RequestError::Network(NetworkError::NonePending) => {
            RpcError::errno(Errno::ENOENT, cause).remedy("change the network again")
        }
        RequestError::Status(_)
        | RequestError::Network(_)
        | RequestError::Io { .. }
        | RequestError::Malformed { .. }
        | RequestError::Lock(_) => RpcError::errno(Errno::EIO, cause),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use nacre_bdev_nvme_vfio::pci::testing::Machine;
    use nacre_engine_appliance::acts::{ActKind, ActState, Entry};
    use serde_json::json;

    use super::*;
    use crate::methods::testing::test_daemon;

    /// Goal: a machine without the image says so, and refuses each act with a remedy.
    #[test]
    fn a_machine_without_the_image_has_no_slots() {
        if status::image(&Places::system()).is_ok() {
            eprintln!("SKIPPED: a_machine_without_the_image_has_no_slots: this is an appliance");
            return;
        }
        let daemon = test_daemon();
        let found = daemon.call("appliance_get", Value::Null);
        assert_eq!(found["appliance"], false);
        assert_eq!(found["slots"], json!([]));
        for (method, params) in [
            ("appliance_update", json!({ "file": "/x.tar" })),
            ("appliance_rollback", json!({ "force": true })),
            ("appliance_restart", json!({})),
            ("appliance_power_off", json!({ "force": true })),
            (
                "appliance_set_network",
                json!({ "interface": "eth0", "dhcp": true }),
            ),
            ("appliance_keep_network", Value::Null),
            ("appliance_revert_network", Value::Null),
            ("appliance_set_name", json!({ "name": "storage-7" })),
            ("appliance_bind_drive", json!({ "address": "5e:00.0" })),
            ("appliance_unbind_drive", json!({ "serial": "S1" })),
        ] {
            let refused = daemon.refused(method, params);
            let text = serde_json::to_string(&refused).unwrap();
            assert!(text.contains("no appliance"), "{method}: {text}");
        }
    }

    /// Goal: bad settings of the network are refused with the name of the field. Method: a table.
    #[test]
    fn settings_of_the_network_are_checked() {
        let request = |params: Value| {
            let params: SetNetworkParams = serde_json::from_value(params).unwrap();
            params.request()
        };
        for good in [
            json!({ "interface": "eth0", "dhcp": true, "mtu": 9000 }),
            json!({ "interface": "eth0", "addresses": ["192.0.2.7/24", "2001:db8::7/64"],
                "gateways": ["192.0.2.1"], "dns": ["192.0.2.53"] }),
        ] {
            let Request::SetNetwork { settings, .. } = request(good).unwrap() else {
                panic!();
            };
            assert_eq!(settings.check(), Ok(()));
        }
        let refused = Settings {
            addressing: Addressing::Dhcp,
            dns: Vec::new(),
            mtu: Some(600),
        };
        let refused = refused.check().unwrap_err();
        let refused = refusal(RequestError::Network(refused.into()));
        let text = serde_json::to_value(&refused).unwrap();
        assert_eq!(text["data"]["field"], "mtu", "{text}");
        for (bad, field) in [
            (json!({ "interface": "../x", "dhcp": true }), "interface"),
            (json!({ "interface": "eth0" }), "addresses"),
            (
                json!({ "interface": "eth0", "addresses": ["192.0.2.7"] }),
                "addresses",
            ),
            (
                json!({ "interface": "eth0", "dhcp": true, "addresses": ["192.0.2.7/24"] }),
                "addresses",
            ),
            (
                json!({ "interface": "eth0", "dhcp": true, "gateways": ["192.0.2.1"] }),
                "gateways",
            ),
            (
                json!({ "interface": "eth0", "dhcp": true, "dns": ["dns.example"] }),
                "dns",
            ),
        ] {
            let refused = request(bad.clone()).unwrap_err();
            let text = serde_json::to_value(&refused).unwrap();
            assert_eq!(text["data"]["field"], field, "{bad}: {text}");
        }
    }

    /// Goal: a bad name is refused with its field, before a request waits.
    #[test]
    fn names_of_the_machine_are_checked() {
        let daemon = test_daemon();
        for bad in ["", "-a", "a_b", "192.0.2.7", "localhost", &"a".repeat(64)] {
            let refused = daemon.refused("appliance_set_name", json!({ "name": bad }));
            let text = serde_json::to_value(&refused).unwrap();
            assert_eq!(text["data"]["field"], "name", "{bad}: {text}");
        }
    }

    /// Goal: the answer has the slots, the upload and the acts. Method: a machine in a folder.
    #[test]
    fn an_appliance_shows_its_slots_and_acts() {
        let machine = Machine::usual();
        let root = tempfile::tempdir().unwrap();
        let places = Places::below(root.path());
        for folder in [
            places.os_release().parent().unwrap().to_owned(),
            places.entries(),
            places.labels(),
            places.interfaces().join("eth0"),
            places.networks(),
            places.state(),
            places.uploads(),
        ] {
            fs::create_dir_all(folder).unwrap();
        }
        let release = "IMAGE_ID=nacre\nIMAGE_VERSION=0.1.0\n";
        fs::write(places.os_release(), release).unwrap();
        fs::create_dir_all(places.host_name_file().parent().unwrap()).unwrap();
        fs::write(places.host_name_file(), "storage-7\n").unwrap();
        fs::write(places.entries().join("nacre_0.1.0.efi"), "kernel").unwrap();
        fs::write(places.uploads().join(UPLOAD), "bundle").unwrap();
        let entry = Entry::begin(&places, ActKind::Rollback, None).unwrap();
        entry.end(ActState::Done, "done").unwrap();
        let found = serde_json::to_value(reply(&places, &machine.system()).unwrap()).unwrap();
        assert_eq!(found["version"], "0.1.0");
        assert_eq!(found["host"], "storage-7");
        assert_eq!(found["slots"][0]["version"], "0.1.0");
        assert_eq!(found["acts"][0]["act"], "rollback");
        assert_eq!(found["acts"][0]["state"], "done");
        assert!(found["upload"].as_str().unwrap().ends_with(UPLOAD));
        assert_eq!(found["request"], Value::Null);
        assert_eq!(found["pending_network"], Value::Null);
        let none = json!([{ "interface": "eth0", "settings": [] }]);
        assert_eq!(found["networks"], none);
        let file = places.networks().join("10-eth0.network");
        fs::write(file, "# By hand.\n[Match]\nName=eth0\n").unwrap();
        let found = serde_json::to_value(reply(&places, &machine.system()).unwrap()).unwrap();
        let settings = json!(["[Match]", "Name=eth0"]);
        assert_eq!(found["networks"][0]["settings"], settings);
        assert_eq!(found["network_problem"], Value::Null);
        fs::write(places.notes().join("network-pending.json"), "{").unwrap();
        let found = serde_json::to_value(reply(&places, &machine.system()).unwrap()).unwrap();
        let problem = found["network_problem"].as_str().unwrap();
        assert!(problem.contains("network-pending.json"), "{problem}");
        assert_eq!(found["version"], "0.1.0");
    }
}
