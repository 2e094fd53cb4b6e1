//! `nacre state`: the configured objects, where they are stored, and restore failures.

use clap::{Args, Subcommand};

use super::{Connection, Failure, output};
use nacre_engine::methods::state::{Forget, ForgetParams, GetState, Retry};
use nacre_engine_rpc::NoParams;

#[derive(Debug, Args)]
pub(crate) struct StateArgs {
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

pub(crate) fn run(args: StateArgs) -> Result<(), Failure> {
    let connection = args.connection;
    match args.command.unwrap_or(StateCommand::List) {
        StateCommand::List => {
            let state = connection.call_for_json::<GetState>(&NoParams {})?;
            if connection.json {
                return output::json(&state);
            }
            let kept = state["store"].as_str().map_or_else(
                || "nowhere: the state ends with the daemon".into(),
                |s| format!("in {s}"),
            );
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
            let answer = connection.call_for_json::<Retry>(&NoParams {})?;
            if connection.json {
                return output::json(&answer);
            }
            output::line(&format!(
                "{} restored, {} failed",
                answer["restored"], answer["failed"]
            ))
        }
        StateCommand::Forget { key } => {
            let answer = connection.call_for_json::<Forget>(&ForgetParams { key })?;
            if connection.json {
                output::json(&answer)
            } else {
                Ok(())
            }
        }
    }
}
