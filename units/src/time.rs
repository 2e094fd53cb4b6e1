//! Durations with units (`250ms`, `1h 30m`), parsed from text; dates and moments in UTC (RFC 3339),
//! parsed and formatted. An error is a sentence for the user.

use std::time::{Duration, SystemTime};

/// The longest accepted duration, 100 years. Every clock can represent a moment that far away.
pub const LONGEST: Duration = Duration::from_secs(36_525 * 24 * 3600);

/// Nanoseconds of a second.
const SECOND: u64 = 1_000_000_000;

/// Parses `250ms`, `5s`, `1h 30m`; a plain number, which may have decimals, is seconds. Fails above
/// [`LONGEST`].
pub fn parse(text: &str) -> Result<Duration, String> {
    let trimmed = text.trim();
    let time = match trimmed.parse::<f64>() {
        Ok(seconds) if seconds.is_finite() && seconds > LONGEST.as_secs_f64() => LONGEST * 2,
        Ok(seconds) => Duration::try_from_secs_f64(seconds).map_err(|_| refusal(text))?,
        Err(_) => humantime::parse_duration(trimmed).map_err(|_| refusal(text))?,
    };
    if time > LONGEST {
        Err(too_long(text))
    } else {
        Ok(time)
    }
}

/// Like [`parse`], but returns milliseconds; a plain number still is seconds. Fails if the time is
/// not a whole number of milliseconds.
pub fn parse_millis(text: &str) -> Result<u64, String> {
    whole(parse(text)?, 1_000_000, text)
}

/// Like [`parse`]; also fails if the time is not a whole number of seconds.
pub fn whole_seconds(text: &str) -> Result<Duration, String> {
    whole(parse(text)?, SECOND, text).map(Duration::from_secs)
}

fn too_long(text: &str) -> String {
    format!("{text} is longer than 100 years, the most that a time may be")
}

/// Refuses a number of units of `nanoseconds` each that exceeds [`LONGEST`].
pub fn bounded(number: u64, nanoseconds: u64) -> Result<u64, String> {
    if u128::from(number) * u128::from(nanoseconds) > LONGEST.as_nanos() {
        Err(too_long(&number.to_string()))
    } else {
        Ok(number)
    }
}

/// Like [`parse`], but refuses zero.
pub fn above_zero(text: &str) -> Result<Duration, String> {
    match parse(text)? {
        time if time.is_zero() => Err("a time longer than 0 is wanted".into()),
        time => Ok(time),
    }
}

/// Parses a date, which means its first moment in UTC, or a moment: `2027-01-31`,
/// `2027-01-31T12:00:00Z`.
pub fn parse_moment(text: &str) -> Result<SystemTime, String> {
    let trimmed = text.trim();
    let full = match trimmed.len() {
        10 => format!("{trimmed}T00:00:00Z"),
        _ => trimmed.to_owned(),
    };
    humantime::parse_rfc3339_weak(&full)
        .map_err(|_| format!("\"{text}\" is not a date: write 2027-01-31, or 2027-01-31T12:00:00Z"))
}

/// Formats a moment in UTC, to the second: `2027-01-31T12:00:00Z`.
pub fn moment(at: SystemTime) -> String {
    humantime::format_rfc3339_seconds(at).to_string()
}

fn refusal(text: &str) -> String {
    format!("\"{text}\" is not a time: write a number and a unit, such as 250ms, 5s or 1h 30m")
}

/// Parses a duration to a count of units of `nanoseconds` each. A plain whole number is that count;
/// a text with a unit is parsed by [`parse`]. Fails above [`LONGEST`] and if the count is not
/// whole. Also fails for a number with decimals and no unit, which could mean seconds, unless
/// `nanoseconds` is one second.
pub fn in_units(text: &str, nanoseconds: u64) -> Result<u64, String> {
    let trimmed = text.trim();
    if let Ok(number) = trimmed.parse() {
        return bounded(number, nanoseconds);
    }
    let number = trimmed.parse::<f64>();
    if nanoseconds != SECOND && number.is_ok_and(|number| number.is_finite() && number >= 0.0) {
        let unit = humantime::format_duration(Duration::from_nanos(nanoseconds));
        return Err(format!(
            "\"{text}\" has no unit: write a whole number of {unit}, or a number and a unit, such as \
             250ms, 5s or 1h 30m"
        ));
    }
    whole(parse(text)?, nanoseconds, text)
}

/// A time as a count of units of `nanoseconds` each.
fn whole(time: Duration, nanoseconds: u64, text: &str) -> Result<u64, String> {
    let (time, unit) = (time.as_nanos(), u128::from(nanoseconds));
    if !time.is_multiple_of(unit) {
        let unit = humantime::format_duration(Duration::from_nanos(nanoseconds));
        return Err(format!("\"{text}\" is not a whole number of {unit}"));
    }
    u64::try_from(time / unit).map_err(|_| refusal(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times() {
        assert_eq!(parse("5s"), Ok(Duration::from_secs(5)));
        assert_eq!(parse("1h 30m"), Ok(Duration::from_secs(5400)));
        assert_eq!(parse("0.5"), Ok(Duration::from_millis(500)));
        assert_eq!(parse_millis("1m"), Ok(60_000));
        assert!(above_zero("0s").is_err() && above_zero("1us").is_ok());
        for (text, nanoseconds, expected) in [
            ("7", 1_000_000, 7),
            ("250ms", 1_000_000, 250),
            ("2s", 1_000_000, 2000),
            ("1m", 1_000_000_000, 60),
            ("1ms", 1000, 1000),
        ] {
            assert_eq!(in_units(text, nanoseconds), Ok(expected), "{text}");
        }
        for (text, said) in [
            ("", "is not a time"),
            ("soon", "is not a time"),
            ("-5s", "is not a time"),
            ("-5", "is not a time"),
            ("inf", "is not a time"),
            ("5 parsecs", "is not a time"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(said), "{text}: {error}");
        }
        for text in ["300000000000y", "101y", "1e19", "36526d"] {
            let error = parse(text).unwrap_err();
            let said = [", the most that a time may be", "is not a time"];
            assert!(
                said.iter().any(|said| error.contains(said)),
                "{text}: {error}"
            );
        }
        assert_eq!(parse("36525d"), Ok(LONGEST));
        let most = LONGEST.as_secs();
        assert_eq!(parse(&most.to_string()), Ok(LONGEST));
        assert_eq!(bounded(most, 1_000_000_000), Ok(most));
        for (number, unit) in [(most + 1, 1_000_000_000), (u64::MAX, 1000)] {
            let error = bounded(number, unit).unwrap_err();
            assert!(error.contains("100 years"), "{error}");
            assert!(in_units(&number.to_string(), unit).is_err());
        }
        let error = in_units("1500ms", 1_000_000_000).unwrap_err();
        assert_eq!(error, "\"1500ms\" is not a whole number of 1s");
        assert!(
            parse_millis("1500us")
                .unwrap_err()
                .contains("whole number of 1ms")
        );
        assert_eq!(parse_millis("0.25"), Ok(250));
        assert_eq!(whole_seconds("1m"), Ok(Duration::from_secs(60)));
        let error = whole_seconds("500ms").unwrap_err();
        assert!(error.contains("whole number of 1s"), "{error}");
    }

    /// A number with decimals and no unit is seconds in a field of seconds. Elsewhere it could mean
    /// the unit of the field or seconds.
    #[test]
    fn decimals_need_a_unit() {
        for (text, unit) in [
            ("0.5", 1_000_000),
            (" 2.0 ", 1_000_000),
            ("1e3", 1_000_000),
            ("0.5", 1000),
            ("1.5", 3600 * SECOND),
        ] {
            let error = in_units(text, unit).unwrap_err();
            assert!(
                error.contains("has no unit: write a whole number of 1"),
                "{error}"
            );
        }
        assert_eq!(in_units("2.0", SECOND), Ok(2));
        assert!(
            in_units("0.5", SECOND)
                .unwrap_err()
                .contains("whole number of 1s")
        );
        assert!(
            in_units("-0.5", 1000)
                .unwrap_err()
                .contains("is not a time")
        );
        assert!(in_units("nan", 1000).unwrap_err().contains("is not a time"));
    }
}
