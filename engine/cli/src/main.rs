//! The program `nacre`: the daemon and its command line.

#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    nacre_engine_cli::main()
}
