/** Acts on keys, and on the keys of hosts. */
import type { Act } from '../act.svelte';
import { rpc } from '../api';
import { line } from '../format';
import type { HostAuth, Key } from '../types';
import { given, or } from './common';

const EXPIRES = { key: 'expires', label: 'Expires on', kind: 'text', optional: true, hint: 'Such as 2027-01-31 (UTC). Never unless given.' } as const;
const NAME = { key: 'name', label: 'Name', kind: 'text', hint: 'Such as host1.' } as const;
const until = (v: { expires?: string }) => (v.expires ? ['--expires', v.expires] : []);

export const generateKey = (): Act => ({
  title: 'Generate a key',
  about: 'The daemon makes the key and stores it sealed. Its text is shown once, for the other end.',
  label: 'Generate',
  fields: [
    NAME,
    { key: 'kind', label: 'For', kind: 'select', options: [['dhchap', 'authentication (DH-HMAC-CHAP)'], ['tls', 'TLS (pre-shared key)']] },
    { key: 'hash', label: 'Hash function', kind: 'select', options: ['sha256', 'sha384', 'sha512', 'none'].map((one): [string, string] => [one, one]), when: (v) => v.kind === 'dhchap' },
    EXPIRES,
  ],
  command: (v) => line('key', 'generate', or(v.name, 'NAME'), '--sealed', v.kind === 'tls' && '--tls', ...(v.kind === 'dhchap' && v.hash !== 'sha256' ? ['--hash', v.hash] : []), ...until(v)),
  async run(v) {
    const { text } = await rpc<{ text: string }>('key_generate', given({ name: v.name, kind: v.kind, hash: v.hash, expires: v.expires, reveal: true }));
    return { text: `The text of key ${v.name}. It is not shown again: no later call reveals it.`, lines: [text], label: 'For the other end' };
  },
});

export const importKey = (): Act => ({
  title: 'Import a key',
  about: 'The daemon stores the key sealed. A file on this machine is read once, and may be deleted then.',
  label: 'Import',
  fields: [
    NAME,
    { key: 'from', label: 'From', kind: 'select', options: [['text', 'its text'], ['file', 'a file on this machine']] },
    { key: 'text', label: 'Text of the key', kind: 'password', hint: 'Such as DHHC-1:… or NVMeTLSkey-1:…', when: (v) => v.from === 'text' },
    { key: 'file', label: 'Path', kind: 'text', hint: 'An absolute path. Only the user of the daemon may be able to read the file.', when: (v) => v.from === 'file' },
    EXPIRES,
  ],
  command: (v) => line('key', 'import', or(v.name, 'NAME'), or(v.file, 'FILE'), '--sealed', ...until(v)),
  async run(v) {
    const key = await rpc<{ fingerprint: string }>('key_import', given({ name: v.name, text: v.text?.trim(), file: v.file, expires: v.expires }));
    return `Key ${v.name} was imported; its fingerprint is ${key.fingerprint}.`;
  },
});

export const sealKey = (key: Key): Act => ({
  title: `Seal key ${key.name}`,
  about: 'The daemon stores the key of the file sealed. The file is no longer used, and may be deleted.',
  label: 'Seal',
  command: () => line('key', 'seal', key.name),
  async run() {
    await rpc('key_seal', { name: key.name });
    return `Key ${key.name} is stored sealed.`;
  },
});

export const expireKey = (key: Key): Act => ({
  title: `End of key ${key.name}`,
  about: 'From then on hosts with the key are refused. Connections that exist go on.',
  label: 'Set the end',
  fields: [{ key: 'expires', label: 'Expires on', kind: 'text', optional: true, initial: key.expires ?? '', hint: 'Such as 2027-01-31 or 2027-01-31T12:00:00Z (UTC). Empty: never.' }],
  command: (v) => line('key', 'expire', key.name, ...(v.expires ? ['--at', v.expires] : ['--never'])),
  async run(v) {
    await rpc('key_expire', given({ name: key.name, expires: v.expires }));
    return v.expires ? `Key ${key.name} expires on ${v.expires}.` : `Key ${key.name} does not expire.`;
  },
});

export const removeKey = (key: Key): Act => ({
  title: `Remove key ${key.name}`,
  label: 'Remove',
  danger: {
    lost: `${key.source === 'sealed' ? 'the key: its sealed secret is deleted' : `the name of the key; its ${key.source} stays`}. ${key.used_by.length > 0 ? `${key.used_by.join(', ')} can use it until the daemon starts again, and not after.` : 'No host uses it.'}`,
    name: key.name,
  },
  command: () => line('key', 'remove', key.name),
  async run() {
    await rpc('keyring_file_remove_key', { name: key.name });
    return `Key ${key.name} was removed.`;
  },
});

export const rotateStore = (): Act => ({
  title: 'Rotate the store key',
  about: 'All sealed keys are sealed again with another store key. Hosts notice nothing. A former export of the machine then opens only its own keys.',
  label: 'Rotate',
  command: () => line('key', 'rotate-store'),
  async run() {
    const done = await rpc<{ keys: number; store_key: string }>('key_store_rotate');
    return `Sealed again: ${done.keys}. The fingerprint of the store key is ${done.store_key}.`;
  },
});

export const rotateHost = (of: HostAuth, keys: Key[]): Act => {
  const kind = of.psk ? 'tls' : 'dhchap';
  const choices = keys.filter((key) => key.kind === kind && key.state === 'ok' && key.name !== (of.psk ?? of.dhchap_key));
  return {
    title: 'Give a host a new key',
    about: `${of.host} has the key ${of.psk ?? of.dhchap_key ?? 'none'} for ${of.subsystem}. The former key stays valid for the time, or until the host uses the new one on every queue. Connections go on.`,
    label: 'Rotate',
    fields: [
      { key: 'key', label: 'New key', kind: 'select', options: choices.length > 0 ? choices.map((key) => [key.name, `${key.name} (${key.fingerprint})`]) : [['', 'No other key of this kind exists: generate one first']] },
      { key: 'overlap', label: 'The former key is valid for', kind: 'select', options: [['86400', 'a day'], ['3600', 'an hour'], ['604800', 'a week'], ['0', 'no longer: it ends now']] },
    ],
    command: (v) => line('key', 'rotate', of.subsystem, of.host, or(v.key, 'KEY'), ...(v.overlap === '86400' ? [] : ['--overlap', ({ 3600: '1h', 604800: '7d', 0: '0s' } as Record<string, string>)[v.overlap]])),
    async run(v) {
      await rpc('host_rotate', { nqn: of.subsystem, host: of.host, key: v.key, overlap_s: Number(v.overlap) });
      return `The host has the key ${v.key}.`;
    },
  };
};
