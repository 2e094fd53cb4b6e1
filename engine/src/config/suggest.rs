//! "Did you mean …?": the known word nearest to an unknown one.

/// The nearest of `known`, if it is near enough to be the intended word.
pub fn closest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let limit = (word.chars().count() / 3).max(2);
    let length = word.chars().count();
    known
        .into_iter()
        // The difference in length is a lower bound of the distance; skip the costly computation.
        .filter(|k| k.chars().count().abs_diff(length) <= limit)
        .map(|k| (distance(word, k), k))
        .filter(|(d, _)| *d <= limit)
        .min_by_key(|(d, _)| *d)
        .map(|(_, k)| k)
}

/// Number of edits (insert, delete, replace, swap of neighbours) between two words.
fn distance(a: &str, b: &str) -> usize {
    let a: Vec<char> = a.chars().collect();
    let b: Vec<char> = b.chars().collect();
    let mut before: Vec<usize> = Vec::new();
    let mut above: Vec<usize> = (0..=b.len()).collect();
    for i in 1..=a.len() {
        let mut row = vec![i];
        for j in 1..=b.len() {
            let replace = above[j - 1] + usize::from(a[i - 1] != b[j - 1]);
            let mut best = replace.min(above[j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                best = best.min(before[j - 2] + 1);
            }
            row.push(best);
        }
        before = std::mem::replace(&mut above, row);
    }
    above[b.len()]
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
        assert_eq!(distance("kitten", "sitting"), 3);
        assert_eq!(distance("", "abc"), 3);
    }
}
