//! Waits for work that continues after a command has returned (resync, verification), with a
//! progress bar per replica.

use std::collections::BTreeMap;
use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;
use serde_json::{Value, json};

use super::super::reply::items;
use super::super::{Connection, Failure, output};
use super::{WaitArgs, show};
use nacre_engine::methods::volume::NameParams;
use nacre_engine::methods::volume::list::GetVolume;
use nacre_engine::services::Engine;
use nacre_engine_rpc::Method;

const PAUSE: Duration = Duration::from_millis(300);
/// How long a replica may be out of sync without a running resync before the wait fails: it may
/// just have returned.
const STUCK: Duration = Duration::from_secs(10);

/// The condition to wait for.
pub(super) enum WaitGoal {
    /// These replicas (all that are not offline, if none is named) are in sync, and that one is
    /// removed.
    InSync {
        there: Vec<String>,
        gone: Option<String>,
    },
    Verified,
}

/// Makes a call, and optionally waits for the work that it began.
pub(super) fn after<M: Method<Engine>>(
    connection: &Connection,
    params: &M::Params,
    name: &str,
    wait: &WaitArgs,
    goal: WaitGoal,
) -> Result<(), Failure>
where
    M::Params: Serialize,
{
    let mut client = connection.open()?;
    let mut volume = client.call_for_json::<M, _>(params)?;
    if wait.wait {
        let bars = Bars::new(connection.json);
        // It may be renamed meanwhile.
        let by_id = NameParams {
            name: volume["uuid"].as_str().unwrap_or_default().to_owned(),
        };
        let mut moved = Instant::now();
        loop {
            match progress(&volume, name, &goal)? {
                Progress::Done => break,
                Progress::Busy => moved = Instant::now(),
                Progress::Stuck(why) if moved.elapsed() > STUCK => {
                    return Err(Failure::Failed(anyhow::anyhow!("{why}")));
                }
                Progress::Stuck(_) => {}
            }
            bars.show(&volume);
            std::thread::sleep(PAUSE);
            volume = client.call_for_json::<GetVolume, _>(&by_id)?;
        }
        bars.all.clear()?;
        if let WaitGoal::Verified = goal
            && !connection.json
        {
            output::line(&show::verify(&volume["verify"]))?;
        }
    }
    if connection.json {
        output::json(&volume)?;
    }
    match goal {
        WaitGoal::Verified if wait.wait => differences(&volume),
        _ => Ok(()),
    }
}

/// Fails if a verification has found differences that remain.
fn differences(volume: &Value) -> Result<(), Failure> {
    let number = |key: &str| volume["verify"][key].as_u64().unwrap_or(0);
    match number("different_blocks").saturating_sub(number("repaired_blocks")) {
        0 => Ok(()),
        left => Err(Failure::Failed(anyhow::anyhow!(
            "{left} blocks differ between replicas"
        ))),
    }
}

/// The progress.
#[derive(Debug, PartialEq)]
enum Progress {
    Done,
    Busy,
    /// No progress, and the reason.
    Stuck(String),
}

/// The progress towards `goal`. An error if it can never be reached.
fn progress(volume: &Value, name: &str, goal: &WaitGoal) -> Result<Progress, Failure> {
    let (there, gone) = match goal {
        WaitGoal::Verified if volume["verify"]["running"] == true => return Ok(Progress::Busy),
        WaitGoal::Verified => return Ok(Progress::Done),
        WaitGoal::InSync { there, gone } => (there, gone),
    };
    let replicas = items(&volume["replicas"]);
    if let Some(gone) = gone
        && replicas.iter().any(|r| is(r, gone))
    {
        // The new one may fail meanwhile: its state below counts.
        return Ok(match waits_for(volume, name, there)? {
            Progress::Done => Progress::Busy,
            stand => stand,
        });
    }
    waits_for(volume, name, there)
}

/// True if the name means the replica: its device, its id, or `NODE:DEVICE` in a cluster.
fn is(replica: &Value, name: &str) -> bool {
    let of_node = show::device_of_node(replica);
    replica["device"] == name || replica["id"] == name || of_node.as_deref() == Some(name)
}

fn waits_for(volume: &Value, name: &str, wanted: &[String]) -> Result<Progress, Failure> {
    let replicas = items(&volume["replicas"]);
    if let Some(missing) = wanted.iter().find(|w| !replicas.iter().any(|r| is(r, w))) {
        return Err(Failure::Failed(anyhow::anyhow!(
            "volume \"{name}\" no longer has a replica on \"{missing}\""
        )));
    }
    let ours = |r: &&Value| {
        if wanted.is_empty() {
            r["offline"] != true
        } else {
            wanted.iter().any(|w| is(r, w))
        }
    };
    for replica in replicas.iter().filter(ours) {
        if replica["state"] != "in_sync" {
            // An absent replica is not copied to: waiting could take forever.
            if replica["attached"] == false && replica["resync"].is_null() {
                let why = replica["why"].as_str().unwrap_or("its device is absent");
                return Ok(Progress::Stuck(format!(
                    "the replica on {} has no resync in progress: {why}",
                    output::cell(replica.get("device"))
                )));
            }
            return Ok(Progress::Busy);
        }
    }
    Ok(Progress::Done)
}

struct Bars {
    all: MultiProgress,
    of: std::cell::RefCell<BTreeMap<String, ProgressBar>>,
}

impl Bars {
    fn new(hidden: bool) -> Self {
        let target = if hidden || !std::io::stderr().is_terminal() {
            ProgressDrawTarget::hidden()
        } else {
            ProgressDrawTarget::stderr()
        };
        Self {
            all: MultiProgress::with_draw_target(target),
            of: Default::default(),
        }
    }

    fn show(&self, volume: &Value) {
        for replica in items(&volume["replicas"]) {
            let resync = &replica["resync"];
            let device = output::cell(replica.get("device"));
            if resync.is_object() {
                self.bar(device, resync, "total_bytes", &show::progress(resync));
            } else if let Some(bar) = self.of.borrow_mut().remove(&device) {
                bar.finish_and_clear();
            }
        }
        let verify = &volume["verify"];
        if verify["running"] == true {
            let compared = verify["compared_bytes"].as_u64().unwrap_or(0);
            let total = verify["total_bytes"].as_u64().unwrap_or(0);
            let left =
                json!({ "total_bytes": total, "left_bytes": total.saturating_sub(compared) });
            self.bar("verify".into(), &left, "total_bytes", &show::verify(verify));
        }
    }

    fn bar(&self, name: String, of: &Value, total: &str, message: &str) {
        let number = |key: &str| of[key].as_u64().unwrap_or(0);
        let mut bars = self.of.borrow_mut();
        let bar = bars.entry(name.clone()).or_insert_with(|| {
            let bar = self.all.add(ProgressBar::new(1000));
            let style = ProgressStyle::with_template("{prefix:12} {bar:24} {msg}");
            bar.set_style(style.expect("the template is right"));
            bar.set_prefix(name);
            bar
        });
        let total = number(total);
        let moved = total.saturating_sub(number("left_bytes"));
        let permille = u128::from(moved) * 1000 / u128::from(total.max(1));
        bar.set_position(permille as u64);
        bar.set_message(message.to_owned());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn volume(replicas: Value) -> Value {
        json!({ "uuid": "u", "replicas": replicas })
    }

    #[test]
    fn a_wait_ends_when_named_replicas_cannot_become_in_sync() {
        let replica = |device: &str, state: &str, attached: bool| json!({ "device": device, "id": format!("id-{device}"), "state": state, "attached": attached, "offline": false, "resync": null, "why": null });
        let goal = |there: &[&str], gone: Option<&str>| WaitGoal::InSync {
            there: there.iter().map(|s| (*s).to_owned()).collect(),
            gone: gone.map(str::to_owned),
        };
        let stuck = || {
            let why = "the replica on b has no resync in progress: its device is absent";
            Progress::Stuck(why.into())
        };
        let good = volume(json!([
            replica("a", "in_sync", true),
            replica("b", "in_sync", true)
        ]));
        let busy = volume(json!([
            replica("a", "in_sync", true),
            replica("b", "syncing", true)
        ]));
        let away = volume(json!([
            replica("a", "in_sync", true),
            replica("b", "out", false)
        ]));
        let mut of_nodes = busy.clone();
        of_nodes["replicas"][1]["node"] = "ant".into();
        of_nodes["replicas"][1]["node_device"] = "disk0".into();
        for (of, goal, expected) in [
            (&of_nodes, goal(&["ant:disk0"], None), Some(Progress::Busy)),
            (&of_nodes, goal(&["bee:disk0"], None), None),
            (&good, goal(&[], None), Some(Progress::Done)),
            (&busy, goal(&[], None), Some(Progress::Busy)),
            (&busy, goal(&["a"], None), Some(Progress::Done)),
            (&busy, goal(&["id-b"], None), Some(Progress::Busy)),
            (&good, goal(&["b"], Some("a")), Some(Progress::Busy)),
            (&good, goal(&["b"], Some("x")), Some(Progress::Done)),
            (&away, goal(&[], None), Some(stuck())),
            (&away, goal(&["b"], Some("a")), Some(stuck())),
            (&good, goal(&["c"], None), None),
        ] {
            assert_eq!(progress(of, "v", &goal).ok(), expected, "{of}");
        }
        let verified = |running: bool| json!({ "verify": { "running": running } });
        assert_eq!(
            progress(&verified(true), "v", &WaitGoal::Verified).ok(),
            Some(Progress::Busy)
        );
        assert_eq!(
            progress(&verified(false), "v", &WaitGoal::Verified).ok(),
            Some(Progress::Done)
        );
    }
}
