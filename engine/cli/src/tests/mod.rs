//! Tests of the command line as a whole: its own consistency, and the documents that show it.

mod documents;

#[test]
fn the_command_line_is_consistent() {
    super::command().debug_assert();
}

/// Goal: `--help` explains each argument.
#[test]
fn every_argument_has_help() {
    fn walk(command: &clap::Command, missing: &mut Vec<String>) {
        for argument in command.get_arguments() {
            let is_explained = argument
                .get_help()
                .or_else(|| argument.get_long_help())
                .is_some();
            // Their heading explains them all.
            let has_no_effect = argument
                .get_help_heading()
                .is_some_and(|heading| heading.ends_with("without effect"));
            if !is_explained && !has_no_effect {
                missing.push(format!("{} {}", command.get_name(), argument.get_id()));
            }
        }
        for subcommand in command.get_subcommands() {
            walk(subcommand, missing);
        }
    }
    let mut missing = Vec::new();
    walk(&super::command(), &mut missing);
    assert_eq!(missing, Vec::<String>::new());
}
