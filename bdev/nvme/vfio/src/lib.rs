//! NVMe drives through VFIO.
