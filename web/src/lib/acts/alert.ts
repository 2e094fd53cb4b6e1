/** Acts on the receivers of alerts. Their secrets are sealed keys, made and removed with them. */
import type { Act, Field, Values } from '../act.svelte';
import { rpc } from '../api';
import { line } from '../format';
import type { Alerts, Key } from '../types';
import { given, or } from './common';

type Receiver = Alerts['receivers'][number];

const SECRETS = ['url', 'secret', 'token', 'password'];
/** Settings that the page does not show. A change keeps them. */
const KEPT = ['categories', 'gather_s', 'retry_for_s', 'ca'];
/** The names of the keys that the page makes for a secret: the second one while the first is in use. */
const keysOf = (name: string, secret: string) => [`alert-${name}-${secret}`, `alert-${name}-${secret}-2`];

/** Removes the keys that the page made for a receiver and that nothing uses any more. */
async function tidy(receiver: string) {
  const own = new Set(SECRETS.flatMap((one) => keysOf(receiver, one)));
  for (const key of await rpc<Key[]>('key_list')) if (own.has(key.name) && !key.removed && key.used_by.length === 0) await rpc('keyring_file_remove_key', { name: key.name });
}

const text = (settings: Values, key: string) => String(settings[key] ?? '');

function selection(settings: Values): Field[] {
  return [
    { key: 'severity', label: 'Events of', kind: 'select', options: [['warning', 'severity warning and above'], ['error', 'severity error: hosts notice'], ['info', 'any severity']], initial: settings.severity ?? 'warning' },
    { key: 'except', label: 'Except types', kind: 'lines', optional: true, initial: ((settings.except as string[]) ?? []).join('\n'), hint: 'Such as nvme_limits, one per line.' },
  ];
}

/** A field for a secret. A receiver that exists keeps its present one, unless another is given. */
const secret = (key: string, label: string, hint: string, optional: boolean, present: boolean, when?: Field['when']): Field => ({ key, label, kind: 'password', optional: optional || present, hint: present ? `${hint} Unchanged unless given.` : hint, when });

/** Stores the secrets that were given, sets the receiver, and removes the keys that it no longer needs. */
async function set(method: string, v: Values, settings: Values, secrets: string[], before: Values) {
  const kept = [...KEPT, ...secrets.filter((one) => !v[one]).flatMap((one) => [`${one}_key`, `${one}_file`])];
  const keys: Values = Object.fromEntries(kept.map((key) => [key, before[key]]));
  for (const one of secrets.filter((one) => v[one])) {
    const all = new Set((await rpc<Key[]>('key_list')).filter((key) => !key.removed).map((key) => key.name));
    const names = keysOf(v.name as string, one);
    const name = names.find((free) => !all.has(free)) ?? names[0];
    if (all.has(name)) await rpc('keyring_file_remove_key', { name });
    await rpc('key_import', { name, kind: 'text', text: (v[one] as string).trim() });
    keys[`${one}_key`] = name;
  }
  try {
    await rpc(method, given({ ...settings, ...keys, name: v.name, severity: v.severity, except: v.except }));
  } finally {
    await tidy(v.name as string);
  }
}

const said = (name: string) => `Receiver ${name} is set. Send a test message to see whether it accepts it.`;
const flags = (v: Values) => [...(v.severity === 'warning' ? [] : ['--severity', v.severity as string]), ...((v.except as string[])?.length ? ['--except', (v.except as string[]).join(',')] : [])];

/** Adds a webhook, or changes one that a call has added. */
export const setWebhook = (receiver?: Receiver): Act => {
  const before: Values = receiver?.settings ?? {};
  const has = (secret: string) => `${secret}_key` in before || `${secret}_file` in before;
  const hidden = has('url');
  return {
    title: receiver ? `Change webhook ${receiver.name}` : 'Add a webhook',
    about: 'The daemon sends JSON by HTTP POST. Secrets are stored sealed.',
    label: receiver ? 'Change' : 'Add',
    fields: [
      ...(receiver ? [] : [{ key: 'name', label: 'Name', kind: 'text', hint: 'Such as oncall.' } as Field]),
      { key: 'hide', label: 'The URL is a secret', kind: 'check', initial: receiver ? hidden : true, hint: 'Stored sealed, and never shown. It needs https://.' },
      { key: 'open', label: 'URL', kind: 'text', initial: text(before, 'url'), hint: 'https://, or http:// in clear. Viewers see its origin.', when: (v) => !v.hide },
      secret('url', 'URL', 'Such as https://hooks.example.org/T0/abc', false, hidden, (v) => !!v.hide),
      secret('secret', 'Signing secret', '24 to 64 random bytes in base64. Requests are not signed without it.', true, has('secret')),
      secret('token', 'Token', 'For the header Authorization: Bearer.', true, has('token')),
      ...selection(before),
    ],
    command: (v) => line('alert', 'webhook', or(receiver?.name ?? v.name, 'NAME'), ...(v.hide ? ['--url-key', 'KEY'] : ['--url', or(v.open, 'URL')]), ...(v.secret || has('secret') ? ['--secret-key', 'KEY'] : []), ...(v.token || has('token') ? ['--token-key', 'KEY'] : []), ...flags(v)),
    async run(v) {
      const values = { ...v, name: receiver?.name ?? v.name } as Values;
      await set('alert_set_webhook', values, v.hide ? {} : { url: v.open }, v.hide ? ['url', 'secret', 'token'] : ['secret', 'token'], before);
      return said(values.name as string);
    },
  };
};

/** Adds recipients by mail, or changes ones that a call has added. */
export const setMail = (receiver?: Receiver): Act => {
  const before: Values = receiver?.settings ?? {};
  return {
    title: receiver ? `Change mail receiver ${receiver.name}` : 'Add a mail receiver',
    about: 'The daemon sends mail through a mail server. The password is stored sealed.',
    label: receiver ? 'Change' : 'Add',
    fields: [
      ...(receiver ? [] : [{ key: 'name', label: 'Name', kind: 'text', hint: 'Such as storage-team.' } as Field]),
      { key: 'server', label: 'Mail server', kind: 'text', initial: text(before, 'server'), hint: 'Such as mail.example.org, or mail.example.org:587.' },
      { key: 'tls', label: 'Encryption', kind: 'select', options: [['starttls', 'STARTTLS'], ['implicit', 'TLS from the first byte'], ['off', 'none: in clear']], initial: before.tls ?? 'starttls' },
      { key: 'from', label: 'Sender', kind: 'text', initial: text(before, 'from'), hint: 'Such as Nacre <nacre@example.org>.' },
      { key: 'to', label: 'Recipients', kind: 'lines', initial: ((before.to as string[]) ?? []).join('\n'), hint: 'One address per line.' },
      { key: 'user', label: 'User', kind: 'text', optional: true, initial: text(before, 'user'), hint: 'For authentication. None unless given.' },
      secret('password', 'Password', 'Of the user.', false, 'password_key' in before || 'password_file' in before, (v) => !!v.user),
      ...selection(before),
    ],
    command: (v) => line('alert', 'mail', or(receiver?.name ?? v.name, 'NAME'), '--server', or(v.server, 'HOST'), ...(v.tls === 'starttls' ? [] : ['--tls', v.tls as string]), '--from', or(v.from, 'ADDRESS'), '--to', or((v.to as string[])?.join(','), 'ADDRESS'), ...(v.user ? ['--user', v.user as string, '--password-key', 'KEY'] : []), ...flags(v)),
    async run(v) {
      const values = { ...v, name: receiver?.name ?? v.name } as Values;
      await set('alert_set_mail', values, { server: v.server, tls: v.tls, from: v.from, to: v.to, user: v.user }, v.user ? ['password'] : [], before);
      return said(values.name as string);
    },
  };
};

export const changeReceiver = (receiver: Receiver) => (receiver.kind === 'mail' ? setMail(receiver) : setWebhook(receiver));

export const removeReceiver = (receiver: Receiver): Act => ({
  title: `Remove receiver ${receiver.name}`,
  label: 'Remove',
  danger: { lost: `the receiver ${receiver.name}, its secrets, and the events that wait for it (${receiver.pending}). No message about later events is sent to it.`, name: receiver.name },
  command: () => line('alert', 'remove', receiver.name),
  async run() {
    await rpc('alert_remove', { name: receiver.name });
    await tidy(receiver.name);
    return `Receiver ${receiver.name} was removed.`;
  },
});
