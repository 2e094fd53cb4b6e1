//! `nacre completions`: a completion script for a shell.

use clap::Args;

use super::{Failure, output};

#[derive(Debug, Args)]
#[command(after_help = "Example: nacre completions bash > /etc/bash_completion.d/nacre")]
pub(crate) struct CompletionsArgs {
    /// Shell whose completions are printed
    shell: clap_complete::Shell,
}

pub(crate) fn run(args: CompletionsArgs) -> Result<(), Failure> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut super::command(), "nacre", &mut script);
    output::line(String::from_utf8_lossy(&script).trim_end())
}
