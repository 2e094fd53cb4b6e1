//! `nacre web`: the administration page, its accounts, and the API tokens of programs. Passwords
//! come from the terminal or from standard input, never from the command line, which other users
//! can read.

use std::io::{BufRead, IsTerminal, Write};
use std::time::{Duration, UNIX_EPOCH};

use clap::{Args, Subcommand};
use ratatui::crossterm::event::{Event, KeyCode, KeyEventKind, KeyModifiers, read};
use ratatui::crossterm::terminal::{disable_raw_mode, enable_raw_mode};
use serde_json::Value;
use zeroize::Zeroizing;

use super::reply::items;
use super::{Connection, Failure, output};
use nacre_engine::methods::web::{
    AddAccount, AddAccountParams, ChangeAccount, ChangeAccountParams, CreateToken,
    CreateTokenParams, DeleteToken, DeleteTokenParams, GetStatus, ListAccounts, ListTokens,
    RemoveAccount, RemoveAccountParams,
};
use nacre_engine_rpc::Role;
use nacre_engine_rpc::method::NoParams;

/// Most bytes of a password.
const MAX_BYTES: u64 = 1024;

#[derive(Debug, Args)]
#[command(mut_args = |arg| arg.global(true))]
pub(crate) struct WebArgs {
    #[command(flatten)]
    connection: Connection,
    #[command(subcommand)]
    command: WebCommand,
}

#[derive(Debug, Subcommand)]
enum WebCommand {
    /// Show the page's addresses, the certificate's fingerprint and the set-up code
    Status,
    /// Accounts of the page
    Account {
        #[command(subcommand)]
        command: AccountCommand,
    },
    /// API tokens of programs, which call over the page's listeners
    Token {
        #[command(subcommand)]
        command: TokenCommand,
    },
}

#[derive(Debug, Subcommand)]
enum TokenCommand {
    /// List the tokens
    #[command(visible_alias = "ls")]
    List,
    /// Make a token and print its secret, which is shown once
    #[command(after_help = "Example: nacre web token create monitor --role viewer --valid-for 90d")]
    Create {
        /// Name of the token
        name: String,
        /// What the program may do
        #[arg(long, value_enum)]
        role: Role,
        /// End of the token, from now; without it: until it is deleted
        #[arg(long, value_name = "TIME", value_parser = nacre_engine_values::time::whole_seconds)]
        valid_for: Option<Duration>,
    },
    /// Delete a token: its next request is refused
    #[command(visible_alias = "rm")]
    Delete {
        /// Name of the token
        name: String,
    },
}

#[derive(Debug, Subcommand)]
enum AccountCommand {
    /// List the accounts
    #[command(visible_alias = "ls")]
    List,
    /// Make an account; its password is asked for, or read from standard input
    #[command(after_help = "Example: nacre web account add ann --role admin")]
    Add {
        /// Name of the account
        name: String,
        /// What the account may do
        #[arg(long, value_enum)]
        role: Role,
    },
    /// Change the role or the password of an account; its sessions end
    #[command(group = clap::ArgGroup::new("what").required(true).multiple(true))]
    Change {
        /// Name of the account
        name: String,
        /// What the account may do from now on
        #[arg(long, value_enum, group = "what")]
        role: Option<Role>,
        /// Ask for a new password, or read it from standard input
        #[arg(long, group = "what")]
        password: bool,
    },
    /// Remove an account; its sessions end
    #[command(visible_alias = "rm")]
    Remove {
        /// Name of the account
        name: String,
    },
}

pub(crate) fn run(args: WebArgs) -> Result<(), Failure> {
    let connection = &args.connection;
    match args.command {
        WebCommand::Status => status(connection),
        WebCommand::Token { command } => token(connection, command),
        WebCommand::Account { command } => match command {
            AccountCommand::List => list(connection),
            AccountCommand::Add { name, role } => {
                let password = new_password(&name)?;
                let done = format!("added {name}");
                let params = AddAccountParams {
                    name,
                    role,
                    password: password.into(),
                };
                let answer = connection.call_for_json::<AddAccount>(&params)?;
                finish(connection, &answer, &done)
            }
            AccountCommand::Change {
                name,
                role,
                password,
            } => {
                let password = password.then(|| new_password(&name)).transpose()?;
                let done = format!("changed {name}");
                let params = ChangeAccountParams {
                    name,
                    role,
                    password: password.map(Into::into),
                };
                let answer = connection.call_for_json::<ChangeAccount>(&params)?;
                finish(connection, &answer, &done)
            }
            AccountCommand::Remove { name } => {
                let done = format!("removed {name}");
                let params = RemoveAccountParams { name };
                let answer = connection.call_for_json::<RemoveAccount>(&params)?;
                finish(connection, &answer, &done)
            }
        },
    }
}

fn token(connection: &Connection, command: TokenCommand) -> Result<(), Failure> {
    match command {
        TokenCommand::List => {
            let answer = connection.call_for_json::<ListTokens>(&NoParams {})?;
            if connection.json {
                return output::json(&answer);
            }
            let rows = items(&answer).iter().map(|token| {
                vec![
                    token["name"].as_str().unwrap_or_default().to_owned(),
                    token["role"].as_str().unwrap_or_default().to_owned(),
                    date(&token["created_ms"]).unwrap_or_default(),
                    date(&token["expires_ms"]).unwrap_or_else(|| "never".into()),
                ]
            });
            output::table(&["NAME", "ROLE", "CREATED", "EXPIRES"], rows)
        }
        TokenCommand::Create {
            name,
            role,
            valid_for,
        } => {
            let params = CreateTokenParams {
                name,
                role,
                validity_s: valid_for.map(|time| time.as_secs()),
            };
            let answer = connection.call_for_json::<CreateToken>(&params)?;
            if connection.json {
                return output::json(&answer);
            }
            output::line(answer["token"].as_str().unwrap_or_default())
        }
        TokenCommand::Delete { name } => {
            let done = format!("deleted {name}");
            let params = DeleteTokenParams { name };
            let answer = connection.call_for_json::<DeleteToken>(&params)?;
            finish(connection, &answer, &done)
        }
    }
}

/// A time in milliseconds since 1970, as text. `None`: there is none.
pub(crate) fn date(ms: &Value) -> Option<String> {
    let time = UNIX_EPOCH.checked_add(Duration::from_millis(ms.as_u64()?))?;
    Some(humantime::format_rfc3339_seconds(time).to_string())
}

fn finish(connection: &Connection, answer: &Value, done: &str) -> Result<(), Failure> {
    if connection.json {
        return output::json(answer);
    }
    output::line(done)
}

fn status(connection: &Connection) -> Result<(), Failure> {
    let status = connection.call_for_json::<GetStatus>(&NoParams {})?;
    if connection.json {
        return output::json(&status);
    }
    let listen = items(&status["listen"]);
    if listen.is_empty() {
        return output::line("the page is off: set [web] listen in the configuration, and restart");
    }
    for address in listen.iter().filter_map(Value::as_str) {
        output::line(&format!("address      {address}"))?;
    }
    if let Some(fingerprint) = status["fingerprint"].as_str() {
        output::line(&format!("certificate  {fingerprint}"))?;
    }
    match status["setup_code"].as_str() {
        Some(code) => output::line(&format!("set-up code  {code}")),
        None if status["setup"] == true => {
            output::line("set-up code  shown to an admin of the daemon's machine only")
        }
        None => Ok(()),
    }
}

fn list(connection: &Connection) -> Result<(), Failure> {
    let answer = connection.call_for_json::<ListAccounts>(&NoParams {})?;
    if connection.json {
        return output::json(&answer);
    }
    let rows = items(&answer).iter().map(|account| {
        vec![
            account["name"].as_str().unwrap_or_default().to_owned(),
            account["role"].as_str().unwrap_or_default().to_owned(),
            date(&account["created_ms"]).unwrap_or_default(),
        ]
    });
    output::table(&["NAME", "ROLE", "CREATED"], rows)
}

/// A new password: asked for twice at a terminal, else the first line of standard input.
fn new_password(name: &str) -> Result<Zeroizing<String>, Failure> {
    if !std::io::stdin().is_terminal() {
        return first_line(std::io::stdin().lock());
    }
    let password = ask(&format!("new password of {name}: "))?;
    let again = ask("the same again: ")?;
    if *password != *again {
        return Err(Failure::Usage("the two passwords differ".into()));
    }
    Ok(password)
}

fn first_line(input: impl BufRead) -> Result<Zeroizing<String>, Failure> {
    let mut line = Zeroizing::new(String::new());
    input.take(MAX_BYTES).read_line(&mut line)?;
    let length = line.trim_end_matches(['\r', '\n']).len();
    line.truncate(length);
    if line.is_empty() {
        let cause = "standard input has no password: its first line is empty";
        return Err(Failure::Usage(cause.into()));
    }
    Ok(line)
}

/// Asks at the terminal, which does not show the answer.
fn ask(prompt: &str) -> Result<Zeroizing<String>, Failure> {
    let mut terminal = std::io::stderr();
    write!(terminal, "{prompt}")?;
    terminal.flush()?;
    enable_raw_mode()?;
    let typed = typed();
    disable_raw_mode()?;
    writeln!(terminal)?;
    typed
}

fn typed() -> Result<Zeroizing<String>, Failure> {
    let mut typed = Zeroizing::new(String::with_capacity(MAX_BYTES as usize));
    loop {
        let Event::Key(key) = read()? else { continue };
        if key.kind == KeyEventKind::Release {
            continue;
        }
        match key.code {
            KeyCode::Enter => return Ok(typed),
            KeyCode::Backspace => drop(typed.pop()),
            KeyCode::Char('c' | 'd') if key.modifiers.contains(KeyModifiers::CONTROL) => {
                return Err(Failure::Usage("no password was given".into()));
            }
            KeyCode::Char(letter) if typed.len() < MAX_BYTES as usize - 4 => typed.push(letter),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_is_one_line() {
        for (input, line) in [
            ("abc\r\nmore", Some("abc")),
            (" a b ", Some(" a b ")),
            ("\n", None),
            ("", None),
        ] {
            let read = first_line(input.as_bytes());
            assert_eq!(
                read.ok().map(|text| text.to_string()).as_deref(),
                line,
                "{input:?}"
            );
        }
    }
}
