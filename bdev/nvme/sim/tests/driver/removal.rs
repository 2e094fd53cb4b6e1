//! A drive that is pulled out, with and without notice, and comes back.

use std::sync::Arc;
use std::time::Duration;

use nacre_bdev::{Bdev, Op, Status};
use nacre_bdev_nvme::{AttachError, Event, Function, Options, State};
use nacre_bdev_nvme_sim::{Action, Config, Drive, Keep, Rule, Target};

use super::rig::Rig;

fn slow() -> Config {
    Config {
        latency: (Duration::from_micros(100), Duration::from_millis(4)),
        ..Config::default()
    }
}

/// Goal: whoever notices first, everything in flight and to come answers Gone, once; and when the drive is back, the
/// same bdevs go on, which tell that something may have been lost.
#[test]
fn pulled_and_back() {
    for told in [false, true] {
        let mut rig = Rig::new(slow());
        let (controller, bdev, mut queue) = rig.one(Options::new("nvme0"));
        let write = rig.write(0, 1, 1);
        rig.run(&mut *queue, write);
        let flush = rig.io(Op::Flush, 0, 0);
        rig.run(&mut *queue, flush);
        let write = rig.write(0, 1, 2);
        rig.run(&mut *queue, write);
        for at in 0..20u64 {
            let write = rig.write(10 + at, 1, 3);
            rig.submit(&mut *queue, write);
        }
        rig.turn(&mut *queue);
        rig.drive.pull(Keep::Nothing);
        if told {
            controller.removed();
        }
        let began = rig.core.now();
        let statuses = rig.settle(&mut *queue);
        assert_eq!(statuses.len(), 20);
        assert!(
            statuses
                .iter()
                .all(|status| matches!(status, Status::Gone | Status::Ok)),
            "{statuses:?}"
        );
        assert!(statuses.contains(&Status::Gone));
        assert!(rig.core.now().since(began) < Duration::from_secs(10));
        rig.until(&mut *queue, |_| controller.status().state == State::Removed);
        let read = rig.read(0, 1);
        assert_eq!(rig.status(&mut *queue, read), Status::Gone);
        assert_eq!(bdev.losses(), 0);

        let function: Arc<dyn Function> = rig.drive.plug();
        let back = controller.clone();
        let returned = rig
            .core
            .block_on(async move { back.returned(function).await });
        assert!(
            returned.is_ok(),
            "{:?}",
            returned.err().map(|e| e.to_string())
        );
        assert_eq!(controller.status().state, State::Live);
        assert_eq!((bdev.losses(), controller.status().losses), (1, 1));
        assert_eq!(rig.values(&mut *queue, 0, 1), [1], "what was flushed");
        let write = rig.write(0, 1, 4);
        assert_eq!(rig.status(&mut *queue, write), Status::Ok);
        let same = controller.namespaces().remove(0);
        assert!(Arc::ptr_eq(&same, &bdev));
        rig.end(&controller, queue);
    }
}

/// Goal: a removal at any command, of the control too, ends in Removed, not in a hang.
#[test]
fn pulled_at_any_command() {
    let mut rig = Rig::new(Config::default());
    let (controller, _bdev, mut queue) = rig.one(Options::new("nvme0"));
    rig.drive
        .inject(Rule::next(Target::Admin, Action::Pulled).after(3));
    let asked = controller.clone();
    let reset = rig.core.block_on(async move { asked.reset().await });
    assert!(reset.is_err());
    rig.until(&mut *queue, |_| controller.status().state == State::Removed);
    let read = rig.read(0, 1);
    assert_eq!(rig.status(&mut *queue, read), Status::Gone);
    drop(queue);
    rig.detach(&controller);
    assert_eq!(controller.status().state, State::Detached);
    rig.drive.check();
}

/// Goal: another drive in the same place is not taken for the one that was there.
#[test]
fn another_drive() {
    let mut rig = Rig::new(Config::default());
    let (controller, _bdev, mut queue) = rig.one(Options::new("nvme0"));
    let function: Arc<dyn Function> = rig.drive.plug();
    let early = controller.clone();
    // It was pulled and is back at once, but the driver has not noticed: then it is gone first.
    controller.removed();
    rig.until(&mut *queue, |_| early.status().state == State::Removed);
    drop(function);
    let iommu = rig.drive.iommu().clone();
    let other = Drive::new(Config {
        serial: "OTHER".to_owned(),
        iommu,
        ..Config::default()
    });
    rig.core
        .add_poller(Box::new(nacre_bdev_nvme_sim::Ticker(other.clone())))
        .unwrap();
    let function: Arc<dyn Function> = other.plug();
    let back = controller.clone();
    let returned = rig
        .core
        .block_on(async move { back.returned(function).await });
    assert!(
        matches!(
            &returned,
            Err(AttachError::OtherDrive { expected, found, .. })
                if expected == "SIM0001" && found == "OTHER"
        ),
        "{:?}",
        returned.err().map(|error| error.to_string())
    );
    assert_eq!(controller.status().state, State::Removed);
    assert!(other.is_given_back());
    other.check();
    let function: Arc<dyn Function> = rig.drive.plug();
    let back = controller.clone();
    let returned = rig
        .core
        .block_on(async move { back.returned(function).await });
    assert!(returned.is_ok());
    let write = rig.write(0, 1, 4);
    assert_eq!(rig.status(&mut *queue, write), Status::Ok);
    rig.end(&controller, queue);
}

/// Goal: only a drive that is gone can return.
#[test]
fn it_was_not_gone() {
    let mut rig = Rig::new(Config::default());
    let (controller, _bdev, mut queue) = rig.one(Options::new("nvme0"));
    let write = rig.write(0, 1, 4);
    rig.run(&mut *queue, write);
    let other = Drive::new(Config {
        iommu: rig.drive.iommu().clone(),
        ..Config::default()
    });
    let function: Arc<dyn Function> = other.plug();
    let back = controller.clone();
    let returned = rig
        .core
        .block_on(async move { back.returned(function).await });
    assert!(matches!(returned, Err(AttachError::NotRemoved { .. })));
    let read = rig.read(0, 1);
    assert_eq!(rig.status(&mut *queue, read), Status::Ok);
    rig.end(&controller, queue);
}

/// Goal: a drive that is pulled without any I/O is noticed all the same, and told of.
#[test]
fn noticed_while_idle() {
    let mut rig = Rig::new(Config::default());
    let (controller, _bdev, mut queue) = rig.one(Options::new("nvme0"));
    rig.events.take();
    rig.drive.pull(Keep::All);
    rig.until(&mut *queue, |_| controller.status().state == State::Removed);
    let removed =
        |event: &Event| matches!(event, Event::State(status) if status.state == State::Removed);
    assert!(rig.events.take().iter().any(removed));
    drop(queue);
    rig.detach(&controller);
    rig.drive.check();
}
