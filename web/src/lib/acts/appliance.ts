/** Acts on the machine: updates of its system, and drives' firmware. */
import type { Act } from '../act.svelte';
import { rpc } from '../api';
import { line, rpcLine } from '../format';
import type { Appliance, Bay, NetworkInterface } from '../types';
import { given, or } from './common';

export const updateMachine = (host: string, now: Appliance): Act => ({
  title: 'Install an update',
  about: 'The signature of the bundle and every digest are checked, then the slot that does not run is written. The next restart boots the new version; after three bad tries the present one returns.',
  label: 'Install',
  fields: [
    { key: 'from', label: 'Bundle', kind: 'select', options: [...(now.upload ? [['upload', 'the uploaded bundle'] as [string, string]] : []), ['file', 'a file on this machine']] },
    { key: 'file', label: 'Path', kind: 'text', hint: 'An absolute path, such as /boot/nacre/nacre_0.2.0.tar.', when: (v) => v.from === 'file' },
    { key: 'allow_older', label: 'Also an older version', kind: 'check' },
    { key: 'force', label: 'Also while volumes depend on this node', kind: 'check', hint: 'A resync, or the last replicas in sync, delay an update otherwise.' },
  ],
  danger: { lost: `version ${now.slots.find((slot) => slot.version !== now.version)?.version ?? 'in the other slot, if any,'}: the update replaces it. Data of volumes stays.`, name: host },
  command: (v) => line('appliance', 'update', v.from === 'file' ? or(v.file, 'FILE') : now.upload, v.allow_older && '--allow-older', v.force && '--force'),
  async run(v) {
    await rpc('appliance_update', given({ file: v.from === 'file' ? v.file : undefined, allow_older: v.allow_older || undefined, force: v.force || undefined }));
    return 'The update has begun. Its progress is on this screen.';
  },
});

/** Starts that the boot menu gives a new version. With fewer failures and none left, a rollback put it aside. */
export const TRIES = 3;

export const rollBack = (host: string, now: Appliance): Act => {
  const other = now.slots.find((slot) => slot.version !== now.version);
  const bad = other?.tries?.left === 0;
  const history = (other?.tries?.failed ?? 0) < TRIES ? 'was put aside by a rollback' : 'has failed in all its tries';
  return {
    title: 'Roll back',
    about: `Version ${other?.version} starts at the next restart, with three tries. Version ${now.version} runs until then, and starts again if the other fails.`,
    label: 'Roll back',
    danger: { lost: `what version ${now.version} added${bad ? `. Version ${other?.version} ${history} before` : ''}. Data of volumes stays.`, name: host },
    command: () => line('appliance', 'rollback', bad && '--force'),
    async run() {
      await rpc('appliance_rollback', given({ force: bad || undefined }));
      return 'The rollback has begun. Its result is on this screen.';
    },
  };
};

const FORCE: Act['fields'] = [{ key: 'force', label: 'Also while volumes depend on this node', kind: 'check', hint: 'Refused otherwise during a resync, or while this node has the last replicas in sync of a volume.' }];

export const restartMachine = (host: string): Act => ({
  title: `Restart ${host}`,
  about: 'Hosts with another path move their I/O; others wait until the machine serves again.',
  label: 'Restart',
  danger: { lost: 'every connection of hosts to this machine, until it serves again', name: host },
  fields: FORCE,
  command: (v) => rpcLine('appliance_restart', given({ force: v.force || undefined })),
  async run(v) {
    await rpc('appliance_restart', given({ force: v.force || undefined }));
    return 'The machine restarts in a moment. This page connects again by itself.';
  },
});

export const powerOffMachine = (host: string): Act => ({
  title: `Power ${host} off`,
  about: 'Hosts with another path move their I/O. The machine serves again when it is switched on, by hand or by its management controller.',
  label: 'Power off',
  danger: { lost: 'every connection of hosts to this machine, and this page, until it is switched on', name: host },
  fields: FORCE,
  command: (v) => rpcLine('appliance_power_off', given({ force: v.force || undefined })),
  async run(v) {
    await rpc('appliance_power_off', given({ force: v.force || undefined }));
    return 'The machine powers off in a moment.';
  },
});

export const renameMachine = (present: string): Act => ({
  title: `Rename ${present}`,
  about: 'The name counts at once and after each start. A certificate that the daemon made itself is made again for it: your browser may ask once more, after a reload of this page. A name server of your network does not learn the name here. A node of a cluster without [cluster] node takes it when its daemon starts next.',
  label: 'Rename',
  fields: [{ key: 'name', label: 'Name', kind: 'text', initial: present, hint: 'Letters, digits and -, in parts with dots between them; at most 63 characters. Such as storage1 or storage1.example.com.' }],
  command: (v) => line('appliance', 'name', or(v.name, 'NAME')),
  async run(v) {
    await rpc('appliance_set_name', { name: v.name });
    return `The machine has the name ${v.name.toLowerCase()} in a moment. Reload this page if it loses its connection.`;
  },
});

const option = (name: string, all: unknown) => (Array.isArray(all) ? all : []).flatMap((one) => [name, String(one)]);

/** `settings`: lines of systemd-networkd; none for an interface with DHCP. */
export const changeNetwork = (now: NetworkInterface, settings: string[]): Act => {
  const present = (key: string) => settings.filter((one) => one.startsWith(`${key}=`)).map((one) => one.slice(key.length + 1));
  const isStatic = (v: { how?: unknown }) => v.how === 'static';
  const fixed = present('Address');
  return {
    title: `Change the network of ${now.name}`,
    about: 'The new settings are in force for 60 s. Then the former ones return, unless you keep the new ones on this screen. So a wrong address locks nobody out.',
    label: 'Change',
    fields: [
      { key: 'how', label: 'Addresses', kind: 'select', options: [['dhcp', 'from the network, by DHCP'], ['static', 'these']], initial: fixed.length > 0 ? 'static' : 'dhcp' },
      { key: 'addresses', label: 'Addresses with prefixes', kind: 'lines', hint: 'One on each line, such as 192.0.2.7/24.', initial: (fixed.length > 0 ? fixed : now.addresses.filter((at) => !at.startsWith('fe80:'))).join('\n'), when: isStatic },
      { key: 'gateways', label: 'Gateways', kind: 'lines', optional: true, hint: 'One for IPv4, and one for IPv6.', initial: present('Gateway').join('\n'), when: isStatic },
      { key: 'dns', label: 'Name servers', kind: 'lines', optional: true, hint: 'Up to three addresses.', initial: present('DNS').join('\n') },
      { key: 'mtu', label: 'MTU', kind: 'number', unit: 'bytes', optional: true, hint: 'Such as 9000, if each switch and host carries it. Empty: the present one stays until the next start.', initial: present('MTUBytes')[0] ?? '' },
    ],
    command: (v) => line('appliance', 'network', 'set', now.name, ...(isStatic(v) ? [...option('--address', v.addresses), ...option('--gateway', v.gateways)] : ['--dhcp']), ...option('--dns', v.dns), ...(v.mtu ? ['--mtu', String(v.mtu)] : [])),
    async run(v) {
      await rpc('appliance_set_network', given({ interface: now.name, dhcp: isStatic(v) ? undefined : true, addresses: v.addresses, gateways: v.gateways, dns: v.dns, mtu: v.mtu }));
      const text = `The settings of ${now.name} change in a moment. Keep them within 60 s.`;
      // The image's page listens on IPv4 addresses.
      const isIpv6Page = location.hostname.startsWith('[');
      const addresses: string[] = isStatic(v) ? v.addresses.filter((at: string) => isIpv6Page || !at.includes(':')) : [];
      if (addresses.length === 0) return text;
      const page = (at: string) => {
        const ip = at.split('/')[0];
        return `${location.protocol}//${ip.includes(':') ? `[${ip}]` : ip}${location.port ? `:${location.port}` : ''}/#/network`;
      };
      return { text, lines: addresses.map(page), label: 'The page at the new addresses' };
    },
  };
};

export const keepNetwork = (name: string): Act => ({
  title: `Keep the new settings of ${name}`,
  label: 'Keep',
  command: () => line('appliance', 'network', 'confirm'),
  async run() {
    await rpc('appliance_keep_network');
    return `The new settings of ${name} are kept in a moment: the notice goes away then.`;
  },
});

export const revertNetwork = (name: string): Act => ({
  title: `Undo the new settings of ${name}`,
  about: 'The former settings return now. This page may need the former address.',
  label: 'Undo',
  command: () => line('appliance', 'network', 'revert'),
  async run() {
    await rpc('appliance_revert_network');
    return `The former settings of ${name} return.`;
  },
});

export const updateFirmware = (drive: string, present: string): Act => ({
  title: `Update the firmware of ${drive}`,
  about: `The drive runs ${present}. The daemon sends the image of the vendor to the drive, activates it, and resets the controller. I/O waits meanwhile.`,
  label: 'Update firmware',
  fields: [{ key: 'filename', label: 'Path of the image', kind: 'text', hint: 'A file on this machine, which the daemon can read.' }],
  danger: { lost: `the present firmware ${present}. A wrong image may make the drive and its data unusable.`, name: drive },
  command: (v) => line('nvme', 'update-firmware', drive, or(v.filename, 'FILE')),
  async run(v) {
    const text = await rpc<string>('bdev_nvme_apply_firmware', { bdev_name: drive, filename: v.filename });
    return `${drive}: ${text}.`;
  },
});

export const locateDisk = (name: string, now: Bay): Act => ({
  title: now.lit ? `Switch the light of ${name} off` : `Locate ${name}`,
  about: now.lit ? undefined : 'The light of its bay goes on, so that nobody takes another disk.',
  label: now.lit ? 'Switch off' : 'Switch on',
  command: () => line('nvme', 'locate', now.disk, now.lit ? 'off' : 'on'),
  async run() {
    const done = await rpc<Bay>('disk_locate', { name, on: !now.lit });
    return done.requested ? `The light of ${name} is switched soon.` : `The light of ${name} is ${done.lit ? 'on' : 'off'}.`;
  },
});

export const resetController = (name: string): Act => ({
  title: `Reset controller ${name}`,
  about: 'The controller is reset, also when it was given up. I/O waits meanwhile.',
  label: 'Reset',
  command: () => rpcLine('bdev_nvme_reset_controller', { name }),
  async run() {
    await rpc('bdev_nvme_reset_controller', { name });
    return `Controller ${name} was reset.`;
  },
});
