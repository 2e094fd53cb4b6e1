//! Keeps the fields of a stored value that this version does not know: nodes of versions n and n+1
//! write the same records.

use serde_json::Value;

/// Adds to `next` what `stored` has and `known` lacks. `known` is `stored` as this version reads
/// and writes it. Elements of lists are matched by their `id`.
pub(crate) fn keep_unknown(stored: &Value, known: &Value, next: &mut Value) {
    match (stored, known, next) {
        (Value::Object(stored), Value::Object(known), Value::Object(next)) => {
            for (name, value) in stored {
                match (known.get(name), next.get_mut(name)) {
                    (Some(known), Some(next)) => keep_unknown(value, known, next),
                    (None, None) => {
                        next.insert(name.clone(), value.clone());
                    }
                    _ => {}
                }
            }
        }
        (Value::Array(stored), Value::Array(known), Value::Array(next)) => {
            for next in next {
                let is_same = |other: &&Value| {
                    let id = other.get("id");
                    id.is_some() && id == next.get("id")
                };
                let stored = stored.iter().find(is_same);
                if let (Some(stored), Some(known)) = (stored, known.iter().find(is_same)) {
                    keep_unknown(stored, known, next);
                }
            }
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn fields_of_a_later_version_stay() {
        let stored = json!({"a": 1, "new": 2, "inner": {"x": 1, "y": 2}, "why": "gone",
            "list": [{"id": 1, "new": 7}, {"id": 2, "new": 8}]});
        let known = json!({"a": 1, "inner": {"x": 1}, "why": "gone",
            "list": [{"id": 1}, {"id": 2}]});
        let mut next = json!({"a": 5, "inner": {"x": 6}, "list": [{"id": 2}, {"id": 3}]});
        keep_unknown(&stored, &known, &mut next);
        let want = json!({"a": 5, "new": 2, "inner": {"x": 6, "y": 2},
            "list": [{"id": 2, "new": 8}, {"id": 3}]});
        assert_eq!(next, want, "a known field that was removed stays removed");
    }
}
