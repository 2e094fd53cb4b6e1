//! Finds the end of a JSON value in a byte stream, fed in pieces of any size.
//!
//! The socket has no framing: requests are consecutive JSON values. The scanner reads each byte
//! once, and refuses the first byte that no JSON value can have there. So garbage gets an answer at
//! once. It checks grammar only; the parser checks UTF-8 and escapes.

/// Deepest nesting accepted: the limit of SPDK's parser.
pub const MAX_DEPTH: usize = 64;
/// Most values (scalars, containers and names) per request: the limit of SPDK's server.
pub const MAX_VALUES: usize = 8192;

/// The effect of one byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// The value continues.
    More,
    /// The value is complete; this byte is its last.
    End,
    /// The value was complete before this byte, which belongs to the next one.
    EndBefore,
}

/// An invalid byte, or an exceeded bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ScanError {
    #[error("unexpected byte 0x{0:02x}")]
    Unexpected(u8),
    #[error("nested deeper than {MAX_DEPTH} levels")]
    TooDeep,
    #[error("more than {MAX_VALUES} values in one request")]
    TooMany,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Expects a value (`true`: or the end of an array just opened).
    Value(bool),
    /// Expects a name (`true`: or the end of an object just opened).
    Name(bool),
    Colon,
    CommaOrEnd,
    String,
    Escape,
    /// Hexadecimal digits still missing after `\u`.
    Hex(u8),
    /// After a minus sign, in the digits, after the point, and so on.
    Minus,
    Zero,
    Integer,
    Point,
    Fraction,
    Exponent,
    ExponentSign,
    ExponentDigits,
    Literal(&'static [u8]),
}

/// The scanner. After [`Step::End`] or [`Step::EndBefore`] it is ready for the next value.
#[derive(Debug, Clone)]
pub struct Scanner {
    state: State,
    /// One bit per open container, the innermost lowest: 1 is an object.
    objects: u64,
    depth: usize,
    values: usize,
    /// The current string is a name.
    in_name: bool,
}

impl Default for Scanner {
    fn default() -> Self {
        Self {
            state: State::Value(false),
            objects: 0,
            depth: 0,
            values: 0,
            in_name: false,
        }
    }
}

impl Scanner {
    /// True if no byte of a value was read yet (whitespace does not count).
    pub fn is_idle(&self) -> bool {
        self.values == 0
    }

    pub fn step(&mut self, byte: u8) -> Result<Step, ScanError> {
        let step = self.advance(byte)?;
        if step != Step::More {
            *self = Self::default();
        }
        Ok(step)
    }

    fn advance(&mut self, byte: u8) -> Result<Step, ScanError> {
        use State::*;
        let space = matches!(byte, b' ' | b'\t' | b'\n' | b'\r');
        match self.state {
            Value(_) | Name(_) | Colon | CommaOrEnd if space => {}
            Value(may_close) => return self.value(byte, may_close),
            Name(may_close) => match byte {
                b'"' => {
                    self.count()?;
                    self.in_name = true;
                    self.state = String;
                }
                b'}' if may_close => return Ok(self.close()),
                _ => return Err(ScanError::Unexpected(byte)),
            },
            Colon if byte == b':' => self.state = Value(false),
            CommaOrEnd => match (byte, self.in_object()) {
                (b',', true) => self.state = Name(false),
                (b',', false) => self.state = Value(false),
                (b'}', true) | (b']', false) => return Ok(self.close()),
                _ => return Err(ScanError::Unexpected(byte)),
            },
            String => match byte {
                b'"' if self.in_name => {
                    self.in_name = false;
                    self.state = Colon;
                }
                b'"' => return Ok(self.scalar_done()),
                b'\\' => self.state = Escape,
                // Control characters must be escaped (RFC 8259 section 7).
                0..=0x1f => return Err(ScanError::Unexpected(byte)),
                _ => {}
            },
            Escape => match byte {
                b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't' => self.state = String,
                b'u' => self.state = Hex(4),
                _ => return Err(ScanError::Unexpected(byte)),
            },
            Hex(left) if byte.is_ascii_hexdigit() => {
                self.state = if left == 1 { String } else { Hex(left - 1) };
            }
            Minus if byte == b'0' => self.state = Zero,
            Minus if byte.is_ascii_digit() => self.state = Integer,
            Integer | Fraction | ExponentDigits if byte.is_ascii_digit() => {}
            Zero | Integer if byte == b'.' => self.state = Point,
            Zero | Integer | Fraction if matches!(byte, b'e' | b'E') => self.state = Exponent,
            Point if byte.is_ascii_digit() => self.state = Fraction,
            Exponent if matches!(byte, b'+' | b'-') => self.state = ExponentSign,
            Exponent | ExponentSign if byte.is_ascii_digit() => self.state = ExponentDigits,
            Zero | Integer | Fraction | ExponentDigits => return self.after_number(byte),
            Literal([next]) if byte == *next => return Ok(self.scalar_done()),
            Literal([next, rest @ ..]) if byte == *next => self.state = Literal(rest),
            _ => return Err(ScanError::Unexpected(byte)),
        }
        Ok(Step::More)
    }

    fn value(&mut self, byte: u8, may_close: bool) -> Result<Step, ScanError> {
        if byte == b']' && may_close {
            return Ok(self.close());
        }
        self.count()?;
        match byte {
            b'{' => self.open(true)?,
            b'[' => self.open(false)?,
            b'"' => self.state = State::String,
            b'-' => self.state = State::Minus,
            b'0' => self.state = State::Zero,
            b'1'..=b'9' => self.state = State::Integer,
            b't' => self.state = State::Literal(b"rue"),
            b'f' => self.state = State::Literal(b"alse"),
            b'n' => self.state = State::Literal(b"ull"),
            _ => return Err(ScanError::Unexpected(byte)),
        }
        Ok(Step::More)
    }

    /// A number ends at the first byte that cannot continue it.
    fn after_number(&mut self, byte: u8) -> Result<Step, ScanError> {
        if self.depth == 0 {
            return Ok(Step::EndBefore);
        }
        self.state = State::CommaOrEnd;
        self.advance(byte)
    }

    fn scalar_done(&mut self) -> Step {
        if self.depth == 0 {
            return Step::End;
        }
        self.state = State::CommaOrEnd;
        Step::More
    }

    fn open(&mut self, object: bool) -> Result<(), ScanError> {
        if self.depth == MAX_DEPTH {
            return Err(ScanError::TooDeep);
        }
        self.depth += 1;
        self.objects = self.objects << 1 | u64::from(object);
        self.state = if object {
            State::Name(true)
        } else {
            State::Value(true)
        };
        Ok(())
    }

    fn close(&mut self) -> Step {
        self.depth -= 1;
        self.objects >>= 1;
        self.scalar_done()
    }

    fn in_object(&self) -> bool {
        self.objects & 1 == 1
    }

    fn count(&mut self) -> Result<(), ScanError> {
        self.values += 1;
        if self.values > MAX_VALUES {
            Err(ScanError::TooMany)
        } else {
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    //! Goal: the scanner accepts exactly the JSON that serde_json accepts, and ends it at the same
    //! byte. Method: tables for the bounds, and random JSON-like texts against serde_json.

    use super::*;
    use proptest::prelude::*;

    /// Scans `text` as one value. Returns its length, `None` while incomplete.
    fn scan(text: &[u8]) -> Result<Option<usize>, ScanError> {
        let mut scanner = Scanner::default();
        for (at, &byte) in text.iter().enumerate() {
            match scanner.step(byte)? {
                Step::More => {}
                Step::End => return Ok(Some(at + 1)),
                Step::EndBefore => return Ok(Some(at)),
            }
        }
        Ok(None)
    }

    #[test]
    fn the_end_of_a_value_is_found() {
        for (text, end) in [
            (&b"{}{"[..], 2),
            (b" [1,2.5e-3,{\"a\":null}] ", 22),
            (b"\"a\\\"b\\u00e9\"x", 12),
            (b"true1", 4),
            (b"-0.5,", 4),
            (b"12 ", 2),
        ] {
            assert_eq!(
                scan(text),
                Ok(Some(end)),
                "{}",
                String::from_utf8_lossy(text)
            );
        }
    }

    #[test]
    fn the_first_impossible_byte_is_named() {
        for (text, byte) in [
            (&b"}"[..], b'}'),
            (b"{1", b'1'),
            (b"{\"a\" 1", b'1'),
            (b"{\"a\":1]", b']'),
            (b"[1,]", b']'),
            (b"{\"a\":1,}", b'}'),
            (b"[01", b'1'),
            (b"nul1", b'1'),
            (b"\"\n", b'\n'),
            (b"xyz", b'x'),
        ] {
            assert_eq!(scan(text), Err(ScanError::Unexpected(byte)));
        }
    }

    #[test]
    fn bounds_are_enforced() {
        let deep = |n: usize| [vec![b'['; n], vec![b']'; n]].concat();
        assert_eq!(scan(&deep(MAX_DEPTH)), Ok(Some(2 * MAX_DEPTH)));
        assert_eq!(scan(&deep(MAX_DEPTH + 1)), Err(ScanError::TooDeep));
        let many = |n: usize| format!("[{}]", vec!["1"; n].join(","));
        assert!(scan(many(MAX_VALUES - 1).as_bytes()).unwrap().is_some());
        assert_eq!(scan(many(MAX_VALUES).as_bytes()), Err(ScanError::TooMany));
    }

    proptest! {
        #[test]
        fn agrees_with_serde_json(text in r#"[\[\]{}:,"\\ a0-9.eE+\-tn]{0,24}|(\{"a":(1|\[true,null\]|"x\\n")\} ?){1,3}"#) {
            let mut stream = serde_json::Deserializer::from_str(&text).into_iter::<serde::de::IgnoredAny>();
            match (scan(text.as_bytes()), stream.next()) {
                (Ok(Some(end)), Some(Ok(_))) => prop_assert_eq!(end, stream.byte_offset()),
                // serde_json requires a delimiter after a top-level scalar; here a directly
                // following value belongs to the next scan.
                (Ok(Some(end)), Some(Err(e))) => {
                    let head = &text[..end];
                    prop_assert!(serde_json::from_str::<serde::de::IgnoredAny>(head).is_ok(), "{} {}", head, e);
                }
                (Ok(None), None) => prop_assert!(text.trim().is_empty()),
                // A truncated number: serde_json calls it invalid rather than incomplete.
                (Ok(None), Some(Err(_))) if text.ends_with(['-', '+', '.', 'e', 'E']) => {}
                (Ok(None), Some(Err(e))) => prop_assert!(e.is_eof(), "{}", e),
                // A number at the very end may continue.
                (Ok(None), Some(Ok(_))) => prop_assert!(text.trim().ends_with(|c: char| c.is_ascii_digit())),
                (Err(_), Some(Err(_))) => {}
                (Err(e), other) => prop_assert!(false, "{} but {:?}", e, other),
                (Ok(Some(_)), None) => prop_assert!(false),
            }
        }
    }
}
