//! Tests of the bytes of pause settings, and of counter names by driver.

use hex_literal::hex;

use super::*;

#[test]
fn pause_is_requested_with_statistics() {
    assert_eq!(
        pause_request(0x14, "eth0"),
        hex!(
            "2c000000 1400 0500 01000000 00000000
             15 01 0000
             1800 0180 0900 0200 6574683000 000000 0800 0300 04000000"
        )
    );
}

#[test]
fn pause_is_set() {
    let pause = Pause {
        tx: true,
        ..Pause::default()
    };
    assert_eq!(
        set_pause_request(0x14, "eth0", &pause),
        hex!(
            "3c000000 1400 0500 01000000 00000000
             16 01 0000
             1000 0180 0900 0200 6574683000 000000
             0500 0200 00 000000 0500 0300 00 000000 0500 0400 01 000000"
        )
    );
}

#[test]
fn pause_as_the_kernel_answers() {
    let body = hex!(
        "16 01 0000
         0c00 0180 0800 0100 02000000
         0500 0200 00 000000
         0500 0300 01 000000
         0500 0400 00 000000
         1c00 0580 0c00 0200 ffffffffffffffff 0c00 0300 2a00000000000000"
    );
    let pause = parse_pause(&body).unwrap();
    assert_eq!((pause.autoneg, pause.rx, pause.tx), (false, true, false));
    // A counter at its highest value is one that the driver does not have.
    assert_eq!((pause.rx_frames, pause.tx_frames), (Some(42), None));
    for length in 0..body.len() {
        if let Some(pause) = parse_pause(&body[..length]) {
            assert!(pause.rx);
        }
    }
}

#[test]
fn names_of_each_driver() {
    use Direction::{Rx, Tx};
    let rows = [
        ("rx_prio3_bytes", Some((Rx, 3, Field::Bytes))),
        ("tx_prio3_packets", Some((Tx, 3, Field::Packets))),
        ("rx_prio5_pause", Some((Rx, 5, Field::Pauses))),
        ("tx_prio5_pause_duration", Some((Tx, 5, Field::PauseTime))),
        // A change of the pause's state, not a frame.
        ("rx_prio5_pause_transition", None),
        ("rx_prio0_buf_discard", Some((Rx, 0, Field::Discards))),
        ("rx_pause_prio_7", Some((Rx, 7, Field::Pauses))),
        ("tx_prio_7_bytes", Some((Tx, 7, Field::Bytes))),
        ("rx_priority_2_xoff.nic", Some((Rx, 2, Field::Pauses))),
        ("rx_priority_2_xon.nic", None),
        ("port.tx_priority_1_xoff", Some((Tx, 1, Field::Pauses))),
        ("port-rx-xoff_prio-4_events", Some((Rx, 4, Field::Pauses))),
        ("rx_bytes_pri6", Some((Rx, 6, Field::Bytes))),
        ("rx_pfc_ena_frames_pri6", Some((Rx, 6, Field::Pauses))),
        ("mac_rx_pfc_pri3_pkt_num", Some((Rx, 3, Field::Pauses))),
        ("rx_prio8_bytes", None),
        ("rx_prio33_bytes", None),
        ("rx_bytes", None),
        ("", None),
    ];
    for (name, expected) in rows {
        assert_eq!(by_priority(name), expected, "{name}");
    }
}

#[test]
fn counters_are_sorted_by_priority() {
    let statistics = [
        ("rx_prio3_bytes", 1),
        ("tx_prio3_pause", 2),
        ("rx_prio3_pause", 3),
        ("rx_discards_phy", 4),
        ("ch0_poll", 5),
    ]
    .map(|(name, value)| (name.to_owned(), value));
    let counters = PriorityCounters::of(&statistics);
    assert_eq!(counters.rx[3].bytes, Some(1));
    assert_eq!(counters.tx[3].pauses, Some(2));
    assert_eq!(counters.rx[3].pauses, Some(3));
    assert_eq!(counters.rx[2], PriorityCount::default());
    assert_eq!(
        counters.loss,
        BTreeMap::from([("rx_discards_phy".into(), 4)])
    );
    assert!(counters.has_bytes() && counters.has_pauses());
    assert!(!PriorityCounters::of(&[]).has_pauses());
}

/// Goal: the running kernel understands the request, whether or not the loopback has pause.
#[test]
fn the_kernel_answers() {
    match pause("lo") {
        Ok(found) => assert_eq!(found, None),
        Err(error) => eprintln!("SKIPPED: the_kernel_answers: {error}"),
    }
}
