/** Who is signed in, and which methods this account may call. */
import { get, post, Refusal, rpc, whenSignedOut } from './api';
import type { Role } from './types';

interface Answer {
  setup: boolean;
  signed_in: boolean;
  name: string | null;
  role: Role | null;
  version: string;
  host: string;
}

class Session {
  known = $state(false);
  setup = $state(false);
  signedIn = $state(false);
  /** The session ended while a screen was open: sign-in appears over the page. */
  expired = $state(false);
  name = $state('');
  role = $state<Role>('viewer');
  version = $state('');
  host = $state('');
  unreachable = $state(false);
  private methods = $state.raw(new Set<string>());

  constructor() {
    whenSignedOut(() => {
      if (this.signedIn) this.expired = true;
    });
  }

  /** True if this account may call the method. The daemon decides again at each call. */
  can(method: string) {
    return this.methods.has(method);
  }

  async load() {
    try {
      await this.take(await get<Answer>('/api/session'));
      this.unreachable = false;
    } catch (error) {
      this.unreachable = error instanceof Refusal && error.status === 0;
      if (!this.unreachable) throw error;
    } finally {
      this.known = true;
    }
  }

  async login(name: string, password: string) {
    await this.take(await post<Answer>('/api/login', { name, password }));
  }

  async claim(code: string, name: string, password: string) {
    await post('/api/setup', { code, name, password });
    await this.take(await get<Answer>('/api/session'));
  }

  async logout() {
    await post('/api/logout').catch(() => {});
    location.hash = '#/';
    location.reload();
  }

  private async take(answer: Answer) {
    // Another account's screens may hold what this one must not see.
    if (this.expired && answer.signed_in && answer.name !== this.name) location.reload();
    this.setup = answer.setup;
    this.name = answer.name ?? this.name;
    this.role = answer.role ?? 'viewer';
    this.version = answer.version;
    this.host = answer.host;
    if (answer.signed_in) await this.learn();
    if (this.signedIn && !answer.signed_in) this.expired = true;
    else this.signedIn = answer.signed_in;
    if (answer.signed_in) this.expired = false;
  }

  private async learn() {
    try {
      this.methods = new Set(await rpc<string[]>('rpc_get_methods', { current: true }, 'background'));
    } catch {
      this.methods = new Set();
    }
  }

  /** Reads the methods again: a daemon that has started offers more of them. */
  refresh() {
    if (this.signedIn && !this.expired) void this.learn();
  }
}

export const session = new Session();
