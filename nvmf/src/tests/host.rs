//! The host of the tests: one function for each operation on an admin queue.

use nacre_nvmf_wire::commands::admin::{GetFeatures, GetLogPage, Identify, SetFeatures};
use nacre_nvmf_wire::fabrics::{DISCOVERY_NQN, PropertyGet, PropertySet, PropertySize};
use nacre_nvmf_wire::identify::{self, IdentifyController, IdentifyNamespace, cns};
use nacre_nvmf_wire::registers::{Cc, Csts, offset};
use nacre_nvmf_wire::{Cqe, Sgl, Sqe, StatusCode};
use zerocopy::{FromBytes, Immutable, KnownLayout};

use super::rig::*;
use crate::transport::ConnId;

pub(super) type Answer<T> = Result<T, StatusCode>;

impl Rig {
    /// Executes a command that reads `bytes`. Returns the data, or the status.
    pub(super) fn fetch(&mut self, conn: ConnId, sqe: Sqe, bytes: u32) -> Answer<Vec<u8>> {
        let response = self.call(conn, sqe.with_sgl(Sgl::Transport { length: bytes }), &[]);
        let status = response.cqe.status();
        let data: Vec<u8> = response.data.iter().flat_map(|p| p.to_vec()).collect();
        if status.is_success() {
            assert_eq!(data.len(), bytes as usize, "exactly what was asked for");
            return Ok(data);
        }
        assert!(data.is_empty(), "no data with a failure");
        Err(status)
    }

    pub(super) fn identify_bytes(
        &mut self,
        conn: ConnId,
        what: Identify,
        nsid: u32,
    ) -> Answer<Vec<u8>> {
        let cid = self.cid();
        self.fetch(conn, what.to_sqe(cid, nsid), identify::SIZE as u32)
    }

    pub(super) fn identify<T: FromBytes + KnownLayout + Immutable>(
        &mut self,
        conn: ConnId,
        cns: u8,
        nsid: u32,
    ) -> Answer<T> {
        let bytes = self.identify_bytes(conn, Identify::new(cns), nsid)?;
        Ok(T::read_from_bytes(&bytes).expect("4096 bytes"))
    }

    pub(super) fn identify_controller(&mut self, conn: ConnId) -> IdentifyController {
        self.identify(conn, cns::CONTROLLER, 0).unwrap()
    }

    pub(super) fn identify_namespace(&mut self, conn: ConnId, nsid: u32) -> IdentifyNamespace {
        self.identify(conn, cns::NAMESPACE, nsid).unwrap()
    }

    pub(super) fn log_page(&mut self, conn: ConnId, page: GetLogPage) -> Answer<Vec<u8>> {
        let cid = self.cid();
        let bytes = page.bytes() as u32;
        self.fetch(conn, page.to_sqe(cid, identify::nsid::BROADCAST), bytes)
    }

    pub(super) fn log(&mut self, conn: ConnId, lid: u8, bytes: u32) -> Vec<u8> {
        self.log_page(conn, GetLogPage::new(lid, bytes, 0)).unwrap()
    }

    pub(super) fn feature(&mut self, conn: ConnId, get: GetFeatures) -> Answer<u32> {
        let cid = self.cid();
        answer(&self.call(conn, get.to_sqe(cid, 0), &[]).cqe)
    }

    pub(super) fn set_feature(&mut self, conn: ConnId, fid: u8, dword: u32) -> Answer<u32> {
        let cid = self.cid();
        let sqe = SetFeatures::new(fid, dword).to_sqe(cid, 0);
        answer(&self.call(conn, sqe, &[]).cqe)
    }

    pub(super) fn property(
        &mut self,
        conn: ConnId,
        offset: u32,
        size: PropertySize,
    ) -> Answer<u64> {
        let cid = self.cid();
        let cqe = self
            .call(conn, PropertyGet { size, offset }.to_sqe(cid), &[])
            .cqe;
        answer(&cqe).map(|_| cqe.result())
    }

    pub(super) fn csts(&mut self, conn: ConnId) -> Csts {
        let value = self.property(conn, offset::CSTS, PropertySize::Four);
        Csts(value.unwrap() as u32)
    }

    pub(super) fn write_cc(&mut self, conn: ConnId, cc: Cc) -> Answer<u32> {
        let cid = self.cid();
        let set = PropertySet {
            size: PropertySize::Four,
            offset: offset::CC,
            value: u64::from(cc.0),
        };
        answer(&self.call(conn, set.to_sqe(cid), &[]).cqe)
    }

    /// An enabled controller of the discovery subsystem.
    pub(super) fn discovery(&mut self, host: &str) -> ConnId {
        let (conn, cqe) = self.connect_as(host, DISCOVERY_NQN, 0, 0xffff, 32);
        assert!(cqe.status().is_success(), "{}", cqe.status());
        self.enable(conn);
        conn
    }
}

fn answer(cqe: &Cqe) -> Answer<u32> {
    if cqe.status().is_success() {
        Ok(cqe.dword0())
    } else {
        Err(cqe.status())
    }
}

pub(super) const INVALID: StatusCode = StatusCode::INVALID_FIELD.with_dnr();
