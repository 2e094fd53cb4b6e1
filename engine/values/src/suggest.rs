//! Finds the known word nearest to an unknown one, for "did you mean …?" in errors.

/// The word of `known` with the fewest edits (insertions, deletions, replacements, exchanges of two
/// neighbours) from `word`: at most a third of the letters of `word`, or 2 if that is more. `None`
/// if all have more.
pub fn closest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let limit = (word.chars().count() / 3).max(2);
    let length = word.chars().count();
    known
        .into_iter()
        // The difference in length is a lower bound of the distance; skip the costly computation.
        .filter(|k| k.chars().count().abs_diff(length) <= limit)
        .map(|k| (strsim::osa_distance(word, k), k))
        .filter(|(d, _)| *d <= limit)
        .min_by_key(|(d, _)| *d)
        .map(|(_, k)| k)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn near_words_are_suggested_and_distant_ones_are_not() {
        let known = ["cores", "mode", "busy_poll_us"];
        assert_eq!(closest("coers", known), Some("cores"));
        assert_eq!(closest("core", known), Some("cores"));
        assert_eq!(closest("busy_pol_us", known), Some("busy_poll_us"));
        assert_eq!(closest("listeners", known), None);
        let long = "x".repeat(1 << 20);
        assert_eq!(closest(&long, known), None, "at once");
        assert_eq!(closest("", ["abc", "ab"]), Some("ab"));
        assert_eq!(
            closest("kitten", ["sitting"]),
            None,
            "three edits of six letters"
        );
    }
}
