//! Limits the rate of each log statement, so that no peer can fill the disk with log lines.
//!
//! A log statement may write a burst of [`BURST`] lines, and then at most one line a second.
//! Further lines are dropped and counted; [`Flood::report_left_out`] logs their number for each
//! statement. Debug lines, which must be enabled, are not limited.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tracing::callsite::Identifier;
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;

/// Lines of a burst: enough for a start with hundreds of objects of one kind to log a line about
/// each.
const BURST: u32 = 500;
const REFILL: Duration = Duration::from_secs(1);

#[derive(Clone, Default)]
pub(super) struct Flood {
    places: Arc<Mutex<HashMap<Identifier, LineBudget>>>,
}

/// The budget of one log statement.
struct LineBudget {
    metadata: &'static Metadata<'static>,
    left: u32,
    refilled: Instant,
    left_out: u64,
}

impl Flood {
    fn admit(&self, metadata: &'static Metadata<'static>, now: Instant) -> bool {
        if *metadata.level() > Level::INFO {
            return true;
        }
        let mut places = self.places.lock();
        // At most one entry per log statement in the program.
        let place = places.entry(metadata.callsite()).or_insert(LineBudget {
            metadata,
            left: BURST,
            refilled: now,
            left_out: 0,
        });
        let periods = now.duration_since(place.refilled).as_secs() / REFILL.as_secs();
        if periods > 0 {
            let more = u32::try_from(periods).unwrap_or(BURST);
            place.left = place.left.saturating_add(more).min(BURST);
            place.refilled = now;
        }
        let Some(left) = place.left.checked_sub(1) else {
            place.left_out += 1;
            return false;
        };
        place.left = left;
        true
    }

    /// Logs the number of lines of each statement that were dropped since the last call.
    pub(super) fn report_left_out(&self) {
        let mut left_out = Vec::new();
        for place in self.places.lock().values_mut() {
            let lines = std::mem::take(&mut place.left_out);
            if lines > 0 {
                left_out.push((place.metadata, lines));
            }
        }
        for (metadata, lines) in left_out {
            let (part, line) = (metadata.target(), metadata.line().unwrap_or_default());
            tracing::warn!(
                lines,
                "log lines of {part}:{line} were left out: they came too fast"
            );
        }
    }
}

impl<S: Subscriber> Layer<S> for Flood {
    fn event_enabled(&self, event: &Event<'_>, _ctx: Context<'_, S>) -> bool {
        self.admit(event.metadata(), Instant::now())
    }
}

#[cfg(test)]
mod tests {
    use tracing_subscriber::layer::SubscriberExt;

    use super::*;

    /// The messages that passed.
    #[derive(Clone, Default)]
    struct Seen(Arc<Mutex<Vec<String>>>);

    impl<S: Subscriber> Layer<S> for Seen {
        fn on_event(&self, event: &Event<'_>, _ctx: Context<'_, S>) {
            struct Text(String);
            impl tracing::field::Visit for Text {
                fn record_debug(
                    &mut self,
                    field: &tracing::field::Field,
                    value: &dyn std::fmt::Debug,
                ) {
                    self.0 += &format!("{field}={value:?} ");
                }
            }
            let mut text = Text(String::new());
            event.record(&mut text);
            self.0.lock().push(text.0);
        }
    }

    /// Goal: one statement cannot flood the log, reports its dropped lines, and does not limit
    /// others.
    #[test]
    fn a_flood_is_limited_and_counted() {
        let (flood, seen) = (Flood::default(), Seen::default());
        let subscriber = tracing_subscriber::registry()
            .with(flood.clone())
            .with(seen.clone());
        tracing::subscriber::with_default(subscriber, || {
            for n in 0..BURST + 100 {
                tracing::warn!(n, "refused");
            }
            tracing::warn!("something else");
            flood.report_left_out();
            flood.report_left_out();
        });
        let seen = seen.0.lock();
        let refused = seen.iter().filter(|line| line.contains("refused")).count();
        // A second may have passed meanwhile.
        assert!((500..510).contains(&refused), "{refused}");
        let rest = &seen[refused..];
        assert_eq!(rest.len(), 2, "{rest:?}");
        assert!(rest[0].contains("something else"), "{rest:?}");
        assert!(
            rest[1].contains("were left out") && rest[1].contains("lines="),
            "{rest:?}"
        );
    }

    fn metadata_of_a_line() -> &'static Metadata<'static> {
        #[derive(Clone, Default)]
        struct First(Arc<Mutex<Option<&'static Metadata<'static>>>>);
        impl<S: Subscriber> Layer<S> for First {
            fn on_event(&self, event: &Event<'_>, _ctx: Context<'_, S>) {
                *self.0.lock() = Some(event.metadata());
            }
        }
        let first = First::default();
        let subscriber = tracing_subscriber::registry().with(first.clone());
        tracing::subscriber::with_default(subscriber, || tracing::warn!("a line"));
        let metadata = *first.0.lock();
        metadata.unwrap()
    }

    #[test]
    fn a_statement_regains_one_line_a_second() {
        let flood = Flood::default();
        let metadata = metadata_of_a_line();
        let start = Instant::now();
        let at = |s: u64| start + Duration::from_secs(s);
        let admitted = (0..2 * BURST)
            .filter(|_| flood.admit(metadata, at(0)))
            .count();
        assert_eq!(admitted, BURST as usize);
        assert!(flood.admit(metadata, at(1)));
        assert!(!flood.admit(metadata, at(1)));
        let admitted = (0..2 * BURST)
            .filter(|_| flood.admit(metadata, at(11)))
            .count();
        assert_eq!(admitted, 10);
    }
}
