//! Writes the results of `nacre bench` as one HTML page, with the medians of each workload (*line*)
//! on each target or device (*side*). Styles and plots (SVG) are inside the page, so it opens
//! without a network.

use super::comparison::{Comparison, Figures, Latency, LineResult, Setting};
use super::plot::{Group, Row, bars, escaped, ranges};
use super::table;

const STYLE: &str = "\
:root{color-scheme:light dark;--fore:#1f2328;--soft:#59636e;--back:#fff;--edge:#d1d9e0;\
--c0:#6e7781;--c1:#2a78d6;--c2:#d9541e;--c3:#14866d;--c4:#7a4fc9;--c5:#a36a00}
@media(prefers-color-scheme:dark){:root{--fore:#e6edf3;--soft:#9198a1;--back:#0d1117;--edge:#3d444d;\
--c0:#9198a1;--c1:#5b9df0;--c2:#f0814f;--c3:#3fb59a;--c4:#b08cf0;--c5:#d7a23b}}
body{margin:2rem auto;max-width:70rem;padding:0 1rem;color:var(--fore);background:var(--back);\
font:15px/1.5 system-ui,sans-serif}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2.2rem}p,li{max-width:60rem}.soft{color:var(--soft)}
.kind{border:1px solid var(--edge);border-radius:.8em;padding:0 .6em;white-space:nowrap}
.kind.software_rdma,.kind.loopback{border-color:var(--c2);color:var(--c2)}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{padding:.25rem .7rem;border-bottom:1px solid var(--edge);text-align:right;white-space:nowrap}
th:first-child,td:first-child{text-align:left}.key span{margin-right:1.4em}.key i{display:inline-block;width:.8em;\
height:.8em;border-radius:.15em;margin-right:.4em}
svg{width:100%;height:auto}svg text{fill:var(--fore);font:12px system-ui,sans-serif}
svg text.group{font-weight:600}svg text.value{fill:var(--soft)}svg line{stroke-width:2}
.s0{fill:var(--c0);stroke:var(--c0);background:var(--c0)}.s1{fill:var(--c1);stroke:var(--c1);background:var(--c1)}
.s2{fill:var(--c2);stroke:var(--c2);background:var(--c2)}.s3{fill:var(--c3);stroke:var(--c3);background:var(--c3)}
.s4{fill:var(--c4);stroke:var(--c4);background:var(--c4)}.s5{fill:var(--c5);stroke:var(--c5);background:var(--c5)}
";

/// The page: machine, parameters of the run, sides, notes, plots of the medians, and a table of all
/// medians per line with failures and ratios.
pub fn page(comparison: &Comparison) -> String {
    let mut html = format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width\">\n<title>nacre bench</title>\n\
         <style>\n{STYLE}</style></head><body>\n<h1>nacre bench</h1>\n"
    );
    html.push_str(&heading(comparison));
    let drawings: [(&str, &str, Drawing, Choice); 4] = [
        (
            "Throughput, MB/s",
            "10^6 bytes per second, medians. Each line has its own scale.",
            bars,
            |f| {
                let rate = f.megabytes_per_second;
                (
                    vec![rate],
                    format!("{rate:.1} MB/s, {:.0} I/O per s", f.iops),
                )
            },
        ),
        (
            "Latency, microseconds",
            "Marks at p50, p99 and p99.9, on a logarithmic axis. In a mix: of the reads.",
            ranges,
            |f| match f.read_latency.or(f.write_latency) {
                Some(latency) => quantiles(&latency),
                None => (Vec::new(), "not known".into()),
            },
        ),
        (
            "Processor time of the host, s/GiB",
            "The load threads poll without sleeping, so they use their cores all the time.",
            bars,
            |f| seconds(f.host_cpu_seconds_per_gib),
        ),
        (
            "Processor time of the target, s/GiB",
            "The process of the target, without interrupts and the kernel's own threads.",
            bars,
            |f| seconds(f.target_cpu_seconds_per_gib),
        ),
    ];
    for (title, remark, draw, choice) in drawings {
        let groups = groups(comparison, choice);
        html.push_str(&format!(
            "<h2>{title}</h2>\n<p class=\"soft\">{remark}</p>\n{}\n",
            draw(title, &groups)
        ));
    }
    html.push_str("<h2>All figures</h2>\n");
    for line in &comparison.lines {
        html.push_str(&figures(line));
    }
    html.push_str("</body></html>\n");
    html
}

type Drawing = fn(&str, &[Group]) -> String;
type Choice = fn(&Figures) -> (Vec<f64>, String);

fn quantiles(latency: &Latency) -> (Vec<f64>, String) {
    let Latency {
        p50_us,
        p99_us,
        p99_9_us,
        ..
    } = *latency;
    let text = format!("{p50_us:.1}, {p99_us:.1}, {p99_9_us:.1} us");
    (vec![p50_us, p99_us, p99_9_us], text)
}

fn seconds(value: Option<f64>) -> (Vec<f64>, String) {
    match value {
        Some(value) => (vec![value], format!("{value:.2} s/GiB")),
        None => (Vec::new(), "not known".into()),
    }
}

fn heading(comparison: &Comparison) -> String {
    let mut html = format!(
        "<p>{}<br>{}</p>\n<ul>\n",
        escaped(&table::machine(comparison)),
        escaped(&table::run(comparison))
    );
    for side in &comparison.sides {
        let kind = match class(side.setting) {
            "" => String::new(),
            word => format!(" {word}"),
        };
        html.push_str(&format!(
            "<li><b>{}</b> {} <span class=\"kind{kind}\">{}</span> {}</li>\n",
            escaped(&side.name),
            escaped(&side.target),
            side.setting.words(),
            escaped(&side.description)
        ));
    }
    for note in &comparison.notes {
        html.push_str(&format!("<li class=\"soft\">{}</li>\n", escaped(note)));
    }
    html.push_str("</ul>\n<p class=\"key\">");
    for (at, side) in comparison.sides.iter().enumerate() {
        let colour = at % super::plot::COLOURS;
        html.push_str(&format!(
            "<span><i class=\"s{colour}\"></i>{}</span>",
            escaped(&side.name)
        ));
    }
    html.push_str("</p>\n");
    html
}

/// The CSS class that highlights a setting whose figures are not those of network hardware; empty
/// for the others.
fn class(setting: Setting) -> &'static str {
    match setting {
        Setting::SoftwareRdma => "software_rdma",
        Setting::Loopback => "loopback",
        _ => "",
    }
}

fn groups(comparison: &Comparison, choice: Choice) -> Vec<Group> {
    let rows = |line: &LineResult| {
        let rows = line.results.iter().enumerate();
        rows.map(|(side, result)| {
            let (values, text) = match &result.median {
                Some(figures) => choice(figures),
                None => (Vec::new(), "failed".into()),
            };
            let name = result.side.clone();
            Row {
                side,
                name,
                values,
                text,
            }
        })
        .collect()
    };
    let each = comparison.lines.iter().map(|line| Group {
        name: line.name.clone(),
        rows: rows(line),
    });
    each.collect()
}

fn figures(line: &LineResult) -> String {
    let mut html = format!(
        "<h3>{}</h3>\n<div class=\"scroll\"><table><tr><th></th>",
        escaped(&line.name)
    );
    for column in table::columns() {
        html.push_str(&format!("<th>{}</th>", escaped(column)));
    }
    html.push_str("</tr>\n");
    for result in &line.results {
        html.push_str(&format!("<tr><td>{}</td>", escaped(&result.side)));
        match &result.median {
            Some(figures) => {
                for cell in table::cells(figures) {
                    html.push_str(&format!("<td>{}</td>", escaped(&cell)));
                }
            }
            None => html.push_str("<td>failed</td>"),
        }
        html.push_str("</tr>\n");
    }
    html.push_str("</table></div>\n");
    let remarks = table::failures(line).into_iter().chain(table::ratios(line));
    for remark in remarks {
        html.push_str(&format!(
            "<p class=\"soft\">{}</p>\n",
            escaped(remark.trim())
        ));
    }
    html
}

#[cfg(test)]
mod tests {
    use super::super::comparison::tests::comparison;
    use super::*;

    /// Goal: the page refers to nothing outside itself, and foreign text cannot become markup.
    #[test]
    fn the_page_needs_no_network() {
        let html = page(&comparison());
        for outside in [
            "http:", "https:", "src=", "href=", "@import", "url(", "<script",
        ] {
            assert!(!html.contains(outside), "{outside} in\n{html}");
        }
        assert!(html.contains("lo &lt;both ends&gt;") && html.contains("A &amp; B"));
        assert!(html.contains("prefers-color-scheme:dark"));
    }

    /// Goal: every element that is opened is closed, in order.
    #[test]
    fn the_page_is_well_formed() {
        let html = page(&comparison());
        assert_eq!(html.matches("<svg ").count(), 4);
        let mut open = Vec::new();
        for tag in html.split('<').skip(1) {
            let (tag, _) = tag.split_once('>').unwrap();
            let name = tag.split(' ').next().unwrap();
            match name.strip_prefix('/') {
                Some(closed) => assert_eq!(open.pop(), Some(closed), "{tag}"),
                None if tag.ends_with('/') || tag.starts_with('!') => {}
                None if ["meta", "br"].contains(&name) => {}
                None => open.push(name),
            }
        }
        assert_eq!(open, Vec::<&str>::new());
    }

    /// Goal: names of sides, failures and ratios are on the page.
    #[test]
    fn the_page_has_all_facts() {
        let html = page(&comparison());
        for part in [
            "<span class=\"kind software_rdma\">RDMA emulated in software</span>",
            "1 of 3 rounds failed: the connection was lost",
            "rdma to tcp: throughput 1.50",
            "<th>p99.9 us</th>",
            "Processor time of the target, s/GiB",
        ] {
            assert!(html.contains(part), "no {part} in\n{html}");
        }
    }
}
