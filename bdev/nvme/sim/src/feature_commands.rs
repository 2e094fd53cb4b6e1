//! Set Features, Get Features and the firmware commands of the simulated controller (Base 5.27,
//! 5.15, 5.12, 5.13).

use nacre_nvmf_wire::StatusCode;
use nacre_nvmf_wire::commands::admin::{
    FirmwareCommit, FirmwareImageDownload, GetFeatures, Select, SetFeatures,
};
use nacre_nvmf_wire::features::{AsyncEvents, Capabilities, HostBehavior, NumberOfQueues, fid};
use nacre_nvmf_wire::opcode::admin;
use nacre_nvmf_wire::{Sqe, zerocopy::IntoBytes};

use crate::admin::Answer;
use crate::executor::Executor;
use crate::features::Features;
use crate::state::State;

const INVALID: Answer = (StatusCode::INVALID_FIELD.with_dnr(), 0);

impl Executor {
    /// Firmware Image Download, Firmware Commit.
    pub(crate) fn update_firmware(&mut self, sqe: &Sqe) -> StatusCode {
        let Some(unit) = self.config.limits.firmware_updates else {
            return StatusCode::INVALID_OPCODE.with_dnr();
        };
        if sqe.opcode == admin::FIRMWARE_COMMIT {
            return self.firmware.commit(FirmwareCommit::parse(sqe));
        }
        let piece = FirmwareImageDownload::parse(sqe);
        let bytes = match self.firmware.check(piece, unit) {
            Ok(bytes) => bytes,
            Err(status) => return status,
        };
        let mut data = vec![0; bytes];
        if let Err(status) = self.take_data(sqe, &mut data) {
            return status;
        }
        self.firmware.add(&data);
        StatusCode::SUCCESS
    }

    pub(crate) fn set_features(&mut self, sqe: &Sqe) -> Answer {
        let set = SetFeatures::parse(sqe);
        if set.save {
            return (StatusCode::FEATURE_NOT_SAVEABLE.with_dnr(), 0);
        }
        let value = set.cdw11;
        let features = &mut self.features;
        match set.fid {
            fid::ARBITRATION => features.arbitration = value,
            fid::POWER_MANAGEMENT => features.power = value,
            fid::TEMPERATURE_THRESHOLD => features.temperature = value,
            fid::ERROR_RECOVERY => features.error_recovery = value,
            fid::INTERRUPT_COALESCING => features.coalescing = value,
            fid::WRITE_ATOMICITY => features.atomicity = value,
            fid::VOLATILE_WRITE_CACHE if self.config.volatile_cache => {
                features.cache = value & 1 != 0;
                if !features.cache {
                    self.namespaces.values_mut().for_each(|ns| ns.flush());
                }
            }
            fid::INTERRUPT_VECTOR_CONFIGURATION => {
                let vector = value as usize & 0xffff;
                if vector >= usize::from(self.config.vectors) {
                    return INVALID;
                }
                let most = features.vectors.len().max(vector + 1);
                features.vectors.resize(most, 0);
                features.vectors[vector] = value;
            }
            fid::ASYNC_EVENT_CONFIGURATION => {
                features.async_events = AsyncEvents::from_bits_retain(value);
            }
            fid::TIMESTAMP | fid::HOST_BEHAVIOR_SUPPORT => {
                let behavior = set.fid == fid::HOST_BEHAVIOR_SUPPORT;
                let mut bytes = [0; HostBehavior::SIZE];
                let len = if behavior { HostBehavior::SIZE } else { 8 };
                if let Err(status) = self.take_data(sqe, &mut bytes[..len]) {
                    return (status, 0);
                }
                if behavior {
                    let place = self.features.host_behavior.as_mut_bytes();
                    place.copy_from_slice(&bytes);
                } else {
                    self.features.timestamp.copy_from_slice(&bytes[..8]);
                }
            }
            _ => return INVALID,
        }
        (StatusCode::SUCCESS, 0)
    }

    pub(crate) fn get_features(&mut self, sqe: &Sqe) -> Answer {
        let get = match GetFeatures::parse(sqe) {
            Ok(get) => get,
            Err(error) => return (error.status(), 0),
        };
        if get.select == Select::SupportedCapabilities {
            return (StatusCode::SUCCESS, Capabilities::CHANGEABLE.bits());
        }
        let fresh = Features::new(self.config.volatile_cache);
        let features = match get.select {
            Select::Current => &self.features,
            _ => &fresh,
        };
        let queues = |queues: Option<NumberOfQueues>| queues.map_or(0, NumberOfQueues::dword);
        let value = match get.fid {
            fid::ARBITRATION => features.arbitration,
            fid::POWER_MANAGEMENT => features.power,
            fid::TEMPERATURE_THRESHOLD => features.temperature,
            fid::ERROR_RECOVERY => features.error_recovery,
            fid::INTERRUPT_COALESCING => features.coalescing,
            fid::WRITE_ATOMICITY => features.atomicity,
            fid::VOLATILE_WRITE_CACHE if self.config.volatile_cache => features.cache.into(),
            fid::NUMBER_OF_QUEUES => queues(features.queues),
            fid::INTERRUPT_VECTOR_CONFIGURATION => {
                let vector = get.cdw11 as usize & 0xffff;
                if vector >= usize::from(self.config.vectors) {
                    return INVALID;
                }
                let set = features.vectors.get(vector).copied();
                set.unwrap_or(vector as u32)
            }
            fid::ASYNC_EVENT_CONFIGURATION => features.async_events.bits(),
            fid::TIMESTAMP => {
                let bytes = features.timestamp;
                return (self.give_data(sqe, &bytes), 0);
            }
            fid::HOST_BEHAVIOR_SUPPORT => {
                let behavior = features.host_behavior;
                return (self.give_data(sqe, behavior.as_bytes()), 0);
            }
            _ => return INVALID,
        };
        (StatusCode::SUCCESS, value)
    }
}

impl State {
    pub(crate) fn set_features(&mut self, sqe: &Sqe) -> Answer {
        let set = SetFeatures::parse(sqe);
        if set.fid == fid::NUMBER_OF_QUEUES && !set.save {
            return self.grant_queues(set.cdw11);
        }
        self.exec.set_features(sqe)
    }

    fn grant_queues(&mut self, value: u32) -> Answer {
        let Some(requested) = NumberOfQueues::from_dword(value) else {
            return INVALID;
        };
        let exist = |queues: usize| queues > 1;
        let created = self.sqs.iter().flatten().count() + self.cqs.iter().flatten().count();
        if exist(created.saturating_sub(1)) {
            self.exec
                .violations
                .note("the number of queues was set though there are queues");
            return (StatusCode::COMMAND_SEQUENCE_ERROR.with_dnr(), 0);
        }
        let has = self.faults.grant.unwrap_or(self.exec.config.io_queues);
        let most = u32::from(has.min(self.exec.config.io_queues));
        let granted = NumberOfQueues {
            submission: requested.submission.min(most),
            completion: requested.completion.min(most),
        };
        self.exec.features.queues = Some(granted);
        (StatusCode::SUCCESS, granted.dword())
    }
}
