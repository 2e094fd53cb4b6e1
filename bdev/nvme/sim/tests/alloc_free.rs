//! Goal: in steady state, the NVMe driver's submit and poll allocate no memory. Method: a counting
//! allocator.

#[path = "driver/rig.rs"]
#[allow(dead_code, reason = "made for more than is needed here")]
mod rig;

use nacre_bdev::{Done, Io, Op};
use nacre_bdev_nvme::DriveOptions;
use nacre_bdev_nvme_sim::Config;

use rig::Rig;

const DEPTH: u64 = 16;

#[test]
fn submit_and_poll() {
    for (sgl, blocks) in [(true, 1), (true, 64), (false, 64)] {
        let mut rig = Rig::new(Config::default());
        let options = DriveOptions {
            sgl,
            ..DriveOptions::new("nvme0")
        };
        let (controller, _bdev, mut queue) = rig.one(options);
        let warm = rig.read(0, 1);
        rig.run(&mut *queue, warm);
        let mut done = Done::with_capacity(64);
        let len = blocks as usize * 512;
        let mut bufs: Vec<_> = (0..DEPTH).map(|_| rig.buf(len, 1)).collect();
        let mut allocated = 0;
        for round in 0..200u64 {
            let now = rig.core.now();
            let counted = allocation_counter::measure(|| {
                for at in 0..DEPTH {
                    let op = if at % 2 == 0 { Op::Write } else { Op::Read };
                    let buf = bufs.pop().expect("as many as there are I/Os");
                    let io = Io::new(at, op, at * 64, blocks).with(buf);
                    assert!(queue.submit(io).is_ok());
                }
                queue.poll(now, &mut done);
            });
            rig.core.turn();
            let now = rig.core.now();
            let polled = allocation_counter::measure(|| {
                queue.poll(now, &mut done);
            });
            assert_eq!(done.len() as u64, DEPTH);
            for mut completion in done.drain() {
                assert!(completion.status.is_ok());
                bufs.extend(completion.data.pop());
            }
            if round >= 20 {
                allocated += counted.count_total + polled.count_total;
            }
        }
        assert_eq!(allocated, 0, "with SGLs: {sgl}, {blocks} blocks");
        drop(bufs);
        rig.end(&controller, queue);
    }
}
