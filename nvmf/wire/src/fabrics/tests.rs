//! Tests of the fabrics commands: their bytes, valid and invalid.

use core::mem::offset_of;

use hex_literal::hex;
use proptest::prelude::*;
use zerocopy::{FromZeros, IntoBytes};

use super::*;

/// A Connect of queue 3 as a Linux host with `disable_sqflow` sends it, in capsule.
#[test]
fn a_connect() {
    let bytes = hex!(
        "7f400500 01 000000 0000000000000000 0000000000000000"
        "0000000000000000 00040000 00000001"
        "0000 0300 7f00 04 00 98390000 000000000000000000000000"
    );
    let sqe = Sqe::read_from_bytes(&bytes).unwrap();
    let FabricsCommand::Connect(connect) = FabricsCommand::parse(&sqe).unwrap() else {
        panic!("{sqe:?} is a Connect");
    };
    let expected = Connect {
        qid: 3,
        sqsize: 127,
        attributes: ConnectAttributes::DISABLE_SQ_FLOW_CONTROL,
        priority_class: 0,
        kato_ms: 14744,
    };
    assert_eq!(connect, expected);
    assert_eq!(connect.queue_entries(), 128);
    assert!(!connect.sq_flow_control() && !connect.is_admin());
    assert_eq!(
        sqe.sgl(),
        Ok(Sgl::InCapsule {
            offset: 0,
            length: 1024
        })
    );
    assert_eq!(connect.to_sqe(5, sqe.sgl().unwrap()).as_bytes(), bytes);
}

/// Invalid fabrics commands, each with its status.
#[test]
fn refusals() {
    let connect = |change: fn(&mut Sqe)| {
        let mut sqe = new_sqe(fctype::CONNECT, 1);
        change(&mut sqe);
        let error = FabricsCommand::parse(&sqe).unwrap_err();
        (error, error.status())
    };
    assert_eq!(
        connect(|sqe| sqe.cdw10 = U32::new(7)),
        (
            FabricsError::RecordFormat { recfmt: 7 },
            StatusCode::CONNECT_INCOMPATIBLE_FORMAT
        )
    );
    assert_eq!(
        connect(|sqe| sqe.set_psdt(crate::sqe::Psdt::Prp)),
        (FabricsError::PrpUsed, StatusCode::INVALID_FIELD)
    );
    assert_eq!(
        connect(|sqe| sqe.set_fctype(0x20)),
        (
            FabricsError::CommandType { fctype: 0x20 },
            StatusCode::INVALID_OPCODE
        )
    );
    assert_eq!(
        connect(|sqe| {
            sqe.set_fctype(fctype::PROPERTY_GET);
            sqe.cdw10 = U32::new(2);
        }),
        (
            FabricsError::PropertySize { size: 2 },
            StatusCode::INVALID_FIELD
        )
    );
    assert_eq!(
        connect(|sqe| {
            sqe.set_fctype(fctype::DISCONNECT);
            sqe.cdw10 = U32::new(1);
        }),
        (
            FabricsError::RecordFormat { recfmt: 1 },
            StatusCode::CONNECT_INCOMPATIBLE_FORMAT
        )
    );
}

/// A Property Set of CC to 00460001h, and a Property Get of CAP.
#[test]
fn properties() {
    let bytes = hex!(
        "7f400100 00 000000 0000000000000000 0000000000000000 00000000000000000000000000000000"
        "00 000000 14000000 0100460000000000 0000000000000000"
    );
    let sqe = Sqe::read_from_bytes(&bytes).unwrap();
    let set = PropertySet {
        size: PropertySize::Four,
        offset: 0x14,
        value: 0x0046_0001,
    };
    assert_eq!(
        FabricsCommand::parse(&sqe),
        Ok(FabricsCommand::PropertySet(set))
    );
    assert_eq!(set.to_sqe(1).as_bytes(), bytes);

    let get = PropertyGet {
        size: PropertySize::Eight,
        offset: 0,
    };
    let sqe = get.to_sqe(2);
    assert_eq!(sqe.as_bytes()[40], 1);
    assert_eq!(
        FabricsCommand::parse(&sqe),
        Ok(FabricsCommand::PropertyGet(get))
    );
}

#[test]
fn connect_data_layout() {
    assert_eq!(offset_of!(ConnectData, hostid), 0);
    assert_eq!(offset_of!(ConnectData, cntlid), 16);
    assert_eq!(offset_of!(ConnectData, subnqn), 256);
    assert_eq!(offset_of!(ConnectData, hostnqn), 512);
    assert_eq!(offset_of!(ConnectData, reserved768), 768);

    let subnqn = Nqn::new("nqn.2025-01.io.nacre:s").unwrap();
    let hostnqn = Nqn::new("nqn.2025-01.io.nacre:h").unwrap();
    let data = ConnectData::new([7; 16], ConnectData::CNTLID_DYNAMIC, &subnqn, &hostnqn);
    assert_eq!(data.subsystem_nqn(), Ok(subnqn));
    assert_eq!(data.host_nqn(), Ok(hostnqn));
    assert_eq!(data.as_bytes()[16..18], [0xff, 0xff]);
    assert_eq!(data.as_bytes()[256..260], *b"nqn.");
    assert_eq!(ConnectData::new_zeroed().host_nqn(), Err(NqnError::Empty));
}

/// Dword 0 of the two answers to a Connect.
#[test]
fn responses() {
    let cqe = ConnectResponse {
        cntlid: 0x1234,
        auth: AuthRequirements::AUTHENTICATION,
    }
    .to_cqe(9);
    assert_eq!(
        cqe.as_bytes(),
        hex!("34120200 00000000 0000 0000 0900 0000")
    );
    assert_eq!(ConnectResponse::from_cqe(&cqe).cntlid, 0x1234);

    let cqe = InvalidParameter::SUBNQN.to_cqe(9);
    assert_eq!(
        cqe.as_bytes(),
        hex!("00010100 00000000 0000 0000 0900 0483")
    );
    assert_eq!(
        InvalidParameter::from_dword0(cqe.dword0()),
        InvalidParameter::SUBNQN
    );
    assert_eq!(InvalidParameter::from_dword0(42), InvalidParameter::QID);
    assert_eq!(
        InvalidParameter::SUBNQN.to_string(),
        "subnqn (data offset 256)"
    );
    assert_eq!(
        InvalidParameter::SQSIZE.to_string(),
        "sqsize (command offset 44)"
    );
}

#[test]
fn authentication() {
    let auth = Authentication {
        secp: Authentication::SECP_NVME,
        spsp0: 1,
        spsp1: 2,
        length: 512,
    };
    let sqe = auth.to_send(4, Sgl::Transport { length: 512 });
    assert_eq!(sqe.as_bytes()[40..48], hex!("000102e9 00020000"));
    assert_eq!(
        FabricsCommand::parse(&sqe),
        Ok(FabricsCommand::AuthenticationSend(auth))
    );
    let sqe = auth.to_receive(4, Sgl::Transport { length: 512 });
    assert_eq!(
        FabricsCommand::parse(&sqe),
        Ok(FabricsCommand::AuthenticationReceive(auth))
    );
    assert_eq!(
        FabricsCommand::parse(&disconnect(4)),
        Ok(FabricsCommand::Disconnect)
    );
}

proptest! {
    #[test]
    fn connect_round_trip(
        qid in any::<u16>(), sqsize in any::<u16>(), cattr in any::<u8>(), kato_ms in any::<u32>(),
    ) {
        let connect = Connect {
            qid,
            sqsize,
            attributes: ConnectAttributes::from_bits_truncate(cattr),
            priority_class: cattr & 0b11,
            kato_ms,
        };
        prop_assert_eq!(Connect::parse(&connect.to_sqe(1, Sgl::Transport { length: 1024 })), Ok(connect));
    }

    #[test]
    fn property_round_trip(eight in any::<bool>(), offset in any::<u32>(), value in any::<u64>()) {
        let (size, value) = if eight { (PropertySize::Eight, value) } else { (PropertySize::Four, value & 0xffff_ffff) };
        let set = PropertySet { size, offset, value };
        prop_assert_eq!(PropertySet::parse(&set.to_sqe(1)), Ok(set));
    }

    /// Any entry parses or is refused; none panics.
    #[test]
    fn any_fabrics_command(mut bytes in any::<[u8; 64]>()) {
        bytes[0] = opcode::FABRICS;
        let sqe = Sqe::read_from_bytes(&bytes).unwrap();
        if let Err(error) = FabricsCommand::parse(&sqe) {
            prop_assert!(!error.status().is_success());
        }
    }
}
