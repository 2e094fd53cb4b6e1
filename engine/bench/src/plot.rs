//! The plots of the HTML page, as SVG: bars, and ranges on a logarithmic axis.

/// Rows under one heading: the compared sides of one measurement.
pub(crate) struct Group {
    pub name: String,
    pub rows: Vec<Row>,
}

/// One side of a comparison. Bars show the first value; ranges mark each value, in rising order.
pub(crate) struct Row {
    pub side: usize,
    pub name: String,
    pub values: Vec<f64>,
    /// The values as text, with their unit.
    pub text: String,
}

const WIDTH: f64 = 900.0;
/// Horizontal start of the drawing, right of the names.
const LEFT: f64 = 130.0;
/// Horizontal end of the drawing, left of the values.
const RIGHT: f64 = 640.0;
const ROW: f64 = 20.0;
const HEADING: f64 = 26.0;
/// Sides with a colour of their own; later ones share these in turn.
pub(crate) const COLOURS: usize = 6;

/// Bars from zero. The largest value of each group has a bar of full length, so the bars of
/// different groups cannot be compared.
pub(crate) fn bars(title: &str, groups: &[Group]) -> String {
    drawing(title, groups, |group, row, middle| {
        let values = group.rows.iter().filter_map(|row| row.values.first());
        let largest = values.copied().fold(f64::MIN_POSITIVE, f64::max);
        let value = row.values.first().copied().unwrap_or_default();
        let length = (RIGHT - LEFT) * value / largest;
        let top = middle - 6.0;
        format!(
            "<rect class=\"s{}\" x=\"{LEFT}\" y=\"{top:.1}\" width=\"{length:.1}\" height=\"12\" rx=\"2\"/>",
            row.side % COLOURS
        )
    })
}

/// Lines from the smallest to the largest value of each row, with a mark at each value, on one
/// logarithmic axis.
pub(crate) fn ranges(title: &str, groups: &[Group]) -> String {
    let all = || groups.iter().flat_map(|group| &group.rows);
    let values = || all().flat_map(|row| row.values.iter().copied());
    // Times below the resolution of the clock are 0, which has no logarithm.
    let positive = || values().filter(|value| *value > 0.0);
    let least = positive().reduce(f64::min).unwrap_or(1.0);
    let most = positive().fold(least, f64::max);
    let (low, high) = (least.log10().floor(), most.log10().ceil());
    let decades = (high - low).max(1.0);
    let place = |value: f64| {
        let decade = value.max(least).log10() - low;
        LEFT + (RIGHT - LEFT) * decade / decades
    };
    drawing(title, groups, |_, row, middle| {
        let side = row.side % COLOURS;
        let mut text = String::new();
        if let (Some(first), Some(last)) = (row.values.first(), row.values.last()) {
            let (from, to) = (place(*first), place(*last));
            text.push_str(&format!(
                "<line class=\"s{side}\" x1=\"{from:.1}\" y1=\"{middle:.1}\" x2=\"{to:.1}\" y2=\"{middle:.1}\"/>"
            ));
        }
        for value in &row.values {
            let at = place(*value);
            text.push_str(&format!(
                "<circle class=\"s{side}\" cx=\"{at:.1}\" cy=\"{middle:.1}\" r=\"4\"/>"
            ));
        }
        text
    })
}

fn drawing(title: &str, groups: &[Group], mark: impl Fn(&Group, &Row, f64) -> String) -> String {
    let mut body = String::new();
    let mut y = 0.0;
    for group in groups {
        y += HEADING;
        let at = y - 7.0;
        body.push_str(&format!(
            "<text class=\"group\" x=\"0\" y=\"{at:.1}\">{}</text>\n",
            escaped(&group.name)
        ));
        for row in &group.rows {
            let middle = y + ROW / 2.0;
            let (name, text) = (escaped(&row.name), escaped(&row.text));
            let (base, end) = (middle + 4.0, RIGHT + 10.0);
            body.push_str(&format!(
                "<g><title>{name}: {text}</title><text x=\"12\" y=\"{base:.1}\">{name}</text>{}\
                 <text class=\"value\" x=\"{end}\" y=\"{base:.1}\">{text}</text></g>\n",
                mark(group, row, middle)
            ));
            y += ROW;
        }
    }
    let height = y + 6.0;
    format!(
        "<svg viewBox=\"0 0 {WIDTH} {height:.0}\" role=\"img\" aria-label=\"{}\">\n{body}</svg>",
        escaped(title)
    )
}

/// Text for HTML and SVG, also inside quoted attributes.
pub(crate) fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(values: &[&[f64]]) -> Group {
        let row = |(side, values): (usize, &&[f64])| Row {
            side,
            name: format!("side{side}"),
            values: values.to_vec(),
            text: "x us".into(),
        };
        Group {
            name: "<line>".into(),
            rows: values.iter().enumerate().map(row).collect(),
        }
    }

    #[test]
    fn the_longest_bar_fills_the_width() {
        let text = bars("t", &[group(&[&[50.0], &[100.0]])]);
        assert!(text.contains("width=\"510.0\""), "{text}");
        assert!(text.contains("width=\"255.0\""), "{text}");
        assert!(
            text.contains("&lt;line&gt;") && !text.contains("<line>"),
            "{text}"
        );
    }

    #[test]
    fn each_decade_has_the_same_width() {
        let text = ranges("t", &[group(&[&[10.0, 100.0, 1000.0]])]);
        for at in ["cx=\"130.0\"", "cx=\"385.0\"", "cx=\"640.0\""] {
            assert!(text.contains(at), "no {at} in {text}");
        }
    }

    /// Goal: no value, or only zeroes, makes no invalid number.
    #[test]
    fn nothing_to_draw() {
        for values in [&[][..], &[&[][..]], &[&[0.0][..]]] {
            for text in [bars("t", &[group(values)]), ranges("t", &[group(values)])] {
                assert!(!text.contains("NaN") && !text.contains("inf"), "{text}");
            }
        }
        assert!(bars("t", &[]).starts_with("<svg "));
    }

    #[test]
    fn special_characters_are_escaped() {
        assert_eq!(
            escaped("<a href='x'>&\""),
            "&lt;a href=&#39;x&#39;&gt;&amp;&quot;"
        );
    }
}
