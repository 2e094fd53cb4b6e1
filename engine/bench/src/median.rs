//! Medians of measured values.

/// The median. With an even number of values it is the lower of the two in the middle. `None`
/// without a value.
pub fn median(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let mut sorted: Vec<f64> = values.into_iter().collect();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len().saturating_sub(1) / 2).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lower_one_of_an_even_number() {
        assert_eq!(median([4.0, 1.0, 3.0, 2.0]), Some(2.0));
        assert_eq!(median([9.0, 1.0, 3.0]), Some(3.0));
        assert_eq!(median([]), None);
    }
}
