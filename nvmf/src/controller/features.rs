//! Get Features and Set Features (Base 5.15, 5.27) of a controller.
//!
//! No feature is saveable: saved values equal the defaults, and the SV bit is refused. The table
//! [`known`] lists the features, also for the Feature Identifiers Supported and Effects log.

use std::sync::Arc;

use nacre_nvmf_wire::commands::admin::{GetFeatures, Select, SetFeatures};
use nacre_nvmf_wire::features::{
    Capabilities, ErrorRecovery, HOST_IDENTIFIER_EXTENDED, HOST_IDENTIFIER_EXTENDED_BYTES,
    HostBehavior, NumberOfQueues, PowerManagement, RESERVATION_PERSISTENCE_PTPL, ReservationMask,
    TemperatureThreshold, VOLATILE_WRITE_CACHE_ENABLE, WRITE_ATOMICITY_DISABLE_NORMAL, fid,
};
use nacre_nvmf_wire::identify::nsid;
use nacre_nvmf_wire::{Sqe, StatusCode};
use nacre_reactor::Nanos;
use zerocopy::{FromBytes, IntoBytes};

use super::Controller;
use super::identify::WARNING_TEMPERATURE_KELVIN;
use crate::subsystems::namespace::Namespace;
use crate::subsystems::reservation::Several;
use crate::subsystems::subsystem_config::SubsystemKind;

const INVALID: StatusCode = StatusCode::INVALID_FIELD.with_dnr();
const INVALID_NAMESPACE: StatusCode = StatusCode::INVALID_NAMESPACE_OR_FORMAT.with_dnr();

/// The current values of features that no other object stores.
#[derive(Debug, Clone)]
pub(crate) struct Features {
    arbitration: u32,
    workload_hint: u8,
    over_temperature: u16,
    under_temperature: u16,
    error_time_limit: u16,
    write_atomicity: u32,
    /// The host honours retry delays (Host Behavior Support, ACRE).
    retry_delays: bool,
}

impl Default for Features {
    fn default() -> Self {
        Self {
            arbitration: 0,
            workload_hint: 0,
            over_temperature: WARNING_TEMPERATURE_KELVIN,
            under_temperature: 0,
            error_time_limit: 0,
            write_atomicity: 0,
            retry_delays: false,
        }
    }
}

/// The features of a kind of controller, and whether a host can change them.
pub(super) fn known(kind: SubsystemKind) -> &'static [(u8, bool)] {
    match kind {
        SubsystemKind::Nvm => &[
            (fid::ARBITRATION, true),
            (fid::POWER_MANAGEMENT, true),
            (fid::TEMPERATURE_THRESHOLD, true),
            (fid::ERROR_RECOVERY, true),
            (fid::VOLATILE_WRITE_CACHE, false),
            (fid::NUMBER_OF_QUEUES, true),
            // Fabrics have no interrupts, but some hosts read these two on every transport.
            (fid::INTERRUPT_COALESCING, false),
            (fid::INTERRUPT_VECTOR_CONFIGURATION, false),
            (fid::WRITE_ATOMICITY, true),
            (fid::ASYNC_EVENT_CONFIGURATION, true),
            (fid::KEEP_ALIVE_TIMER, true),
            (fid::HOST_BEHAVIOR_SUPPORT, true),
            (fid::IO_COMMAND_SET_PROFILE, true),
            (fid::HOST_IDENTIFIER, false),
            (fid::RESERVATION_NOTIFICATION_MASK, true),
            (fid::RESERVATION_PERSISTENCE, true),
        ],
        SubsystemKind::Discovery => &[
            (fid::ASYNC_EVENT_CONFIGURATION, true),
            (fid::KEEP_ALIVE_TIMER, true),
            (fid::HOST_IDENTIFIER, false),
        ],
    }
}

/// True if the feature has a separate value for each namespace.
pub(super) const fn is_namespace_specific(fid: u8) -> bool {
    matches!(
        fid,
        fid::RESERVATION_NOTIFICATION_MASK | fid::RESERVATION_PERSISTENCE
    )
}

/// Bytes of data that a Get Features command returns.
pub(super) fn data_bytes_of_get(sqe: &Sqe) -> Result<u32, StatusCode> {
    let command = GetFeatures::parse(sqe).map_err(|error| error.status().with_dnr())?;
    if command.select == Select::SupportedCapabilities {
        return Ok(0);
    }
    match command.fid {
        fid::HOST_BEHAVIOR_SUPPORT => Ok(HostBehavior::SIZE as u32),
        // Fabrics hosts have 128-bit identifiers and must set EXHID (Base 5.27.1.19).
        fid::HOST_IDENTIFIER if command.cdw11 & HOST_IDENTIFIER_EXTENDED == 0 => Err(INVALID),
        fid::HOST_IDENTIFIER => Ok(HOST_IDENTIFIER_EXTENDED_BYTES as u32),
        _ => Ok(0),
    }
}

impl Controller {
    fn feature(&self, fid: u8) -> Result<bool, StatusCode> {
        let (_, changeable) = known(self.subsystem.kind)
            .iter()
            .find(|(known, _)| *known == fid)
            .ok_or(INVALID)?;
        Ok(*changeable)
    }

    /// Executes Get Features. Returns completion dword 0.
    pub(super) fn get_features(&self, sqe: &Sqe, data: &mut [u8]) -> Result<u32, StatusCode> {
        let command = GetFeatures::parse(sqe).map_err(|error| error.status().with_dnr())?;
        let changeable = self.feature(command.fid)?;
        match command.select {
            Select::SupportedCapabilities => {
                let mut capabilities = Capabilities::empty();
                capabilities.set(Capabilities::CHANGEABLE, changeable);
                let specific = is_namespace_specific(command.fid);
                capabilities.set(Capabilities::NAMESPACE_SPECIFIC, specific);
                Ok(capabilities.bits())
            }
            _ if is_namespace_specific(command.fid) => {
                self.reservation_feature(command.fid, command.select, sqe.nsid())
            }
            Select::Current => self.value(&command, &self.features, data),
            Select::Default | Select::Saved => self.default_value(&command, data),
        }
    }

    /// The value of a reservation feature; the default is 0 (no mask, no persistence).
    fn reservation_feature(&self, fid: u8, select: Select, nsid: u32) -> Result<u32, StatusCode> {
        let view = self.association.view();
        let namespace = view.get(nsid).ok_or(INVALID_NAMESPACE)?;
        Ok(match (select, fid) {
            (Select::Default | Select::Saved, _) => 0,
            (_, fid::RESERVATION_NOTIFICATION_MASK) => {
                self.association.reservations().mask(nsid).bits()
            }
            // An empty state would be wrong while another machine has the real one.
            _ => match namespace.reservation.state() {
                Some(state) if state.ptpl => RESERVATION_PERSISTENCE_PTPL,
                Some(_) => 0,
                None => return Err(StatusCode::ANA_TRANSITION),
            },
        })
    }

    /// The namespaces that a Set Features of a namespace-specific feature applies to.
    fn namespaces_for(&self, sqe: &Sqe) -> Result<Several, StatusCode> {
        let view = self.association.view();
        let entry = |n: &Arc<Namespace>| (n.nsid, Arc::clone(&n.reservation));
        match sqe.nsid() {
            nsid::BROADCAST => Ok(view.iter().map(entry).collect()),
            nsid => Ok(vec![view.get(nsid).map(entry).ok_or(INVALID_NAMESPACE)?]),
        }
    }

    fn set_reservation_mask(&self, sqe: &Sqe, dword: u32) -> Result<u32, StatusCode> {
        let mask = ReservationMask::from_bits(dword).ok_or(INVALID)?;
        for (nsid, _) in self.namespaces_for(sqe)? {
            self.association.reservations().set_mask(nsid, mask);
        }
        Ok(0)
    }

    /// Reservation Persistence: the new value and its namespaces. NSID FFFFFFFFh skips namespaces
    /// that do not support persistence.
    pub(super) fn set_reservation_persistence(
        &self,
        sqe: &Sqe,
    ) -> Result<(bool, Several), StatusCode> {
        let command = SetFeatures::parse(sqe);
        self.feature(command.fid)?;
        if command.save {
            return Err(StatusCode::FEATURE_NOT_SAVEABLE.with_dnr());
        }
        let on = match command.cdw11 {
            0 => false,
            RESERVATION_PERSISTENCE_PTPL => true,
            _ => return Err(INVALID),
        };
        let mut namespaces = self.namespaces_for(sqe)?;
        if sqe.nsid() == nsid::BROADCAST {
            namespaces.retain(|(_, reservation)| reservation.can_persist());
        }
        Ok((on, namespaces))
    }

    fn value(
        &self,
        command: &GetFeatures,
        features: &Features,
        data: &mut [u8],
    ) -> Result<u32, StatusCode> {
        Ok(match command.fid {
            fid::ARBITRATION => features.arbitration,
            fid::POWER_MANAGEMENT => PowerManagement {
                power_state: 0,
                workload_hint: features.workload_hint,
            }
            .dword(),
            fid::TEMPERATURE_THRESHOLD => {
                let threshold = temperature_threshold(command.cdw11)?;
                if threshold.sensor != 0 {
                    return Err(INVALID);
                }
                u32::from(if threshold.under {
                    features.under_temperature
                } else {
                    features.over_temperature
                })
            }
            fid::ERROR_RECOVERY => ErrorRecovery {
                time_limit: features.error_time_limit,
                deallocated_error: false,
            }
            .dword(),
            fid::VOLATILE_WRITE_CACHE => VOLATILE_WRITE_CACHE_ENABLE,
            fid::NUMBER_OF_QUEUES => {
                let granted = self.io_queues().min(self.association.io_queues());
                queues(granted)
            }
            fid::INTERRUPT_COALESCING | fid::INTERRUPT_VECTOR_CONFIGURATION => 0,
            fid::WRITE_ATOMICITY => features.write_atomicity,
            fid::ASYNC_EVENT_CONFIGURATION => self.events.configuration().bits(),
            fid::KEEP_ALIVE_TIMER => self.keep_alive_ms(),
            fid::HOST_BEHAVIOR_SUPPORT => {
                let mut behavior = HostBehavior::zeroed();
                behavior.acre = u8::from(features.retry_delays);
                super::identify::put(&behavior, data);
                0
            }
            fid::IO_COMMAND_SET_PROFILE => 0,
            fid::HOST_IDENTIFIER => {
                super::identify::put(&self.association.hostid, data);
                0
            }
            _ => return Err(INVALID),
        })
    }

    fn default_value(&self, command: &GetFeatures, data: &mut [u8]) -> Result<u32, StatusCode> {
        match command.fid {
            fid::NUMBER_OF_QUEUES => Ok(queues(self.io_queues())),
            fid::ASYNC_EVENT_CONFIGURATION => Ok(self.events.default_configuration().bits()),
            // Disabled until Connect or Set Features enables it.
            fid::KEEP_ALIVE_TIMER => Ok(0),
            _ => self.value(command, &Features::default(), data),
        }
    }

    /// Executes Set Features. Returns completion dword 0.
    pub(super) fn set_features(
        &mut self,
        sqe: &Sqe,
        data: &[u8],
        now: Nanos,
    ) -> Result<u32, StatusCode> {
        let command = SetFeatures::parse(sqe);
        let changeable = self.feature(command.fid)?;
        if command.save {
            return Err(StatusCode::FEATURE_NOT_SAVEABLE.with_dnr());
        }
        if command.fid == fid::RESERVATION_NOTIFICATION_MASK {
            return self.set_reservation_mask(sqe, command.cdw11);
        }
        if sqe.nsid() != 0 && sqe.nsid() != nsid::BROADCAST {
            return Err(StatusCode::FEATURE_NOT_NAMESPACE_SPECIFIC.with_dnr());
        }
        let dword = command.cdw11;
        if !changeable {
            return match command.fid {
                // Connect has set it; it cannot change afterwards (Base 5.27.1.19).
                fid::HOST_IDENTIFIER => Err(StatusCode::COMMAND_SEQUENCE_ERROR.with_dnr()),
                // Setting the present value is harmless.
                fid::VOLATILE_WRITE_CACHE if dword & 1 == VOLATILE_WRITE_CACHE_ENABLE => Ok(0),
                _ => Err(StatusCode::FEATURE_NOT_CHANGEABLE.with_dnr()),
            };
        }
        match command.fid {
            // Stored without effect: queues on different connections are not arbitrated.
            fid::ARBITRATION => self.features.arbitration = dword & 0xffff_ff07,
            fid::POWER_MANAGEMENT => {
                let power = PowerManagement::from_dword(dword);
                if power.power_state != 0 {
                    return Err(INVALID);
                }
                self.features.workload_hint = power.workload_hint;
            }
            fid::TEMPERATURE_THRESHOLD => {
                let threshold = temperature_threshold(dword)?;
                if threshold.sensor != 0 && threshold.sensor != 0xf {
                    return Err(INVALID);
                }
                if threshold.under {
                    self.features.under_temperature = threshold.kelvin;
                } else {
                    self.features.over_temperature = threshold.kelvin;
                }
            }
            fid::ERROR_RECOVERY => {
                let recovery = ErrorRecovery::from_dword(dword);
                if recovery.deallocated_error {
                    return Err(INVALID);
                }
                self.features.error_time_limit = recovery.time_limit;
            }
            fid::NUMBER_OF_QUEUES => return self.set_number_of_queues(dword),
            fid::WRITE_ATOMICITY => {
                self.features.write_atomicity = dword & WRITE_ATOMICITY_DISABLE_NORMAL;
            }
            fid::ASYNC_EVENT_CONFIGURATION => self.events.configure(dword).ok_or(INVALID)?,
            fid::KEEP_ALIVE_TIMER => self.set_keep_alive_ms(dword, now),
            fid::HOST_BEHAVIOR_SUPPORT => self.set_host_behavior(data)?,
            fid::IO_COMMAND_SET_PROFILE if dword & 0x1ff == 0 => {}
            fid::IO_COMMAND_SET_PROFILE => {
                return Err(StatusCode::IO_COMMAND_SET_COMBINATION_REJECTED.with_dnr());
            }
            _ => return Err(INVALID),
        }
        Ok(0)
    }

    /// Most I/O queues of one controller.
    fn io_queues(&self) -> u16 {
        self.target.queue_limits(self.caps.kind).max_io_queues
    }

    /// Grants the requested number of queues up to the limit. Connect enforces the granted number.
    fn set_number_of_queues(&mut self, dword: u32) -> Result<u32, StatusCode> {
        let asked = NumberOfQueues::from_dword(dword).ok_or(INVALID)?;
        if self.association.queues().iter().any(|queue| queue.qid != 0) {
            return Err(StatusCode::COMMAND_SEQUENCE_ERROR.with_dnr());
        }
        // Over fabrics submission and completion queues come in pairs: use the smaller number.
        let asked = asked.submission.min(asked.completion);
        let granted = u32::from(self.io_queues()).min(asked) as u16;
        self.association.set_io_queues(granted);
        Ok(queues(granted))
    }

    fn set_host_behavior(&mut self, data: &[u8]) -> Result<(), StatusCode> {
        let (behavior, _) = HostBehavior::read_from_prefix(data)
            .map_err(|_| StatusCode::DATA_SGL_LENGTH_INVALID.with_dnr())?;
        let mut known = HostBehavior::zeroed();
        known.acre = behavior.acre;
        // Only ACRE can be set: ETDAS, LBAFEE and HDISNS are not supported.
        if behavior.acre > 1 || known.as_bytes()[..6] != behavior.as_bytes()[..6] {
            return Err(INVALID);
        }
        self.features.retry_delays = behavior.acre == 1;
        self.association
            .set_retry_delays(self.features.retry_delays);
        Ok(())
    }
}

fn queues(granted: u16) -> u32 {
    NumberOfQueues {
        submission: u32::from(granted),
        completion: u32::from(granted),
    }
    .dword()
}

fn temperature_threshold(dword: u32) -> Result<TemperatureThreshold, StatusCode> {
    // THSEL has two valid values; refuse the others.
    match dword >> 20 & 0b11 {
        0 | 1 => Ok(TemperatureThreshold::from_dword(dword)),
        _ => Err(INVALID),
    }
}
