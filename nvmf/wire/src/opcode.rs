//! Opcodes (Base 5, 6, 7) and the direction of data transfer that each implies.
//!
//! Opcodes are plain numbers here, because the meaning of one depends on the queue (admin or I/O)
//! on which the command arrived.

/// Declares opcodes of one kind, with the names that messages and metrics show.
macro_rules! opcodes {
    ($(#[$doc:meta])* pub mod $module:ident { $($name:ident = $value:literal, $text:literal;)* }) => {
        $(#[$doc])*
        pub mod $module {
            $(pub const $name: u8 = $value;)*

            /// Every opcode named here.
            pub const ALL: &[u8] = &[$($name),*];

            /// The specification's name of an opcode, or `None` for one that it does not define.
            pub fn name(opcode: u8) -> Option<&'static str> {
                match opcode {
                    $($name => Some($text),)*
                    _ => None,
                }
            }
        }
    };
}

opcodes! {
    /// Admin commands (Base 5).
    pub mod admin {
        DELETE_IO_SQ = 0x00, "Delete I/O Submission Queue";
        CREATE_IO_SQ = 0x01, "Create I/O Submission Queue";
        GET_LOG_PAGE = 0x02, "Get Log Page";
        DELETE_IO_CQ = 0x04, "Delete I/O Completion Queue";
        CREATE_IO_CQ = 0x05, "Create I/O Completion Queue";
        IDENTIFY = 0x06, "Identify";
        ABORT = 0x08, "Abort";
        SET_FEATURES = 0x09, "Set Features";
        GET_FEATURES = 0x0a, "Get Features";
        ASYNC_EVENT_REQUEST = 0x0c, "Asynchronous Event Request";
        NAMESPACE_MANAGEMENT = 0x0d, "Namespace Management";
        FIRMWARE_COMMIT = 0x10, "Firmware Commit";
        FIRMWARE_IMAGE_DOWNLOAD = 0x11, "Firmware Image Download";
        DEVICE_SELF_TEST = 0x14, "Device Self-test";
        NAMESPACE_ATTACHMENT = 0x15, "Namespace Attachment";
        KEEP_ALIVE = 0x18, "Keep Alive";
        DIRECTIVE_SEND = 0x19, "Directive Send";
        DIRECTIVE_RECEIVE = 0x1a, "Directive Receive";
        VIRTUALIZATION_MANAGEMENT = 0x1c, "Virtualization Management";
        NVME_MI_SEND = 0x1d, "NVMe-MI Send";
        NVME_MI_RECEIVE = 0x1e, "NVMe-MI Receive";
        CAPACITY_MANAGEMENT = 0x20, "Capacity Management";
        LOCKDOWN = 0x24, "Lockdown";
        DOORBELL_BUFFER_CONFIG = 0x7c, "Doorbell Buffer Config";
        FABRICS = 0x7f, "Fabrics";
        FORMAT_NVM = 0x80, "Format NVM";
        SECURITY_SEND = 0x81, "Security Send";
        SECURITY_RECEIVE = 0x82, "Security Receive";
        SANITIZE = 0x84, "Sanitize";
        GET_LBA_STATUS = 0x86, "Get LBA Status";
    }
}

opcodes! {
    /// I/O commands of the NVM command set (NVM 3) and those common to all sets (Base 7).
    pub mod io {
        FLUSH = 0x00, "Flush";
        WRITE = 0x01, "Write";
        READ = 0x02, "Read";
        WRITE_UNCORRECTABLE = 0x04, "Write Uncorrectable";
        COMPARE = 0x05, "Compare";
        WRITE_ZEROES = 0x08, "Write Zeroes";
        DATASET_MANAGEMENT = 0x09, "Dataset Management";
        VERIFY = 0x0c, "Verify";
        RESERVATION_REGISTER = 0x0d, "Reservation Register";
        RESERVATION_REPORT = 0x0e, "Reservation Report";
        RESERVATION_ACQUIRE = 0x11, "Reservation Acquire";
        RESERVATION_RELEASE = 0x15, "Reservation Release";
        CANCEL = 0x18, "Cancel";
        COPY = 0x19, "Copy";
        FABRICS = 0x7f, "Fabrics";
    }
}

opcodes! {
    /// Fabrics command types: byte 4 of a command whose opcode is [`FABRICS`] (Base 6).
    pub mod fabrics {
        PROPERTY_SET = 0x00, "Property Set";
        CONNECT = 0x01, "Connect";
        PROPERTY_GET = 0x04, "Property Get";
        AUTHENTICATION_SEND = 0x05, "Authentication Send";
        AUTHENTICATION_RECEIVE = 0x06, "Authentication Receive";
        DISCONNECT = 0x08, "Disconnect";
    }
}

/// The opcode of every fabrics command, on any queue; the command type says which one it is.
pub const FABRICS: u8 = 0x7f;

/// The direction of a command's data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DataTransfer {
    None,
    HostToController,
    ControllerToHost,
    Bidirectional,
}

/// The direction encoded in bits 1:0 of an opcode, or of a fabrics command type (Base 3.3.3.1).
///
/// A command may transfer no data in spite of it: Set Features has data for some features only.
pub const fn data_transfer(opcode: u8) -> DataTransfer {
    match opcode & 0b11 {
        0 => DataTransfer::None,
        1 => DataTransfer::HostToController,
        2 => DataTransfer::ControllerToHost,
        _ => DataTransfer::Bidirectional,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The opcode's direction bits agree with the known direction of common commands.
    #[test]
    fn direction_is_in_the_low_bits() {
        use DataTransfer::*;
        for (opcode, direction) in [
            (io::FLUSH, None),
            (io::READ, ControllerToHost),
            (io::WRITE, HostToController),
            (io::COMPARE, HostToController),
            (io::DATASET_MANAGEMENT, HostToController),
            (io::WRITE_ZEROES, None),
            (io::COPY, HostToController),
            (admin::IDENTIFY, ControllerToHost),
            (admin::GET_LOG_PAGE, ControllerToHost),
            (admin::SET_FEATURES, HostToController),
            (admin::KEEP_ALIVE, None),
            (admin::ASYNC_EVENT_REQUEST, None),
            (fabrics::CONNECT, HostToController),
            (fabrics::PROPERTY_GET, None),
            (fabrics::AUTHENTICATION_RECEIVE, ControllerToHost),
        ] {
            assert_eq!(data_transfer(opcode), direction, "{opcode:#04x}");
        }
    }

    /// Each list names each of its opcodes once.
    #[test]
    fn names_are_distinct() {
        for (all, name) in [
            (admin::ALL, admin::name as fn(u8) -> Option<&'static str>),
            (io::ALL, io::name),
            (fabrics::ALL, fabrics::name),
        ] {
            let mut names: Vec<_> = all.iter().map(|&opcode| name(opcode).unwrap()).collect();
            names.sort_unstable();
            names.dedup();
            assert_eq!(names.len(), all.len());
        }
        assert_eq!(io::name(0xff), None);
    }
}
