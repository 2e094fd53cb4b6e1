//! Tests of plans: their steps and commands, and steps that fail.

use super::*;
use crate::dcb::Priorities;
use crate::qos::Class;

fn class(dscp: u8, prio: u8, share: Option<u8>) -> Class {
    Class {
        dscp: Some(dscp),
        prio: Some(prio),
        share,
    }
}

fn qos() -> Qos {
    Qos {
        storage: class(26, 3, Some(50)),
        lossless: true,
        ..Qos::default()
    }
}

/// A card as its driver leaves it.
fn fresh() -> Found {
    Found {
        driver: Some("dcbsim".into()),
        dcb: Dcb {
            mode: Some(DcbxMode(0x0a)),
            ets: Some(Ets {
                willing: true,
                classes: 8,
                credit_shaper: false,
                share: [0; 8],
                algorithm: [Algorithm::Strict; 8],
                class_of: [0; 8],
            }),
            pfc: Some(Pfc {
                capability: 8,
                delay: 100,
                ..Pfc::default()
            }),
            apps: vec![App::dscp(26, 5), App::dscp(10, 1)],
            buffers: Some(Buffers {
                buffer_of: [0; 8],
                bytes: [200_001, 0, 0, 0, 0, 0, 0, 0],
                total: 200_001,
            }),
            trust: Some(vec![Selector::Pcp]),
            ..Dcb::default()
        },
        pause: Some(Pause {
            rx: true,
            tx: true,
            ..Pause::default()
        }),
    }
}

fn commands(found: &Found, qos: &Qos) -> Vec<String> {
    let steps = plan("eth0", found, qos);
    steps
        .iter()
        .map(|step| command("eth0", &step.action))
        .collect()
}

#[test]
fn commands_in_the_order_that_never_pauses_everything() {
    assert_eq!(
        commands(&fresh(), &qos()),
        [
            "dcb dcbx set dev eth0 host ieee",
            "ethtool -A eth0 autoneg off rx off tx off",
            "dcb buffer set dev eth0 prio-buffer 0:0 1:0 2:0 3:1 4:0 5:0 6:0 7:0 buffer-size \
             0:100001 1:100000 2:0 3:0 4:0 5:0 6:0 7:0",
            "dcb ets set dev eth0 willing off tc-tsa all:strict 0:ets 3:ets tc-bw all:0 0:50 3:50 \
             prio-tc all:0 3:3",
            "dcb app del dev eth0 dscp-prio 26:5",
            "dcb app add dev eth0 dscp-prio 26:3",
            "dcb apptrust set dev eth0 order dscp pcp",
            "dcb pfc set dev eth0 prio-pfc all:off 3:on",
        ]
    );
}

/// Makes the changes to settings in memory, as a driver would.
fn simulate(found: &mut Found, action: &Action) {
    match action {
        Action::Pause(pause) => found.pause = Some(*pause),
        Action::Vendor(_) => {}
        Action::Dcb(change) => match change.clone() {
            Change::Mode(mode) => found.dcb.mode = Some(mode),
            Change::Ets(ets) => found.dcb.ets = Some(ets),
            Change::Pfc(pfc) => found.dcb.pfc = Some(pfc),
            Change::Buffers(buffers) => found.dcb.buffers = Some(buffers),
            Change::AddApps(apps) => found.dcb.apps.extend(apps),
            Change::DeleteApps(apps) => found.dcb.apps.retain(|app| !apps.contains(app)),
            Change::Trust(order) => found.dcb.trust = Some(order),
        },
    }
    found.dcb.apps.sort_unstable();
}

#[test]
fn a_plan_that_was_made_leaves_nothing_to_do() {
    let mut found = fresh();
    let steps = plan("eth0", &found, &qos());
    apply(&steps, &mut |action| {
        simulate(&mut found, action);
        Ok(())
    })
    .unwrap();
    assert_eq!(commands(&found, &qos()), [""; 0]);
    let pfc = found.dcb.pfc.unwrap();
    assert_eq!((pfc.enabled, pfc.delay), (Priorities(0x08), 100));
    // Undone, it is as it was.
    let left = undo(&steps, &mut |action| {
        simulate(&mut found, action);
        Ok(())
    });
    assert!(left.is_empty());
    let mut before = fresh();
    before.dcb.apps.sort_unstable();
    assert_eq!(found, before);
}

/// Goal: wherever a step fails, the settings are as before. Method: fail at each step in turn.
#[test]
fn a_step_that_fails_takes_back_those_before_it() {
    let steps = plan("eth0", &fresh(), &qos());
    for failing in 0..steps.len() {
        let mut found = fresh();
        let mut made = 0;
        let failed = apply(&steps, &mut |action| {
            if made == failing {
                made += 1;
                return Err("refused".into());
            }
            made += 1;
            simulate(&mut found, action);
            Ok(())
        })
        .unwrap_err();
        assert_eq!(failed.about, steps[failing].about);
        assert!(
            failed
                .to_string()
                .contains("refused; the steps before it were taken back")
        );
        let mut before = fresh();
        before.dcb.apps.sort_unstable();
        found.dcb.apps.sort_unstable();
        assert_eq!(found, before, "step {failing}");
    }
    let failed = apply(&steps, &mut |action| match action {
        Action::Dcb(Change::Pfc(_)) => Err("no".into()),
        Action::Dcb(Change::Mode(DcbxMode(0x0a))) => Err("stays".into()),
        _ => Ok(()),
    })
    .unwrap_err();
    assert!(
        failed
            .to_string()
            .contains("not taken back: this machine decides")
    );
}

#[test]
fn shares_add_up() {
    let shares = |qos: &Qos| shares(&fresh().dcb, qos).unwrap().1;
    let both = Qos {
        replication: class(28, 5, Some(20)),
        ..qos()
    };
    assert_eq!(shares(&both).share, [30, 0, 0, 50, 0, 20, 0, 0]);
    let open = Qos {
        replication: class(28, 5, None),
        ..qos()
    };
    assert_eq!(shares(&open).share, [25, 0, 0, 50, 0, 25, 0, 0]);
    // One class for both.
    let same = Qos {
        replication: class(26, 3, None),
        ..qos()
    };
    let ets = shares(&same);
    assert_eq!((ets.share[0], ets.share[3], ets.sum()), (50, 50, 100));
    // A card with four classes.
    let mut few = fresh();
    few.dcb.ets.as_mut().unwrap().classes = 4;
    let ets = super::shares(&few.dcb, &both).unwrap().1;
    assert_eq!((ets.class(3), ets.class(5), ets.class(0)), (1, 2, 0));
    assert_eq!(ets.sum(), 100);
    // Nothing is asked for: nothing is planned.
    assert!(super::shares(&fresh().dcb, &Qos::default()).is_none());
}

/// Goal: a card that reports shares of strict classes, as mlx5 does, has its plan made at some
/// point, and its undo is a command that dcb(8) accepts.
#[test]
fn shares_of_strict_classes_have_no_meaning() {
    let mut found = fresh();
    found.dcb.ets = found.dcb.ets.map(|ets| Ets {
        share: [100; 8],
        algorithm: [Algorithm::Other(255); 8],
        ..ets
    });
    let (before, after) = shares(&found.dcb, &qos()).unwrap();
    assert_eq!(before.share, [0; 8]);
    assert_eq!(
        command("eth0", &Action::Dcb(Change::Ets(before))),
        "dcb ets set dev eth0 willing on tc-tsa all:strict 0:vendor 1:vendor 2:vendor 3:vendor \
         4:vendor 5:vendor 6:vendor 7:vendor tc-bw all:0 prio-tc all:0"
    );
    let mut reported = after;
    for (share, algorithm) in reported.share.iter_mut().zip(after.algorithm) {
        if algorithm == Algorithm::Strict {
            *share = 100;
        }
    }
    found.dcb.ets = Some(reported);
    assert!(shares(&found.dcb, &qos()).is_none());
}

/// Goal: the way back, written down at each start of the machine, does not grow.
#[test]
fn counters_do_not_make_another_plan() {
    let plans = [0, 1].map(|frames| {
        let mut found = fresh();
        found.dcb.pfc.as_mut().unwrap().received[3] = frames;
        found.pause.as_mut().unwrap().rx_frames = Some(frames);
        plan("eth0", &found, &qos())
    });
    assert_eq!(plans[0], plans[1]);
}

#[test]
fn vendors_have_commands_of_their_own() {
    let mut found = fresh();
    found.driver = Some("mlx5_core".into());
    found.dcb.trust = None;
    found.dcb.apps.clear();
    let of_mlx5 = commands(&found, &qos());
    assert_eq!(of_mlx5[0], "mlnx_qos -i eth0 --trust dscp");
    // Its buffers follow PFC unless they were ever set.
    assert!(!of_mlx5.iter().any(|c| c.contains("buffer")), "{of_mlx5:?}");
    // mlx5 with its firmware's agent.
    found.dcb.mode = Some(DcbxMode(0x0c));
    let steps = plan("eth0", &found, &qos());
    let modes = (DcbxMode::HOST_IEEE, DcbxMode(0));
    assert!(steps.iter().any(|step| {
        step.action == Action::Dcb(Change::Mode(modes.0))
            && step.undo == Action::Dcb(Change::Mode(modes.1))
    }));
    found.dcb.mode = Some(DcbxMode(0x0a));
    found.driver = Some("ice".into());
    assert_eq!(
        commands(&found, &qos())[0],
        "ethtool --set-priv-flags eth0 fw-lldp-agent off"
    );
}
