//! Parses bytes into requests: the pure half of the JSON-RPC server, without a socket.
//!
//! ```text
//!   bytes ── Decoder::push ──▶ Frame::One(Call | Invalid)     one JSON object
//!                              Frame::Batch([Call | Invalid]) one JSON array
//!                              FrameError                     the stream can no longer be parsed
//! ```
//!
//! Accepts and refuses the same requests as SPDK's server, with the same codes: `jsonrpc` may be
//! absent, `params` is an object, an array, null or absent, `id` is a string, a number, null or
//! absent, and any other member makes the request invalid.

use serde::Deserialize;
use serde_json::value::RawValue;
use zeroize::{Zeroize, Zeroizing};

use super::scan::{ScanError, Scanner, Step};
use super::secret::{SecretJson, SecretValue};

/// Largest request in bytes: the size of SPDK's receive buffer.
pub const MAX_REQUEST_BYTES: usize = 256 * 1024;

/// A well-formed request.
#[derive(Debug)]
pub struct Call {
    /// The id to answer with, byte for byte. `None`: a notification, whose result is not sent.
    pub id: Option<Box<RawValue>>,
    pub method: String,
    /// `None` when absent or null.
    pub params: Option<SecretJson>,
}

/// One element of the stream or of a batch: a call, or a value that is not a valid request.
pub type Element = Result<Call, Invalid>;

/// A JSON value that is not a request (error -32600). The reply has the id null, because the
/// value's id is not trusted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not a request: {cause}")]
pub struct Invalid {
    pub cause: String,
}

/// A complete JSON value from the stream: one request or a batch.
#[derive(Debug)]
pub enum Frame {
    One(Element),
    /// Never empty: an empty array is an invalid request.
    Batch(Vec<Element>),
}

/// The stream cannot be parsed any more: the reply is error -32700, and the connection is closed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    #[error("not JSON at byte {at} of the request: {cause}")]
    Syntax { at: usize, cause: ScanError },
    #[error("not UTF-8, or an escape without meaning: {cause}")]
    Text { cause: String },
    #[error("a request of more than {MAX_REQUEST_BYTES} bytes")]
    TooLong,
}

/// Splits a byte stream into frames. Bytes may be pushed in pieces of any size. Overwrites consumed
/// requests, which may contain secrets.
#[derive(Debug, Default)]
pub struct Decoder {
    buf: Zeroizing<Vec<u8>>,
    /// Start of the current value in `buf`; bytes before it are consumed.
    start: usize,
    /// Position of the scanner.
    scanned: usize,
    scanner: Scanner,
}

impl Decoder {
    /// Bytes received and not yet part of a frame.
    pub fn pending(&self) -> usize {
        self.buf.len() - self.start
    }

    pub fn push(&mut self, bytes: &[u8]) {
        let pending = self.pending();
        self.buf.copy_within(self.start.., 0);
        self.buf[pending..].zeroize();
        self.buf.truncate(pending);
        self.scanned -= self.start;
        self.start = 0;
        let room = pending + bytes.len();
        if room > self.buf.capacity() {
            // A reallocation would leave a copy in freed memory.
            let mut larger = Zeroizing::new(Vec::with_capacity(2 * room));
            larger.extend_from_slice(&self.buf);
            self.buf = larger;
        }
        self.buf.extend_from_slice(bytes);
    }

    /// The next complete frame; `None` until more bytes arrive. After an error the decoder is
    /// unusable.
    pub fn next_frame(&mut self) -> Result<Option<Frame>, FrameError> {
        while self.scanned < self.buf.len() {
            let at = self.scanned - self.start;
            let step = self.scanner.step(self.buf[self.scanned]);
            let end = match step.map_err(|cause| FrameError::Syntax { at, cause })? {
                Step::More => {
                    self.scanned += 1;
                    if self.scanner.is_idle() {
                        // Drop whitespace between requests at once.
                        self.start = self.scanned;
                    } else if at >= MAX_REQUEST_BYTES {
                        return Err(FrameError::TooLong);
                    }
                    continue;
                }
                Step::End => self.scanned + 1,
                Step::EndBefore => self.scanned,
            };
            let frame = parse(&self.buf[self.start..end]);
            self.start = end;
            self.scanned = end;
            return frame.map(Some);
        }
        Ok(None)
    }
}

fn parse(bytes: &[u8]) -> Result<Frame, FrameError> {
    let text = |e: &dyn std::fmt::Display| FrameError::Text {
        cause: e.to_string(),
    };
    let value = std::str::from_utf8(bytes).map_err(|e| text(&e))?;
    // A lone surrogate is grammatical JSON but not valid text; only a full decode finds it.
    let decoded = serde_json::from_str(value).map(SecretValue);
    decoded.map_err(|e| text(&e))?;
    match value.trim_start().as_bytes().first() {
        Some(b'{') => Ok(Frame::One(request(value))),
        Some(b'[') => {
            let elements: Vec<&RawValue> = serde_json::from_str(value).map_err(|e| text(&e))?;
            if elements.is_empty() {
                return Ok(Frame::One(Err(Invalid {
                    cause: "an empty batch".into(),
                })));
            }
            Ok(Frame::Batch(
                elements.into_iter().map(|e| request(e.get())).collect(),
            ))
        }
        _ => Ok(Frame::One(Err(Invalid {
            cause: "neither an object nor an array".into(),
        }))),
    }
}

fn request(text: &str) -> Element {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Wire {
        #[serde(default)]
        jsonrpc: Option<serde_json::Value>,
        method: String,
        #[serde(default)]
        params: Option<Box<RawValue>>,
        #[serde(default)]
        id: Option<Box<RawValue>>,
    }

    let invalid = |cause: &str| Invalid {
        cause: cause.to_owned(),
    };
    if !text.starts_with('{') {
        return Err(invalid("a batch element that is not an object"));
    }
    let wire: Wire = serde_json::from_str(text).map_err(|e| invalid(&e.to_string()))?;
    let params = wire.params.map(SecretJson::from);
    if wire.jsonrpc.is_some_and(|v| v != "2.0") {
        return Err(invalid("\"jsonrpc\" is not \"2.0\""));
    }
    let id = match wire.id.as_deref().map(|id| id.get().as_bytes()[0]) {
        None | Some(b'n') => None,
        Some(b'"' | b'-' | b'0'..=b'9') => wire.id,
        Some(_) => return Err(invalid("\"id\" is neither a string nor a number nor null")),
    };
    let params = match params.as_deref().map(|p| p.get().as_bytes()[0]) {
        None | Some(b'n') => None,
        Some(b'{' | b'[') => params,
        Some(_) => {
            return Err(invalid(
                "\"params\" is neither an object nor an array nor null",
            ));
        }
    };
    Ok(Call {
        id,
        method: wire.method,
        params,
    })
}

#[cfg(test)]
mod tests {
    //! Goal: any split of the stream gives the same frames. Method: a table of streams, each cut
    //! at every byte, and into single bytes.

    use super::*;

    fn describe(element: &Element) -> String {
        match element {
            Ok(call) => format!(
                "{}({}) id {}",
                call.method,
                call.params.as_ref().map_or("", |p| p.get()),
                call.id.as_ref().map_or("-", |i| i.get()),
            ),
            Err(_) => "invalid".into(),
        }
    }

    fn frames(pieces: &[&[u8]]) -> Vec<String> {
        let mut decoder = Decoder::default();
        let mut out = Vec::new();
        for piece in pieces {
            decoder.push(piece);
            loop {
                match decoder.next_frame() {
                    Ok(Some(Frame::One(element))) => out.push(describe(&element)),
                    Ok(Some(Frame::Batch(elements))) => {
                        let parts: Vec<_> = elements.iter().map(describe).collect();
                        out.push(format!("[{}]", parts.join("; ")));
                    }
                    Ok(None) => break,
                    Err(_) => {
                        out.push("error".into());
                        return out;
                    }
                }
            }
        }
        out
    }

    #[test]
    fn any_split_gives_the_same_frames() {
        for (stream, expected) in [
            (
                r#"{"method":"a","id":1}{"method":"b","id":"x"}"#,
                vec!["a() id 1", "b() id \"x\""],
            ),
            (
                "\n {\"jsonrpc\":\"2.0\",\"method\":\"a\",\"params\":{\"n\":[1]},\"id\":null} ",
                vec!["a({\"n\":[1]}) id -"],
            ),
            (
                r#"[{"method":"a","id":1},5,{"id":2}]"#,
                vec!["[a() id 1; invalid; invalid]"],
            ),
            ("[]", vec!["invalid"]),
            ("12 ", vec!["invalid"]),
            (r#"{"jsonrpc":"1.0","method":"a","id":1}"#, vec!["invalid"]),
            (r#"{"method":7,"id":1}"#, vec!["invalid"]),
            (r#"{"method":"a","id":{}}"#, vec!["invalid"]),
            (r#"{"method":"a","params":"x","id":1}"#, vec!["invalid"]),
            (r#"{"method":"a","extra":1,"id":1}"#, vec!["invalid"]),
            (r#"{"method":"a","params":null,"id":-3}"#, vec!["a() id -3"]),
            (r#"{"method":"a","id":1}}"#, vec!["a() id 1", "error"]),
            (r#"{"method":"\ud800","id":1}"#, vec!["error"]),
        ] {
            let bytes = stream.as_bytes();
            assert_eq!(frames(&[bytes]), expected, "{stream}");
            for cut in 0..bytes.len() {
                assert_eq!(
                    frames(&[&bytes[..cut], &bytes[cut..]]),
                    expected,
                    "{stream} at {cut}"
                );
            }
            let singles: Vec<&[u8]> = bytes.chunks(1).collect();
            assert_eq!(frames(&singles), expected, "{stream} in bytes");
        }
    }

    #[test]
    fn long_requests_are_refused_and_whitespace_is_dropped() {
        let mut decoder = Decoder::default();
        decoder.push(&vec![b' '; 3 * MAX_REQUEST_BYTES]);
        assert!(decoder.next_frame().unwrap().is_none());
        assert_eq!(decoder.pending(), 0, "whitespace is not kept");
        decoder.push(b"{\"method\":\"");
        decoder.push(&vec![b'a'; MAX_REQUEST_BYTES]);
        assert_eq!(decoder.next_frame().unwrap_err(), FrameError::TooLong);
    }
}
