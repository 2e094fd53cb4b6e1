//! Tests of the I/O commands: their bytes, and both directions of the conversion.

use core::mem::offset_of;

use hex_literal::hex;
use proptest::prelude::*;

use super::*;
use crate::sqe::Sgl;

#[test]
fn layout() {
    assert_eq!(offset_of!(DsmRange, cattr), 0);
    assert_eq!(offset_of!(DsmRange, nlb), 4);
    assert_eq!(offset_of!(DsmRange, slba), 8);
    assert_eq!(offset_of!(CopyRange0, slba), 8);
    assert_eq!(offset_of!(CopyRange0, nlb), 16);
    assert_eq!(offset_of!(CopyRange0, elbt), 24);
    assert_eq!(offset_of!(CopyRange0, elbat), 28);
    assert_eq!(offset_of!(CopyRange0, elbatm), 30);
    assert_eq!(offset_of!(CopyRange1, slba), 8);
    assert_eq!(offset_of!(CopyRange1, nlb), 16);
    assert_eq!(offset_of!(CopyRange1, elbt), 26);
    assert_eq!(offset_of!(CopyRange1, elbat), 36);
    assert_eq!(offset_of!(CopyRange1, elbatm), 38);
}

/// Whole entries, byte for byte: a FUA write, a discard, zeroes to deallocate, a copy.
#[test]
fn entries() {
    let write = ReadWrite {
        fua: true,
        ..ReadWrite::new(0x1_0000_0000, 256)
    };
    let sqe = write
        .to_sqe(io::WRITE, 3, 1)
        .with_sgl(Sgl::Transport { length: 131_072 });
    assert_eq!(
        sqe.as_bytes(),
        hex!(
            "01400300 01000000 00000000 00000000 0000000000000000"
            "0000000000000000 00000200 0000005a"
            "00000000 01000000 ff000040 00000000 00000000 00000000"
        )
    );
    assert_eq!(IoCommand::parse(&sqe), Ok(IoCommand::Write(write)));

    let dsm = DatasetManagement {
        ranges: 2,
        deallocate: true,
        ..Default::default()
    };
    let sqe = dsm.to_sqe(3, 1);
    assert_eq!(sqe.as_bytes()[40..48], hex!("01000000 04000000"));
    assert_eq!(
        IoCommand::parse(&sqe),
        Ok(IoCommand::DatasetManagement(dsm))
    );
    assert_eq!(dsm.data_bytes(), 32);

    let zeroes = WriteZeroes {
        slba: 5,
        blocks: 1 << 16,
        deallocate: true,
        ..Default::default()
    };
    let sqe = zeroes.to_sqe(3, 1);
    assert_eq!(sqe.as_bytes()[40..52], hex!("05000000 00000000 ffff0002"));
    assert_eq!(IoCommand::parse(&sqe), Ok(IoCommand::WriteZeroes(zeroes)));

    let bad = WriteUncorrectable { slba: 9, blocks: 3 };
    assert_eq!(
        IoCommand::parse(&bad.to_sqe(3, 1)),
        Ok(IoCommand::WriteUncorrectable(bad))
    );
}

#[test]
fn ranges() {
    let list = [DsmRange::new(100, 8), DsmRange::new(1 << 40, 0)];
    let mut data = list.as_bytes().to_vec();
    data.push(0xff);
    assert_eq!(DsmRange::list(&data), list);
    assert_eq!(DsmRange::list(&data[..15]), []);

    let copy = CopyCommand {
        sdlba: 1000,
        ranges: 2,
        format: CopyFormat::Format0,
        fua: false,
        lr: false,
        read_protection: 0,
        protection: Protection::default(),
        directive: Directive::default(),
    };
    let list = [CopyRange0::new(7, 1), CopyRange0::new(1 << 33, 1 << 16)];
    let sources: Vec<_> = copy.sources(list.as_bytes()).collect();
    assert_eq!(sources, [(7, 1), (1 << 33, 1 << 16)]);
    assert_eq!(
        copy.sources(&list.as_bytes()[..63]).len(),
        1,
        "a torn descriptor is left out"
    );

    let mut wide = [0u8; 80];
    wide[8] = 7;
    wide[40 + 8] = 9;
    wide[40 + 16] = 4;
    let copy = CopyCommand {
        format: CopyFormat::Format1,
        ..copy
    };
    assert_eq!(copy.sources(&wide).collect::<Vec<_>>(), [(7, 1), (9, 5)]);

    let mut sqe = copy.to_sqe(1, 1);
    assert_eq!(IoCommand::parse(&sqe), Ok(IoCommand::Copy(copy)));
    sqe.cdw12 = U32::new(2 << 8);
    assert_eq!(
        CopyCommand::parse(&sqe),
        Err(CommandError::CopyFormat { format: 2 })
    );
}

fn any_protection() -> impl Strategy<Value = Protection> {
    (
        any::<bool>(),
        0u8..8,
        any::<bool>(),
        any::<u32>(),
        any::<u16>(),
        any::<u16>(),
    )
        .prop_map(
            |(action, check, storage_tag, reference_tag, application_tag, mask)| Protection {
                action,
                check,
                storage_tag,
                reference_tag,
                application_tag,
                application_tag_mask: mask,
            },
        )
}

proptest! {
    #[test]
    fn round_trips(
        slba in any::<u64>(), blocks in 1u32..=1 << 16, ranges in 1u16..=256,
        flags in any::<[bool; 4]>(), protection in any_protection(),
        (dsm, dtype, dspec) in (any::<u8>(), 0u8..16, any::<u16>()),
    ) {
        let [fua, lr, third, fourth] = flags;
        let directive = Directive { dtype, dspec };
        let rw = ReadWrite { slba, blocks, fua, lr, protection, dsm, directive };
        prop_assert_eq!(ReadWrite::parse(&rw.to_sqe(io::READ, 1, 1)), rw);
        let zeroes = WriteZeroes {
            slba, blocks, deallocate: third, namespace_zeroes: fourth, fua, lr, protection,
        };
        prop_assert_eq!(WriteZeroes::parse(&zeroes.to_sqe(1, 1)), zeroes);
        let dsm = DatasetManagement {
            ranges, deallocate: fua, integral_write: lr, integral_read: third,
        };
        prop_assert_eq!(DatasetManagement::parse(&dsm.to_sqe(1, 1)), dsm);
        let format = if third { CopyFormat::Format1 } else { CopyFormat::Format0 };
        let copy = CopyCommand {
            sdlba: slba, ranges, format, fua, lr, read_protection: dtype, protection, directive,
        };
        prop_assert_eq!(CopyCommand::parse(&copy.to_sqe(1, 1)), Ok(copy));
    }

    /// Any entry is understood or refused, and its data can be looked at.
    #[test]
    fn any_entry(
        bytes in any::<[u8; 64]>(),
        opcode in proptest::option::of(proptest::sample::select(io::ALL)),
        data in proptest::collection::vec(any::<u8>(), 0..300),
    ) {
        let mut sqe = Sqe::read_from_bytes(&bytes).unwrap();
        sqe.opcode = opcode.unwrap_or(sqe.opcode);
        match IoCommand::parse(&sqe) {
            Ok(IoCommand::Copy(copy)) => {
                prop_assert!(copy.sources(&data).count() <= usize::from(copy.ranges));
            }
            Ok(_) => {}
            Err(error) => prop_assert!(!error.status().is_success()),
        }
    }
}
