//! Reads while the keeper changes the map.

use std::time::{Duration, Instant};

use nacre_bdev::Status;

use super::rig::{self, block_on};

/// Goal: a read whose leaf changes each time that the lane looks at it returns the data in the end.
/// Method: the leaf is in the middle of a change for many loads; the read has three places, of
/// which one has no data.
#[test]
fn a_leaf_changes_under_a_read_again_and_again() {
    let (_home, pool, id, mut host) = rig::start(64, 4);
    let lvol = block_on(pool.lvol(id)).unwrap();
    assert_eq!(host.write(8, 8, 1), Status::Ok);
    assert_eq!(host.write(32, 4, 2), Status::Ok);
    let expected = [1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0];
    let expected: Vec<u8> = expected.into_iter().chain([0; 8]).chain([2; 4]).collect();
    for (lba, blocks) in [(8, 4), (8, 8), (8, 28), (20, 14), (34, 2)] {
        lvol.map.hold(0, true);
        let token = host.begin_read(lba, blocks);
        // A load is answered within microseconds, and the lane asks again at each poll.
        let began = Instant::now();
        while began.elapsed() < Duration::from_millis(20) {
            assert_eq!(host.ended(token), None, "{blocks} at {lba}");
        }
        lvol.map.hold(0, false);
        let (status, bytes) = host.end_read(token);
        assert_eq!(status, Status::Ok);
        let first = (lba - 8) as usize;
        for (at, block) in bytes.chunks(4096).enumerate() {
            let byte = expected[first + at];
            assert!(
                block.iter().all(|one| *one == byte),
                "block {at} of {blocks} at {lba}"
            );
        }
        assert_eq!(bytes.len(), blocks as usize * 4096);
    }
    rig::check(&pool);
}
