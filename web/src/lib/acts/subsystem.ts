/** Acts on subsystems, namespaces, hosts and listeners. */
import type { Act, Values } from '../act.svelte';
import { rpc } from '../api';
import { line, plural, rpcLine, seconds } from '../format';
import type { Address, Reservation, Subsystem } from '../types';
import { url } from '../words';
import { given, or, type World, freeOptions, LISTENER, address, connectLines } from './common';

export const createSubsystem = (): Act => ({
  title: 'Create a subsystem',
  about: 'To give hosts one volume, publish the volume: that makes its subsystem.',
  label: 'Create',
  fields: [
    { key: 'nqn', label: 'NQN', kind: 'text', hint: 'Such as nqn.2026-01.com.example:disk0.' },
    { key: 'any', label: 'Allow any host', kind: 'check' },
    { key: 'ana', label: 'Report ANA states, so that hosts prefer a path', kind: 'check', initial: true },
  ],
  command: (v) => line('subsystem', 'create', or(v.nqn, 'NQN'), v.any && '--allow-any-host', v.ana && '--ana'),
  async run(v) {
    await rpc('nvmf_create_subsystem', { nqn: v.nqn, allow_any_host: v.any, ana_reporting: v.ana });
    return `Subsystem ${v.nqn} was created.`;
  },
});

export const deleteSubsystem = (s: Subsystem, then: () => void): Act => ({
  title: 'Delete a subsystem',
  label: 'Delete',
  danger: { lost: `subsystem ${s.nqn} with ${plural(s.namespaces?.length ?? 0, 'namespace')}: its hosts are disconnected. The bdevs and their data stay.`, name: s.nqn.split(':').at(-1)! },
  command: () => line('subsystem', 'delete', s.nqn),
  async run() {
    await rpc('nvmf_delete_subsystem', { nqn: s.nqn });
    then();
    return `Subsystem ${s.nqn} was deleted.`;
  },
});

export const clearReservation = (nqn: string, nsid: number, now: Reservation, holders: string[]): Act => ({
  title: `Clear the reservation of namespace ${nsid}`,
  about: 'For hosts that do not come back. Each connected host that was registered is notified (Reservation Preempted).',
  label: 'Clear',
  fields: [{ key: 'force', label: 'Also while its holder is connected', kind: 'check', hint: 'That host may go on writing, beside the host that reserves the namespace next.' }],
  danger: { lost: `${now.type ? `the reservation (${now.type})${holders.length > 0 ? ` of ${holders.join(', ')}` : ''} and ` : ''}${plural(now.registrants?.length ?? 0, 'registration')} with keys. From then on every host may write. Data stays.`, name: nqn.split(':').at(-1)! },
  command: (v) => line('subsystem', 'clear-reservation', nqn, String(nsid), v.force && '--force'),
  async run(v) {
    const done = await rpc<{ registrants: unknown[] }>('nvmf_ns_clear_reservation', given({ nqn, nsid, generation: now.generation, force: v.force || undefined }));
    return `The reservation of namespace ${nsid} was cleared, with ${plural(done.registrants.length, 'registration')}.`;
  },
});

export const addNamespace = (s: Subsystem, world: World): Act => ({
  title: 'Add a namespace',
  label: 'Add',
  fields: [{ key: 'bdev', label: 'Bdev', kind: 'select', options: freeOptions(world, true) }],
  command: (v) => line('subsystem', 'add-namespace', s.nqn, or(v.bdev, 'BDEV')),
  async run(v) {
    const nsid = await rpc<number>('nvmf_subsystem_add_ns', { nqn: s.nqn, namespace: { bdev_name: v.bdev } });
    return `Namespace ${nsid} was added.`;
  },
});

export const removeNamespace = (s: Subsystem, nsid: number, bdev: string): Act => ({
  title: `Remove namespace ${nsid}`,
  label: 'Remove',
  danger: { lost: `the access of hosts to ${bdev} through ${s.nqn}. The bdev and its data stay.`, name: bdev },
  command: () => line('subsystem', 'remove-namespace', s.nqn, String(nsid)),
  async run() {
    await rpc('nvmf_subsystem_remove_ns', { nqn: s.nqn, nsid });
    return `Namespace ${nsid} was removed.`;
  },
});

export const allowHost = (s: Subsystem): Act => ({
  title: 'Allow a host',
  about: 'A host finds its NQN in /etc/nvme/hostnqn. The name is a claim unless the host has a key: see nacre host allow --generate-key.',
  label: 'Allow',
  fields: [
    { key: 'host', label: 'NQN of the host', kind: 'text' },
    { key: 'dhchap_key', label: 'Name of its key', kind: 'text', optional: true, hint: 'For authentication, from nacre key list.' },
  ],
  command: (v) => line('host', 'allow', s.nqn, or(v.host, 'HOSTNQN'), ...(v.dhchap_key ? ['--dhchap-key', v.dhchap_key] : [])),
  async run(v) {
    await rpc('nvmf_subsystem_add_host', given({ nqn: s.nqn, host: v.host, dhchap_key: v.dhchap_key }));
    return { text: `Host ${v.host} may connect.`, lines: s.listen_addresses.length > 0 ? connectLines(s.nqn, s.listen_addresses, [v.host]) : undefined };
  },
});

export const removeHost = (s: Subsystem, host: string): Act => ({
  title: 'Stop allowing a host',
  label: 'Remove',
  danger: { lost: `the access of host ${host} to ${s.nqn}: it is disconnected unless any host is allowed`, name: host.slice(-8) },
  command: () => line('host', 'remove', s.nqn, host),
  async run() {
    await rpc('nvmf_subsystem_remove_host', { nqn: s.nqn, host });
    return `Host ${host} may not connect any more.`;
  },
});

export const allowAny = (s: Subsystem): Act =>
  s.allow_any_host
    ? {
        title: 'Allow only the hosts of the list',
        label: 'Allow only these',
        danger: { lost: `the access of every host that is not in the list of ${s.nqn}: they are disconnected`, name: s.nqn.split(':').at(-1)! },
        command: () => line('host', 'allow-any', s.nqn, '--off'),
        async run() {
          await rpc('nvmf_subsystem_allow_any_host', { nqn: s.nqn, allow_any_host: false });
          return 'Only the hosts of the list may connect.';
        },
      }
    : {
        title: 'Allow any host',
        about: 'Every machine that reaches a listener can read and write all namespaces of the subsystem.',
        label: 'Allow any host',
        command: () => line('host', 'allow-any', s.nqn),
        async run() {
          await rpc('nvmf_subsystem_allow_any_host', { nqn: s.nqn, allow_any_host: true });
          return 'Any host may connect.';
        },
      };

export const addListener = (s: Subsystem): Act => ({
  title: 'Add a listener',
  label: 'Add',
  fields: LISTENER(false),
  command: (v) => line('listener', 'add', s.nqn, url({ ...address(v), traddr: or(v.traddr, 'ADDRESS') })),
  async run(v) {
    await rpc('nvmf_subsystem_add_listener', { nqn: s.nqn, listen_address: address(v) });
    return { text: `The subsystem listens on ${url(address(v))}.`, lines: connectLines(s.nqn, [address(v)], []) };
  },
});

export const removeListener = (s: Subsystem, at: Address): Act => ({
  title: `Remove listener ${url(at)}`,
  label: 'Remove',
  danger: { lost: `the connections of all hosts through ${url(at)} to ${s.nqn}`, name: at.traddr },
  command: () => line('listener', 'remove', s.nqn, url(at)),
  async run() {
    await rpc('nvmf_subsystem_remove_listener', { nqn: s.nqn, listen_address: at });
    return `Listener ${url(at)} was removed.`;
  },
});

export const setAna = (s: Subsystem, at: Address, now: string): Act => ({
  title: `ANA state of ${url(at)}`,
  about: 'Hosts are notified and move their I/O. On an inaccessible path a host retries on another one, and waits if it has none.',
  label: 'Set state',
  fields: [{ key: 'state', label: 'State', kind: 'select', initial: now, options: [['optimized', 'optimized: hosts prefer it'], ['non_optimized', 'non-optimized: hosts use it when no optimized one works'], ['inaccessible', 'inaccessible: hosts do not use it']] }],
  command: (v) => line('listener', 'set-ana', s.nqn, url(at), String(v.state).replaceAll('_', '-')),
  async run(v) {
    await rpc('nvmf_subsystem_listener_set_ana_state', { nqn: s.nqn, listen_address: at, ana_state: v.state });
    return `${url(at)} is ${String(v.state).replaceAll('_', '-')}.`;
  },
});

export const testFailover = (s: Subsystem, at: Address): Act => {
  const params = (v: Values) => ({ nqn: s.nqn, listen_address: at, seconds: v.seconds ?? 30 });
  return {
    title: `Test the failover from ${url(at)}`,
    about: 'The listener is inaccessible for the time, so that hosts move their I/O to another one. Its state returns by itself. The test is refused if a connected host has no other path.',
    label: 'Start the test',
    fields: [{ key: 'seconds', label: 'For', kind: 'number', unit: 'seconds', initial: '30', hint: 'At most 3600; 0 ends a running test.' }],
    command: (v) => rpcLine('nvmf_subsystem_test_failover', params(v)),
    async run(v) {
      const answer = await rpc<{ accessible: Address[] }>('nvmf_subsystem_test_failover', params(v));
      return { text: `${url(at)} is inaccessible for ${seconds(v.seconds ?? 30)}. These listeners stay accessible:`, detail: answer.accessible.map(url) };
    },
  };
};
