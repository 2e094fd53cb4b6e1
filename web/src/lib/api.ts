/** Calls of the daemon: accounts and sessions by their paths, everything else by JSON-RPC methods. */

export class Refusal extends Error {
  readonly status: number;
  readonly code: number;
  readonly field?: string;
  readonly cause_?: string;
  readonly remedy?: string;
  readonly wait_ms?: number;

  constructor(status: number, error: { code?: number; message?: string; data?: Record<string, unknown> }) {
    super(error.message ?? `HTTP status ${status}`);
    this.status = status;
    this.code = error.code ?? 0;
    const text = (key: string) => (typeof error.data?.[key] === 'string' ? (error.data[key] as string) : undefined);
    this.field = text('field');
    this.cause_ = text('cause');
    this.remedy = text('remedy');
    this.wait_ms = typeof error.data?.wait_ms === 'number' ? error.data.wait_ms : undefined;
  }

  /** One sentence or two: the cause, else the message. */
  get text() {
    return this.cause_ ?? this.message;
  }
}

const UNREACHABLE = { message: 'The daemon does not answer. The page connects again by itself.' };

/** Called with 401 answers: the session has ended. */
let onSignedOut = () => {};
export const whenSignedOut = (act: () => void) => (onSignedOut = act);

/** Calls that refresh what is shown do not prolong the session: only people do. */
export type Caller = 'person' | 'background';

export async function post<T>(path: string, body: unknown = {}, caller: Caller = 'person'): Promise<T> {
  let response: Response;
  try {
    response = await fetch(path, {
      method: 'POST',
      headers: { 'Content-Type': 'application/json', 'X-Nacre': caller === 'person' ? '1' : 'background' },
      body: JSON.stringify(body),
      credentials: 'same-origin',
    });
  } catch {
    throw new Refusal(0, UNREACHABLE);
  }
  // A wrong password or set-up code is answered with 401, too; it ends no session.
  return answer(response, path === '/api/rpc');
}

export async function get<T>(path: string): Promise<T> {
  let response: Response;
  try {
    response = await fetch(path, { credentials: 'same-origin', cache: 'no-store' });
  } catch {
    throw new Refusal(0, UNREACHABLE);
  }
  return answer(response, true);
}

async function answer<T>(response: Response, needsSession: boolean): Promise<T> {
  const body = await response.json().catch(() => null);
  if (response.status === 401 && needsSession) onSignedOut();
  if (!response.ok || body === null || body?.error) {
    throw new Refusal(response.status, body?.error ?? { message: `The server answered with HTTP status ${response.status}.` });
  }
  return body as T;
}

export async function rpc<T>(method: string, params: Record<string, unknown> = {}, caller: Caller = 'person'): Promise<T> {
  return (await post<{ result: T }>('/api/rpc', { method, params }, caller)).result;
}
