//! Tests of ICMP messages: tables of bytes, with the replies that Linux sends.

use hex_literal::hex;

use super::*;

#[test]
fn requests() {
    let v4 = request(Version::V4, 0x1234, 1, 4);
    assert_eq!(v4, hex!("0800 e3c6 1234 0001 00010203"));
    // An odd number of bytes ends in a half word.
    let odd = request(Version::V4, 0x1234, 1, 3);
    assert_eq!(odd, hex!("0800 e3c9 1234 0001 000102"));
    let v6 = request(Version::V6, 0x1234, 2, 4);
    assert_eq!(v6, hex!("8000 0000 1234 0002 00010203"));
    assert_eq!(request(Version::V4, 0, 0, 9000 - 28).len() + 20, 9000);
    assert_eq!((Version::V4.headers(), Version::V6.headers()), (28, 48));
}

#[test]
fn replies_to_our_request() {
    let ours = request(Version::V4, 0x1234, 1, 4);
    let bytes = hex!("0000 ebc6 1234 0001 00010203");
    let found = reply(Version::V4, &bytes).expect("a reply");
    assert_eq!((found.identifier, found.sequence), (0x1234, 1));
    assert!(found.answers(&ours, false));
    // The kernel chose another identifier, as it does for SOCK_DGRAM.
    let other = request(Version::V4, 0x4321, 1, 4);
    assert!(found.answers(&other, true) && !found.answers(&other, false));
    for wrong in [
        request(Version::V4, 0x1234, 2, 4),
        request(Version::V4, 0x1234, 1, 5),
        Vec::new(),
    ] {
        assert!(!found.answers(&wrong, true), "{wrong:02x?}");
    }
    let v6 = hex!("8100 abcd 1234 0002 00010203");
    let found = reply(Version::V6, &v6).expect("a reply");
    assert!(found.answers(&request(Version::V6, 0x1234, 2, 4), false));
}

#[test]
fn other_messages_are_no_replies() {
    let refused: [&[u8]; 8] = [
        // An echo request, as a raw socket on the loopback receives its own.
        &hex!("0800 e3c6 1234 0001 00010203"),
        // A wrong checksum.
        &hex!("0000 ebc8 1234 0001 00010203"),
        // A reply of the other version.
        &hex!("8100 6ac7 1234 0001 00010203"),
        // Destination unreachable, fragmentation needed.
        &hex!("0304 fcfb 0000 0000"),
        // A code that replies do not have.
        &hex!("0001 ebc5 1234 0001 00010203"),
        &hex!("0000 ebc6 1234 00"),
        &hex!("00"),
        &[],
    ];
    for bytes in refused {
        assert_eq!(reply(Version::V4, bytes), None, "{bytes:02x?}");
    }
    assert_eq!(reply(Version::V6, &hex!("8000 0000 1234 0002")), None);
}

#[test]
fn ip_headers_are_removed() {
    let plain = hex!("4500001c 00004000 40010000 0a000001 0a000002 aabb");
    assert_eq!(without_ip_header(&plain), Some(&hex!("aabb")[..]));
    // Four bytes of options.
    let options = hex!("46000020 00004000 40010000 0a000001 0a000002 01010101 aabb");
    assert_eq!(without_ip_header(&options), Some(&hex!("aabb")[..]));
    let refused: [&[u8]; 4] = [&hex!("6500"), &hex!("4400"), &hex!("45"), &[]];
    for bytes in refused {
        assert_eq!(without_ip_header(bytes), None, "{bytes:02x?}");
    }
}

#[test]
fn corpus() {
    crate::tests::replay("icmp", crate::fuzzing::icmp);
}
