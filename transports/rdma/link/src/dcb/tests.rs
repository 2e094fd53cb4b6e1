//! Tests of DCB messages: bytes of replies and changes, as iproute2 and the kernel write them.

use hex_literal::hex;

use super::*;

/// struct ieee_ets: three classes, 0 and 3 by ETS.
const ETS: [u8; 59] = hex!(
    "00 08 00
     32 00 00 32 00 00 00 00
     00 00 00 00 00 00 00 00
     02 00 00 02 00 00 00 00
     00 00 00 03 00 00 00 00
     00 00 00 00 00 00 00 00
     00 00 00 00 00 00 00 00
     00 00 00 00 00 00 00 00"
);

fn ets() -> Ets {
    let mut ets = Ets {
        willing: false,
        classes: 8,
        credit_shaper: false,
        share: [50, 0, 0, 50, 0, 0, 0, 0],
        algorithm: [Algorithm::Strict; 8],
        class_of: [0, 0, 0, 3, 0, 0, 0, 0],
    };
    ets.algorithm[0] = Algorithm::Ets;
    ets.algorithm[3] = Algorithm::Ets;
    ets
}

/// The body of an answer: a `dcbmsg`, the name, and `tables` inside the attribute of IEEE.
fn answer(tables: &[(u16, &[u8])]) -> Vec<u8> {
    let head = Request::new(RTM_GETDCB, 0, &[0, command::IEEE_GET, 0, 0])
        .attribute(attribute::IFNAME, b"eth0\0");
    let message = head.nested(attribute::IEEE, |ieee| {
        let put = |ieee: Request, (kind, value): &(u16, &[u8])| ieee.attribute(*kind, value);
        tables.iter().fold(ieee, put)
    });
    message.finish()[crate::nlmsg::HEADER..].to_vec()
}

#[test]
fn every_table_of_an_answer_is_read() {
    let mut pfc = vec![8, 0x28, 1, 0];
    pfc.extend(0x1234u16.to_ne_bytes());
    pfc.extend([0; 2]);
    for count in 0..16u64 {
        pfc.extend((count * 1000).to_ne_bytes());
    }
    // The kernel's entry: selector, priority, value in the machine's byte order.
    let table = |entries: &[[u8; 4]]| {
        entries
            .iter()
            .flat_map(|entry| [&[8, 0, 1, 0][..], entry].concat())
            .collect::<Vec<u8>>()
    };
    let entry = |selector, priority, value: u16| {
        let [low, high] = value.to_ne_bytes();
        [selector, priority, low, high]
    };
    let apps = table(&[entry(5, 3, 26), entry(2, 4, 4420)]);
    let rates: Vec<u8> = (0..8u64).flat_map(|rate| rate.to_ne_bytes()).collect();
    let sizes = (0..9u32).flat_map(|size| (size * 100).to_ne_bytes());
    let buffers: Vec<u8> = [0, 0, 0, 1, 0, 0, 0, 0].into_iter().chain(sizes).collect();
    let trust = hex!("0500 0100 05 000000 0500 0200 ff 000000");
    // The switch's entries follow a head of their own.
    let peer = [&hex!("0600 0000 0100 0000")[..], &apps].concat();
    let body = answer(&[
        (ieee::ETS, &ETS),
        (ieee::PFC, &pfc),
        (ieee::APP_TABLE, &apps),
        (ieee::MAXRATE, &rates),
        (ieee::BUFFER, &buffers),
        // With the flag for nested attributes.
        (ieee::APP_TRUST_TABLE | change::NESTED, &trust),
        (ieee::PEER_ETS, &ETS),
        (ieee::PEER_PFC, &pfc),
        (ieee::PEER_APP, &peer),
        (99, b"later kernels have more"),
    ]);
    let dcb = Dcb::parse(&body).unwrap();
    assert_eq!(dcb.ets, Some(ets()));
    assert_eq!((ets().sum(), ets().class(3)), (100, 3));
    assert_eq!(ets().priorities(0).to_string(), "0,1,2,4,5,6,7");
    let read = dcb.pfc.unwrap();
    assert_eq!(read.enabled.to_string(), "3,5");
    assert_eq!(
        (read.capability, read.bypass, read.delay),
        (8, true, 0x1234)
    );
    assert_eq!((read.sent[1], read.received[7]), (1000, 15_000));
    let stream = App {
        selector: Selector::Stream,
        value: 4420,
        priority: 4,
    };
    assert_eq!(dcb.apps, [stream, App::dscp(26, 3)]);
    assert_eq!(dcb.peer_apps, dcb.apps);
    assert_eq!(dcb.priority_of_dscp(26), Some(3));
    assert_eq!(dcb.priority_of_dscp(27), None);
    assert_eq!(dcb.rates, Some([0, 1, 2, 3, 4, 5, 6, 7]));
    let buffers = dcb.buffers.unwrap();
    assert_eq!((buffers.buffer_of[3], buffers.bytes[3]), (1, 300));
    assert_eq!(buffers.total, 800);
    assert_eq!(dcb.trusted(), [Selector::Dscp, Selector::Pcp]);
    assert_eq!((dcb.peer_ets, dcb.peer_pfc), (dcb.ets, dcb.pfc));
    // An answer that is cut off anywhere is refused, or read as far as it goes.
    for length in 0..body.len() {
        let _ = Dcb::parse(&body[..length]);
    }
}

#[test]
fn malformed_tables_are_named() {
    let refused = |kind, value: &[u8]| match Dcb::parse(&answer(&[(kind, value)])) {
        Err(DcbError::Malformed { field }) => field,
        other => panic!("{other:?}"),
    };
    assert_eq!(refused(ieee::ETS, &ETS[..58]), "ets");
    assert_eq!(refused(ieee::PFC, &[0; 135]), "pfc");
    assert_eq!(refused(ieee::APP_TABLE, &hex!("0700 0100 050300")), "app");
    assert_eq!(refused(ieee::BUFFER, &[0; 43]), "buffer");
    assert_eq!(refused(ieee::MAXRATE, &[0; 63]), "maxrate");
    assert!(Dcb::parse(&[0, 21, 0, 0]).is_err());
    assert!(Dcb::parse(&[]).is_err());
}

#[test]
fn trust_without_a_table_follows_the_entries() {
    let mut dcb = Dcb::default();
    assert_eq!(dcb.trusted(), [Selector::Pcp]);
    dcb.apps.push(App::dscp(26, 3));
    assert_eq!(dcb.trusted(), [Selector::Dscp]);
    dcb.trust = Some(vec![]);
    assert_eq!(dcb.trusted(), []);
}

/// Goal: each change is the message that iproute2 6.1 sends (`strace -e trace=network -x dcb …`).
#[test]
fn changes_as_bytes() {
    let head = |command: u8| vec![0, command, 0, 0];
    let name = hex!("0900 0100 6574683000 000000");
    let body = |change: &Change| message("eth0", change)[16..].to_vec();
    let apps = vec![App::dscp(26, 3)];
    assert_eq!(
        message("eth0", &Change::Mode(DcbxMode::HOST_IEEE)),
        [
            &hex!("28000000 4f00 0100 01000000 00000000")[..],
            &head(23),
            &name,
            &hex!("0500 0e00 09 000000")
        ]
        .concat()
    );
    let add = hex!("1000 0d00 0c00 0300 0800 0100 05031a00");
    assert_eq!(
        body(&Change::AddApps(apps.clone())),
        [&head(20)[..], &name, &add].concat()
    );
    assert_eq!(
        body(&Change::DeleteApps(apps)),
        [&head(27)[..], &name, &add].concat()
    );
    let trust = hex!("1800 0d00 1400 0b80 0500 0100 05 000000 0500 0200 ff 000000");
    assert_eq!(
        body(&Change::Trust(vec![Selector::Dscp, Selector::Pcp])),
        [&head(20)[..], &name, &trust].concat()
    );
    let pfc = Pfc {
        capability: 8,
        enabled: Priorities(0x08),
        delay: 7,
        sent: [9; 8],
        ..Pfc::default()
    };
    let bytes = [
        &head(20)[..],
        &name,
        &hex!("9000 0d00 8c00 0200 08080000 0700 0000"),
        &[0; 128],
    ];
    assert_eq!(body(&Change::Pfc(pfc)), bytes.concat());
    // A change reads back the same.
    assert_eq!(
        Dcb::parse(&body(&Change::Ets(ets()))).unwrap().ets,
        Some(ets())
    );
    let buffers = Buffers {
        buffer_of: [0, 0, 0, 1, 0, 0, 0, 0],
        bytes: [1, 2, 3, 4, 5, 6, 7, 8],
        total: 36,
    };
    let read = Dcb::parse(&body(&Change::Buffers(buffers))).unwrap();
    assert_eq!(read.buffers, Some(buffers));
}

#[test]
fn a_change_is_accepted_or_refused_with_a_number() {
    let change = Change::Pfc(Pfc::default());
    let status = |body: &[u8]| parse_status(body, &change);
    let with = |code: u8| [&hex!("00140000 0500 0d00")[..], &[code, 0, 0, 0]].concat();
    assert_eq!(status(&with(0)), Some(Ok(())));
    // -EINVAL and -EOPNOTSUPP in a byte.
    assert_eq!(status(&with(234)), Some(Err(Errno::INVAL)));
    assert_eq!(status(&with(161)), Some(Err(Errno::OPNOTSUPP)));
    assert_eq!(status(&[0, 20]), None);
    let mode = Change::Mode(DcbxMode::HOST_IEEE);
    let refused = hex!("00170000 0500 0e00 01000000");
    assert_eq!(parse_status(&refused, &mode), Some(Err(Errno::OPNOTSUPP)));
    let read = parse_mode(&hex!("00160000 0500 0e00 0a000000")).unwrap();
    assert_eq!(read.to_string(), "lld-managed ieee");
}

/// Goal: the running kernel understands the request. The loopback has no DCB.
#[test]
fn the_kernel_answers() {
    match read("lo") {
        Err(DcbError::NotSupported { interface }) => assert_eq!(interface, "lo"),
        other => eprintln!("SKIPPED: the_kernel_answers: this kernel answers {other:?}"),
    }
    match read("none-such") {
        Err(DcbError::NoInterface { interface }) => assert_eq!(interface, "none-such"),
        other => eprintln!("SKIPPED: the_kernel_answers: this kernel answers {other:?}"),
    }
}

#[test]
fn corpus() {
    crate::tests::replay("dcb", crate::fuzzing::dcb);
}

/// Goal: an undo restores what a change of shares does not name.
#[test]
fn shares_keep_the_recommendation_found() {
    let found: [u8; 59] = std::array::from_fn(|at| at as u8);
    let bytes = ets().over(found);
    assert_eq!((bytes[0], &bytes[3..11]), (0, &ets().share[..]));
    assert_eq!(&bytes[19..35], &ets().to_bytes()[19..35]);
    for kept in [1..3_usize, 11..19, 35..59] {
        assert_eq!(bytes[kept.clone()], found[kept]);
    }
}
