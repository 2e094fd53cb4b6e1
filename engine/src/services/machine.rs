//! Facts of the machine for several services.

use nacre_engine_appliance::place::Places;
use nacre_engine_appliance::status;

/// The machine's host name. Reads two small files.
pub fn host_name() -> String {
    let name = status::host_name(&Places::system());
    if !name.is_empty() {
        return name;
    }
    // A container without /proc.
    let kernel = rustix::system::uname();
    kernel.nodename().to_string_lossy().into_owned()
}
