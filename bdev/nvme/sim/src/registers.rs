//! Controller registers (Base 3.1.3) and doorbells of the simulated controller, and its transitions
//! between disabled and ready.

use nacre_bdev_nvme::GONE;
use nacre_nvmf_wire::registers::{Aqa, Cap, Cc, Csts, NSSR_RESET, Shutdown, offset};
use nacre_random::Random;

use crate::executor::Executor;
use crate::media::CacheSurvival;
use crate::queues::{Cq, Sq};
use crate::state::{AdminQueue, Mode, ShutDown, State};

impl State {
    pub(crate) fn read(&mut self, at: u32) -> u32 {
        let halves = |value: u64| (value as u32, (value >> 32) as u32);
        match at {
            offset::CAP => halves(self.exec.cap().0).0,
            0x04 => halves(self.exec.cap().0).1,
            offset::VS => self.exec.config.identity.version.0,
            offset::CC => self.cc.0,
            offset::CSTS => self.csts.0,
            offset::AQA => self.admin_queue.aqa.0,
            offset::ASQ => halves(self.admin_queue.asq).0,
            0x2c => halves(self.admin_queue.asq).1,
            offset::ACQ => halves(self.admin_queue.acq).0,
            0x34 => halves(self.admin_queue.acq).1,
            offset::INTMS | offset::INTMC | offset::NSSR => 0,
            // Optional registers and reserved ones: zero.
            at if at < offset::DOORBELLS => 0,
            at => {
                self.exec
                    .violations
                    .note(format!("a doorbell was read, at {at:#x}"));
                GONE
            }
        }
    }

    pub(crate) fn write(&mut self, at: u32, value: u32) {
        let low = |old: u64| old & !0xffff_ffff | u64::from(value);
        let high = |old: u64| old & 0xffff_ffff | u64::from(value) << 32;
        match at {
            offset::CC => self.configure(Cc(value)),
            offset::AQA | offset::ASQ..=0x34 if self.cc.is_enabled() => self.exec.violations.note(
                format!("the admin queues were changed while enabled, at {at:#x}"),
            ),
            offset::AQA => self.admin_queue.aqa = Aqa(value),
            offset::ASQ => self.admin_queue.asq = low(self.admin_queue.asq),
            0x2c => self.admin_queue.asq = high(self.admin_queue.asq),
            offset::ACQ => self.admin_queue.acq = low(self.admin_queue.acq),
            0x34 => self.admin_queue.acq = high(self.admin_queue.acq),
            offset::NSSR if value == NSSR_RESET => self
                .exec
                .violations
                .note("a subsystem reset, which is not supported"),
            offset::INTMS | offset::INTMC => self
                .exec
                .violations
                .note("interrupts are masked in the registers, which MSI-X forbids"),
            at if at < offset::DOORBELLS => self.exec.violations.note(format!(
                "{value:#x} was written to {at:#x}, which is read only"
            )),
            at => self.ring(at - offset::DOORBELLS, value),
        }
    }

    fn configure(&mut self, cc: Cc) {
        let before = std::mem::replace(&mut self.cc, cc);
        match (before.is_enabled(), cc.is_enabled()) {
            (false, true) => self.enable(),
            (true, false) => {
                self.exec.stats.controller_resets += 1;
                self.mode = Mode::Disabling(None);
            }
            (true, true) if before.with_shn(0) != cc.with_shn(0) => self.exec.violations.note(
                format!("CC {:#x} became {:#x} while enabled", before.0, cc.0),
            ),
            _ => {}
        }
        let (was, is) = (before.shutdown(), cc.shutdown());
        if was != is && is != Shutdown::None && cc.is_enabled() {
            match is {
                Shutdown::Normal => self.exec.stats.normal_shutdowns += 1,
                Shutdown::Abrupt => self.exec.stats.abrupt_shutdowns += 1,
                Shutdown::None | Shutdown::Reserved => {
                    self.exec.violations.note("CC.SHN has a reserved value");
                }
            }
            self.shutdown = ShutDown::Under(None);
            self.csts = self.csts.with_shst(Csts::SHST_OCCURRING);
        }
    }

    fn enable(&mut self) {
        if self.mode != Mode::Disabled {
            self.exec
                .violations
                .note("enabled before CSTS.RDY said that it is disabled");
        }
        let wrong = self
            .exec
            .enable_mistakes(self.cc, &self.admin_queue, self.bus_master);
        self.exec.stats.enabled += 1;
        self.shutdown = ShutDown::No;
        self.csts = Csts(0);
        self.mode = Mode::Enabling(None);
        if !wrong.is_empty() {
            self.fail(format!("enabled with {}", wrong.join(", ")));
        }
    }

    /// Completes transitions whose time has come.
    pub(crate) fn turn_registers(&mut self) -> bool {
        let now = self.now;
        let mut worked = false;
        // The end time is set in the first turn that sees the change.
        let passed = |at: &mut Option<_>, after| now >= *at.get_or_insert(now + after);
        let mut mode = self.mode;
        match &mut mode {
            Mode::Enabling(at) => {
                let due = passed(at, self.exec.config.pace.ready_after);
                if due && !self.faults.never_ready && !self.csts.is_fatal() {
                    self.start();
                    mode = Mode::Ready;
                    worked = true;
                }
            }
            Mode::Disabling(at) => {
                if passed(at, self.exec.config.pace.disabled_after) && !self.faults.never_disabled {
                    self.clear();
                    mode = Mode::Disabled;
                    worked = true;
                }
            }
            Mode::Disabled | Mode::Ready => {}
        }
        self.mode = mode;
        if let ShutDown::Under(at) = &mut self.shutdown
            && passed(at, self.exec.config.pace.shutdown_after)
            && !self.faults.never_shut_down
        {
            self.shutdown = ShutDown::Done;
            self.csts = self.csts.with_shst(Csts::SHST_COMPLETE);
            self.exec.flush_all();
            worked = true;
        }
        worked
    }

    /// Becomes ready, with the admin queues.
    fn start(&mut self) {
        let (sq, cq) = (
            self.admin_queue.aqa.asqs() + 1,
            self.admin_queue.aqa.acqs() + 1,
        );
        self.sqs[0] = Some(Sq::new(0, self.admin_queue.asq, sq as u16, 0));
        self.cqs[0] = Some(Cq::new(0, self.admin_queue.acq, cq as u16, Some(0)));
        self.csts = self.csts.with_rdy(1);
    }

    /// Resets all but CC, the admin queues' registers and the stored data, as a Controller Level
    /// Reset.
    pub(crate) fn clear(&mut self) {
        self.sqs.iter_mut().for_each(|sq| *sq = None);
        self.cqs.iter_mut().for_each(|cq| *cq = None);
        self.waiting.clear();
        self.stuck.clear();
        self.posts.clear();
        self.async_requests.clear();
        self.events.clear();
        self.masked = 0;
        self.exec.changed.clear();
        let identity = &mut self.exec.config.identity;
        self.exec.firmware.reset(&mut identity.firmware);
        self.exec.features = crate::features::Features::new(self.exec.config.volatile_cache);
        self.shutdown = ShutDown::No;
        self.csts = Csts(0);
    }

    /// Resets the controller by itself: the driver must disable and enable it again.
    pub(crate) fn reset_controller(&mut self) {
        self.clear();
        self.cc = self.cc.with_en(0);
        self.mode = Mode::Disabled;
    }

    /// Resets the function at once: all registers get their power-on values.
    pub(crate) fn reset_function(&mut self) {
        self.exec.stats.function_resets += 1;
        self.reset_registers();
    }

    pub(crate) fn reset_registers(&mut self) {
        self.clear();
        self.cc = Cc(0);
        self.admin_queue = AdminQueue::default();
        self.mode = Mode::Disabled;
        self.bus_master = false;
        self.vectors.clear();
    }

    /// Removes the drive: registers read as all ones, and the cache loses power.
    pub(crate) fn pull(&mut self, keep: CacheSurvival) {
        self.present = false;
        self.reset_registers();
        self.exec.lose_power(keep, &mut self.random);
    }

    /// Handles a doorbell write, at this number of bytes after the first doorbell.
    pub(crate) fn ring(&mut self, at: u32, value: u32) {
        let stride = 4 << self.exec.config.doorbell_stride;
        let (index, is_head) = ((at / stride / 2) as usize, at / stride % 2 == 1);
        if !at.is_multiple_of(stride) {
            return self
                .exec
                .violations
                .note(format!("there is no doorbell at {at:#x} of them"));
        }
        if !self.csts.is_ready() {
            // The driver cannot know of the failure yet, so this is not its mistake.
            return;
        }
        if value > 0xffff {
            self.exec
                .violations
                .note(format!("{value:#x} was written to a doorbell"));
        }
        if !is_head && self.shutdown != ShutDown::No {
            self.exec
                .violations
                .note(format!("a command for queue {index} after the shutdown"));
        }
        let outcome = if is_head {
            self.exec.stats.head_doorbells += 1;
            let Some(Some(cq)) = self.cqs.get_mut(index) else {
                return self.no_queue("completion queue", index);
            };
            cq.wake();
            cq.set_head(value)
        } else {
            self.exec.stats.tail_doorbells += 1;
            let Some(Some(sq)) = self.sqs.get_mut(index) else {
                return self.no_queue("queue", index);
            };
            sq.awake = true;
            sq.quiet = 0;
            if sq.shadow.is_some() {
                // The write wakes the controller, which reads the tail from memory.
                if value < u32::from(sq.entries) {
                    Ok(())
                } else {
                    Err(format!("tail {value} of queue {index}"))
                }
            } else if u32::from(sq.tail) == value {
                Err(format!("tail {value} of queue {index}, as before"))
            } else {
                sq.set_tail(value)
            }
        };
        if let Err(wrong) = outcome {
            self.exec.violations.note(format!("doorbell: {wrong}"));
        }
    }

    fn no_queue(&mut self, what: &str, index: usize) {
        self.exec.violations.note(format!(
            "a doorbell was rung of {what} {index}, which does not exist"
        ));
    }
}

impl Executor {
    pub(crate) fn cap(&self) -> Cap {
        let config = &self.config;
        let css = if config.nvm_command_set {
            Cap::CSS_NVM
        } else {
            Cap::CSS_ADMIN_ONLY
        };
        Cap(0)
            .with_mqes(u64::from(config.queue_entries - 1))
            .with_cqr(1)
            .with_to((config.ready_timeout.as_millis() as u64).div_ceil(500))
            .with_dstrd(config.doorbell_stride.into())
            .with_css(css)
            .with_mpsmin(config.pages.0.into())
            .with_mpsmax(config.pages.1.into())
    }

    /// The reasons why the controller cannot be enabled with these registers.
    fn enable_mistakes(&self, cc: Cc, queue: &AdminQueue, bus_master: bool) -> Vec<String> {
        let config = &self.config;
        let page = 12 + cc.mps();
        let mut wrong = Vec::new();
        if cc.css() != Cc::CSS_NVM {
            wrong.push(format!("CC.CSS {:#b}", cc.css()));
        }
        if !(config.pages.0.into()..=config.pages.1.into()).contains(&cc.mps()) {
            wrong.push(format!("CC.MPS {}", cc.mps()));
        }
        if cc.ams() != 0 {
            wrong.push(format!("CC.AMS {}", cc.ams()));
        }
        if (cc.iosqes(), cc.iocqes()) != (6, 4) {
            wrong.push(format!(
                "CC.IOSQES {} and IOCQES {}",
                cc.iosqes(),
                cc.iocqes()
            ));
        }
        if queue.aqa.asqs() == 0 || queue.aqa.acqs() == 0 {
            wrong.push(format!("AQA {:#x}", queue.aqa.0));
        }
        for address in [queue.asq, queue.acq] {
            if address == 0 || !address.is_multiple_of(1 << page) {
                wrong.push(format!("an admin queue at {address:#x}"));
            }
        }
        if !bus_master {
            wrong.push("no bus mastering".to_owned());
        }
        wrong
    }

    pub(crate) fn lose_power(&mut self, keep: CacheSurvival, random: &mut Random) {
        let namespaces = self.namespaces.values_mut();
        namespaces.for_each(|namespace| namespace.lose_power(keep, random));
    }

    fn flush_all(&mut self) {
        self.namespaces.values_mut().for_each(|ns| ns.flush());
    }
}
