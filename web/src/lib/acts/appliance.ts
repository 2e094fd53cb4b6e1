/** Acts on the machine: updates of its system, and drives' firmware. */
import type { Act } from '../act.svelte';
import { rpc } from '../api';
import { line, rpcLine } from '../format';
import type { Appliance } from '../types';
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

export const restartMachine = (host: string): Act => ({
  title: `Restart ${host}`,
  about: 'Hosts with another path move their I/O; others wait until the machine serves again.',
  label: 'Restart',
  danger: { lost: 'every connection of hosts to this machine, until it serves again', name: host },
  command: () => rpcLine('appliance_restart', {}),
  async run() {
    await rpc('appliance_restart');
    return 'The machine restarts. This page connects again by itself.';
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
