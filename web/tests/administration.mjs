// What the page does for the administrator of the machine: keys, the audit log, the appliance, firmware, reservations.
import assert from 'node:assert/strict';
import { execFileSync, spawn, spawnSync } from 'node:child_process';
import { existsSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { basename, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { button, dialog, heading, open, REFUSED, signIn, violations } from './browser.mjs';
import { empty } from './fixtures.mjs';
import { Mock, PASSWORD } from './mock.mjs';

export const ADMINISTRATION = {
  async 'a key: its text once, its end, and its removal'({ browser }) {
    const mock = await new Mock().start();
    const page = await open(browser, mock);
    await signIn(page, mock, '#/keys');
    await page.getByText('expires soon').waitFor();
    await page.getByText('other users may read it').waitFor();
    await page.getByRole('link', { name: 'Keys' }).getByText('2', { exact: true }).waitFor();
    await button(page, 'Generate key').click();
    await page.getByLabel('Name', { exact: true }).fill('host9');
    await page.getByRole('textbox', { name: 'Expires on' }).fill('2100-01-31');
    await page.getByText('nacre key generate host9 --sealed --expires 2100-01-31', { exact: true }).waitFor();
    await button(page, 'Generate', 'dialog').click();
    await page.getByText(/^DHHC-1:01:/).waitFor();
    assert.deepEqual(await violations(page, 'key'), []);
    await button(page, 'Close', 'dialog').click();
    await page.getByRole('rowheader', { name: 'host9' }).waitFor();
    await page.getByText(/DHHC-1/).waitFor({ state: 'detached' });
    assert.deepEqual(mock.calls.at(-1), ['key_generate', { name: 'host9', kind: 'dhchap', hash: 'sha256', expires: '2100-01-31', reveal: true }]);

    await page.getByRole('button', { name: 'Expire host9' }).click();
    await page.getByRole('textbox', { name: 'Expires on' }).fill('');
    await page.getByText('nacre key expire host9 --never', { exact: true }).waitFor();
    await button(page, 'Set the end', 'dialog').click();
    await page.getByText('Key host9 does not expire.').waitFor();
    assert.deepEqual(mock.calls.at(-1), ['key_expire', { name: 'host9' }]);

    await button(page, 'Import key').click();
    await page.getByLabel('Name', { exact: true }).fill('host8');
    await page.getByLabel('Text of the key').fill(' DHHC-1:00:abc: ');
    assert.equal(await page.getByLabel('Text of the key').getAttribute('type'), 'password');
    await button(page, 'Import', 'dialog').click();
    await page.getByText('its fingerprint is c5307614').waitFor();
    assert.deepEqual(mock.calls.at(-1), ['key_import', { name: 'host8', text: 'DHHC-1:00:abc:' }]);

    await page.getByRole('button', { name: /^Rotate key of/ }).first().click();
    await page.getByText('key rotate nqn.2025-01.io.nacre:orders').waitFor();
    await button(page, 'Rotate', 'dialog').click();
    await page.getByText('The host has the key shop2.').waitFor();
    assert.equal(mock.calls.at(-1)[1].overlap_s, 86400);

    await page.getByRole('button', { name: 'Remove shop1' }).click();
    await page.getByText('can use it until the daemon starts again').waitFor();
    await page.getByLabel('Type shop1 to confirm').fill('shop1');
    await button(page, 'Remove', 'dialog').click();
    await page.getByRole('rowheader', { name: 'shop1' }).waitFor({ state: 'detached' });
    return { mock, page };
  },

  async 'the audit log: filters go to the daemon, and pages go back'({ browser }) {
    const mock = await new Mock().start();
    const page = await open(browser, mock, { allow: [REFUSED] });
    await signIn(page, mock, '#/audit');
    const rows = page.locator('main tbody tr');
    await page.getByText('calls 1 to 25, the newest first').waitFor();
    for (const [from, to] of [[26, 50], [51, 75], [76, 100], [101, 125], [126, 130]]) {
      await button(page, 'Older calls').click();
      await page.getByText(`calls ${from} to ${to}`).waitFor();
      await page.getByText(new RegExp(`^nacre audit --limit 25 --until \\S+ --skip ${from - 1}$`)).waitFor();
      assert.equal(await rows.count(), to - from + 1);
    }
    assert.equal(await button(page, 'Older calls').isDisabled(), true);
    await button(page, 'Newer calls').click();
    await page.getByText('calls 101 to 125').waitFor();

    await page.getByLabel('Who').fill('erin');
    await page.getByLabel('Refused only').check();
    await page.keyboard.press('Tab');
    await button(page, 'Search').click();
    await page.getByText('nacre audit --limit 25 --user erin --refused', { exact: true }).waitFor();
    await page.getByText('hosts have the volume: unpublish it first').first().waitFor();
    const names = await rows.locator('th').allTextContents();
    assert.ok(names.length > 0 && names.every((text) => text.startsWith('erin')), names.join());
    await page.getByLabel('Object').fill('nothing');
    await page.keyboard.press('Enter');
    await page.getByText('No call matches.').waitFor();
    await button(page, 'Clear').click();
    await page.getByText('calls 1 to 25').waitFor();
    mock.refuse.audit_get = () => ({ cause: 'there is no audit file: calls are only in the daemon\'s log', remedy: 'set [rpc.audit] file in the configuration' });
    await button(page, 'Search').click();
    await page.getByText('there is no audit file').waitFor();
    assert.deepEqual(await violations(page, 'audit'), []);
    return { mock, page };
  },

  async 'a viewer is told which role a screen needs'({ browser }) {
    const mock = await new Mock({ role: 'viewer' }).start();
    const page = await open(browser, mock);
    await signIn(page, mock, '#/audit');
    await page.getByText('the role admin is needed').waitFor();
    assert.deepEqual(await violations(page, 'forbidden'), []);
    await page.goto(`${mock.url}/#/appliance`);
    await page.getByRole('rowheader', { name: '0.0.9' }).waitFor();
    assert.equal(await page.getByLabel('Update bundle').count(), 0);
    return { mock, page };
  },

  async 'an update of the appliance: upload, install, progress, rollback'({ browser }) {
    const mock = await new Mock().start();
    const page = await open(browser, mock, { allow: [REFUSED] });
    await signIn(page, mock, '#/appliance');
    await page.getByText('made by none of the keys of this appliance').waitFor();
    const bundle = { name: 'nacre_0.2.0.tar', mimeType: 'application/x-tar', buffer: Buffer.alloc(3 * 1024 * 1024, 7) };
    mock.refuse.upload = (bytes) => ({ cause: `9 bytes are free; the upload needs ${bytes} and a reserve`, remedy: 'remove files of this machine' });
    assert.equal(await button(page, 'Upload').isDisabled(), true);
    await page.getByLabel('Update bundle').setInputFiles(bundle);
    await button(page, 'Upload').click();
    await page.getByText('the upload needs 3145728').waitFor();
    await page.getByText('remove files of this machine').waitFor();
    delete mock.refuse.upload;
    await button(page, 'Upload').click();
    await page.getByText('a bundle is on the machine').waitFor();
    assert.deepEqual(await violations(page, 'uploaded'), []);

    await button(page, 'Install update').click();
    await page.getByText('nacre appliance update /var/lib/nacre-appliance/upload/bundle.tar', { exact: true }).waitFor();
    await page.getByText('version 0.0.9: the update replaces it').waitFor();
    assert.equal(await button(page, 'Install', 'dialog').isDisabled(), true);
    await page.getByLabel('Type store1 to confirm').fill('store1');
    await button(page, 'Install', 'dialog').click();
    await dialog(page).waitFor({ state: 'hidden' });
    assert.deepEqual(mock.calls.at(-1), ['appliance_update', {}]);

    const a = mock.world.appliance;
    const act = { act: 'update', state: 'running', running: '0.1.0', file: a.upload, text: 'checks and unpacks the bundle', percent: 35, began_ms: Date.now(), ended_ms: null };
    mock.world.appliance = { ...a, acts: [act, ...a.acts] };
    mock.changed();
    await page.getByText('It checks and unpacks the bundle: 35 %.').waitFor();
    assert.deepEqual(await violations(page, 'progress'), []);
    const slots = [a.slots[0], { version: '0.2.0', state: 'new', entry: 'nacre_0.2.0+3-0.efi', tries: { left: 3, failed: 0 }, complete: true }];
    mock.world.appliance = { ...a, upload: null, slots, acts: [{ ...act, state: 'done', percent: null, ended_ms: Date.now(), text: 'version 0.2.0 is installed, signed by the key "maker"; a restart boots it' }, ...a.acts] };
    mock.changed();
    await page.getByText('A restart boots the other version.').waitFor();
    await page.getByText('It has 3 tries.').waitFor();

    await button(page, 'Roll back').click();
    await page.getByText('nacre appliance rollback', { exact: true }).waitFor();
    await page.keyboard.press('Escape');
    await button(page, 'Restart').click();
    await page.getByText('every connection of hosts to this machine').waitFor();
    await page.getByLabel('Type store1 to confirm').fill('store1');
    await button(page, 'Restart', 'dialog').click();
    await page.getByText('The machine restarts in a moment.').waitFor();
    assert.deepEqual(mock.calls.at(-1), ['appliance_restart', {}]);
    mock.world.appliance = empty().appliance;
    mock.changed();
    await page.getByText('This machine does not run from the image').waitFor();
    assert.equal(await button(page, 'Restart').count(), 0);
    return { mock, page };
  },

  async 'the network of the appliance: a change is kept, another is undone; the machine powers off'({ browser }) {
    const mock = await new Mock().start();
    const page = await open(browser, mock, { allow: [REFUSED] });
    await signIn(page, mock, '#/network');
    await page.getByRole('row', { name: 'eth1' }).getByText('9000 B').waitFor();
    await page.getByRole('row', { name: 'eth1' }).getByText('100 Gbit/s').waitFor();
    await button(page, 'Change eth1').click();
    assert.equal(await page.getByLabel('Addresses with prefixes').inputValue(), '10.0.1.4/24');
    await page.getByLabel('Addresses with prefixes').fill('10.0.1.5/24 2001:db8::5/64');
    await page.getByLabel('Gateways').fill('10.0.1.1');
    await page.getByText('nacre appliance network set eth1 --address 10.0.1.5/24 --address 2001:db8::5/64 --gateway 10.0.1.1 --mtu 9000', { exact: true }).waitFor();
    mock.refuse.appliance_set_network = () => ({ field: 'gateways', cause: '"10.0.1.1": it answers no request' });
    await button(page, 'Change', 'dialog').click();
    await page.getByText('"10.0.1.1": it answers no request', { exact: true }).waitFor();
    delete mock.refuse.appliance_set_network;
    await button(page, 'Change', 'dialog').click();
    await page.getByText('http://10.0.1.5').waitFor();
    assert.equal(await page.getByText('http://[2001:db8::5]').count(), 0);
    assert.deepEqual(mock.calls.at(-1), ['appliance_set_network', { interface: 'eth1', addresses: ['10.0.1.5/24', '2001:db8::5/64'], gateways: ['10.0.1.1'], mtu: 9000 }]);
    await button(page, 'Close', 'dialog').click();
    await page.getByText('The settings of eth1 are new.').waitFor();
    assert.deepEqual(await violations(page, 'new settings'), []);
    await button(page, 'Keep the new settings').click();
    await button(page, 'Keep', 'dialog').click();
    await page.getByText('The settings of eth1 are new.').waitFor({ state: 'detached' });

    // The first run has the step on an appliance. An interface without settings begins with DHCP.
    await page.goto(`${mock.url}/#/setup`);
    await page.getByRole('heading', { name: '2. Name and network' }).waitFor();
    await button(page, 'Rename').click();
    assert.equal(await page.getByLabel('Name', { exact: true }).inputValue(), 'store1');
    await page.getByLabel('Name', { exact: true }).fill('Storage-7');
    await page.getByText('nacre appliance name Storage-7', { exact: true }).waitFor();
    await button(page, 'Rename', 'dialog').click();
    await page.getByText('The machine has the name storage-7 in a moment.').waitFor();
    assert.deepEqual(mock.calls.at(-1), ['appliance_set_name', { name: 'Storage-7' }]);
    await page.getByText('storage-7', { exact: true }).first().waitFor();
    await button(page, 'Change eth0').click();
    assert.equal(await page.getByLabel('Addresses with prefixes').count(), 0);
    await page.getByText('nacre appliance network set eth0 --dhcp', { exact: true }).waitFor();
    await button(page, 'Change', 'dialog').click();
    await page.getByText('The settings of eth0 are new.').waitFor();
    assert.deepEqual(await violations(page, 'first run'), []);
    await button(page, 'Undo').click();
    await button(page, 'Undo', 'dialog').click();
    await page.getByText('The settings of eth0 are new.').waitFor({ state: 'detached' });
    assert.equal(mock.calls.at(-1)[0], 'appliance_revert_network');
    await button(page, 'Next').click();
    await page.getByRole('heading', { name: '3. Disks' }).waitFor();
    const a = mock.world.appliance;
    mock.world.appliance = { ...a, acts: [{ ...a.acts[0], act: 'network', state: 'failed', text: 'networkctl: no such device' }, ...a.acts] };
    mock.changed();
    await page.goto(`${mock.url}/#/network`);
    await page.getByText('networkctl: no such device').waitFor();

    await page.goto(`${mock.url}/#/appliance`);
    await button(page, 'Power off').click();
    // Confirmations take the new name.
    await page.getByLabel('Type storage-7 to confirm').fill('storage-7');
    await button(page, 'Power off', 'dialog').click();
    await page.getByText('The machine powers off in a moment.').waitFor();
    assert.deepEqual(mock.calls.at(-1), ['appliance_power_off', {}]);
    mock.world.appliance = { ...a, acts: [{ ...a.acts[0], act: 'power_off', state: 'failed', text: 'volume orders: a resync' }, ...a.acts] };
    mock.changed();
    await page.getByText('The machine did not power off.').waitFor();
    return { mock, page };
  },

  async 'the firmware of a drive: slots, an update that wants the name, a refusal'({ browser }) {
    const mock = await new Mock().start();
    const page = await open(browser, mock, { allow: [REFUSED] });
    await signIn(page, mock, '#/disks');
    await page.getByRole('link', { name: 'Nvme0', exact: true }).click();
    await heading(page, 'Nvme0');
    await page.getByText('active after the next reset').waitFor();
    await page.getByText('unrecovered read error').waitFor();
    mock.refuse.bdev_nvme_apply_firmware = (p) => (p.filename === '/srv/bad.bin' ? { field: 'filename', cause: '/srv/bad.bin: 3 bytes, not a multiple of 4' } : null);
    await button(page, 'Update firmware').click();
    await page.getByText('the present firmware MPK93B5Q').waitFor();
    await page.getByLabel('Path of the image').fill('/srv/bad.bin');
    await page.getByLabel('Type Nvme0 to confirm').fill('Nvme0');
    await button(page, 'Update firmware', 'dialog').click();
    await page.getByText('not a multiple of 4').first().waitFor();
    await page.getByLabel('Path of the image').fill('/srv/good.bin');
    await page.getByText('nacre nvme update-firmware Nvme0 /srv/good.bin', { exact: true }).waitFor();
    await button(page, 'Update firmware', 'dialog').click();
    await page.getByText('firmware MPK95B5Q runs').waitFor();
    assert.deepEqual(mock.calls.at(-1), ['bdev_nvme_apply_firmware', { bdev_name: 'Nvme0', filename: '/srv/good.bin' }]);
    return { mock, page };
  },

  async 'a disk is replaced step by step'({ browser }) {
    const mock = await new Mock().start();
    const page = await open(browser, mock);
    await signIn(page, mock, '#/disks/Nvme1n1');
    await page.getByText('nacre nvme unbind 0000:5f:00.0', { exact: true }).waitFor();
    await page.getByRole('button', { name: 'Move the replica of vm-images' }).click();
    await page.getByText('nacre volume move vm-images Nvme1n1 disk7', { exact: true }).waitFor();
    await button(page, 'Move', 'dialog').click();
    await page.getByText('disk7 is being filled.').waitFor();
    const vm = mock.world.volumes.find((v) => v.name === 'vm-images');
    const disk7 = { ...vm.replicas[0], id: 'new', device: 'disk7', state: 'filling', resync: { kind: 'full', source: 'Nvme1n1', total_bytes: 100, left_bytes: 60, bytes_per_s: 1, left_s: 60 } };
    vm.replicas = [...vm.replicas, disk7];
    mock.changed();
    await page.getByText('copying, 40 %').waitFor();
    vm.replicas = [vm.replicas[1], { ...disk7, state: 'in_sync', resync: null }];
    mock.changed();
    await page.getByText('nothing uses it').waitFor();
    assert.deepEqual(await violations(page, 'replaced'), []);
    return { mock, page };
  },

  async 'a disk is located by the light of its bay'({ browser }) {
    const mock = await new Mock().start();
    const page = await open(browser, mock);
    await signIn(page, mock, '#/drives/Nvme0');
    await page.getByText('the light is off').waitFor();
    await button(page, 'Locate Nvme0').click();
    await page.getByText('nacre nvme locate 0000:5e:00.0 on', { exact: true }).waitFor();
    await button(page, 'Switch on', 'dialog').click();
    await page.getByText('the light is on').waitFor();
    assert.deepEqual(mock.calls.at(-1), ['disk_locate', { name: 'Nvme0', on: true }]);
    assert.deepEqual(await violations(page, 'a light'), []);
    await button(page, 'Switch the light off Nvme0').click();
    await button(page, 'Switch off', 'dialog').click();
    await page.getByText('the light is off').waitFor();
    await page.goto(`${mock.url}/#/drives/Nvme1`);
    await page.getByText('the kernel shows no light of the bay of Nvme1').waitFor();
    return { mock, page };
  },

  async 'a drive is taken from the kernel, attached, given back; one that is gone is forgotten'({ browser }) {
    const mock = await new Mock().start();
    const page = await open(browser, mock, { allow: [REFUSED] });
    await signIn(page, mock, '#/disks');
    const panel = page.getByRole('region', { name: 'Drives for the daemon' });
    const row = (serial) => panel.getByRole('row').filter({ hasText: serial });
    await row('S4EWNX0M123456').getByText('attached as Nvme0').waitFor();
    await row('S4EWNX0M888888').getByText('ready to attach').waitFor();
    await row('S4EWNX0M777777').getByText('not found').waitFor();
    // The daemon has the attached one: it is detached first.
    assert.equal(await row('S4EWNX0M123456').getByRole('button').count(), 0);
    assert.deepEqual(await violations(page, 'taken drives'), []);
    await button(page, 'Take a drive').click();
    await page.getByText('The kernel does not see the drive any more').waitFor();
    await page.getByLabel('Drive', { exact: true }).selectOption('0000:62:00.0');
    await page.getByText('nacre appliance drive bind 0000:62:00.0 --serial S4EWNX0M999990', { exact: true }).waitFor();
    const used = { field: 'address', cause: 'drive 0000:62:00.0 is in use: nvme3n1 is swap space; end that first', remedy: 'choose another drive' };
    mock.refuse.appliance_bind_drive = () => used;
    await button(page, 'Take', 'dialog').click();
    await page.getByText('nvme3n1 is swap space').waitFor();
    assert.deepEqual(await violations(page, 'a drive in use'), []);
    delete mock.refuse.appliance_bind_drive;
    await button(page, 'Take', 'dialog').click();
    await page.getByText('Drive 0000:62:00.0 is taken in a moment.').waitFor();
    assert.deepEqual(mock.calls.at(-1), ['appliance_bind_drive', { address: '0000:62:00.0', serial: 'S4EWNX0M999990' }]);
    await row('S4EWNX0M999990').getByText('ready to attach').waitFor();

    // The disks were read again: the drive is offered by its PCI address, and no more as a disk.
    await button(page, 'Attach drive').click();
    await page.getByText('taken from the kernel first, by Take a drive').waitFor();
    await page.getByLabel('Drive', { exact: true }).selectOption('0000:62:00.0');
    await page.getByText('nacre bdev attach pcie://0000:62:00.0 --name Nvme0', { exact: true }).waitFor();
    await page.keyboard.press('Escape');
    await button(page, 'Take a drive').click();
    await page.getByLabel('PCI address', { exact: true }).waitFor();
    assert.equal(await page.getByLabel('Drive', { exact: true }).count(), 0);
    await page.keyboard.press('Escape');

    // The first run has the act, too.
    await page.goto(`${mock.url}/#/setup`);
    await page.getByRole('navigation', { name: 'Steps' }).getByRole('button', { name: /Disks/ }).click();
    await page.getByLabel('NVMe drive', { exact: true }).check();
    await page.getByLabel('Drive', { exact: true }).selectOption({ label: 'S4EWNX0M999990, SAMSUNG MZWLR1T9HBJR-00007' });
    await button(page, 'Take a drive').click();
    await page.getByLabel('PCI address', { exact: true }).waitFor();
    await page.keyboard.press('Escape');
    assert.deepEqual(await violations(page, 'first run'), []);
    await page.goto(`${mock.url}/#/disks`);

    await button(page, 'Give back S4EWNX0M999990').click();
    await page.getByText('nacre appliance drive unbind 0000:62:00.0 --serial S4EWNX0M999990', { exact: true }).waitFor();
    await button(page, 'Give back', 'dialog').click();
    await row('S4EWNX0M999990').waitFor({ state: 'detached' });
    assert.deepEqual(mock.calls.at(-1), ['appliance_unbind_drive', { address: '0000:62:00.0', serial: 'S4EWNX0M999990' }]);
    await button(page, 'Forget S4EWNX0M777777').click();
    await page.getByText('nacre appliance drive unbind --serial S4EWNX0M777777', { exact: true }).waitFor();
    await button(page, 'Forget', 'dialog').click();
    await row('S4EWNX0M777777').waitFor({ state: 'detached' });
    assert.deepEqual(mock.calls.at(-1), ['appliance_unbind_drive', { serial: 'S4EWNX0M777777' }]);

    // A drive was pulled and put back; two drives of one serial number are gone.
    const back = { serial: 'S4EWNX0M555555', model: 'SAMSUNG', address: '0000:63:00.0', state: 'kernel' };
    const lost = { serial: 'S4EWNX0M666666', model: 'SAMSUNG', address: null, state: 'missing' };
    mock.world.appliance = { ...mock.world.appliance, drives: [back, lost, lost] };
    await row('S4EWNX0M555555').getByText('the kernel has it').waitFor();
    assert.equal(await row('S4EWNX0M666666').count(), 2);
    await button(page, 'Take again S4EWNX0M555555').click();
    await page.getByText('nacre appliance drive bind 0000:63:00.0 --serial S4EWNX0M555555', { exact: true }).waitFor();
    await button(page, 'Take again', 'dialog').click();
    await row('S4EWNX0M555555').getByText('ready to attach').waitFor();
    assert.deepEqual(mock.calls.at(-1), ['appliance_bind_drive', { address: '0000:63:00.0', serial: 'S4EWNX0M555555' }]);

    mock.world.appliance = { ...mock.world.appliance, drives: [], drives_problem: 'drives.json: expected value' };
    await panel.getByText('drives.json: expected value').waitFor();
    // Another machine has a shell.
    mock.world.appliance = { ...mock.world.appliance, appliance: false, drives: [], drives_problem: null };
    await panel.waitFor({ state: 'detached' });
    await button(page, 'Attach drive').click();
    await page.getByText('nacre nvme bind ADDRESS').waitFor();
    return { mock, page };
  },

  async 'reservations: the holder by name, a registrant that is gone, clearing it, and another node'({ browser }) {
    const mock = await new Mock().start();
    const page = await open(browser, mock);
    const nqn = 'nqn.2025-01.io.nacre:orders';
    await signIn(page, mock, `#/subsystems/${encodeURIComponent(nqn)}`);
    const panel = page.getByRole('region', { name: 'Reservations' });
    await panel.getByText('write exclusive, registrants only').waitFor();
    await panel.getByText('host identifier 7c9e6679-7425-40de-944b-e07fc1f90ae7').waitFor();
    assert.match(await panel.locator('.registrant').first().textContent(), /holder nqn\.2014-08\.org\.nvmexpress:uuid:1f4e8a52/);
    const former = mock.world.reservations[`${nqn} 1`];
    await button(page, 'Clear reservation of namespace 1').click();
    await page.getByText(`nacre subsystem clear-reservation ${nqn} 1`, { exact: true }).waitFor();
    assert.match(await page.getByRole('dialog').textContent(), /write exclusive, registrants only\) of nqn\.2014-08\.org\.nvmexpress:uuid:1f4e8a52.* and 2 registrations/);
    assert.deepEqual(await violations(page, 'clear a reservation'), []);
    await page.getByLabel('Type orders to confirm').fill('orders');
    await button(page, 'Clear', 'dialog').click();
    await page.getByText('The reservation of namespace 1 was cleared, with 2 registrations.').waitFor();
    assert.deepEqual(mock.calls.at(-1), ['nvmf_ns_clear_reservation', { nqn, nsid: 1, generation: former.generation }]);
    await panel.getByText('not reserved').waitFor();
    mock.world.reservations[`${nqn} 1`] = { known: false, ptpl_capable: true, conflicts: 0 };
    mock.changed();
    await panel.getByText('Another node of the cluster serves the volume.').waitFor();
    mock.world.reservations = {};
    mock.changed();
    await panel.getByText('no; a host may ask for it').waitFor();
    return { mock, page };
  },
};

/** Makes a signed bundle of small files. */
function bundle(folder, version, key) {
  const part = (name, text) => {
    writeFileSync(join(folder, name), text);
    return join(folder, name);
  };
  const out = join(folder, `nacre_${version}_${basename(key)}.tar`);
  const id = '01234567-89ab-cdef-0123-456789abcdef';
  const words = [version, 'x86-64', key, out, part('root', 'r'.repeat(200_000)), id, part('verity', 'v'), id, part('kernel', 'k')];
  execFileSync('bash', [fileURLToPath(new URL('../../deploy/image/bundle.sh', import.meta.url)), ...words]);
  return out;
}

const sleep = (ms) => new Promise((done) => setTimeout(done, ms));

/** The whole way with a real daemon; this case does what systemd does for a request. */
export async function updatesARealAppliance({ browser, binary }) {
  const script = fileURLToPath(new URL('stand-in-appliance.sh', import.meta.url));
  const folder = mkdtempSync(join(tmpdir(), 'nacre-web-'));
  const [key, other, socket, config] = ['key.pem', 'other.pem', 'nacre.sock', 'nacre.toml'].map((name) => join(folder, name));
  for (const one of [key, other]) execFileSync('openssl', ['genpkey', '-algorithm', 'ed25519', '-out', one]);
  const url = 'https://127.0.0.1:18444';
  writeFileSync(config, `[reactor]\ncores = "auto:1"\n[memory]\nhugepages = "off"\n[web]\nlisten = ["${url}"]\n`);
  const daemon = spawn('unshare', ['--mount', 'sh', script, key, binary, 'serve', '--config', config, '-r', socket, '--data-dir', '/var/lib/nacre'], { stdio: ['ignore', 'ignore', 'pipe'] });
  let log = '';
  daemon.stderr.on('data', (text) => (log += text));
  const inside = (...words) => {
    const done = spawnSync('nsenter', ['--target', String(daemon.pid), '--mount', ...words], { env: { ...process.env, NACRE_RPC_SOCKET: socket }, encoding: 'utf8', timeout: 60_000 });
    return [done.status, `${done.stdout}${done.stderr}`];
  };
  const obey = async () => {
    for (let n = 0; n < 100 && inside('test', '-e', '/var/lib/nacre-appliance/request.json')[0] !== 0; n += 1) await sleep(50);
    return inside(binary, 'appliance', 'obey');
  };
  try {
    for (let n = 0; n < 600 && !existsSync(socket); n += 1) await sleep(100);
    assert.ok(existsSync(socket), log);
    const { setup_code } = JSON.parse(inside(binary, 'web', 'status', '--json')[1]);
    const page = await open(browser, { url }, { allow: [REFUSED] });
    await page.goto(url);
    await page.getByLabel('Set-up code').fill(setup_code);
    await page.getByLabel('Password', { exact: true }).fill(PASSWORD);
    await page.getByLabel('Password again').fill(PASSWORD);
    await page.getByRole('button', { name: 'Make the account' }).click();
    await heading(page, 'First run');
    await page.goto(`${url}/#/appliance`);
    await page.getByText('The other slot is empty').waitFor();
    const host = await page.locator('.brand .quiet').first().textContent();
    const send = async (file) => {
      await page.getByLabel('Update bundle').setInputFiles(file);
      await button(page, 'Upload').click();
      await page.getByText('The bundle was uploaded.').or(page.getByText('The bundle was not uploaded.')).waitFor();
      assert.equal(await page.locator('form .notice.bad').count(), 0, await page.locator('form').textContent());
    };
    const act = async (name, submit = name) => {
      await button(page, name).click();
      await page.getByLabel(`Type ${host} to confirm`).fill(host);
      await button(page, submit, 'dialog').click();
      await dialog(page).waitFor({ state: 'hidden' });
      return obey();
    };
    // Another maker's bundle changes nothing.
    await send(bundle(folder, '0.2.0', other));
    const [refused, why] = await act('Install update', 'Install');
    assert.equal(refused, 1, why);
    await page.getByText('made by none of the keys of this appliance').waitFor();
    await page.getByText('The other slot is empty').waitFor();

    await send(bundle(folder, '0.2.0', key));
    const [code, text] = await act('Install update', 'Install');
    assert.equal(code, 0, text);
    await page.getByText('version 0.2.0 is installed, signed by the key "maker"').first().waitFor();
    await page.getByText('It has 3 tries.').waitFor();
    assert.deepEqual(await violations(page, 'installed'), []);
    assert.equal(inside('test', '-e', '/var/lib/nacre-appliance/upload/bundle.tar')[0], 1);
    const [, history] = inside(binary, 'appliance', 'history', '--json');
    assert.deepEqual(JSON.parse(history).map((one) => one.state), ['done', 'failed']);

    const [back, rolled] = await act('Roll back');
    assert.equal(back, 0, rolled);
    await page.getByText(/^version 0\.2\.0 starts at the next restart/).waitFor();
    const [restarted, ran] = await act('Restart');
    assert.equal(restarted, 0, ran);
    assert.equal(inside('cat', '/boot/systemctl')[1], 'reboot\n');
    await page.goto(`${url}/#/audit`);
    await page.getByText('appliance_restart').first().waitFor();
    await page.getByText('page_upload').first().waitFor();
    assert.deepEqual(page.problems, []);
    await page.context().close();
  } finally {
    daemon.kill();
    rmSync(folder, { recursive: true, force: true });
  }
}
