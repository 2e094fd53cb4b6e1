/** The stream of the daemon: a measurement each second, events, and which objects changed. */
import { get, rpc } from './api';
import { session } from './session.svelte';
import type { Event } from './types';

export const WINDOW_S = 900;
/** Rows of the heat map: upper bounds of 1 µs to about 8 s, each twice the one before. */
export const ROWS = 24;

interface Metrics {
  time_ms: number;
  read_ops: number;
  write_ops: number;
  read_bytes: number;
  write_bytes: number;
  read_p50_us: number | null;
  read_p99_us: number | null;
  write_p50_us: number | null;
  write_p99_us: number | null;
  latency_us: [number, number][];
}

type Column = (number | null)[];

class Live {
  /** `lost`: the daemon is away. `full`: it answers, but gives no stream. Attempts go on in both cases. */
  link = $state<'idle' | 'connecting' | 'open' | 'lost' | 'full'>('idle');
  phase = $state('running');
  last = $state.raw<Metrics | null>(null);
  events = $state.raw<Event[]>([]);
  lost = $state(0);
  /** Streams after the first one: each may be of a daemon that was started again. */
  reconnections = 0;

  /** One entry per second; plain arrays, which charts read when `last` changes. */
  times: number[] = [];
  readonly columns = {
    read_ops: [] as Column,
    write_ops: [] as Column,
    read_bytes: [] as Column,
    write_bytes: [] as Column,
    read_p50_us: [] as Column,
    read_p99_us: [] as Column,
    write_p50_us: [] as Column,
    write_p99_us: [] as Column,
  };
  heat: number[][] = [];

  private source: EventSource | null = null;
  private timer = 0;
  private tries = 0;
  private readonly watchers = new Set<() => void>();

  onChange(act: () => void) {
    this.watchers.add(act);
    return () => this.watchers.delete(act);
  }

  start() {
    this.stop();
    if (this.tries === 0) this.link = 'connecting';
    const source = new EventSource('/api/live');
    this.source = source;
    source.addEventListener('snapshot', (message) => {
      this.phase = JSON.parse(message.data).phase;
      const again = this.link !== 'connecting' && this.link !== 'open';
      this.link = 'open';
      this.tries = 0;
      void this.readEvents();
      if (again) {
        this.reconnections += 1;
        session.refresh();
      }
      this.changed();
    });
    source.addEventListener('metrics', (message) => this.add(JSON.parse(message.data)));
    source.addEventListener('event', (message) => this.addEvent(JSON.parse(message.data)));
    source.addEventListener('changed', () => this.changed());
    source.onerror = () => this.retry();
  }

  stop() {
    clearTimeout(this.timer);
    this.source?.close();
    this.source = null;
  }

  /** The server may be away, or may have ended the session: the two look alike here. */
  private retry() {
    this.stop();
    this.tries += 1;
    const wait = Math.min(1000 * 1.6 ** (this.tries - 1), 10_000);
    this.timer = window.setTimeout(async () => {
      const answer = await get<{ signed_in: boolean }>('/api/session').catch(() => null);
      if (answer === null) {
        this.link = 'lost';
        this.retry();
      } else if (answer.signed_in) {
        if (this.tries > 2) this.link = 'full';
        this.start();
      } else {
        this.link = 'idle';
        session.expired = true;
      }
    }, wait);
  }

  private async readEvents() {
    try {
      const answer = await rpc<{ events: Event[]; lost: number }>('events_get', {}, 'background');
      this.events = answer.events;
      this.lost = answer.lost;
    } catch {
      // The next snapshot reads them again.
    }
  }

  private addEvent(event: Event) {
    if (this.events.some((known) => known.id === event.id)) return;
    this.events = [...this.events.slice(-1023), event];
  }

  private pending = 0;
  private changed() {
    clearTimeout(this.pending);
    this.pending = window.setTimeout(() => this.watchers.forEach((act) => act()), 250);
  }

  private add(metrics: Metrics) {
    const now = Math.floor(metrics.time_ms / 1000);
    if (now <= (this.times.at(-1) ?? 0)) this.clear();
    this.times.push(now);
    for (const [key, column] of Object.entries(this.columns)) {
      column.push(metrics[key as keyof typeof this.columns]);
    }
    const row = new Array<number>(ROWS).fill(0);
    for (const [bound, count] of metrics.latency_us) {
      const at = Math.max(0, Math.min(ROWS - 1, Math.ceil(Math.log2(Math.max(1, bound)))));
      row[at] += count;
    }
    this.heat.push(row);
    while (this.times.length > 0 && this.times[0] < now - WINDOW_S) {
      this.times.shift();
      this.heat.shift();
      Object.values(this.columns).forEach((column) => column.shift());
    }
    this.newest = metrics;
    // The start of a stream may bring many measurements at once: one drawing shows them all.
    this.frame ||= requestAnimationFrame(() => {
      this.frame = 0;
      this.last = this.newest;
    });
  }

  private newest: Metrics | null = null;
  private frame = 0;

  /** The machine's clock went back: old measurements have no place on the time line. */
  private clear() {
    this.times = [];
    this.heat = [];
    Object.values(this.columns).forEach((column) => (column.length = 0));
  }
}

export const live = new Live();
