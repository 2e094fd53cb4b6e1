//! Tests of LLDP frames of switches, valid and invalid.

use hex_literal::hex;

use super::*;

/// Addresses and the three TLVs that every frame begins with.
const HEAD: &[u8] = &hex!(
    "0180c200000e 020000000002 88cc
     0207 04 020000000002
     0407 03 020000000002
     0602 0078"
);

fn frame(tlvs: &[&[u8]]) -> Vec<u8> {
    [HEAD, &tlvs.concat()].concat()
}

const ETS: &[u8] =
    &hex!("fe19 0080c2 09 05 00030000 32 00 00 32 00 00 00 00 02 00 00 02 00 00 00 00");
const PFC: &[u8] = &hex!("fe06 0080c2 0b 08 28");
const APPS: &[u8] = &hex!("fe08 0080c2 0c 00 65 001a");
const END: &[u8] = &hex!("0000");

#[test]
fn the_switchs_configuration_is_parsed() {
    let name = &hex!("0a08 737769746368 1b41")[..];
    let size = &hex!("fe06 00120f 04 2400")[..];
    let cee = &hex!("fe04 001b21 02")[..];
    let other = &hex!("fe05 001018 01 ff")[..];
    let frame = frame(&[name, ETS, PFC, APPS, size, cee, other, END]);
    let neighbour = parse(&frame).unwrap();
    assert_eq!(neighbour.chassis, "02:00:00:00:00:02");
    assert_eq!(neighbour.port, "02:00:00:00:00:02");
    assert_eq!(neighbour.ttl, 120);
    // A control character would reach a terminal.
    assert_eq!(neighbour.system_name.as_deref(), Some("switch A"));
    let pfc = neighbour.pfc.unwrap();
    assert_eq!((pfc.capability, pfc.enabled.to_string()), (8, "3,5".into()));
    assert!(!pfc.willing && !pfc.bypass);
    let ets = neighbour.ets.unwrap();
    assert_eq!((ets.classes, ets.sum(), ets.class(3)), (5, 100, 3));
    assert_eq!(neighbour.apps, [App::dscp(26, 3)]);
    assert_eq!(neighbour.max_frame, Some(0x2400));
    assert!(neighbour.cee && neighbour.has_dcbx());
    // Bytes after the end TLV are padding.
    let padded = [&frame[..], &[0xff; 20]].concat();
    assert_eq!(parse(&padded), Ok(neighbour));
}

#[test]
fn flags_and_nibbles() {
    let mut bytes = ETS.to_vec();
    bytes[6] = 0xc0;
    bytes[7..11].copy_from_slice(&hex!("01234567"));
    let ets = parse(&frame(&[&bytes, END])).unwrap().ets.unwrap();
    assert!(ets.willing && ets.credit_shaper);
    assert_eq!(ets.classes, 8);
    assert_eq!(ets.class_of, [0, 1, 2, 3, 4, 5, 6, 7]);
    let pfc = hex!("fe06 0080c2 0b c4 00");
    let pfc = parse(&frame(&[&pfc, END])).unwrap().pfc.unwrap();
    assert!(pfc.willing && pfc.bypass && pfc.enabled.is_empty());
    assert_eq!(pfc.capability, 4);
}

/// As lldpd 1.0.16 sends `custom-tlv` of a switch with two storage classes.
#[test]
fn two_classes_beside_the_default() {
    let ets = hex!("fe19 0080c2 09 00 00030500 04 00 00 5f 00 01 00 00 02 00 00 02 00 02 00 00");
    let ets = parse(&frame(&[&ets, END])).unwrap().ets.unwrap();
    assert_eq!(ets.class_of, [0, 0, 0, 3, 0, 5, 0, 0]);
    assert_eq!(ets.share, [4, 0, 0, 95, 0, 1, 0, 0]);
    assert_eq!(ets.sum(), 100);
}

#[test]
fn bad_frames_are_refused() {
    let refused = |tlvs: &[&[u8]]| parse(&frame(tlvs)).unwrap_err();
    assert_eq!(parse(&[]), Err(BadFrame::NotLldp));
    let mut other = frame(&[END]);
    other[12] = 0x08;
    assert_eq!(parse(&other), Err(BadFrame::NotLldp));
    assert_eq!(refused(&[]), BadFrame::NoEnd);
    assert_eq!(refused(&[PFC]), BadFrame::NoEnd);
    assert_eq!(refused(&[&PFC[..7]]), BadFrame::Overrun { at: 36 });
    assert_eq!(
        refused(&[PFC, PFC, END]),
        BadFrame::Repeated { name: "PFC" }
    );
    assert_eq!(
        refused(&[ETS, ETS, END]),
        BadFrame::Repeated { name: "ETS" }
    );
    let short = hex!("fe05 0080c2 0b 08");
    let (name, length) = ("PFC", 1);
    assert_eq!(refused(&[&short, END]), BadFrame::Length { name, length });
    let uneven = hex!("fe07 0080c2 0c 00 65 00");
    assert!(matches!(refused(&[&uneven, END]), BadFrame::Length { .. }));
    let headless = hex!("fe03 0080c2");
    assert!(matches!(
        refused(&[&headless, END]),
        BadFrame::Length { .. }
    ));
    // A second chassis, and a frame without its first TLVs.
    assert_eq!(refused(&[&HEAD[14..23], END]), BadFrame::Mandatory);
    let bare = [&HEAD[..14], END].concat();
    assert_eq!(parse(&bare), Err(BadFrame::Mandatory));
}

#[test]
fn corpus() {
    crate::tests::replay("lldp", crate::fuzzing::lldp);
}
