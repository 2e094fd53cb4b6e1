/** Answers of methods of class read: kept between screens, read again on changes and at intervals. */
import { onMount } from 'svelte';
import { Refusal, rpc, type Caller } from './api';
import { live } from './live.svelte';
import { session } from './session.svelte';

export class Resource<T> {
  value = $state.raw<T>();
  error = $state.raw<Refusal>();
  private busy = false;
  private again = false;

  constructor(
    readonly method: string,
    readonly params: Record<string, unknown>,
  ) {}

  async read(caller: Caller = 'person'): Promise<void> {
    if (this.busy) {
      this.again = true;
      return;
    }
    this.busy = true;
    try {
      this.value = await rpc<T>(this.method, this.params, caller);
      this.error = undefined;
    } catch (error) {
      const refusal = error as Refusal;
      // While the daemon is away or the session has ended, the last answer stays on the screen.
      if (!(this.value !== undefined && (refusal.status === 0 || refusal.status === 401))) this.error = refusal;
    } finally {
      this.busy = false;
    }
    if (this.again) {
      this.again = false;
      await this.read(caller);
    }
  }
}

const all = new Map<string, Resource<unknown>>();

/** A resource for the life of a component. */
export function use<T>(method: string, params: Record<string, unknown> = {}, every_s = 15): Resource<T> {
  const key = `${method} ${JSON.stringify(params)}`;
  let found = all.get(key) as Resource<T> | undefined;
  if (!found) {
    found = new Resource<T>(method, params);
    all.set(key, found as Resource<unknown>);
  }
  const resource = found;
  onMount(() => {
    const read = () => {
      if (!session.expired && document.visibilityState === 'visible') void resource.read('background');
    };
    void resource.read();
    const stop = live.onChange(read);
    const timer = setInterval(read, every_s * 1000);
    return () => {
      stop();
      clearInterval(timer);
    };
  });
  return resource;
}
