//! `nacre state`: the configured objects, where they are stored, and restore failures.

use clap::{Args, Subcommand};
use serde_json::{Value, json};

use super::{Connection, Failure, output};

#[derive(Debug, Args)]
pub struct StateArgs {
    #[command(flatten)]
    connection: Connection,
    #[command(subcommand)]
    command: Option<StateCommand>,
}

#[derive(Debug, Subcommand)]
enum StateCommand {
    /// List every configured object (the default)
    List,
    /// Retry now to restore objects that could not be restored
    Retry,
    /// Forget an object that could not be restored
    Forget {
        /// Key of the object, as `nacre state` lists it
        key: String,
    },
}

pub fn run(args: StateArgs) -> Result<(), Failure> {
    let connection = args.connection;
    match args.command.unwrap_or(StateCommand::List) {
        StateCommand::List => {
            let state = connection.call("state_get", Value::Null)?;
            if connection.json {
                return output::json(&state);
            }
            let kept = state["store"]
                .as_str()
                .map_or("nowhere: the state ends with the daemon".into(), |s| {
                    format!("in {s}")
                });
            output::line(&format!("kept {kept}\n"))?;
            output::columns(
                &state["objects"],
                &[
                    ("object", "/key"),
                    ("state", "/state"),
                    ("kept in", "/kept_in"),
                    ("error", "/error"),
                ],
            )
        }
        StateCommand::Retry => {
            let answer = connection.call("state_retry", Value::Null)?;
            if connection.json {
                return output::json(&answer);
            }
            output::line(&format!(
                "{} restored, {} failed",
                answer["restored"], answer["failed"]
            ))
        }
        StateCommand::Forget { key } => {
            let answer = connection.call("state_forget", json!({ "key": key }))?;
            if connection.json {
                output::json(&answer)
            } else {
                Ok(())
            }
        }
    }
}
