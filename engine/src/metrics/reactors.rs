//! Metrics of reactors and their buffers.

use super::{Desc, MetricKind, MetricsSource, Moment, Scrape};

macro_rules! family {
    ($name:ident, $metric:literal, $kind:ident, $help:literal, [$($label:literal),*]) => {
        static $name: Desc = Desc { name: $metric, kind: MetricKind::$kind, help: $help, labels: &[$($label),*] };
    };
}
pub(super) use family;

family!(
    BUSY,
    "nacre_reactor_busy_seconds",
    Counter,
    "Time in turns with work.",
    ["reactor"]
);
family!(
    IDLE,
    "nacre_reactor_idle_seconds",
    Counter,
    "Time in turns without work.",
    ["reactor"]
);
family!(
    SLEEP,
    "nacre_reactor_sleep_seconds",
    Counter,
    "Time for which the reactor slept.",
    ["reactor"]
);
family!(
    SLEEPS,
    "nacre_reactor_sleeps",
    Counter,
    "Sleeps of the reactor.",
    ["reactor"]
);
family!(
    CORE_TAKEN,
    "nacre_reactor_core_taken",
    Counter,
    "Times another thread took the core for a millisecond or more.",
    ["reactor"]
);
family!(TURNS, "nacre_reactor_turns", Counter, "Turns.", ["reactor"]);
family!(
    STALLS,
    "nacre_reactor_stalls",
    Counter,
    "Turns that took too long for other work of the reactor.",
    ["reactor"]
);
family!(
    LONGEST,
    "nacre_reactor_longest_turn_seconds",
    Gauge,
    "The longest turn since the start.",
    ["reactor"]
);
family!(
    ALIVE,
    "nacre_reactor_alive",
    Gauge,
    "1 while the reactor runs.",
    ["reactor"]
);
family!(
    BUFFERS,
    "nacre_buffers",
    Gauge,
    "Buffers of the pool.",
    ["reactor", "pool", "size"]
);
family!(
    FREE,
    "nacre_buffers_free",
    Gauge,
    "Free buffers of the pool.",
    ["reactor", "pool", "size"]
);
family!(
    LOW,
    "nacre_buffers_low_water",
    Gauge,
    "Lowest number of free buffers since the start.",
    ["reactor", "pool", "size"]
);
family!(
    WAITS,
    "nacre_buffers_exhausted",
    Counter,
    "Requests that waited for a free buffer.",
    ["reactor", "pool", "size"]
);

#[derive(Debug)]
pub struct Reactors;

impl MetricsSource for Reactors {
    fn describe(&self) -> &'static [&'static Desc] {
        static ALL: [&Desc; 13] = [
            &BUSY,
            &IDLE,
            &SLEEP,
            &SLEEPS,
            &CORE_TAKEN,
            &TURNS,
            &STALLS,
            &LONGEST,
            &ALIVE,
            &BUFFERS,
            &FREE,
            &LOW,
            &WAITS,
        ];
        &ALL
    }

    fn collect(&self, of: &Moment, into: &mut Scrape) {
        let Some(plane) = &of.plane else { return };
        let seconds = |ns: u64| ns as f64 / 1e9;
        for stats in plane.reactors.iter().map(|r| r.stats()) {
            let labels = [stats.name.as_str()];
            into.value(&BUSY, &labels, seconds(stats.busy_ns));
            into.value(&IDLE, &labels, seconds(stats.idle_ns));
            into.value(&SLEEP, &labels, seconds(stats.sleep_ns));
            into.value(&SLEEPS, &labels, stats.sleeps);
            into.value(&CORE_TAKEN, &labels, stats.core_taken);
            into.value(&TURNS, &labels, stats.turns);
            into.value(&STALLS, &labels, stats.stalls);
            into.value(&LONGEST, &labels, seconds(stats.longest_turn_ns));
            into.value(&ALIVE, &labels, stats.alive);
        }
        for pools in &of.pools {
            for (kind, classes) in [("io", &pools.io), ("admin", &pools.admin)] {
                for class in classes {
                    let size = class.size.to_string();
                    let labels = [pools.reactor.as_str(), kind, size.as_str()];
                    into.value(&BUFFERS, &labels, class.count);
                    into.value(&FREE, &labels, class.free);
                    into.value(&LOW, &labels, class.low_water);
                    into.value(&WAITS, &labels, class.exhausted);
                }
            }
        }
    }
}
