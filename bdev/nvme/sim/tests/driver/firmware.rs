//! Tests of firmware updates: images, refusals of the drive, and failures half way.

use std::sync::Arc;
use std::time::Duration;

use nacre_bdev::Status;
use nacre_bdev_nvme::{
    ActionOnTimeout, ControlError, Controller, DriveOptions, FirmwareError, FirmwareUpdate,
    IMAGE_MAX,
};
use nacre_bdev_nvme_sim::{Action, Config, IMAGE_MARK, Limits, Rule, Target};
use nacre_nvmf_wire::StatusCode;
use nacre_nvmf_wire::opcode::admin::{FIRMWARE_COMMIT, FIRMWARE_IMAGE_DOWNLOAD};

use super::rig::Rig;

fn updatable(fwug: u8) -> Config {
    Config {
        limits: Limits {
            firmware_updates: Some(fwug),
            ..Limits::default()
        },
        ..Config::default()
    }
}

/// An image of a simulated drive.
fn image(revision: &str, bytes: usize) -> Arc<[u8]> {
    let mut image = IMAGE_MARK.to_vec();
    image.extend(format!("{revision:8}").into_bytes());
    image.resize(bytes, 0xee);
    image.into()
}

fn update(
    rig: &mut Rig,
    controller: &Arc<Controller>,
    image: Arc<[u8]>,
) -> Result<FirmwareUpdate, FirmwareError> {
    let controller = controller.clone();
    rig.core
        .block_on(async move { controller.update_firmware(image).await })
}

fn pieces(rig: &Rig) -> u64 {
    rig.drive.stats().admin[usize::from(FIRMWARE_IMAGE_DOWNLOAD)]
}

/// Goal: an update under load loses no I/O, and the new revision is reported. The length of the
/// image is no multiple of a piece.
#[test]
fn an_update_under_load() {
    for (fwug, expected) in [(0, 4), (0xff, 4), (2, 2)] {
        let mut rig = Rig::new(updatable(fwug));
        let (controller, _bdev, mut queue) = rig.one(DriveOptions::new("nvme0"));
        for at in 0..20u64 {
            let write = rig.write(at, 1, at as u8);
            rig.submit(&mut *queue, write);
        }
        let handle = controller.clone();
        let image = image("2.1", 3 * 4096 + 20);
        let task = rig
            .core
            .spawn_local(async move { handle.update_firmware(image).await });
        assert_eq!(rig.run_until_idle(&mut *queue), vec![Status::Ok; 20]);
        let updated = rig.core.block_on(task).expect("it runs");
        let expected_update = FirmwareUpdate {
            before: "1.0".to_owned(),
            after: "2.1".to_owned(),
            needs: None,
        };
        assert_eq!(updated, Ok(expected_update));
        assert_eq!(pieces(&rig), expected);
        assert_eq!(controller.info().drive.firmware, "2.1");
        assert_eq!(controller.status().resets, 1);
        rig.end(&controller, queue);
    }
}

/// Goal: an image that cannot be one, and a drive that takes none, cost no command of an update.
#[test]
fn refused_before_the_first_piece() {
    let cases = [
        (updatable(0), 0),
        (updatable(0), 4095),
        (updatable(0), IMAGE_MAX + 4),
        (Config::default(), 4096),
    ];
    for (config, bytes) in cases {
        let mut rig = Rig::new(config);
        let controller = rig.attach();
        let image = vec![0; bytes].into();
        match update(&mut rig, &controller, image).unwrap_err() {
            FirmwareError::Size { bytes: found, .. } => assert_eq!(found, bytes),
            error => assert_eq!((error, bytes), (FirmwareError::Unsupported, 4096)),
        }
        assert_eq!(pieces(&rig), 0);
        rig.detach(&controller);
        rig.drive.check();
    }
    let mut rig = Rig::new(updatable(0x80));
    let controller = rig.attach();
    let error = update(&mut rig, &controller, image("2.1", 4096)).unwrap_err();
    assert!(
        matches!(error, FirmwareError::Granularity { .. }),
        "{error}"
    );
    rig.detach(&controller);
    rig.drive.check();
}

/// Goal: a drive that refuses the image, or a piece of it, keeps its firmware and is not reset. The
/// next image succeeds.
#[test]
fn refused_by_the_drive() {
    let mut rig = Rig::new(updatable(0));
    let controller = rig.attach();
    let wrong = vec![0xee; 4096].into();
    let error = update(&mut rig, &controller, wrong).unwrap_err();
    let refused = ControlError::Status {
        opcode: FIRMWARE_COMMIT,
        status: StatusCode::INVALID_FIRMWARE_IMAGE.with_dnr(),
    };
    assert_eq!(error, FirmwareError::Commit(refused));
    let failure = Action::Status(StatusCode::INTERNAL_ERROR);
    let rule = Rule::next(Target::AdminOp(FIRMWARE_IMAGE_DOWNLOAD), failure);
    rig.drive.inject(rule.after(2));
    let error = update(&mut rig, &controller, image("2.1", 5 * 4096)).unwrap_err();
    assert!(
        matches!(
            error,
            FirmwareError::Download {
                taken: 8192,
                bytes: 20480,
                ..
            }
        ),
        "{error}"
    );
    assert_eq!(controller.info().drive.firmware, "1.0");
    assert_eq!(controller.status().resets, 0);
    let updated = update(&mut rig, &controller, image("2.1", 5 * 4096)).expect("a good image");
    assert_eq!(updated.after, "2.1");
    rig.detach(&controller);
    rig.drive.check();
}

/// Goal: an image that needs a stronger reset than the driver has is reported, and the drive goes
/// on with its old firmware.
#[test]
fn a_stronger_reset_is_needed() {
    for (status, needs) in [
        (
            StatusCode::FIRMWARE_NEEDS_SUBSYSTEM_RESET,
            Some("power cycle"),
        ),
        (StatusCode::FIRMWARE_NEEDS_CONVENTIONAL_RESET, Some("PCI")),
        (StatusCode::FIRMWARE_NEEDS_CONTROLLER_RESET, None),
    ] {
        let mut rig = Rig::new(updatable(0));
        let controller = rig.attach();
        let target = Target::AdminOp(FIRMWARE_COMMIT);
        rig.drive
            .inject(Rule::next(target, Action::Status(status.with_dnr())));
        let updated = update(&mut rig, &controller, image("2.1", 4096)).expect("accepted");
        match (updated.needs, needs) {
            (Some(text), Some(part)) => assert!(text.contains(part), "{text}"),
            (found, expected) => assert_eq!(found, expected),
        }
        assert_eq!(controller.status().resets, u64::from(needs.is_none()));
        rig.detach(&controller);
        rig.drive.check();
    }
}

/// Goal: I/O that is late while the drive writes the image does not reset the controller before the
/// drive has answered Firmware Commit.
#[test]
fn a_commit_is_not_cut_off() {
    let mut rig = Rig::new(updatable(0));
    let (controller, _bdev, mut queue) = rig.one(DriveOptions {
        timeout: Duration::from_secs(1),
        action_on_timeout: ActionOnTimeout::Reset,
        ..DriveOptions::new("nvme0")
    });
    let commit = Target::AdminOp(FIRMWARE_COMMIT);
    let late = Action::Late(Duration::from_secs(20));
    rig.drive.inject(Rule::next(commit, late));
    rig.drive.inject(Rule::next(Target::Io, late));
    let (handle, image) = (controller.clone(), image("2.1", 4096));
    let task = rig
        .core
        .spawn_local(async move { handle.update_firmware(image).await });
    let write = rig.write(0, 1, 1);
    rig.submit(&mut *queue, write);
    assert_eq!(rig.run_until_idle(&mut *queue), [Status::Ok]);
    let updated = rig.core.block_on(task).expect("it runs");
    assert_eq!(updated.map(|update| update.after), Ok("2.1".to_owned()));
    rig.end(&controller, queue);
}

/// Goal: a drive that never answers Firmware Commit leaves the outcome open, and says so.
#[test]
fn a_commit_without_an_answer() {
    let mut rig = Rig::new(updatable(0));
    let controller = rig.attach();
    let late = Action::Late(Duration::from_secs(1000));
    rig.drive
        .inject(Rule::next(Target::AdminOp(FIRMWARE_COMMIT), late));
    let error = update(&mut rig, &controller, image("2.1", 4096)).unwrap_err();
    assert!(matches!(error, FirmwareError::Unknown(_)), "{error}");
    rig.drive.heal();
    rig.detach(&controller);
}

/// Goal: a second update while one runs is refused; it does not mix its pieces into the first.
#[test]
fn one_update_at_a_time() {
    let mut rig = Rig::new(updatable(0));
    let controller = rig.attach();
    let tasks = ["2.1", "2.2"].map(|revision| {
        let (handle, image) = (controller.clone(), image(revision, 64 << 10));
        rig.core
            .spawn_local(async move { handle.update_firmware(image).await })
    });
    let [first, second] = tasks.map(|task| rig.core.block_on(task).expect("it runs"));
    assert_eq!(first.map(|update| update.after), Ok("2.1".to_owned()));
    assert_eq!(second, Err(FirmwareError::Running));
    rig.detach(&controller);
    rig.drive.check();
}

/// Goal: a drive that is pulled out during the download ends the call with an error.
#[test]
fn the_drive_vanishes() {
    let mut rig = Rig::new(updatable(0));
    let controller = rig.attach();
    let rule = Rule::next(Target::AdminOp(FIRMWARE_IMAGE_DOWNLOAD), Action::Pulled);
    rig.drive.inject(rule.after(3));
    let error = update(&mut rig, &controller, image("2.1", 64 << 10)).unwrap_err();
    assert!(matches!(error, FirmwareError::Download { .. }), "{error}");
    rig.detach(&controller);
    rig.drive.check();
}
