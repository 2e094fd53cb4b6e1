/** Acts on alerts, accounts, API tokens and the stored configuration. */
import type { Act } from '../act.svelte';
import { rpc } from '../api';
import { line, plural, seconds } from '../format';
import type { Account, ApiToken } from '../types';
import { given, or } from './common';

export const silence = (): Act => {
  const HOURS: Record<string, string> = { 3600: '1h', 7200: '2h', 28800: '8h', 86400: '24h', 604800: '7d' };
  return {
    title: 'Silence alerts',
    about: 'The events themselves stay. A silence ends after its time, or with the daemon.',
    label: 'Silence',
    fields: [
      { key: 'duration', label: 'For', kind: 'select', options: Object.keys(HOURS).map((key) => [key, seconds(Number(key)).replace(/ 0 (min|h)$/, '')]) },
      { key: 'object', label: 'Only events about', kind: 'text', optional: true, hint: 'The name of an object, such as vol0.' },
      { key: 'types', label: 'Only events of types', kind: 'lines', optional: true, hint: 'Such as replica_out, one per line.' },
    ],
    command: (v) => line('alert', 'silence', '--for', HOURS[v.duration], ...(v.types?.length ? ['--type', v.types.join(',')] : []), ...(v.object ? ['--object', v.object] : [])),
    async run(v) {
      await rpc('alert_silence', given({ duration_s: Number(v.duration), object: v.object, types: v.types }));
      return 'Alerts are silenced.';
    },
  };
};

export const unsilence = (id: number): Act => ({
  title: 'End a silence',
  about: 'Events that it covered are not sent later.',
  label: 'End the silence',
  command: () => line('alert', 'unsilence', String(id)),
  async run() {
    await rpc('alert_unsilence', { id });
    return 'The silence has ended.';
  },
});

export const testAlert = (name?: string): Act => ({
  title: name ? `Test receiver ${name}` : 'Test all receivers',
  about: 'Sends a test message once, whatever is silenced.',
  label: 'Send',
  command: () => line('alert', 'test', name),
  async run() {
    const results = await rpc<{ name: string; delivered: boolean; error?: string; milliseconds: number }[]>('alert_test', given({ name }));
    return { text: results.length === 0 ? 'There is no receiver.' : 'The answers of the receivers:', detail: results.map((r) => `${r.name}: ${r.delivered ? `accepted the message in ${r.milliseconds} ms` : `did not accept it: ${r.error}`}`) };
  },
});

const ROLES: [string, string][] = [
  ['viewer', 'viewer: sees everything, changes nothing'],
  ['operator', 'operator: also resync, verify, ANA states, silences'],
  ['admin', 'admin: everything'],
];

export const addAccount = (): Act => ({
  title: 'Add an account',
  label: 'Add',
  fields: [
    { key: 'name', label: 'Name', kind: 'text', hint: 'Small letters, digits, dot, underscore and hyphen; a letter first.' },
    { key: 'role', label: 'Role', kind: 'select', options: ROLES },
    { key: 'password', label: 'Password', kind: 'password', hint: 'At least 12 characters.' },
  ],
  command: (v) => line('web', 'account', 'add', or(v.name, 'NAME'), '--role', v.role),
  async run(v) {
    await rpc('web_account_add', { name: v.name, role: v.role, password: v.password });
    return `Account ${v.name} was added.`;
  },
});

export const changeAccount = (account: Account): Act => ({
  title: `Change account ${account.name}`,
  user: account.name,
  label: 'Change',
  fields: [
    { key: 'role', label: 'Role', kind: 'select', options: ROLES, initial: account.role },
    { key: 'password', label: 'New password', kind: 'password', optional: true, hint: 'At least 12 characters. Unchanged unless given.' },
  ],
  command: (v) => line('web', 'account', 'change', account.name, ...(v.role === account.role && v.password ? [] : ['--role', v.role]), ...(v.password ? ['--password'] : [])),
  async run(v) {
    await rpc('web_account_change', given({ name: account.name, role: v.role === account.role ? undefined : v.role, password: v.password }));
    return `Account ${account.name} was changed.`;
  },
});

export const removeAccount = (account: Account): Act => ({
  title: `Remove account ${account.name}`,
  label: 'Remove',
  danger: { lost: `the account ${account.name} (${account.role}), and its sessions`, name: account.name },
  command: () => line('web', 'account', 'remove', account.name),
  async run() {
    await rpc('web_account_remove', { name: account.name });
    return `Account ${account.name} was removed.`;
  },
});

export const createToken = (): Act => {
  const VALIDITY: Record<string, string> = { 2592000: '30d', 7776000: '90d', 31536000: '365d' };
  return {
    title: 'Create an API token',
    about: 'A program sends it with each call: Authorization: Bearer TOKEN. It is shown once.',
    label: 'Create',
    fields: [
      { key: 'name', label: 'Name', kind: 'text', hint: 'Small letters, digits, dot, underscore and hyphen; a letter first.' },
      { key: 'role', label: 'Role', kind: 'select', options: ROLES },
      { key: 'validity', label: 'Valid for', kind: 'select', options: [['7776000', '90 days'], ['2592000', '30 days'], ['31536000', 'a year'], ['', 'until it is deleted']] },
    ],
    command: (v) => line('web', 'token', 'create', or(v.name, 'NAME'), '--role', v.role, ...(v.validity ? ['--valid-for', VALIDITY[v.validity]] : [])),
    async run(v) {
      const { token } = await rpc<{ token: string }>('web_token_create', given({ name: v.name, role: v.role, validity_s: v.validity ? Number(v.validity) : undefined }));
      return { text: `The secret of ${v.name}. It is not shown again.`, lines: [token], label: 'For the program' };
    },
  };
};

export const deleteToken = (token: ApiToken): Act => ({
  title: `Delete API token ${token.name}`,
  label: 'Delete',
  danger: { lost: `the API token ${token.name} (${token.role}). The program that uses it is refused.`, name: token.name },
  command: () => line('web', 'token', 'delete', token.name),
  async run() {
    await rpc('web_token_delete', { name: token.name });
    return `API token ${token.name} was deleted.`;
  },
});

export const retryState = (): Act => ({
  title: 'Restore configured objects now',
  about: 'Tries now to restore what could not be restored before.',
  label: 'Try again',
  command: () => line('state', 'retry'),
  async run() {
    const answer = await rpc<{ failed: number; restored: number }>('state_retry');
    return `${plural(answer.restored, 'object')} restored, ${answer.failed} failed.`;
  },
});

export const forget = (key: string): Act => ({
  title: `Forget ${key}`,
  label: 'Forget',
  danger: { lost: `the configuration of ${key}, with the objects in it or on it. Data on the device stays.`, name: key },
  command: () => line('state', 'forget', key),
  async run() {
    await rpc('state_forget', { key });
    return `${key} was forgotten.`;
  },
});
