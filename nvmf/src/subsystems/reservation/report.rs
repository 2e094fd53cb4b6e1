//! Builds the data of Reservation Report (Base 7.5).

use nacre_nvmf_wire::commands::reservation::{Registrant, RegistrantExtended, ReportHeader};
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U16, U32, U64};

use super::state::ReservationState;

/// A registrant is a host, whichever controllers it has.
const NO_CONTROLLER: U16 = U16::new(0xffff);

/// The whole data structure; a host gets the part that fits its buffer. `extended`: with
/// identifiers of 128 bits, as hosts over fabrics have; otherwise the low 64 bits.
pub(crate) fn report(state: &ReservationState, extended: bool) -> Vec<u8> {
    let header = ReportHeader {
        generation: U32::new(state.generation),
        rtype: state.held.map_or(0, |held| held.kind as u8),
        regctl: U16::new(state.registrants.len() as u16),
        reserved7: [0; 2],
        ptpls: state.ptpl.into(),
        reserved10: [0; 14],
    };
    let mut page = header.as_bytes().to_vec();
    if extended {
        page.resize(ReportHeader::EXTENDED_SIZE, 0);
    }
    for registrant in &state.registrants {
        let rcsts = u8::from(state.holds(&registrant.host));
        let rkey = U64::new(registrant.key);
        if extended {
            let entry = RegistrantExtended {
                cntlid: NO_CONTROLLER,
                rcsts,
                reserved3: [0; 5],
                rkey,
                hostid: registrant.host,
                reserved32: [0; 32],
            };
            page.extend(entry.as_bytes());
        } else {
            let (low, _) = registrant.host.split_at(8);
            let entry = Registrant {
                cntlid: NO_CONTROLLER,
                rcsts,
                reserved3: [0; 5],
                hostid: low.try_into().expect("half of 16 bytes"),
                rkey,
            };
            page.extend(entry.as_bytes());
        }
    }
    page
}
