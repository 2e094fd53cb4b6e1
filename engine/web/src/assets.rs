//! The files of the administration page, compressed when the page is built and embedded in the
//! program.

use std::fmt::Write as _;

use aws_lc_rs::digest::{SHA256, digest};

/// Name, content type and gzip content of each file. The build of the page writes the list.
const BUNDLE: &[(&str, &str, &[u8])] = include!("../dist/list.rs");

#[derive(Debug)]
pub struct Asset {
    /// The path in the URL.
    path: String,
    pub content_type: &'static str,
    /// The contents, compressed with gzip.
    pub gzip: &'static [u8],
    /// The value of the header `ETag`, with its quotes.
    pub etag: String,
}

/// All files of the page.
#[derive(Debug)]
pub struct Assets(Vec<Asset>);

impl Assets {
    pub fn embedded() -> Self {
        let all = BUNDLE.iter().map(|&(name, content_type, gzip)| {
            let mut etag = String::from("\"");
            for byte in &digest(&SHA256, gzip).as_ref()[..16] {
                let _ = write!(etag, "{byte:02x}");
            }
            etag.push('"');
            let path = match name {
                "index.html" => "/".to_owned(),
                name => format!("/{name}"),
            };
            Asset {
                path,
                content_type,
                gzip,
                etag,
            }
        });
        Self(all.collect())
    }

    /// The file with exactly this path.
    pub fn find(&self, path: &str) -> Option<&Asset> {
        self.0.iter().find(|asset| asset.path == path)
    }
}

/// True if a client with this `Accept-Encoding` accepts gzip. A client without the header accepts
/// any coding (RFC 9110, 12.5.3).
pub fn takes_gzip(accept_encoding: Option<&str>) -> bool {
    let Some(list) = accept_encoding else {
        return true;
    };
    let (mut named, mut any) = (None, None);
    for entry in list.split(',') {
        let mut parts = entry.split(';').map(str::trim);
        let coding = parts.next().unwrap_or_default();
        let weight = parts.find_map(|part| part.strip_prefix("q="));
        let is_wanted = weight.is_none_or(|weight| weight.parse().is_ok_and(|q: f32| q > 0.0));
        if coding.eq_ignore_ascii_case("gzip") || coding.eq_ignore_ascii_case("x-gzip") {
            named = Some(is_wanted);
        } else if coding == "*" {
            any = Some(is_wanted);
        }
    }
    named.or(any).unwrap_or(false)
}

/// True if `If-None-Match` has this tag.
pub fn matches(if_none_match: &str, etag: &str) -> bool {
    let mut tags = if_none_match.split(',').map(str::trim);
    tags.any(|tag| tag == "*" || tag.strip_prefix("W/").unwrap_or(tag) == etag)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bundle_has_a_page_and_is_gzip() {
        let assets = Assets::embedded();
        let page = assets.find("/").expect("index.html");
        assert_eq!(page.content_type, "text/html; charset=utf-8");
        for asset in &assets.0 {
            assert!(asset.gzip.starts_with(&[0x1f, 0x8b]), "{}", asset.path);
            assert_eq!(asset.etag.len(), 34);
        }
        let total: usize = assets.0.iter().map(|asset| asset.gzip.len()).sum();
        assert!(total < 200 * 1024, "{total} bytes");
        for path in [
            "",
            "/..",
            "/index.html",
            "//",
            "/../list.rs",
            "/%2e%2e/list.rs",
        ] {
            assert!(assets.find(path).is_none(), "{path}");
        }
    }

    #[test]
    fn codings_and_tags() {
        for (header, taken) in [
            (None, true),
            (Some("gzip, deflate, br"), true),
            (Some("GZIP;q=0.5"), true),
            (Some("*"), true),
            (Some("gzip;q=0, *"), false),
            (Some("*;q=0"), false),
            (Some("identity"), false),
            (Some(""), false),
        ] {
            assert_eq!(takes_gzip(header), taken, "{header:?}");
        }
        assert!(matches("\"a\", W/\"b\"", "\"b\"") && matches("*", "\"b\""));
        assert!(!matches("\"a\"", "\"b\"") && !matches("", "\"b\""));
    }
}
