//! The status field of a completion queue entry (Base 3.3.3.2.1) and the names of its status codes.

use core::fmt;

/// The status field of a completion: bits 15:1 of its last word, moved down by one.
///
/// ```text
///   14  13  12:11  10:8   7:0
///   DNR  M   CRD    SCT    SC
/// ```
///
/// The constants have SCT and SC only; [`StatusCode::with_dnr`], [`StatusCode::with_more`] and
/// [`StatusCode::with_crd`] set the other bits. `==` compares the whole field: compare
/// [`StatusCode::code`] to ignore DNR, M and CRD.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StatusCode(u16);

const CODE_MASK: u16 = 0x07ff;
const CRD_SHIFT: u16 = 11;
const MORE: u16 = 1 << 13;
const DNR: u16 = 1 << 14;

impl StatusCode {
    /// Combines a status code type (3 bits) and a status code.
    pub const fn new(sct: u8, sc: u8) -> Self {
        Self(((sct & 0b111) as u16) << 8 | sc as u16)
    }

    /// Decodes the 15 bits above the phase tag.
    pub const fn from_field(field: u16) -> Self {
        Self(field & 0x7fff)
    }

    /// The 15 bits that go above the phase tag.
    pub const fn field(self) -> u16 {
        self.0
    }

    /// Status code type (SCT).
    pub const fn sct(self) -> u8 {
        (self.0 >> 8) as u8 & 0b111
    }

    /// Status code (SC).
    pub const fn sc(self) -> u8 {
        self.0 as u8
    }

    /// SCT and SC, with DNR, M and CRD cleared.
    pub const fn code(self) -> Self {
        Self(self.0 & CODE_MASK)
    }

    pub const fn is_success(self) -> bool {
        self.0 & CODE_MASK == 0
    }

    /// Command retry delay: which of CRDT1 to CRDT3 to wait before a retry, 0 for none.
    pub const fn crd(self) -> u8 {
        (self.0 >> CRD_SHIFT) as u8 & 0b11
    }

    /// More (M): the Error Information log page has an entry for this error.
    pub const fn more(self) -> bool {
        self.0 & MORE != 0
    }

    /// Do Not Retry (DNR): the same command would fail again.
    pub const fn dnr(self) -> bool {
        self.0 & DNR != 0
    }

    pub const fn with_crd(self, crd: u8) -> Self {
        Self(self.0 & !(0b11 << CRD_SHIFT) | ((crd & 0b11) as u16) << CRD_SHIFT)
    }

    pub const fn with_more(self) -> Self {
        Self(self.0 | MORE)
    }

    pub const fn with_dnr(self) -> Self {
        Self(self.0 | DNR)
    }

    /// True for a path related status (SCT 3h): a multipath host retries on another path.
    pub const fn is_path_related(self) -> bool {
        self.sct() == sct::PATH_RELATED
    }
}

/// Status code types.
pub mod sct {
    pub const GENERIC: u8 = 0;
    pub const COMMAND_SPECIFIC: u8 = 1;
    pub const MEDIA: u8 = 2;
    pub const PATH_RELATED: u8 = 3;
    pub const VENDOR: u8 = 7;
}

/// Declares the named codes and a table of their names.
macro_rules! codes {
    ($table:ident: $({ $($name:ident = $sct:literal, $sc:literal, $text:literal;)* })*) => {
        impl StatusCode {
            $($(pub const $name: StatusCode = StatusCode::new($sct, $sc);)*)*
        }

        const $table: &[(StatusCode, &str)] = &[$($((StatusCode::$name, $text),)*)*];
    };
}

codes! {
    NAMES:
    // Generic command status (SCT 0h), Base figure 94.
    {
        SUCCESS = 0x0, 0x00, "Successful Completion";
        INVALID_OPCODE = 0x0, 0x01, "Invalid Command Opcode";
        INVALID_FIELD = 0x0, 0x02, "Invalid Field in Command";
        COMMAND_ID_CONFLICT = 0x0, 0x03, "Command ID Conflict";
        DATA_TRANSFER_ERROR = 0x0, 0x04, "Data Transfer Error";
        ABORTED_POWER_LOSS = 0x0, 0x05, "Commands Aborted due to Power Loss Notification";
        INTERNAL_ERROR = 0x0, 0x06, "Internal Error";
        ABORT_REQUESTED = 0x0, 0x07, "Command Abort Requested";
        ABORTED_SQ_DELETION = 0x0, 0x08, "Command Aborted due to SQ Deletion";
        ABORTED_FAILED_FUSED = 0x0, 0x09, "Command Aborted due to Failed Fused Command";
        ABORTED_MISSING_FUSED = 0x0, 0x0a, "Command Aborted due to Missing Fused Command";
        INVALID_NAMESPACE_OR_FORMAT = 0x0, 0x0b, "Invalid Namespace or Format";
        COMMAND_SEQUENCE_ERROR = 0x0, 0x0c, "Command Sequence Error";
        INVALID_SGL_SEGMENT_DESCRIPTOR = 0x0, 0x0d, "Invalid SGL Segment Descriptor";
        INVALID_NUMBER_OF_SGL_DESCRIPTORS = 0x0, 0x0e, "Invalid Number of SGL Descriptors";
        DATA_SGL_LENGTH_INVALID = 0x0, 0x0f, "Data SGL Length Invalid";
        METADATA_SGL_LENGTH_INVALID = 0x0, 0x10, "Metadata SGL Length Invalid";
        SGL_DESCRIPTOR_TYPE_INVALID = 0x0, 0x11, "SGL Descriptor Type Invalid";
        INVALID_USE_OF_CMB = 0x0, 0x12, "Invalid Use of Controller Memory Buffer";
        PRP_OFFSET_INVALID = 0x0, 0x13, "PRP Offset Invalid";
        ATOMIC_WRITE_UNIT_EXCEEDED = 0x0, 0x14, "Atomic Write Unit Exceeded";
        OPERATION_DENIED = 0x0, 0x15, "Operation Denied";
        SGL_OFFSET_INVALID = 0x0, 0x16, "SGL Offset Invalid";
        HOST_ID_INCONSISTENT_FORMAT = 0x0, 0x18, "Host Identifier Inconsistent Format";
        KEEP_ALIVE_TIMER_EXPIRED = 0x0, 0x19, "Keep Alive Timer Expired";
        KEEP_ALIVE_TIMEOUT_INVALID = 0x0, 0x1a, "Keep Alive Timeout Invalid";
        ABORTED_PREEMPT_AND_ABORT = 0x0, 0x1b, "Command Aborted due to Preempt and Abort";
        SANITIZE_FAILED = 0x0, 0x1c, "Sanitize Failed";
        SANITIZE_IN_PROGRESS = 0x0, 0x1d, "Sanitize In Progress";
        SGL_DATA_BLOCK_GRANULARITY_INVALID = 0x0, 0x1e, "SGL Data Block Granularity Invalid";
        NOT_SUPPORTED_FOR_QUEUE_IN_CMB = 0x0, 0x1f, "Command Not Supported for Queue in CMB";
        NAMESPACE_IS_WRITE_PROTECTED = 0x0, 0x20, "Namespace is Write Protected";
        COMMAND_INTERRUPTED = 0x0, 0x21, "Command Interrupted";
        TRANSIENT_TRANSPORT_ERROR = 0x0, 0x22, "Transient Transport Error";
        PROHIBITED_BY_LOCKDOWN = 0x0, 0x23, "Command Prohibited by Command and Feature Lockdown";
        ADMIN_COMMAND_MEDIA_NOT_READY = 0x0, 0x24, "Admin Command Media Not Ready";
        INVALID_KEY_TAG = 0x0, 0x25, "Invalid Key Tag";
        HOST_DISPERSED_NS_SUPPORT_NOT_ENABLED = 0x0, 0x26, "Host Dispersed Namespace Support Not Enabled";
        HOST_ID_NOT_INITIALIZED = 0x0, 0x27, "Host Identifier Not Initialized";
        INCORRECT_KEY = 0x0, 0x28, "Incorrect Key";
        FDP_DISABLED = 0x0, 0x29, "FDP Disabled";
        INVALID_PLACEMENT_HANDLE_LIST = 0x0, 0x2a, "Invalid Placement Handle List";
        LBA_OUT_OF_RANGE = 0x0, 0x80, "LBA Out of Range";
        CAPACITY_EXCEEDED = 0x0, 0x81, "Capacity Exceeded";
        NAMESPACE_NOT_READY = 0x0, 0x82, "Namespace Not Ready";
        RESERVATION_CONFLICT = 0x0, 0x83, "Reservation Conflict";
        FORMAT_IN_PROGRESS = 0x0, 0x84, "Format In Progress";
    }
    // Command specific status (SCT 1h), Base figure 95 and NVM figure 19.
    {
        COMPLETION_QUEUE_INVALID = 0x1, 0x00, "Completion Queue Invalid";
        INVALID_QUEUE_IDENTIFIER = 0x1, 0x01, "Invalid Queue Identifier";
        INVALID_QUEUE_SIZE = 0x1, 0x02, "Invalid Queue Size";
        ABORT_COMMAND_LIMIT_EXCEEDED = 0x1, 0x03, "Abort Command Limit Exceeded";
        ASYNC_EVENT_REQUEST_LIMIT_EXCEEDED = 0x1, 0x05, "Asynchronous Event Request Limit Exceeded";
        INVALID_FIRMWARE_SLOT = 0x1, 0x06, "Invalid Firmware Slot";
        INVALID_FIRMWARE_IMAGE = 0x1, 0x07, "Invalid Firmware Image";
        INVALID_INTERRUPT_VECTOR = 0x1, 0x08, "Invalid Interrupt Vector";
        INVALID_LOG_PAGE = 0x1, 0x09, "Invalid Log Page";
        INVALID_FORMAT = 0x1, 0x0a, "Invalid Format";
        FIRMWARE_NEEDS_CONVENTIONAL_RESET = 0x1, 0x0b, "Firmware Activation Requires Conventional Reset";
        INVALID_QUEUE_DELETION = 0x1, 0x0c, "Invalid Queue Deletion";
        FEATURE_NOT_SAVEABLE = 0x1, 0x0d, "Feature Identifier Not Saveable";
        FEATURE_NOT_CHANGEABLE = 0x1, 0x0e, "Feature Not Changeable";
        FEATURE_NOT_NAMESPACE_SPECIFIC = 0x1, 0x0f, "Feature Not Namespace Specific";
        FIRMWARE_NEEDS_SUBSYSTEM_RESET = 0x1, 0x10, "Firmware Activation Requires NVM Subsystem Reset";
        FIRMWARE_NEEDS_CONTROLLER_RESET = 0x1, 0x11, "Firmware Activation Requires Controller Level Reset";
        FIRMWARE_NEEDS_MAX_TIME_VIOLATION = 0x1, 0x12, "Firmware Activation Requires Maximum Time Violation";
        FIRMWARE_ACTIVATION_PROHIBITED = 0x1, 0x13, "Firmware Activation Prohibited";
        OVERLAPPING_RANGE = 0x1, 0x14, "Overlapping Range";
        NAMESPACE_INSUFFICIENT_CAPACITY = 0x1, 0x15, "Namespace Insufficient Capacity";
        NAMESPACE_ID_UNAVAILABLE = 0x1, 0x16, "Namespace Identifier Unavailable";
        NAMESPACE_ALREADY_ATTACHED = 0x1, 0x18, "Namespace Already Attached";
        NAMESPACE_IS_PRIVATE = 0x1, 0x19, "Namespace Is Private";
        NAMESPACE_NOT_ATTACHED = 0x1, 0x1a, "Namespace Not Attached";
        THIN_PROVISIONING_NOT_SUPPORTED = 0x1, 0x1b, "Thin Provisioning Not Supported";
        CONTROLLER_LIST_INVALID = 0x1, 0x1c, "Controller List Invalid";
        SELF_TEST_IN_PROGRESS = 0x1, 0x1d, "Device Self-test In Progress";
        BOOT_PARTITION_WRITE_PROHIBITED = 0x1, 0x1e, "Boot Partition Write Prohibited";
        INVALID_CONTROLLER_ID = 0x1, 0x1f, "Invalid Controller Identifier";
        INVALID_SECONDARY_CONTROLLER_STATE = 0x1, 0x20, "Invalid Secondary Controller State";
        INVALID_NUMBER_OF_CONTROLLER_RESOURCES = 0x1, 0x21, "Invalid Number of Controller Resources";
        INVALID_RESOURCE_ID = 0x1, 0x22, "Invalid Resource Identifier";
        SANITIZE_PROHIBITED_WITH_PMR = 0x1, 0x23, "Sanitize Prohibited While Persistent Memory Region is Enabled";
        ANA_GROUP_ID_INVALID = 0x1, 0x24, "ANA Group Identifier Invalid";
        ANA_ATTACH_FAILED = 0x1, 0x25, "ANA Attach Failed";
        INSUFFICIENT_CAPACITY = 0x1, 0x26, "Insufficient Capacity";
        NAMESPACE_ATTACHMENT_LIMIT_EXCEEDED = 0x1, 0x27, "Namespace Attachment Limit Exceeded";
        PROHIBITION_NOT_SUPPORTED = 0x1, 0x28, "Prohibition of Command Execution Not Supported";
        IO_COMMAND_SET_NOT_SUPPORTED = 0x1, 0x29, "I/O Command Set Not Supported";
        IO_COMMAND_SET_NOT_ENABLED = 0x1, 0x2a, "I/O Command Set Not Enabled";
        IO_COMMAND_SET_COMBINATION_REJECTED = 0x1, 0x2b, "I/O Command Set Combination Rejected";
        INVALID_IO_COMMAND_SET = 0x1, 0x2c, "Invalid I/O Command Set";
        IDENTIFIER_UNAVAILABLE = 0x1, 0x2d, "Identifier Unavailable";
        CONFLICTING_ATTRIBUTES = 0x1, 0x80, "Conflicting Attributes";
        INVALID_PROTECTION_INFORMATION = 0x1, 0x81, "Invalid Protection Information";
        WRITE_TO_READ_ONLY_RANGE = 0x1, 0x82, "Attempted Write to Read Only Range";
        COMMAND_SIZE_LIMIT_EXCEEDED = 0x1, 0x83, "Command Size Limit Exceeded";
        INCOMPATIBLE_NAMESPACE_OR_FORMAT = 0x1, 0x85, "Incompatible Namespace or Format";
        FAST_COPY_NOT_POSSIBLE = 0x1, 0x86, "Fast Copy Not Possible";
        OVERLAPPING_IO_RANGE = 0x1, 0x87, "Overlapping I/O Range";
        NAMESPACE_NOT_REACHABLE = 0x1, 0x88, "Namespace Not Reachable";
        INSUFFICIENT_RESOURCES = 0x1, 0x89, "Insufficient Resources";
    }
    // Media and data integrity errors (SCT 2h), Base figure 98.
    {
        WRITE_FAULT = 0x2, 0x80, "Write Fault";
        UNRECOVERED_READ_ERROR = 0x2, 0x81, "Unrecovered Read Error";
        GUARD_CHECK_ERROR = 0x2, 0x82, "End-to-end Guard Check Error";
        APPLICATION_TAG_CHECK_ERROR = 0x2, 0x83, "End-to-end Application Tag Check Error";
        REFERENCE_TAG_CHECK_ERROR = 0x2, 0x84, "End-to-end Reference Tag Check Error";
        COMPARE_FAILURE = 0x2, 0x85, "Compare Failure";
        ACCESS_DENIED = 0x2, 0x86, "Access Denied";
        DEALLOCATED_OR_UNWRITTEN_BLOCK = 0x2, 0x87, "Deallocated or Unwritten Logical Block";
        STORAGE_TAG_CHECK_ERROR = 0x2, 0x88, "End-to-End Storage Tag Check Error";
    }
    // Path related status (SCT 3h), Base figure 99.
    {
        INTERNAL_PATH_ERROR = 0x3, 0x00, "Internal Path Error";
        ANA_PERSISTENT_LOSS = 0x3, 0x01, "Asymmetric Access Persistent Loss";
        ANA_INACCESSIBLE = 0x3, 0x02, "Asymmetric Access Inaccessible";
        ANA_TRANSITION = 0x3, 0x03, "Asymmetric Access Transition";
        CONTROLLER_PATHING_ERROR = 0x3, 0x60, "Controller Pathing Error";
        HOST_PATHING_ERROR = 0x3, 0x70, "Host Pathing Error";
        ABORTED_BY_HOST = 0x3, 0x71, "Command Aborted By Host";
    }
}

codes! {
    FABRICS_NAMES:
    // Fabrics commands (SCT 1h), Base figure 97. They share numbers with those of the NVM command
    // set: what 180h means depends on the command that it answers.
    {
        CONNECT_INCOMPATIBLE_FORMAT = 0x1, 0x80, "Connect Incompatible Format";
        CONNECT_CONTROLLER_BUSY = 0x1, 0x81, "Connect Controller Busy";
        CONNECT_INVALID_PARAMETERS = 0x1, 0x82, "Connect Invalid Parameters";
        CONNECT_RESTART_DISCOVERY = 0x1, 0x83, "Connect Restart Discovery";
        CONNECT_INVALID_HOST = 0x1, 0x84, "Connect Invalid Host";
        INVALID_QUEUE_TYPE = 0x1, 0x85, "Invalid Queue Type";
        DISCOVER_RESTART = 0x1, 0x90, "Discover Restart";
        AUTHENTICATION_REQUIRED = 0x1, 0x91, "Authentication Required";
    }
}

impl StatusCode {
    /// The name in the specification, for any command except a Fabrics command.
    pub fn name(self) -> Option<&'static str> {
        find(NAMES, self.code()).or_else(|| find(FABRICS_NAMES, self.code()))
    }

    /// The name in the specification, for a Fabrics command.
    pub fn fabrics_name(self) -> Option<&'static str> {
        find(FABRICS_NAMES, self.code()).or_else(|| find(NAMES, self.code()))
    }
}

fn find(table: &[(StatusCode, &'static str)], code: StatusCode) -> Option<&'static str> {
    table
        .iter()
        .find(|(known, _)| *known == code)
        .map(|(_, name)| *name)
}

impl StatusCode {
    /// Formats the status as that of a Fabrics command, for which 180h to 185h have other names.
    pub const fn of_fabrics(self) -> FabricsStatus {
        FabricsStatus(self)
    }

    fn write(self, name: Option<&str>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (name, self.sct()) {
            (Some(name), _) => f.write_str(name)?,
            (None, sct::VENDOR) => f.write_str("Vendor Specific")?,
            (None, _) => f.write_str("Unknown Status")?,
        }
        write!(f, " (sct {:#x}, sc {:#04x}", self.sct(), self.sc())?;
        if self.crd() != 0 {
            write!(f, ", retry delay {}", self.crd())?;
        }
        if self.dnr() {
            f.write_str(", do not retry")?;
        }
        f.write_str(")")
    }
}

/// Formats the status of a Fabrics command; see [`StatusCode::of_fabrics`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FabricsStatus(StatusCode);

/// `LBA Out of Range (sct 0x0, sc 0x80, do not retry)`.
impl fmt::Display for StatusCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write(self.name(), f)
    }
}

/// `Connect Controller Busy (sct 0x1, sc 0x81)`.
impl fmt::Display for FabricsStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.write(self.0.fabrics_name(), f)
    }
}

impl fmt::Debug for StatusCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StatusCode({self})")
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Numbers as they appear in the specification (and in Linux's log lines: SCT and SC in one).
    #[test]
    fn numbers() {
        for (status, field) in [
            (StatusCode::SUCCESS, 0x000),
            (StatusCode::INVALID_FIELD.with_dnr(), 0x4002),
            (StatusCode::LBA_OUT_OF_RANGE, 0x080),
            (StatusCode::CONNECT_INVALID_PARAMETERS.with_dnr(), 0x4182),
            (StatusCode::CONNECT_INVALID_HOST, 0x184),
            (StatusCode::COMPARE_FAILURE, 0x285),
            (StatusCode::ANA_INACCESSIBLE, 0x302),
            (StatusCode::HOST_PATHING_ERROR, 0x370),
            (StatusCode::COMMAND_INTERRUPTED.with_crd(1), 0x0821),
            (StatusCode::INTERNAL_ERROR.with_more(), 0x2006),
        ] {
            assert_eq!(status.field(), field, "{status}");
        }
    }

    #[test]
    fn display() {
        for (status, text) in [
            (
                StatusCode::SUCCESS,
                "Successful Completion (sct 0x0, sc 0x00)",
            ),
            (
                StatusCode::LBA_OUT_OF_RANGE.with_dnr(),
                "LBA Out of Range (sct 0x0, sc 0x80, do not retry)",
            ),
            (
                StatusCode::COMMAND_INTERRUPTED.with_crd(2),
                "Command Interrupted (sct 0x0, sc 0x21, retry delay 2)",
            ),
            (StatusCode::new(7, 1), "Vendor Specific (sct 0x7, sc 0x01)"),
            (
                StatusCode::new(0, 0x7f),
                "Unknown Status (sct 0x0, sc 0x7f)",
            ),
        ] {
            assert_eq!(status.to_string(), text);
        }
    }

    /// 180h has one name for Fabrics commands and another for the others.
    #[test]
    fn fabrics_codes_share_numbers() {
        let status = StatusCode::CONNECT_INCOMPATIBLE_FORMAT;
        assert_eq!(status, StatusCode::CONFLICTING_ATTRIBUTES);
        assert_eq!(status.name(), Some("Conflicting Attributes"));
        assert_eq!(status.fabrics_name(), Some("Connect Incompatible Format"));
        for (status, plain, fabrics) in [
            (
                StatusCode::CONNECT_INCOMPATIBLE_FORMAT,
                "Conflicting Attributes (sct 0x1, sc 0x80)",
                "Connect Incompatible Format (sct 0x1, sc 0x80)",
            ),
            (
                StatusCode::CONNECT_CONTROLLER_BUSY,
                "Invalid Protection Information (sct 0x1, sc 0x81)",
                "Connect Controller Busy (sct 0x1, sc 0x81)",
            ),
            (
                StatusCode::CONNECT_INVALID_PARAMETERS.with_dnr(),
                "Attempted Write to Read Only Range (sct 0x1, sc 0x82, do not retry)",
                "Connect Invalid Parameters (sct 0x1, sc 0x82, do not retry)",
            ),
        ] {
            assert_eq!(status.to_string(), plain);
            assert_eq!(status.of_fabrics().to_string(), fabrics);
        }
        // What only one of the two has is called the same in both.
        let busy = StatusCode::COMMAND_INTERRUPTED;
        assert_eq!(busy.of_fabrics().to_string(), busy.to_string());
        assert_eq!(
            StatusCode::AUTHENTICATION_REQUIRED.name(),
            Some("Authentication Required")
        );
    }

    /// No number is listed twice in a table.
    #[test]
    fn codes_are_distinct() {
        for table in [NAMES, FABRICS_NAMES] {
            let mut codes: Vec<_> = table.iter().map(|(code, _)| *code).collect();
            codes.sort_unstable();
            codes.dedup();
            assert_eq!(codes.len(), table.len());
        }
    }

    proptest! {
        #[test]
        fn parts_make_the_whole(field in 0u16..1 << 15) {
            let status = StatusCode::from_field(field);
            let mut again = StatusCode::new(status.sct(), status.sc()).with_crd(status.crd());
            if status.more() { again = again.with_more(); }
            if status.dnr() { again = again.with_dnr(); }
            prop_assert_eq!(again, status);
            prop_assert!(!status.to_string().is_empty());
        }
    }
}
