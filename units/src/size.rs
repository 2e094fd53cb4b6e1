//! Sizes with units (`4k`, `64MiB`), parsed and formatted. As for `truncate`(1), `K` and `KiB` are
//! 1024, and `KB` is 1000; `Ki` is 1024, too. Units go up to `E`, in letters of either case. An
//! error is a sentence for the user.

const UNITS: [char; 6] = ['K', 'M', 'G', 'T', 'P', 'E'];

/// Formats a number of bytes with a binary unit and one decimal: `64.0 MiB`.
pub fn bytes(count: u64) -> String {
    bytesize::ByteSize(count).display().iec().to_string()
}

/// Parses a size such as `4096`, `4KiB` or `1.5GiB` to a number of bytes. Fails if that is not a
/// whole number, or does not fit in 64 bits.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let said = || {
        format!(
            "\"{text}\" is not a size: write a number and a unit, such as 512, 64MiB, 1.5GiB or 100GB"
        )
    };
    let trimmed = text.trim();
    let digits = trimmed
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(trimmed.len());
    let (number, unit) = trimmed.split_at(digits);
    let scale = scale(unit.trim()).ok_or_else(said)?;
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    // Twelve decimals exceed the precision of any unit, and fit.
    if whole.is_empty() || fraction.len() > 12 || (number.contains('.') && fraction.is_empty()) {
        return Err(said());
    }
    let whole: u128 = whole.parse().map_err(|_| said())?;
    let parts = 10u128.pow(fraction.len() as u32);
    let fraction: u128 = match fraction {
        "" => 0,
        digits => digits.parse().map_err(|_| said())?,
    };
    let bytes = whole
        .checked_mul(parts)
        .and_then(|n| (n + fraction).checked_mul(scale))
        .ok_or_else(|| format!("\"{text}\" is more than 64 bits of bytes"))?;
    if !bytes.is_multiple_of(parts) {
        return Err(format!("\"{text}\" is not a whole number of bytes"));
    }
    u64::try_from(bytes / parts).map_err(|_| format!("\"{text}\" is more than 64 bits of bytes"))
}

/// Parses a whole number without a unit as MiB, as SPDK does, or a size of whole MiB. Returns MiB.
pub fn parse_mebibytes(text: &str) -> Result<u64, String> {
    let trimmed = text.trim();
    match trimmed.parse() {
        Ok(mebibytes) => Ok(mebibytes),
        // It could mean MiB or bytes.
        Err(_)
            if trimmed
                .parse::<f64>()
                .is_ok_and(|n| n.is_finite() && n >= 0.0) =>
        {
            Err(format!(
                "\"{text}\" has no unit: write a whole number of MiB, or a number and a unit, such as \
             512MiB or 1.5GiB"
            ))
        }
        Err(_) => whole_mebibytes(text),
    }
}

/// Parses a size to a number of MiB. Fails if it is not a whole number of MiB.
pub fn whole_mebibytes(text: &str) -> Result<u64, String> {
    const MIB: u64 = 1 << 20;
    match parse_bytes(text)? {
        bytes if bytes.is_multiple_of(MIB) => Ok(bytes / MIB),
        _ => Err(format!("\"{text}\" is not a whole number of MiB")),
    }
}

/// The factor of a unit: a bare letter is binary, as in most storage tools.
fn scale(unit: &str) -> Option<u128> {
    let unit = unit.to_ascii_uppercase();
    let Some(letter) = unit.chars().next().filter(|c| *c != 'B') else {
        return (unit.is_empty() || unit == "B").then_some(1);
    };
    let power = UNITS.iter().position(|u| *u == letter)? as u32 + 1;
    match &unit[letter.len_utf8()..] {
        "" | "I" | "IB" => Some(1024u128.pow(power)),
        "B" => Some(1000u128.pow(power)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        for (text, bytes) in [
            ("0", 0),
            ("512", 512),
            ("512B", 512),
            ("4k", 4096),
            ("4KiB", 4096),
            ("4Ki", 4096),
            ("4KB", 4000),
            ("64MiB", 64 << 20),
            ("64 MiB", 64 << 20),
            ("1.5GiB", 3 << 29),
            ("0.5k", 512),
            ("2T", 2 << 40),
            ("1EB", 10u64.pow(18)),
            ("15EiB", 15 << 60),
        ] {
            assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
        }
        for (text, said) in [
            ("", "is not a size"),
            ("x", "is not a size"),
            ("64Mib/s", "is not a size"),
            ("-1", "is not a size"),
            ("1..5k", "is not a size"),
            ("1.", "is not a size"),
            (".5k", "is not a size"),
            ("4KX", "is not a size"),
            ("4\u{e9}", "is not a size"),
            ("1.3", "not a whole number of bytes"),
            ("16EiB", "more than 64 bits"),
            ("99999999999999999999999999999999999999", "64 bits"),
        ] {
            let error = parse_bytes(text).unwrap_err();
            assert!(error.contains(said), "{text}: {error}");
        }
    }

    #[test]
    fn sizes_in_mebibytes() {
        for (text, mebibytes) in [("2048", 2048), ("2G", 2048), ("64MiB", 64), ("0", 0)] {
            assert_eq!(parse_mebibytes(text), Ok(mebibytes), "{text}");
        }
        assert!(parse_mebibytes("1000k").is_err() && parse_mebibytes("x").is_err());
        for text in ["0.5", "1048576.0", "99999999999999999999"] {
            let error = parse_mebibytes(text).unwrap_err();
            assert!(error.contains("has no unit"), "{error}");
        }
    }
}
