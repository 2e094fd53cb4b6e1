//! Controller registers (properties over fabrics; Base 3.1.3): offsets and fields.

/// Byte offsets, for Property Get and Set and for a mapped BAR.
pub mod offset {
    pub const CAP: u32 = 0x00;
    pub const VS: u32 = 0x08;
    pub const INTMS: u32 = 0x0c;
    pub const INTMC: u32 = 0x10;
    pub const CC: u32 = 0x14;
    pub const CSTS: u32 = 0x1c;
    pub const NSSR: u32 = 0x20;
    pub const AQA: u32 = 0x24;
    pub const ASQ: u32 = 0x28;
    pub const ACQ: u32 = 0x30;
    pub const NSSD: u32 = 0x64;
    pub const CRTO: u32 = 0x68;
    /// First doorbell; the others follow at the stride that CAP states.
    pub const DOORBELLS: u32 = 0x1000;
}

/// The value that requests a subsystem reset in NSSR: "NVMe".
pub const NSSR_RESET: u32 = 0x4e56_4d65;

/// Declares the accessors of a register's fields: a reader, and a builder that replaces the field.
macro_rules! fields {
    ($register:ident($int:ty) { $($(#[$doc:meta])* $field:ident / $with:ident: $first:literal, $count:literal;)* }) => {
        impl $register {
            $(
                $(#[$doc])*
                pub const fn $field(self) -> $int {
                    self.0 >> $first & ((1 << $count) - 1)
                }

                pub const fn $with(self, value: $int) -> $register {
                    let mask: $int = ((1 << $count) - 1) << $first;
                    $register(self.0 & !mask | value << $first & mask)
                }
            )*
        }
    };
}

/// CAP, controller capabilities (64 bits, read only).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Cap(pub u64);

fields! {
    Cap(u64) {
        /// Maximum queue entries supported, less one.
        mqes / with_mqes: 0, 16;
        /// Contiguous queues required.
        cqr / with_cqr: 16, 1;
        ams / with_ams: 17, 2;
        /// Longest time to become ready, in units of 500 ms.
        to / with_to: 24, 8;
        /// Doorbell stride: 2^(2 + DSTRD) bytes.
        dstrd / with_dstrd: 32, 4;
        /// Subsystem reset supported.
        nssrs / with_nssrs: 36, 1;
        /// Command sets supported, such as [`Cap::CSS_NVM`].
        css / with_css: 37, 8;
        bps / with_bps: 45, 1;
        cps / with_cps: 46, 2;
        /// Smallest memory page: 2^(12 + MPSMIN) bytes.
        mpsmin / with_mpsmin: 48, 4;
        /// Largest memory page: 2^(12 + MPSMAX) bytes.
        mpsmax / with_mpsmax: 52, 4;
        pmrs / with_pmrs: 56, 1;
        cmbs / with_cmbs: 57, 1;
        /// Subsystem shutdown supported.
        nsss / with_nsss: 58, 1;
        /// Controller ready with media supported.
        crwms / with_crwms: 59, 1;
        /// Controller ready independent of media supported.
        crims / with_crims: 60, 1;
    }
}

impl Cap {
    /// In the CSS field: the NVM command set.
    pub const CSS_NVM: u64 = 1 << 0;
    /// One or more I/O command sets: Identify CNS 1Ch lists them.
    pub const CSS_IO_COMMAND_SETS: u64 = 1 << 6;
    pub const CSS_ADMIN_ONLY: u64 = 1 << 7;

    pub const fn queue_entries_max(self) -> u32 {
        self.mqes() as u32 + 1
    }

    pub const fn ready_timeout_ms(self) -> u64 {
        self.to() * 500
    }

    pub const fn doorbell_stride_bytes(self) -> u32 {
        4 << self.dstrd()
    }

    pub const fn page_bytes_min(self) -> u64 {
        4096 << self.mpsmin()
    }
}

/// VS, the version that a controller conforms to.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, PartialOrd, Ord)]
pub struct Version(pub u32);

impl Version {
    pub const V1_4: Self = Self::new(1, 4, 0);
    pub const V2_0: Self = Self::new(2, 0, 0);
    pub const V2_1: Self = Self::new(2, 1, 0);

    pub const fn new(major: u16, minor: u8, tertiary: u8) -> Self {
        Self((major as u32) << 16 | (minor as u32) << 8 | tertiary as u32)
    }

    pub const fn major(self) -> u16 {
        (self.0 >> 16) as u16
    }

    pub const fn minor(self) -> u8 {
        (self.0 >> 8) as u8
    }

    pub const fn tertiary(self) -> u8 {
        self.0 as u8
    }
}

impl core::fmt::Display for Version {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{}.{}.{}", self.major(), self.minor(), self.tertiary())
    }
}

impl core::fmt::Debug for Version {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Version({self})")
    }
}

/// CC, controller configuration (32 bits, written by the host).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Cc(pub u32);

fields! {
    Cc(u32) {
        en / with_en: 0, 1;
        /// Command set selected, such as [`Cc::CSS_NVM`].
        css / with_css: 4, 3;
        /// Memory page: 2^(12 + MPS) bytes.
        mps / with_mps: 7, 4;
        ams / with_ams: 11, 3;
        /// Shutdown notification; see [`Shutdown`].
        shn / with_shn: 14, 2;
        /// Size of an I/O submission queue entry: 2^IOSQES bytes; 6 for 64 bytes.
        iosqes / with_iosqes: 16, 4;
        /// Size of an I/O completion queue entry: 2^IOCQES bytes; 4 for 16 bytes.
        iocqes / with_iocqes: 20, 4;
        /// Controller ready independent of media enable.
        crime / with_crime: 24, 1;
    }
}

impl Cc {
    pub const CSS_NVM: u32 = 0b000;
    pub const CSS_ALL_IO_COMMAND_SETS: u32 = 0b110;
    pub const CSS_ADMIN_ONLY: u32 = 0b111;

    /// The value that a host writes to enable a fabrics controller.
    pub const fn enabled() -> Self {
        Self(0).with_en(1).with_iosqes(6).with_iocqes(4)
    }

    pub const fn is_enabled(self) -> bool {
        self.en() != 0
    }

    pub const fn shutdown(self) -> Shutdown {
        match self.shn() {
            0 => Shutdown::None,
            1 => Shutdown::Normal,
            2 => Shutdown::Abrupt,
            _ => Shutdown::Reserved,
        }
    }
}

/// Shutdown notification of a host (CC.SHN).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Shutdown {
    None,
    Normal,
    Abrupt,
    Reserved,
}

/// CSTS, controller status (32 bits).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Csts(pub u32);

fields! {
    Csts(u32) {
        rdy / with_rdy: 0, 1;
        /// Controller fatal status.
        cfs / with_cfs: 1, 1;
        /// Shutdown status, such as [`Csts::SHST_COMPLETE`].
        shst / with_shst: 2, 2;
        nssro / with_nssro: 4, 1;
        pp / with_pp: 5, 1;
        /// Shutdown type: of the subsystem, not of the controller.
        st / with_st: 6, 1;
    }
}

impl Csts {
    pub const SHST_NORMAL: u32 = 0;
    pub const SHST_OCCURRING: u32 = 1;
    pub const SHST_COMPLETE: u32 = 2;

    pub const fn is_ready(self) -> bool {
        self.rdy() != 0
    }

    pub const fn is_fatal(self) -> bool {
        self.cfs() != 0
    }
}

/// AQA, admin queue attributes (PCIe).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Aqa(pub u32);

fields! {
    Aqa(u32) {
        /// Entries of the submission queue, less one.
        asqs / with_asqs: 0, 12;
        /// Entries of the completion queue, less one.
        acqs / with_acqs: 16, 12;
    }
}

/// CRTO, controller ready timeouts, in units of 500 ms.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Crto(pub u32);

fields! {
    Crto(u32) {
        crwmt / with_crwmt: 0, 16;
        crimt / with_crimt: 16, 16;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Registers of a Linux nvmet controller, and the values that a Linux host writes to it.
    #[test]
    fn known_values() {
        let cap = Cap(0x0000_0020_0f01_03ff);
        assert_eq!(cap.queue_entries_max(), 1024);
        assert_eq!(cap.ready_timeout_ms(), 7500);
        assert_eq!((cap.cqr(), cap.css(), cap.dstrd()), (1, Cap::CSS_NVM, 0));
        assert_eq!(cap.doorbell_stride_bytes(), 4);
        assert_eq!(cap.page_bytes_min(), 4096);
        let built = Cap(0)
            .with_mqes(1023)
            .with_cqr(1)
            .with_to(15)
            .with_css(Cap::CSS_NVM);
        assert_eq!(built, cap);
        assert_eq!(Cap(0).with_crwms(1).with_nsss(1).0, 0x0c00_0000_0000_0000);

        let cc = Cc(0x0046_0001);
        assert_eq!(cc, Cc::enabled());
        assert!(cc.is_enabled());
        assert_eq!(cc.with_shn(1).shutdown(), Shutdown::Normal);
        assert_eq!(cc.with_css(Cc::CSS_ALL_IO_COMMAND_SETS).0, 0x0046_0061);
        assert_eq!(Csts(0).with_rdy(1).with_shst(Csts::SHST_COMPLETE).0, 0b1001);
        assert_eq!(Aqa(0).with_asqs(31).with_acqs(31).0, 0x001f_001f);
        assert_eq!(Version::V2_1.to_string(), "2.1.0");
        assert_eq!(Version(0x0001_0300), Version::new(1, 3, 0));
    }

    proptest! {
        /// A builder changes its own field and nothing else, and takes no more bits than it has.
        #[test]
        fn builders(raw in any::<u64>(), value in any::<u64>()) {
            let cap = Cap(raw).with_css(value);
            prop_assert_eq!(cap.css(), value & 0xff);
            prop_assert_eq!(cap.with_css(Cap(raw).css()), Cap(raw));
            let cc = Cc(raw as u32).with_shn(value as u32);
            prop_assert_eq!(cc.shn(), value as u32 & 0b11);
            prop_assert_eq!(cc.with_shn(Cc(raw as u32).shn()), Cc(raw as u32));
        }
    }
}
