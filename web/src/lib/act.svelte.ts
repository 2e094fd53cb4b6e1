/** Acts: what changes something. Each has a form, the command that does the same, and a call. */
import { Refusal } from './api';

export type Values = Record<string, any>;

export interface Field {
  key: string;
  label: string;
  kind: 'text' | 'size' | 'number' | 'select' | 'check' | 'bdevs' | 'lines' | 'password';
  hint?: string;
  unit?: string;
  options?: [value: string, label: string][];
  /** Bdevs to choose from, with a word on each. */
  bdevs?: { name: string; label: string; detail: string }[];
  most?: number;
  /** The smallest size, in whole MiB. */
  least?: number;
  initial?: unknown;
  optional?: boolean;
  when?: (v: Values) => boolean;
}

export interface Outcome {
  text: string;
  /** Lines to copy, and where they belong: on the host, if nothing else is said. */
  lines?: string[];
  label?: string;
  /** Text to look at, such as findings. */
  detail?: string[];
}

export interface Act {
  title: string;
  /** What happens, for those who have not done it before. */
  about?: string;
  label: string;
  /** The account whose password is asked for, for password managers. */
  user?: string;
  fields?: Field[];
  /** What is lost, and the name that confirms it. */
  danger?: { lost: string; name: string };
  /** What the daemon refuses unless confirmed: the name goes into `v.force`. */
  force?: { lost: string; name: string };
  command: (v: Values) => string | string[];
  run: (v: Values) => Promise<Outcome | string>;
}

class Acts {
  open = $state.raw<Act | null>(null);
  /** The last success, for the line at the bottom. */
  said = $state('');
  private timer = 0;

  start(act: Act) {
    this.open = act;
  }

  say(text: string) {
    clearTimeout(this.timer);
    this.said = text;
    this.timer = window.setTimeout(() => (this.said = ''), 8000);
  }
}

export const acts = new Acts();
export const start = (act: Act) => acts.start(act);
export const refusal = (error: unknown) =>
  error instanceof Refusal ? error : new Refusal(-1, { message: error instanceof Error ? error.message : String(error) });
