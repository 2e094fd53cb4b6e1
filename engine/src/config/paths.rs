//! Makes the paths of the settings absolute. Paths in the file are relative to the file's
//! directory. Paths in the environment and in flags are relative to the working directory.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::{Problem, Settings, origin_of};

/// Resolves all paths. `file` is the name of the configuration file, if there is one.
pub(super) fn make_absolute(
    settings: &mut Settings,
    origins: &BTreeMap<String, String>,
    file: Option<&str>,
) -> Vec<Problem> {
    let resolver = Resolver { origins, file };
    let mut problems = Vec::new();
    let mut note = |outcome: Result<(), Problem>| problems.extend(outcome.err());
    if settings.rpc.socket != "auto" {
        note(resolver.text("rpc.socket", &mut settings.rpc.socket));
    }
    if !["auto", "none"].contains(&settings.data.dir.as_str()) {
        note(resolver.text("data.dir", &mut settings.data.dir));
    }
    if !["auto", "none"].contains(&settings.rpc.audit.file.as_str()) {
        note(resolver.text("rpc.audit.file", &mut settings.rpc.audit.file));
    }
    if let Some(path) = &mut settings.log.file {
        note(resolver.path("log.file", path));
    }
    if let Some(path) = &mut settings.metrics.token_file {
        note(resolver.path("metrics.token_file", path));
    }
    let (rpc, metrics) = (&mut settings.rpc.tls, &mut settings.metrics.tls);
    let store = &mut settings.store;
    for (key, path) in [
        ("store.ca", &mut store.ca),
        ("store.cert", &mut store.cert),
        ("store.key", &mut store.key),
        ("store.password_file", &mut store.password_file),
        ("rpc.tls.cert", &mut rpc.cert),
        ("rpc.tls.key", &mut rpc.key),
        ("rpc.tls.client_ca", &mut rpc.client_ca),
        ("rpc.tls.client_crl", &mut rpc.client_crl),
        ("metrics.tls.cert", &mut metrics.cert),
        ("metrics.tls.key", &mut metrics.key),
        ("metrics.tls.client_ca", &mut metrics.client_ca),
        ("metrics.tls.client_crl", &mut metrics.client_crl),
        ("web.cert", &mut settings.web.cert),
        ("web.key", &mut settings.web.key),
    ] {
        if let Some(path) = path {
            note(resolver.path(key, path));
        }
    }
    for (at, webhook) in settings.alert.webhook.iter_mut().enumerate() {
        for (key, path) in [
            ("url_file", &mut webhook.url_file),
            ("secret_file", &mut webhook.secret_file),
            ("token_file", &mut webhook.token_file),
            ("ca", &mut webhook.ca),
        ] {
            if let Some(path) = path {
                note(resolver.path(&format!("alert.webhook[{at}].{key}"), path));
            }
        }
    }
    for (at, mail) in settings.alert.mail.iter_mut().enumerate() {
        for (key, path) in [
            ("password_file", &mut mail.password_file),
            ("ca", &mut mail.ca),
        ] {
            if let Some(path) = path {
                note(resolver.path(&format!("alert.mail[{at}].{key}"), path));
            }
        }
    }
    for (at, bdev) in settings.bdev.iter_mut().enumerate() {
        if let Some(path) = &mut bdev.path {
            note(resolver.path(&format!("bdev[{at}].path"), path));
        }
    }
    problems
}

struct Resolver<'a> {
    origins: &'a BTreeMap<String, String>,
    file: Option<&'a str>,
}

impl Resolver<'_> {
    fn text(&self, key: &str, text: &mut String) -> Result<(), Problem> {
        let mut path = PathBuf::from(&*text);
        self.path(key, &mut path)?;
        path.to_str().unwrap_or_default().clone_into(text);
        Ok(())
    }

    fn path(&self, key: &str, path: &mut PathBuf) -> Result<(), Problem> {
        let origin = origin_of(self.origins, key);
        let refuse = |cause: &str| {
            Err(Problem::new(&origin, key, format!("{key}: {cause}"))
                .remedy("write an absolute path"))
        };
        if path.as_os_str().is_empty() {
            return refuse("the path is empty");
        }
        let in_file = |file: &&str| {
            let place = origin.strip_prefix(*file);
            place.is_some_and(|rest| rest.starts_with(':'))
        };
        let folder = self
            .file
            .filter(in_file)
            .and_then(|f| Path::new(f).parent());
        match std::path::absolute(folder.unwrap_or_else(|| Path::new("")).join(&*path)) {
            // Replies and state of the daemon are JSON, which is UTF-8.
            Ok(absolute) if absolute.to_str().is_none() => refuse("the path is not UTF-8"),
            Ok(absolute) => {
                *path = absolute;
                Ok(())
            }
            Err(error) => refuse(&format!("the working directory is not known ({error})")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Flag, load_text};
    use serde_json::json;

    const RELATIVE: &str = "[rpc]\nsocket = \"run/n.sock\"\n[data]\ndir = \"../state\"\n[[bdev]]\nname = \"a\"\npath = \"a.img\"\n[[bdev]]\nname = \"b\"\npath = \"/b.img\"\n";

    #[test]
    fn a_path_in_a_file_is_relative_to_its_directory() {
        let settings = load_text(Some(("/etc/nacre/n.toml", RELATIVE)), [], &[]);
        let settings = settings.unwrap().settings;
        assert_eq!(settings.rpc.socket, "/etc/nacre/run/n.sock");
        assert_eq!(settings.data.dir, "/etc/nacre/../state");
        let paths: Vec<_> = settings.bdev.iter().map(|b| b.path.clone()).collect();
        assert_eq!(
            paths,
            [Some("/etc/nacre/a.img".into()), Some("/b.img".into())]
        );
    }

    #[test]
    fn other_paths_are_relative_to_the_working_directory() {
        let here = std::env::current_dir().unwrap();
        let flag = |key, value: &str| Flag {
            key,
            value: json!(value),
            flag: "--flag",
        };
        let env = [("NACRE_DATA_DIR".into(), "state".into())];
        let flags = [flag("rpc.socket", "n.sock")];
        let loaded = load_text(Some(("/etc/nacre/n.toml", RELATIVE)), env, &flags);
        let settings = loaded.unwrap().settings;
        assert_eq!(settings.rpc.socket, here.join("n.sock").to_str().unwrap());
        assert_eq!(settings.data.dir, here.join("state").to_str().unwrap());
        // Keywords are not paths.
        let words = load_text(None, [("NACRE_DATA_DIR".into(), "none".into())], &[]);
        let words = words.unwrap().settings;
        assert_eq!((&*words.rpc.socket, &*words.data.dir), ("auto", "none"));
    }

    #[test]
    fn an_empty_path_is_refused_with_its_place() {
        let text = "[rpc]\nsocket = \"\"\n[[bdev]]\nname = \"a\"\npath = \"\"\n";
        let error = load_text(Some(("n.toml", text)), [], &[]).unwrap_err();
        let messages: Vec<String> = error.problems.iter().map(ToString::to_string).collect();
        assert_eq!(
            messages,
            [
                "n.toml:2: rpc.socket: the path is empty; write an absolute path",
                "n.toml:5: bdev[0].path: the path is empty; write an absolute path"
            ]
        );
    }
}
