//! Links the program of debug builds at a fixed address.
//!
//! An executable that can move has a quarter of a million addresses to adjust whenever it starts.
//! The tests start `nacre` thousands of times, and in an emulated machine each start then takes
//! 50 ms more.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let is = |key: &str, value: &str| std::env::var(key).is_ok_and(|it| it == value);
    if is("PROFILE", "debug") && is("CARGO_CFG_TARGET_ENV", "gnu") {
        println!("cargo::rustc-link-arg-bin=nacre=-no-pie");
    }
}
