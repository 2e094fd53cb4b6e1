//! Initialises a controller (Base 3.5.1): disables it, configures and enables it, and reads its
//! Identify data and features.

use std::sync::Arc;
use std::time::Duration;

use nacre_nvmf_wire::commands::admin::{GetFeatures, Identify, SetFeatures};
use nacre_nvmf_wire::features::{AsyncEvents, NumberOfQueues, VOLATILE_WRITE_CACHE_ENABLE, fid};
use nacre_nvmf_wire::identify::controller::{Oacs, Oncs, Sgls, cntrltype, vwc};
use nacre_nvmf_wire::identify::{self, IdentifyController, NvmController, cns, csi};
use nacre_nvmf_wire::registers::{Aqa, Cap, Cc, Csts, Version, offset};
use nacre_nvmf_wire::{Sqe, opcode};
use zerocopy::{FromBytes, IntoBytes};

use super::commands::Commands;
use crate::admin::{self, AdminMemory};
use crate::data::{PAGE, Pointer, SglSupport, list_bytes};
use crate::error::AttachError;
use crate::function::{Function, GONE};
use crate::info::{ControllerInfo, DriveIdentity, celsius};
use crate::link::count;
use crate::options::DriveOptions;
use crate::properties::Properties;
use crate::ring::{Doorbell, Shadows};

/// The largest transfer for which lists are allocated.
const TRANSFER_MAX: u64 = 1 << 20;
/// Most entries of an I/O queue: the other bits of command identifiers count uses.
const DEPTH_MAX: u32 = 4096;
/// Interval of register reads while the controller becomes ready.
const LOOK: Duration = Duration::from_millis(1);
/// Minimum time for a controller to become ready, whatever CAP.TO reports.
const READY_MIN: Duration = Duration::from_secs(2);

impl Commands<'_> {
    /// Resets and initialises the controller, from any state. After success, no command from before
    /// the reset accesses memory.
    pub(super) async fn bring_up(self) -> Result<Properties, AttachError> {
        let function = self.shared.function();
        let address = function.address().to_owned();
        let csts = function.read32(offset::CSTS);
        let cap = Cap(function.read64(offset::CAP));
        if csts == GONE || cap.0 == u64::MAX {
            return Err(AttachError::Gone { address });
        }
        self.check(&*function, cap)?;
        self.disable(&*function, cap).await?;
        let stride = cap.doorbell_stride_bytes();
        let memory = Arc::new(AdminMemory::allocate(&function)?);
        let last = u32::from(admin::ENTRIES) - 1;
        function.write32(offset::AQA, Aqa(0).with_asqs(last).with_acqs(last).0);
        function.write64(offset::ASQ, memory.sq.address(0));
        function.write64(offset::ACQ, memory.cq.address(0));
        self.admin.open(Arc::clone(&function), memory, stride);
        function.set_bus_master(true)?;
        let css = if cap.css() & Cap::CSS_NVM != 0 {
            Cc::CSS_NVM
        } else {
            Cc::CSS_ALL_IO_COMMAND_SETS
        };
        function.write32(offset::CC, Cc::enabled().with_css(css).0);
        self.wait_ready(&*function, cap, 1).await?;
        let identify = self.identify_controller().await?;
        self.properties_of(&function, cap, &identify).await
    }

    fn check(self, function: &dyn Function, cap: Cap) -> Result<(), AttachError> {
        let address = || function.address().to_owned();
        if cap.css() & (Cap::CSS_NVM | Cap::CSS_IO_COMMAND_SETS) == 0 {
            return Err(AttachError::CommandSet {
                address: address(),
                css: cap.css(),
            });
        }
        if cap.page_bytes_min() > PAGE as u64 {
            return Err(AttachError::PageSize {
                address: address(),
                minimum: cap.page_bytes_min(),
                maximum: PAGE as u64,
            });
        }
        let needed = u32::from(DriveOptions::IO_QUEUE_DEPTH_MIN);
        if cap.queue_entries_max() < needed {
            return Err(AttachError::QueueSize {
                address: address(),
                entries: cap.queue_entries_max(),
                needed,
            });
        }
        // The registers must include the doorbells of the admin queue and of one I/O queue pair.
        let needed = Doorbell::completion(1, cap.doorbell_stride_bytes()).end();
        if function.register_bytes() < needed {
            return Err(AttachError::Registers {
                address: address(),
                bytes: function.register_bytes(),
                needed,
            });
        }
        Ok(())
    }

    /// Clears CC.EN and waits for CSTS.RDY 0. If the controller does not reach it, resets the
    /// function.
    pub(super) async fn disable(
        self,
        function: &dyn Function,
        cap: Cap,
    ) -> Result<(), AttachError> {
        let cc = Cc(function.read32(offset::CC));
        let csts = Csts(function.read32(offset::CSTS));
        if cc.is_enabled() {
            if !csts.is_ready() && !csts.is_fatal() {
                // Base 3.5.1 forbids clearing CC.EN before CSTS.RDY is 1. A timeout is no error.
                let _ = self.wait_ready(function, cap, 1).await;
            }
            function.write32(offset::CC, cc.with_en(0).with_shn(0).0);
        }
        let down = self.wait_ready(function, cap, 0).await;
        if let Err(AttachError::NotReady { .. }) = down {
            count(&self.shared.counters.function_resets);
            function.reset()?;
            return self.wait_ready(function, cap, 0).await;
        }
        down
    }

    async fn wait_ready(
        self,
        function: &dyn Function,
        cap: Cap,
        ready: u8,
    ) -> Result<(), AttachError> {
        let limit = Duration::from_millis(cap.ready_timeout_ms()).max(READY_MIN);
        let deadline = self.core.now() + limit;
        loop {
            let csts = function.read32(offset::CSTS);
            let address = || function.address().to_owned();
            if csts == GONE {
                return Err(AttachError::Gone { address: address() });
            }
            if Csts(csts).rdy() == u32::from(ready) {
                return Ok(());
            }
            if ready == 1 && Csts(csts).is_fatal() {
                return Err(AttachError::Fatal { address: address() });
            }
            if self.core.now() >= deadline {
                return Err(AttachError::NotReady {
                    address: address(),
                    ready,
                    limit,
                    csts,
                });
            }
            self.core.after(LOOK).await;
        }
    }

    async fn identify_controller(self) -> Result<Box<IdentifyController>, AttachError> {
        let mut page = Box::new(IdentifyController::zeroed());
        let sqe = Identify::new(cns::CONTROLLER).to_sqe(0, 0);
        self.ask(sqe, &[], page.as_mut().as_mut_bytes()).await?;
        Ok(page)
    }

    async fn properties_of(
        self,
        function: &Arc<dyn Function>,
        cap: Cap,
        said: &IdentifyController,
    ) -> Result<Properties, AttachError> {
        let address = function.address().to_owned();
        let version = Version(function.read32(offset::VS));
        if !matches!(said.cntrltype, 0 | cntrltype::IO) {
            return Err(AttachError::ControllerType {
                address,
                cntrltype: said.cntrltype,
            });
        }
        let stride = cap.doorbell_stride_bytes();
        let oacs = Oacs::from_bits_retain(said.oacs.get());
        let oncs = Oncs::from_bits_retain(said.oncs.get());
        let mdts = said.max_transfer_bytes(cap.page_bytes_min());
        let max_transfer = mdts.unwrap_or(u64::MAX).min(TRANSFER_MAX);
        let wanted = u32::from(
            self.shared
                .options
                .io_queue_depth
                .max(DriveOptions::IO_QUEUE_DEPTH_MIN),
        );
        let entries = wanted.min(cap.queue_entries_max()).min(DEPTH_MAX) as u16;
        let mut queues = self.ask_for_queues(&address).await?;
        let room = function.register_bytes().saturating_sub(offset::DOORBELLS) / (2 * stride);
        queues = queues.min(room.saturating_sub(1).min(0x7fff) as u16);
        let shadows =
            if self.shared.options.shadow_doorbells && oacs.contains(Oacs::DOORBELL_BUFFER) {
                self.configure_shadows(function).await?
            } else {
                None
            };
        if shadows.is_some() {
            queues = queues.min((PAGE as u32 / (2 * stride)) as u16 - 1);
        }
        let vectors = self.connect_vectors(&**function, queues)?;
        self.choose_events(said).await;
        let nvm = self.nvm_limits(version).await;
        let sgl = match said.sgls.get() & 0b11 {
            _ if !self.shared.options.sgl => SglSupport::No,
            level if level == Sgls::SUPPORTED.bits() => SglSupport::Bytes,
            level if level == Sgls::SUPPORTED_DWORD.bits() => SglSupport::Dwords,
            _ => SglSupport::No,
        };
        let volatile_cache = if said.vwc & vwc::PRESENT != 0 {
            self.is_cache_on().await
        } else {
            false
        };
        let tenths = |value: u16| Duration::from_millis(u64::from(value) * 100);
        let info = ControllerInfo {
            address,
            numa_node: function.numa_node(),
            drive: DriveIdentity::from(said),
            cntlid: said.cntlid.get(),
            version: version.to_string(),
            max_transfer_bytes: max_transfer,
            mdts_bytes: mdts,
            io_queues: queues,
            io_queue_depth: entries - 1,
            page_bytes: PAGE as u32,
            sgl: sgl != SglSupport::No,
            shadow_doorbells: shadows.is_some(),
            vectors,
            nn: said.nn.get(),
            oacs: oacs.bits(),
            oncs: oncs.bits(),
            fuses: said.fuses.get(),
            volatile_cache,
            warning_temperature_c: Some(said.wctemp.get()).filter(|k| *k != 0).map(celsius),
            critical_temperature_c: Some(said.cctemp.get()).filter(|k| *k != 0).map(celsius),
            unusable: Vec::new(),
        };
        Ok(Properties {
            info,
            version,
            stride,
            queues,
            entries,
            vectors,
            sgl: Some(sgl),
            shadows,
            list_bytes: list_bytes(max_transfer as usize),
            max_transfer: max_transfer as u32,
            page_bytes_min: cap.page_bytes_min(),
            awupf: said.awupf.get(),
            acwu: said.acwu.get(),
            oncs,
            aerl: said.aerl,
            rtd3e: Duration::from_micros(said.rtd3e.get().into()),
            delays: [
                Duration::ZERO,
                tenths(said.crdt1.get()),
                tenths(said.crdt2.get()),
                tenths(said.crdt3.get()),
            ],
            wzsl: nvm.wzsl,
            vsl: nvm.vsl,
            dmrsl: nvm.dmrsl.get(),
            dmsl: nvm.dmsl.get(),
            elpe: said.elpe,
            warning_kelvin: said.wctemp.get(),
        })
    }

    async fn ask_for_queues(self, address: &str) -> Result<u16, AttachError> {
        let wanted = u32::from(self.shared.options.io_queues.clamp(1, 0x7fff));
        let ask = NumberOfQueues {
            submission: wanted,
            completion: wanted,
        };
        let sqe = SetFeatures::new(fid::NUMBER_OF_QUEUES, ask.dword()).to_sqe(0, 0);
        let answer = self.ask(sqe, &[], &mut []).await?;
        let granted = NumberOfQueues::from_dword(answer.dword0);
        let granted = granted.map_or(0, |got| got.submission.min(got.completion).min(wanted));
        match granted {
            0 => Err(AttachError::NoQueues {
                address: address.to_owned(),
            }),
            granted => Ok(granted as u16),
        }
    }

    /// Configures shadow doorbells (Doorbell Buffer Config), if the controller accepts them.
    async fn configure_shadows(
        self,
        function: &Arc<dyn Function>,
    ) -> Result<Option<Arc<Shadows>>, AttachError> {
        let shadows = Shadows::allocate(function)?;
        let mut sqe = Sqe::new(opcode::admin::DOORBELL_BUFFER_CONFIG, 0);
        let (shadow, event) = (shadows.shadow.address(0), shadows.event.address(0));
        crate::command::set_pointer(&mut sqe, &Pointer::prp(shadow, event));
        match self.ask(sqe, &[], &mut []).await {
            Ok(_) => Ok(Some(Arc::new(shadows))),
            Err(crate::error::ControlError::Status { status, .. }) => {
                tracing::info!(controller = self.name(), %status, "no shadow doorbells");
                Ok(None)
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Connects vector 0 for the admin queue, and one per queue pair if there are enough.
    fn connect_vectors(self, function: &dyn Function, queues: u16) -> Result<u16, AttachError> {
        if !self.shared.options.interrupts {
            return Ok(0);
        }
        let count = function.vectors().min(queues.saturating_add(1));
        let other = count != self.shared.properties().vectors;
        if count > 0 && (other || function.vector_fd(count - 1).is_none()) {
            function.interrupts(count)?;
        }
        Ok(count)
    }

    /// Selects the events to report. The controller does not send events that it refuses here.
    async fn choose_events(self, said: &IdentifyController) {
        let offered = AsyncEvents::from_bits_retain(said.oaes.get());
        let smart = AsyncEvents::SMART_SPARE
            | AsyncEvents::SMART_TEMPERATURE
            | AsyncEvents::SMART_RELIABILITY
            | AsyncEvents::SMART_READ_ONLY
            | AsyncEvents::SMART_VOLATILE_BACKUP;
        let notices = AsyncEvents::NAMESPACE_ATTRIBUTE | AsyncEvents::FIRMWARE_ACTIVATION;
        let wanted = smart | notices & offered;
        let sqe = SetFeatures::new(fid::ASYNC_EVENT_CONFIGURATION, wanted.bits()).to_sqe(0, 0);
        if let Err(error) = self.ask(sqe, &[], &mut []).await {
            tracing::info!(controller = self.name(), %error, "asynchronous events stay as they are");
        }
    }

    /// Reads the limits of the NVM command set, if the controller reports them.
    async fn nvm_limits(self, version: Version) -> Box<NvmController> {
        let mut page = Box::new(NvmController::zeroed());
        if version < Version::V2_0 {
            return page;
        }
        let mut identify = Identify::new(cns::IO_CONTROLLER);
        identify.csi = csi::NVM;
        let mut bytes = vec![0; identify::SIZE];
        let sqe = identify.to_sqe(0, 0);
        if self.ask(sqe, &[], &mut bytes).await.is_ok()
            && let Ok(said) = NvmController::read_from_bytes(&bytes)
        {
            *page = said;
        }
        page
    }

    /// True if the volatile write cache is enabled, or if its state cannot be read.
    async fn is_cache_on(self) -> bool {
        let sqe = GetFeatures::new(fid::VOLATILE_WRITE_CACHE).to_sqe(0, 0);
        match self.ask(sqe, &[], &mut []).await {
            Ok(answer) => answer.dword0 & VOLATILE_WRITE_CACHE_ENABLE != 0,
            Err(_) => true,
        }
    }
}
