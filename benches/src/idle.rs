//! Idle hosts: connections that complete the handshake and then send no command.
//!
//! The caller measures the cost per connection (CPU time and memory of the target) from outside.
//! This module encodes its PDUs by hand from the specification, so it also shows that the target
//! accepts an independent host.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

const PATIENCE: Duration = Duration::from_secs(20);

/// Bytes of an ICReq or ICResp PDU (NVMe/TCP 3.6.2).
const IC_LENGTH: usize = 128;
/// Bytes of a command capsule PDU without data.
const CAPSULE_LENGTH: usize = 72;
/// Bytes of a response capsule PDU.
const RESPONSE_LENGTH: usize = 24;
/// Bytes of the data of Connect.
const CONNECT_DATA_LENGTH: usize = 1024;

const PDU_IC_REQ: u8 = 0x00;
const PDU_IC_RESP: u8 = 0x01;
const PDU_COMMAND: u8 = 0x04;
const PDU_RESPONSE: u8 = 0x05;
const OPCODE_FABRICS: u8 = 0x7f;
const FCTYPE_CONNECT: u8 = 0x01;
/// SGLs are used for the transfer (PSDT 01b).
const PSDT_SGL: u8 = 0x40;
/// A data block whose address is an offset into the capsule.
const SGL_IN_CAPSULE: u8 = 0x01;
const DYNAMIC_CONTROLLER: u16 = 0xffff;

/// Connects the admin queue of a new controller of subsystem `nqn`, without a keep-alive timer. The
/// host NQN ends with the number `host`. Fails if the target refuses, or is silent for 20 s.
pub fn connect(address: SocketAddr, nqn: &str, host: u32) -> Result<TcpStream> {
    let mut stream = TcpStream::connect_timeout(&address, PATIENCE).context("connecting")?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PATIENCE))?;

    stream.write_all(&ic_req()).context("sending ICReq")?;
    let mut answer = [0; IC_LENGTH];
    stream
        .read_exact(&mut answer)
        .context("waiting for ICResp")?;
    ensure!(
        answer[0] == PDU_IC_RESP,
        "PDU type {:#04x} in answer to ICReq",
        answer[0]
    );

    stream
        .write_all(&fabrics_connect(nqn, host)?)
        .context("sending Connect")?;
    let mut answer = [0; RESPONSE_LENGTH];
    stream
        .read_exact(&mut answer)
        .context("waiting for the answer to Connect")?;
    ensure!(
        answer[0] == PDU_RESPONSE,
        "PDU type {:#04x} in answer to Connect",
        answer[0]
    );
    let status = u16::from_le_bytes([answer[22], answer[23]]) >> 1;
    ensure!(status == 0, "Connect was refused with status {status:#06x}");
    Ok(stream)
}

fn header(kind: u8, header_length: usize, data_offset: usize, length: usize) -> [u8; 8] {
    let mut header = [kind, 0, header_length as u8, data_offset as u8, 0, 0, 0, 0];
    header[4..].copy_from_slice(&(length as u32).to_le_bytes());
    header
}

fn ic_req() -> [u8; IC_LENGTH] {
    let mut pdu = [0; IC_LENGTH];
    pdu[..8].copy_from_slice(&header(PDU_IC_REQ, IC_LENGTH, 0, IC_LENGTH));
    pdu
}

/// The Connect command of an admin queue, with its data in the capsule (NVMe over Fabrics 3.3).
fn fabrics_connect(nqn: &str, host: u32) -> Result<Vec<u8>> {
    let length = CAPSULE_LENGTH + CONNECT_DATA_LENGTH;
    let mut pdu = vec![0; length];
    pdu[..8].copy_from_slice(&header(PDU_COMMAND, CAPSULE_LENGTH, CAPSULE_LENGTH, length));
    let entry = &mut pdu[8..CAPSULE_LENGTH];
    entry[0] = OPCODE_FABRICS;
    entry[1] = PSDT_SGL;
    entry[4] = FCTYPE_CONNECT;
    entry[32..36].copy_from_slice(&(CONNECT_DATA_LENGTH as u32).to_le_bytes());
    entry[39] = SGL_IN_CAPSULE;
    // SQSIZE, zero-based; queue id, record format and keep-alive time stay 0.
    entry[44..46].copy_from_slice(&31u16.to_le_bytes());

    let data = &mut pdu[CAPSULE_LENGTH..];
    data[..4].copy_from_slice(&(host + 1).to_le_bytes());
    data[16..18].copy_from_slice(&DYNAMIC_CONTROLLER.to_le_bytes());
    put_text(&mut data[256..512], nqn)?;
    put_text(
        &mut data[512..768],
        &format!("nqn.2026-01.io.nacre:idle-host-{host}"),
    )?;
    Ok(pdu)
}

/// Writes a zero-terminated text field.
fn put_text(field: &mut [u8], text: &str) -> Result<()> {
    ensure!(text.len() < field.len(), "{text:?} is too long for a name");
    field[..text.len()].copy_from_slice(text.as_bytes());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_connect_capsule_has_its_fields_where_the_specification_puts_them() {
        let pdu = fabrics_connect("nqn.x", 6).unwrap();
        assert_eq!(pdu[..8], [0x04, 0, 72, 72, 0x48, 0x04, 0, 0]);
        assert_eq!((pdu[8], pdu[9], pdu[12]), (0x7f, 0x40, 0x01));
        assert_eq!(pdu[8 + 32..8 + 40], [0, 4, 0, 0, 0, 0, 0, 0x01]);
        assert_eq!(pdu[8 + 44..8 + 46], [31, 0]);
        assert_eq!(pdu[72], 7);
        assert_eq!(pdu[72 + 16..72 + 18], [0xff, 0xff]);
        assert_eq!(pdu[72 + 256..72 + 262], *b"nqn.x\0");
        assert_eq!(pdu.len(), 1096);
    }

    #[test]
    fn a_name_without_room_for_its_terminator_is_refused() {
        assert!(fabrics_connect(&"n".repeat(256), 0).is_err());
        assert!(fabrics_connect(&"n".repeat(255), 0).is_ok());
    }
}
