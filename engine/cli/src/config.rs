//! `nacre config`: checks a file without starting, shows the effective settings, exports the
//! running configuration.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use serde_json::Value;

use super::{Connection, Failure, output};
use nacre_engine::config::source::variable;
use nacre_engine::config::{self, ConfigError};
use nacre_engine::methods::state::ExportConfig;
use nacre_engine_rpc::NoParams;

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, arg_required_else_help = true)]
pub(crate) struct ConfigArgs {
    #[command(subcommand)]
    command: Option<ConfigCommand>,
    /// Print the reference of all keys, in Markdown
    #[arg(long)]
    reference: bool,
}

#[derive(Debug, Subcommand)]
enum ConfigCommand {
    /// Check a configuration file and report its errors
    Check {
        /// The file: TOML
        file: PathBuf,
        /// Check it also against this machine: cores, memory, interfaces, addresses, RDMA devices
        /// and files
        #[arg(long)]
        here: bool,
        /// Print the problems as JSON
        #[arg(long)]
        json: bool,
    },
    /// Show every setting as `nacre serve` would use it here, and its source
    Show {
        /// The configuration file; the system's unless given
        #[arg(short = 'c', long, value_name = "FILE", env = "NACRE_CONFIG")]
        config: Option<PathBuf>,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Print the running daemon's whole configuration as a file for `nacre serve -c`
    Export {
        /// Write a file for SPDK's own target; lists the entries that it leaves out
        #[arg(long)]
        spdk: bool,
        #[command(flatten)]
        connection: Connection,
    },
    /// Print the sample configuration, with every key explained
    Sample,
}

pub(crate) fn run(args: ConfigArgs) -> Result<(), Failure> {
    let Some(command) = args.command else {
        return output::line(config::reference::markdown().trim_end());
    };
    match command {
        ConfigCommand::Check { file, here, json } => {
            // Only the file: the environment here is not the daemon's.
            let problems = match config::load(Some(&file), [], &[]) {
                Err(ConfigError { problems }) => problems,
                Ok(loaded) if here => nacre_engine::daemon::machine_check::check(&loaded),
                Ok(_) => Vec::new(),
            };
            if json {
                output::json(&serde_json::json!({ "problems": problems }))?;
            }
            match problems.is_empty() {
                true if json => Ok(()),
                true => output::line(&format!("{}: good", file.display())),
                false if json => Err(Failure::Failed(anyhow::anyhow!(
                    "{}",
                    output::count(problems.len() as u64, "problem")
                ))),
                false => Err(Failure::Failed(ConfigError { problems }.into())),
            }
        }
        ConfigCommand::Show { config, json } => {
            let file = config.or_else(config::system_file);
            let loaded = config::load(file.as_deref(), std::env::vars_os(), &[])
                .map_err(anyhow::Error::from)?;
            let mut rows = Vec::new();
            let value = serde_json::to_value(&loaded.settings).expect("settings are plain data");
            flatten("", &value, &mut rows);
            let origin = |key: &str| {
                loaded
                    .origins
                    .get(key)
                    .cloned()
                    .unwrap_or_else(|| "default".into())
            };
            if json {
                let object = |(key, value): &(String, Value)| {
                    (
                        key.clone(),
                        serde_json::json!({ "value": value, "origin": origin(key), "variable": variable(key) }),
                    )
                };
                return output::json(
                    &rows
                        .iter()
                        .map(object)
                        .collect::<serde_json::Map<_, _>>()
                        .into(),
                );
            }
            let row =
                |(key, value): &(String, Value)| vec![key.clone(), value.to_string(), origin(key)];
            output::table(&["key", "value", "origin"], rows.iter().map(row))
        }
        ConfigCommand::Export { spdk, connection } => {
            let whole = connection.call_for_json::<ExportConfig>(&NoParams {})?;
            if !spdk {
                return output::json(&whole);
            }
            let (config, left_out) = nacre_engine::methods::spdk::export::for_spdk(&whole);
            for what in left_out {
                eprintln!("left out: {what}");
            }
            output::json(&config)
        }
        ConfigCommand::Sample => output::line(config::reference::SAMPLE.trim_end()),
    }
}

fn flatten(path: &str, value: &Value, out: &mut Vec<(String, Value)>) {
    match value.as_object() {
        Some(table) => {
            for (key, value) in table {
                flatten(
                    &if path.is_empty() {
                        key.clone()
                    } else {
                        format!("{path}.{key}")
                    },
                    value,
                    out,
                );
            }
        }
        None => out.push((path.to_owned(), value.clone())),
    }
}
