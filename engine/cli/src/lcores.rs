//! Parses DPDK's `--lcores`: threads, and the processors on which they run.
//!
//! ```text
//! 0-2            three threads on processors 0, 1 and 2
//! 0@4,1@6        two threads on processors 4 and 6
//! (0-1)@(4-7)    two threads on processors 4 and 5: DPDK lets both use all four, Nacre pins each
//! ```

use nacre_reactor::CoreSet;

/// The first processors that `list` names, one for each thread. Fewer if an entry has fewer
/// processors than threads.
pub(crate) fn processors(list: &str) -> Result<CoreSet, String> {
    let mut all = Vec::new();
    for item in items(list) {
        let (threads, processors) = match item.split_once('@') {
            Some((threads, processors)) => (set(threads)?, set(processors)?),
            None => (set(item)?, set(item)?),
        };
        all.extend(processors.iter().take(threads.len()));
    }
    Ok(all.into_iter().collect())
}

/// The parts between commas, except inside parentheses.
fn items(list: &str) -> impl Iterator<Item = &str> {
    let mut depth = 0_i32;
    list.split(move |c| {
        depth += match c {
            '(' => 1,
            ')' => -1,
            _ => 0,
        };
        c == ',' && depth == 0
    })
}

/// `3`, `0-2`, or several of these in parentheses.
fn set(text: &str) -> Result<CoreSet, String> {
    let inner = text.trim();
    let inner = match inner.strip_prefix('(') {
        Some(rest) => rest
            .strip_suffix(')')
            .ok_or_else(|| format!("\"{inner}\" lacks a closing parenthesis"))?,
        None => inner,
    };
    // Masks and brackets are of other flags.
    if inner.starts_with(|c: char| c.is_ascii_digit()) && !inner.contains(['x', 'X']) {
        CoreSet::parse(inner).map_err(|error| error.to_string())
    } else {
        Err(format!("\"{text}\" is not a list of cores"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_and_their_processors() {
        for (list, expected) in [
            ("0", "0"),
            ("0-2", "0-2"),
            ("1,3", "1,3"),
            ("0@4,1@6", "4,6"),
            ("0-1@4-5,7", "4-5,7"),
            ("(0-1)@(4-7)", "4-5"),
            ("(0,2)@(8,9,10),3@1", "1,8-9"),
            ("(1,3-5)", "1,3-5"),
            // More threads than processors: a reactor on each.
            ("(0-3)@2", "2"),
        ] {
            let cores = processors(list).unwrap_or_else(|error| panic!("{list}: {error}"));
            assert_eq!(cores.to_string(), expected, "{list}");
        }
    }

    #[test]
    fn wrong_lists_are_refused() {
        for list in [
            "", ",", "0,", "a", "0@", "@1", "(0", "0)", "(0,1", "2-1", "0x3", "[0]", "0@1@2", "()",
        ] {
            assert!(processors(list).is_err(), "{list}");
        }
    }
}
