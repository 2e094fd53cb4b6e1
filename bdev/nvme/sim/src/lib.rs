//! A simulated NVMe controller, in process, for the tests of the driver.
