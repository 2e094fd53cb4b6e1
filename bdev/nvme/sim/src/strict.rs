//! Checks each submission queue entry for reserved fields: the bits that a driver may set, by
//! command.

use nacre_nvmf_wire::opcode::{admin, io};
use nacre_nvmf_wire::{Fuse, Sqe};

/// Defined bits of dwords 10 to 15, and whether the command has a data pointer and a namespace.
struct Shape {
    dwords: [u32; 6],
    data: bool,
    namespace: bool,
}

const ALL: u32 = u32::MAX;

fn shape(is_admin: bool, opcode: u8) -> Option<Shape> {
    let of = |dwords, data, namespace| Shape {
        dwords,
        data,
        namespace,
    };
    Some(if is_admin {
        match opcode {
            admin::DELETE_IO_SQ | admin::DELETE_IO_CQ => of([0xffff, 0, 0, 0, 0, 0], false, false),
            admin::CREATE_IO_SQ => of([ALL, 0xffff_0007, 0xffff, 0, 0, 0], true, false),
            admin::CREATE_IO_CQ => of([ALL, 0xffff_0003, 0, 0, 0, 0], true, false),
            admin::IDENTIFY => of([0xffff_00ff, 0xff00_ffff, 0, 0, 0x7f, 0], true, true),
            admin::GET_LOG_PAGE => of([ALL, ALL, ALL, ALL, 0xff80_007f, 0], true, true),
            admin::ABORT => of([ALL, 0, 0, 0, 0, 0], false, false),
            admin::SET_FEATURES => of([0x8000_00ff, ALL, ALL, ALL, 0x7f, ALL], true, true),
            admin::GET_FEATURES => of([0x7ff, ALL, 0, 0, 0x7f, 0], true, true),
            admin::ASYNC_EVENT_REQUEST => of([0; 6], false, false),
            admin::DOORBELL_BUFFER_CONFIG => of([0; 6], true, false),
            _ => return None,
        }
    } else {
        match opcode {
            io::FLUSH => of([0; 6], false, true),
            io::READ => of([ALL, ALL, 0xfd00_ffff, 0xff, 0, 0], true, true),
            io::WRITE => of([ALL, ALL, 0xfdf0_ffff, 0xffff_00ff, 0, 0], true, true),
            io::COMPARE => of([ALL, ALL, 0xfd00_ffff, 0, 0, 0], true, true),
            io::VERIFY => of([ALL, ALL, 0xfd00_ffff, 0, 0, 0], false, true),
            io::WRITE_ZEROES => of([ALL, ALL, 0xff80_ffff, 0, 0, 0], false, true),
            io::DATASET_MANAGEMENT => of([0xff, 0x7, 0, 0, 0, 0], true, true),
            io::COPY => of([ALL, ALL, 0xfcf0_ffff, 0xffff_0000, 0, 0], true, true),
            _ => return None,
        }
    })
}

/// Describes the first reserved field that an entry sets; `None`: none. Of unknown opcodes, only
/// the fields of all commands are checked.
pub(crate) fn reserved(is_admin: bool, sqe: &Sqe) -> Option<String> {
    if sqe.flags & 0b11_1100 != 0 {
        return Some(format!("reserved flags {:#x}", sqe.flags));
    }
    if is_admin && sqe.flags != 0 {
        return Some("an admin command with SGLs, or fused".to_owned());
    }
    let fusable = matches!(
        (sqe.fuse(), sqe.opcode),
        (Fuse::Normal, _) | (Fuse::First, io::COMPARE) | (Fuse::Second, io::WRITE)
    );
    if !fusable {
        return Some("fused, which it cannot be".to_owned());
    }
    if sqe.cdw2.get() != 0 || sqe.cdw3.get() != 0 {
        return Some("dwords 2 and 3 are reserved".to_owned());
    }
    if sqe.mptr.get() != 0 {
        return Some("a metadata pointer without metadata".to_owned());
    }
    let Shape {
        dwords,
        data,
        namespace,
    } = shape(is_admin, sqe.opcode)?;
    let found = [
        sqe.cdw10, sqe.cdw11, sqe.cdw12, sqe.cdw13, sqe.cdw14, sqe.cdw15,
    ];
    for ((number, allowed), found) in (10..).zip(dwords).zip(found) {
        // ILBRT: the reference tag that goes with protection information.
        let tag = !is_admin && number == 14 && sqe.cdw12.get() & PRACT != 0;
        if found.get() & !allowed != 0 && !tag {
            return Some(format!("reserved bits of dword {number}: {found:#x}"));
        }
    }
    if !data && (sqe.dptr != [0; 16] || sqe.flags >> 6 != 0) {
        return Some("a data pointer without data".to_owned());
    }
    if !namespace && sqe.nsid() != 0 {
        return Some("a namespace where there is none".to_owned());
    }
    None
}

/// PRACT in dword 12: the controller inserts and strips protection information.
const PRACT: u32 = 1 << 29;

#[cfg(test)]
mod tests {
    use nacre_nvmf_wire::commands::admin::{Abort, queues};
    use nacre_nvmf_wire::commands::io::ReadWrite;
    use nacre_nvmf_wire::sqe::Psdt;

    use super::*;

    /// Goal: a valid entry passes; an entry with one reserved bit set does not.
    #[test]
    fn bits() {
        let read = ReadWrite::new(5, 8).to_sqe(io::READ, 1, 1);
        assert_eq!(reserved(false, &read), None);
        assert_eq!(reserved(true, &queues::delete_cq(1, 1)), None);
        type Spoil = fn(&mut Sqe);
        let spoilt: [Spoil; 7] = [
            |sqe| sqe.flags |= 4,
            |sqe| sqe.cdw2.set(1),
            |sqe| sqe.cdw3.set(1),
            |sqe| sqe.mptr.set(4096),
            |sqe| sqe.cdw12.set(1 << 16),
            |sqe| sqe.cdw15.set(1),
            |sqe| sqe.set_fuse(Fuse::First),
        ];
        for spoil in spoilt {
            let mut sqe = read;
            spoil(&mut sqe);
            assert!(reserved(false, &sqe).is_some(), "{sqe:?}");
        }
        let mut abort = Abort { sqid: 1, cid: 2 }.to_sqe(3);
        assert!(reserved(true, &abort).is_some(), "SGLs of an admin command");
        abort.set_psdt(Psdt::Prp);
        assert_eq!(reserved(true, &abort), None);
        abort.dptr[0] = 8;
        assert!(reserved(true, &abort).is_some());
    }
}
