//! `nacre rpc`: calls any RPC method, with parameters as JSON or as `key=value`.

use clap::Args;
use serde_json::{Map, Value};

use super::{Connection, Failure, output};
use nacre_engine::methods::reference::is_text;
use nacre_engine_rpc::client::ClientError;

#[derive(Debug, Args)]
#[command(
    after_help = "Parameters: one JSON object, or key=value pairs. A value is read as JSON if it is JSON\nand as text otherwise, and as text where the method wants text; dots make objects:\nlisten_address.trsvcid=4420.\n\nExample: nacre rpc bdev_malloc_create name=ram0 num_blocks=131072 block_size=512"
)]
pub(crate) struct RpcArgs {
    #[command(flatten)]
    connection: Connection,
    /// Print the reference of all methods, in Markdown
    #[arg(long, conflicts_with_all = ["method", "params"])]
    reference: bool,
    /// The method; `rpc_get_methods` lists them
    #[arg(required_unless_present = "reference")]
    method: Option<String>,
    /// JSON, or key=value …
    params: Vec<String>,
}

pub(crate) fn run(args: RpcArgs) -> Result<(), Failure> {
    if args.reference {
        return output::line(nacre_engine::methods::reference::markdown().trim_end());
    }
    let method = args.method.as_deref().unwrap_or_default();
    let params = parse_params(method, &args.params)?;
    // Users of methods read the daemon's own words.
    let answer = args.connection.call_by_name(method, params);
    let answer = answer.map_err(|failure| match failure {
        Failure::Daemon(error @ ClientError::Refused { .. }) => Failure::Exit {
            code: 4,
            error: error.into(),
        },
        other => other,
    });
    output::json(&answer?)
}

/// Reads the parameters of a call.
fn parse_params(method: &str, words: &[String]) -> Result<Value, Failure> {
    if let [only] = words
        && only.trim_start().starts_with(['{', '['])
    {
        return serde_json::from_str(only)
            .map_err(|e| Failure::Usage(format!("the parameters are not JSON: {e}")));
    }
    let mut params = Map::new();
    for word in words {
        let (key, text) = word
            .split_once('=')
            .ok_or_else(|| Failure::Usage(format!("\"{word}\" is neither JSON nor key=value")))?;
        let value = match value(text) {
            // A port, or a name of digits only.
            Value::Number(_) | Value::Bool(_) if is_text(method, key) => text.into(),
            value => value,
        };
        insert(&mut params, key, value)
            .map_err(|()| Failure::Usage(format!("\"{key}\" is given twice")))?;
    }
    Ok(if params.is_empty() {
        Value::Null
    } else {
        Value::Object(params)
    })
}

/// Numbers, booleans, null, arrays and objects as JSON; anything else as text.
fn value(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|_| Value::String(text.to_owned()))
}

fn insert(into: &mut Map<String, Value>, key: &str, value: Value) -> Result<(), ()> {
    match key.split_once('.') {
        None => match into.insert(key.to_owned(), value) {
            None => Ok(()),
            Some(_) => Err(()),
        },
        Some((head, rest)) => {
            let inner = into
                .entry(head.to_owned())
                .or_insert_with(|| Value::Object(Map::new()));
            insert(inner.as_object_mut().ok_or(())?, rest, value)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn parse(words: &[&str]) -> Result<Value, Failure> {
        parse_for("unheard_of", words)
    }

    fn parse_for(method: &str, words: &[&str]) -> Result<Value, Failure> {
        let words: Vec<String> = words.iter().map(|w| (*w).to_owned()).collect();
        parse_params(method, &words)
    }

    /// A port is text in SPDK's dialect, and a name may be a number: neither needs double quotes.
    #[test]
    fn text_stays_text_where_the_method_wants_it() {
        assert_eq!(
            parse_for(
                "nvmf_subsystem_add_listener",
                &[
                    "nqn=n",
                    "listen_address.trsvcid=4420",
                    "secure_channel=false",
                    "options.tos=8"
                ]
            )
            .unwrap(),
            json!({ "nqn": "n", "listen_address": { "trsvcid": "4420" }, "secure_channel": false, "options": { "tos": 8 } })
        );
        assert_eq!(
            parse_for(
                "bdev_malloc_create",
                &["name=7", "num_blocks=7", "uuid=null"]
            )
            .unwrap(),
            json!({ "name": "7", "num_blocks": 7, "uuid": null })
        );
        assert_eq!(
            parse_for("bdev_null_delete", &["name=\"7\""]).unwrap(),
            json!({ "name": "7" })
        );
    }

    #[test]
    fn parameters_in_both_spellings() {
        assert_eq!(parse(&[]).unwrap(), Value::Null);
        assert_eq!(parse(&[r#"{"a": 1}"#]).unwrap(), json!({ "a": 1 }));
        assert_eq!(
            parse(&[
                "name=ram0",
                "n=3",
                "on=true",
                "list=[1]",
                "uuid=1-2",
                "a.b=x",
                "a.c=4420"
            ])
            .unwrap(),
            json!({ "name": "ram0", "n": 3, "on": true, "list": [1], "uuid": "1-2", "a": { "b": "x", "c": 4420 } })
        );
        assert_eq!(
            parse(&["trsvcid=\"4420\""]).unwrap(),
            json!({ "trsvcid": "4420" })
        );
        for bad in [&["x"][..], &["{"], &["a=1", "a=2"], &["a=1", "a.b=2"]] {
            assert!(matches!(parse(bad), Err(Failure::Usage(_))), "{bad:?}");
        }
    }
}
