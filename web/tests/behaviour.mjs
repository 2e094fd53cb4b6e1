// What the page does: first run, roles, sessions, restarts, dangerous acts, the keyboard, and the commands it shows.
import assert from 'node:assert/strict';
import { execFile, spawn } from 'node:child_process';
import { existsSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { ADMINISTRATION, updatesARealAppliance } from './administration.mjs';
import { button, dialog, heading, launch, open, picture, REFUSED, signIn, violations } from './browser.mjs';
import { busy, empty } from './fixtures.mjs';
import { Mock, PASSWORD } from './mock.mjs';
import { SCREENS } from './pictures.mjs';
import { SNAPSHOTS } from './snapshots.mjs';

const HOST = 'nqn.2014-08.org.nvmexpress:uuid:1f4e8a52-63b1-4f2e-9d3a-0c5b7e9a1d2f';

const binary = [process.env.NACRE, '../target/debug/nacre'].find((path) => path && existsSync(path));
const sleep = (ms) => new Promise((done) => setTimeout(done, ms));
const NO_BINARY = 'SKIPPED: page: NACRE names no binary, and target/debug/nacre does not exist';

export const CASES = {
  async 'a real daemon: from nothing to a volume that nacre perf verifies, and every screen'({ browser }) {
    if (!binary) return console.log(NO_BINARY);
    const folder = mkdtempSync(join(tmpdir(), 'nacre-web-'));
    const socket = join(folder, 'nacre.sock');
    const url = 'https://127.0.0.1:18443';
    const config = join(folder, 'nacre.toml');
    writeFileSync(config, `[reactor]\ncores = "auto:1"\n[memory]\nhugepages = "off"\n[web]\nlisten = ["${url}"]\n`);
    const daemon = spawn(binary, ['serve', '--config', config, '-r', socket, '--data-dir', join(folder, 'data')], { stdio: 'ignore' });
    const nacre = (...words) => new Promise((done) => execFile(binary, words, { env: { NACRE_RPC_SOCKET: socket }, timeout: 60_000 }, (failure, out, err) => done([failure?.code ?? 0, out + err])));
    try {
      for (let n = 0; n < 600 && !existsSync(socket); n += 1) await sleep(100);
      const [failed, status] = await nacre('web', 'status', '--json');
      assert.equal(failed, 0, status);
      const mock = { url, stop: () => {} };
      const page = await open(browser, mock, { width: 1120, height: 720, allow: [REFUSED] });
      await page.goto(mock.url);
      await page.getByLabel('Set-up code').waitFor();
      await picture(page, 'first-account');
      await page.getByLabel('Set-up code').fill(JSON.parse(status).setup_code);
      await page.getByLabel('Password', { exact: true }).fill(PASSWORD);
      await page.getByLabel('Password again').fill(PASSWORD);
      await page.getByRole('button', { name: 'Make the account' }).click();
      await heading(page, 'First run');
      for (const n of [0, 1]) {
        await page.getByLabel('Name', { exact: true }).fill(`disk${n}`);
        await page.getByLabel('Path', { exact: true }).fill(join(folder, `disk${n}.img`));
        await page.getByRole('textbox', { name: 'Size' }).fill('64 MiB');
        await button(page, 'Create').click();
        await page.getByRole('main').getByText(`Bdev disk${n} was created.`).waitFor();
      }
      await page.getByText('2 free bdevs').waitFor();
      await picture(page, 'first-disks');
      await button(page, 'Next').click();
      await page.getByLabel('Name', { exact: true }).fill('vol0');
      await page.getByLabel('disk0').check();
      await page.getByLabel('disk1').check();
      await picture(page, 'first-volume');
      await button(page, 'Create').click();
      await page.getByRole('heading', { name: '4. Hosts' }).waitFor();
      await page.getByLabel('Allow any host').check();
      await page.getByRole('textbox', { name: 'Address' }).fill('127.0.0.1');
      await page.getByRole('textbox', { name: 'Port' }).fill('18420');
      await button(page, 'Publish').click();
      await page.getByText('nvme connect -t tcp -a 127.0.0.1 -s 18420 -n nqn.2025-01.io.nacre:vol0', { exact: true }).waitFor();
      await picture(page, 'first-connect');
      const [code, text] = await nacre('perf', 'tcp://127.0.0.1:18420/nqn.2025-01.io.nacre:vol0', '--rw', 'randrw', '--verify', '--seconds', '2');
      assert.equal(code, 0, text);
      await page.goto(`${mock.url}/#/`);
      await page.getByText('Nothing is wrong').waitFor();
      await picture(page, 'dashboard');

      await page.goto(`${mock.url}/#/disks`);
      await button(page, 'Create RAM disk').click();
      await page.getByLabel('Name', { exact: true }).fill('ram0');
      await page.getByRole('textbox', { name: 'Size' }).fill('96 MiB');
      await button(page, 'Create', 'dialog').click();
      await page.getByText('RAM disk ram0 was created.').waitFor();
      await page.goto(`${mock.url}/#/pools`);
      await page.waitForFunction(() => document.querySelector('main')?.textContent.includes('There is no pool'));
      await sleep(500);
      await button(page, 'Create pool').click();
      await page.getByLabel('Name', { exact: true }).fill('pool0');
      await button(page, 'Create', 'dialog').click();
      await page.getByText('Pool pool0 was created.').waitFor();
      await page.getByRole('link', { name: 'pool0' }).click();
      await button(page, 'Create lvol').click();
      await page.getByLabel('Name', { exact: true }).fill('v1');
      await page.getByRole('textbox', { name: 'Size' }).fill('1 GiB');
      await button(page, 'Create', 'dialog').click();
      await page.getByRole('button', { name: 'Snapshot of v1' }).click();
      await button(page, 'Make snapshot', 'dialog').click();
      await page.getByRole('button', { name: /^Clone v1@/ }).waitFor();
      await button(page, 'Check').click();
      await button(page, 'Check', 'dialog').click();
      await page.getByText('Pool pool0 is in order').waitFor();
      await page.keyboard.press('Escape');
      await page.goto(`${mock.url}/#/volumes/vol0`);
      await button(page, 'Settings').click();
      await page.getByRole('textbox', { name: 'Description' }).fill('a test');
      await button(page, 'Change', 'dialog').click();
      await page.locator('dd').getByText('a test').waitFor();
      await page.getByRole('button', { name: 'Take offline disk1' }).click();
      await button(page, 'Take offline', 'dialog').click();
      await page.getByText('The volume is degraded.').waitFor();
      await page.getByRole('button', { name: 'Bring online disk1' }).click();
      await button(page, 'Bring online', 'dialog').click();
      await page.getByText('The volume is degraded.').waitFor({ state: 'detached' });
      await button(page, 'Verify').click();
      await button(page, 'Verify', 'dialog').click();
      await page.getByText('No block differs').waitFor();
      await page.goto(`${mock.url}/#/keys`);
      await button(page, 'Generate key').click();
      await page.getByLabel('Name', { exact: true }).fill('host1');
      await button(page, 'Generate', 'dialog').click();
      await page.getByText(/^DHHC-1:01:/).waitFor();
      const secret = await dialog(page).locator('code').textContent();
      await button(page, 'Close', 'dialog').click();
      await page.getByRole('rowheader', { name: 'host1' }).waitFor();
      const [, listed] = await nacre('key', 'list', '--json');
      assert.deepEqual(JSON.parse(listed).map((key) => [key.name, key.source]), [['host1', 'sealed']]);
      await page.goto(`${mock.url}/#/audit`);
      await page.getByLabel('Who').fill('admin');
      await page.getByLabel('Method').fill('key_generate');
      await button(page, 'Search').click();
      await page.getByText('nacre audit --limit 25 --user admin --method key_generate', { exact: true }).waitFor();
      // The command changes before the answer comes.
      await page.locator('main tbody tr').nth(2).waitFor({ state: 'detached' });
      assert.deepEqual(await page.locator('main tbody tr td[data-label=Result]').allTextContents(), [' done', ' started']);
      assert.equal(await page.getByText(secret).count(), 0);
      const screens = SCREENS.map(([, hash]) => hash.replace('disk8', 'disk0').replace('drives/Nvme0', 'disks/disk0').replace('Nvme1n1', 'disk1').replace('fast', 'pool0').replace(/orders|scratch|archive/, 'vol0'));
      for (const hash of screens) {
        await page.goto(`${mock.url}/${hash}`);
        await page.waitForFunction(() => !/Loading…|Checking…/.test(document.querySelector('main')?.textContent ?? 'Loading…'), undefined, { timeout: 30_000 });
        assert.equal(await page.getByText('This cannot be shown now').count(), 0, hash);
        assert.equal(await page.getByText('any more.').count(), 0, hash);
        assert.deepEqual(await violations(page, hash), []);
      }
      await page.goto(`${mock.url}/#/volumes/vol0`);
      for (const name of ['Unpublish', 'Delete']) {
        await button(page, name).click();
        await page.getByLabel('Type vol0 to confirm').fill('vol0');
        await button(page, name, 'dialog').click();
        await dialog(page).waitFor({ state: 'hidden' });
        await sleep(600);
      }
      await heading(page, 'Volumes');
      await page.getByText('There is no volume').waitFor();
      return { mock, page };
    } finally {
      daemon.kill();
      rmSync(folder, { recursive: true, force: true });
    }
  },

  async 'a real daemon on a stand-in appliance: upload, refused and installed updates, rollback, restart'({ browser }) {
    if (!binary) return console.log(NO_BINARY);
    if (process.getuid() !== 0) return console.log('SKIPPED: page: a mount namespace of its own needs root');
    return updatesARealAppliance({ browser, binary });
  },

  async 'first run: from the set-up code to a connect line'({ browser }) {
    const mock = await new Mock({ world: empty(), setup: true }).start();
    const page = await open(browser, mock, { allow: [REFUSED] });
    await page.goto(mock.url);
    await page.getByLabel('Set-up code').fill('WRONG123');
    await page.getByLabel('Password', { exact: true }).fill(PASSWORD);
    await page.getByLabel('Password again').fill('other');
    await page.getByRole('button', { name: 'Make the account' }).click();
    await page.getByText('not the same').waitFor();
    await page.getByLabel('Password again').fill(PASSWORD);
    await page.getByRole('button', { name: 'Make the account' }).click();
    await page.getByText('the set-up code is wrong').waitFor();
    await page.getByLabel('Set-up code').fill('k7mq2xpa');
    assert.deepEqual(await violations(page, 'claim'), []);
    await page.getByRole('button', { name: 'Make the account' }).click();
    await heading(page, 'First run');
    for (const n of [0, 1]) {
      await page.getByLabel('Name', { exact: true }).fill(`disk${n}`);
      await page.getByLabel('Path', { exact: true }).fill(`/srv/nacre/disk${n}.img`);
      await page.getByRole('textbox', { name: 'Size' }).fill('65 GiB');
      await page.getByText(`nacre bdev create file disk${n} /srv/nacre/disk${n}.img --size 65GiB`, { exact: true }).waitFor();
      await button(page, 'Create').click();
      await page.getByRole('main').getByText(`Bdev disk${n} was created.`).waitFor();
    }
    // A disk of the machine, by its serial number; those in use are named.
    await page.getByLabel('Name', { exact: true }).fill('disk2');
    await page.getByText('Not offered: sdb (sdb2 is mounted at / (ext4)); sdc (it has 1 partition).').waitFor();
    await page.getByLabel('Disk', { exact: true }).selectOption({ label: 'S662NN0T123456, SAMSUNG MZ7L3960HCJR, 894 GiB' });
    await page.getByLabel('Path', { exact: true }).waitFor({ state: 'detached' });
    await page.getByText('nacre bdev create file disk2 /dev/disk/by-id/ata-SAMSUNG_MZ7L3960HCJR_S662NN0T123456', { exact: true }).waitFor();
    await button(page, 'Create').click();
    await page.getByRole('main').getByText('Bdev disk2 was created.').waitFor();
    await page.getByLabel('NVMe drive', { exact: true }).check();
    await page.getByLabel('Drive', { exact: true }).selectOption('0000:61:00.0');
    await page.getByText('nacre bdev attach pcie://0000:61:00.0 --name Nvme0', { exact: true }).waitFor();
    await page.reload();
    await heading(page, 'First run');
    await button(page, 'Next').click();
    await page.getByLabel('Name', { exact: true }).fill('vol0');
    await page.getByLabel('disk0').check();
    await page.getByLabel('disk1').check();
    await page.getByText('nacre volume create vol0 disk0 disk1', { exact: true }).waitFor();
    await button(page, 'Create').click();
    await page.getByRole('heading', { name: '4. Hosts' }).waitFor();
    await page.getByLabel('NQNs of hosts').fill(HOST);
    await page.getByRole('textbox', { name: 'Address' }).fill('192.0.2.1');
    await page.getByText(`nacre volume publish vol0 --host ${HOST} --listen tcp://192.0.2.1:4420`, { exact: true }).waitFor();
    await button(page, 'Publish').click();
    await page.getByText(`nvme connect -t tcp -a 192.0.2.1 -s 4420 -n nqn.2025-01.io.nacre:vol0 --hostnqn ${HOST}`, { exact: true }).waitFor();
    assert.deepEqual(mock.calls.map(([method]) => method), ['bdev_aio_create', 'bdev_aio_create', 'bdev_aio_create', 'volume_create', 'volume_publish']);
    assert.deepEqual(mock.calls[3][1], { name: 'vol0', devices: ['disk0', 'disk1'] });
    assert.deepEqual(await violations(page, 'connect'), []);
    await page.getByRole('link', { name: 'Finish' }).click();
    await page.getByText('the volume is healthy').waitFor();
    return { mock, page };
  },

  async 'a resync is watched to its end'({ browser }) {
    const mock = await new Mock().start();
    const page = await open(browser, mock);
    await signIn(page, mock, '#/volumes/orders');
    const copied = async (percent) => {
      await page.locator('.replicas').getByText(`${percent} %`).waitFor();
    };
    await copied(61);
    const orders = mock.world.volumes.find((v) => v.name === 'orders');
    const [, far] = orders.replicas;
    far.resync = { ...far.resync, left_bytes: far.resync.total_bytes * 0.1, left_s: 31 };
    mock.changed();
    await copied(90);
    Object.assign(far, { state: 'in_sync', why: null, resync: null, last_resync: { kind: 'partial', bytes: 61.4 * 2 ** 30, seconds: 314.2 } });
    Object.assign(orders, { state: 'healthy', why: null, dirty_regions: 0 });
    mock.event({ category: 'replica', type: 'replica_resync_end', ctx: 'orders', text: 'volume "orders": farn1 is in sync' });
    await page.getByText('The volume is degraded.').waitFor({ state: 'detached' });
    await page.getByText('Last resync: partial, 61.4 GiB in 5 min 14 s').waitFor();
    return { mock, page };
  },

  async 'a wrong password is refused, and says how long to wait'({ browser }) {
    const mock = await new Mock().start();
    const page = await open(browser, mock, { allow: [REFUSED] });
    await page.goto(mock.url);
    for (let n = 0; n < 3; n += 1) {
      await page.getByLabel('Name', { exact: true }).fill('admin');
      await page.getByLabel('Password', { exact: true }).fill('wrong');
      await page.keyboard.press('Enter');
      await page.getByText('The name or the password is wrong.').waitFor();
      assert.equal(await page.getByLabel('Password', { exact: true }).inputValue(), '');
    }
    await page.getByText('The next attempt is possible in 4 s.').waitFor();
    assert.deepEqual(await violations(page, 'wrong password'), []);
    return { mock, page };
  },

  async 'a viewer sees no acting button, an operator those of the class operate'({ browser }) {
    const passive = ['Copy', 'Sign out', 'Menu', 'Close', 'Run again', 'Download report', 'Download the configuration', 'Change password', 'Back', 'Skip', 'Next', 'Show older events', 'Search', 'Clear', 'Older calls', 'Newer calls'];
    const acting = async (page) => {
      const found = new Set();
      for (const [, hash] of SCREENS.filter(([name]) => name !== 'setup')) {
        // From an empty page: a change of the hash alone may leave the last screen for a moment.
        await page.goto('about:blank');
        await page.goto(`${page.mock.url}/${hash}`);
        await page.locator('main h1').waitFor();
        await page.waitForFunction(() => !/Loading…|Checking…/.test(document.querySelector('main')?.textContent ?? 'Loading…'));
        for (const text of await page.locator('main button').allTextContents()) if (!passive.includes(text.trim())) found.add(text.trim());
      }
      return [...found].sort();
    };
    const result = {};
    for (const role of ['viewer', 'operator']) {
      const mock = await new Mock({ role }).start();
      const page = await open(browser, mock);
      page.mock = mock;
      await signIn(page, mock);
      result[role] = await acting(page);
      assert.deepEqual(page.problems, []);
      if (role === 'operator') {
        assert.deepEqual(await page.evaluate(() => fetch('/api/rpc', { method: 'POST', headers: { 'Content-Type': 'application/json', 'X-Nacre': '1' }, body: '{"method":"rpc_get_methods","params":{}}' }).then((r) => r.status)), 200);
      }
      await page.context().close();
      await mock.stop();
    }
    assert.deepEqual(result.viewer, []);
    assert.deepEqual(result.operator, ['Bring online', 'Check', 'End', 'Fail the I/O', 'Limit I/O', 'Locate', 'Rescan', 'Reset', 'Resync now', 'Set ANA state', 'Silence', 'Stop verifying', 'Take offline', 'Test', 'Test all', 'Test failover', 'Thaw', 'Try again now', 'Try now', 'Verify']);
  },

  async 'a call that the role lost meanwhile is refused in the form'({ browser }) {
    const mock = await new Mock().start();
    const page = await open(browser, mock, { allow: [REFUSED] });
    await signIn(page, mock, '#/volumes/vm-images');
    await button(page, 'Verify').click();
    mock.role = 'viewer';
    await button(page, 'Verify', 'dialog').click();
    await page.getByText('Your role does not allow this.').waitFor();
    return { mock, page };
  },

  async 'an expired session: sign-in over the page, nothing that was typed is lost'({ browser }) {
    const mock = await new Mock().start();
    const page = await open(browser, mock, { allow: [REFUSED] });
    await signIn(page, mock, '#/volumes');
    await button(page, 'Create volume').click();
    await page.getByLabel('Name', { exact: true }).fill('half-typed');
    mock.expire();
    await page.getByText('Your session has ended').waitFor();
    assert.deepEqual(await violations(page, 'expired'), []);
    await page.keyboard.press('Escape');
    await page.getByText('Your session has ended').waitFor();
    const again = page.getByRole('dialog', { name: 'Sign in again' });
    await again.getByLabel('Password').fill(PASSWORD);
    await again.getByRole('button', { name: 'Sign in' }).click();
    await page.getByText('Your session has ended').waitFor({ state: 'detached' });
    assert.equal(await page.getByLabel('Name', { exact: true }).inputValue(), 'half-typed');
    assert.equal(await page.evaluate(() => location.hash), '#/volumes');
    await page.getByLabel('disk7').check();
    await button(page, 'Create', 'dialog').click();
    await page.getByText('Volume half-typed was created.').waitFor();
    return { mock, page };
  },

  async 'the daemon restarts under an open page: a banner, then everything is live again'({ browser }) {
    const mock = await new Mock().start();
    const page = await open(browser, mock, { allow: [REFUSED] });
    await signIn(page, mock, '#/volumes');
    const kept = new Set(mock.sessions);
    await mock.stop();
    await page.getByText('No connection.').waitFor();
    assert.deepEqual(await violations(page, 'banner'), []);
    await page.getByRole('link', { name: 'orders', exact: true }).waitFor();
    mock.world.volumes[0].name = 'renamed-meanwhile';
    mock.sessions = kept;
    mock.phase = 'starting';
    await mock.start();
    await page.getByText('The daemon is starting.').waitFor({ timeout: 20_000 });
    await page.getByText('renamed-meanwhile').first().waitFor();
    await page.getByText('No connection.').waitFor({ state: 'detached' });
    return { mock, page };
  },

  async 'a page that opens before the daemon waits for it'({ browser }) {
    const mock = await new Mock().start();
    const page = await open(browser, mock, { allow: [REFUSED] });
    await page.route('**/api/session', (route) => route.abort());
    await page.goto(mock.url);
    await page.getByText('The daemon does not answer. Connecting again').waitFor();
    await page.unroute('**/api/session');
    await page.getByLabel('Name', { exact: true }).waitFor();
    return { mock, page };
  },

  async 'a dangerous act names what is lost, and wants the name'({ browser }) {
    const mock = await new Mock().start();
    const page = await open(browser, mock);
    await signIn(page, mock, '#/volumes/vm-images');
    await button(page, 'Delete').click();
    await page.getByText('all data of volume vm-images, 750 GiB, on 2 replicas').waitFor();
    const go = button(page, 'Delete', 'dialog');
    assert.equal(await go.isDisabled(), true);
    await page.getByLabel('Type vm-images to confirm').fill('vm-image');
    assert.equal(await go.isDisabled(), true);
    await page.getByLabel('Type vm-images to confirm').fill('vm-images');
    await go.click();
    await heading(page, 'Volumes');
    assert.deepEqual(mock.calls, [['volume_delete', { name: 'vm-images' }]]);
    return { mock, page };
  },

  async 'what the daemon refuses without force shows the loss first'({ browser }) {
    const mock = await new Mock().start();
    mock.refuse.volume_offline_replica = (p) => (p.force ? null : { field: 'force', cause: 'that would remove the last good replica of "orders": type the volume\'s name to confirm', remedy: 'bring another replica in sync first' });
    const page = await open(browser, mock, { allow: [REFUSED] });
    await signIn(page, mock, '#/volumes/orders');
    await page.getByRole('button', { name: 'Take offline Nvme0n1' }).click();
    await button(page, 'Take offline', 'dialog').click();
    await page.getByText('the last good copy of volume orders').waitFor();
    await page.getByText('nacre volume offline orders Nvme0n1 --force orders', { exact: true }).waitFor();
    await page.getByLabel('Type orders to confirm').fill('orders');
    assert.deepEqual(await violations(page, 'forced'), []);
    await button(page, 'Take offline', 'dialog').click();
    await dialog(page).waitFor({ state: 'hidden' });
    assert.equal(mock.calls.at(-1)[1].force, 'orders');
    return { mock, page };
  },

  async 'a refused field is marked, with the cause and the remedy'({ browser }) {
    const mock = await new Mock().start();
    mock.refuse.bdev_aio_create = () => ({ field: 'filename', cause: '/srv/x.img: no such file (give a `size` to create it)' });
    const page = await open(browser, mock, { allow: [REFUSED] });
    await signIn(page, mock, '#/disks');
    await button(page, 'Create file bdev').click();
    await button(page, 'Create', 'dialog').click();
    assert.equal(await page.getByText('This is required.').count(), 2);
    await page.getByLabel('Name', { exact: true }).fill('x');
    await page.getByLabel('Path', { exact: true }).fill('/srv/x.img');
    await page.getByRole('textbox', { name: 'Size' }).fill('many');
    await button(page, 'Create', 'dialog').click();
    await page.getByText('Write a size with its unit').waitFor();
    await page.getByRole('textbox', { name: 'Size' }).fill('');
    await button(page, 'Create', 'dialog').click();
    await page.getByText('no such file').first().waitFor();
    assert.equal(await page.getByLabel('Path', { exact: true }).getAttribute('aria-invalid'), 'true');
    assert.deepEqual(await violations(page, 'refused'), []);
    return { mock, page };
  },

  async 'the own password: two that differ, a wrong one, and a right one'({ browser }) {
    const mock = await new Mock().start();
    const page = await open(browser, mock, { allow: [REFUSED] });
    await signIn(page, mock, '#/settings');
    const fill = async (old, fresh, again) => {
      await page.getByLabel('Present password').fill(old);
      await page.getByLabel('New password', { exact: true }).fill(fresh);
      await page.getByLabel('New password again').fill(again);
      await button(page, 'Change password').click();
    };
    await fill(PASSWORD, 'one long password', 'another long password');
    await page.getByText('The two new passwords are not the same.').waitFor();
    await fill('wrong', 'one long password', 'one long password');
    await page.getByText('the present password is wrong').waitFor();
    assert.equal(await page.getByText('Your session has ended').count(), 0);
    await fill(PASSWORD, 'one long password', 'one long password');
    await page.getByText('Your password was changed.').waitFor();
    return { mock, page };
  },

  async 'an API token: its secret once, and its end'({ browser }) {
    const mock = await new Mock().start();
    const page = await open(browser, mock);
    await signIn(page, mock, '#/settings');
    await page.getByText('(over)').waitFor();
    await button(page, 'Create token').click();
    await page.getByLabel('Name', { exact: true }).fill('backup');
    await page.getByText('nacre web token create backup --role viewer --valid-for 90d').waitFor();
    await button(page, 'Create', 'dialog').click();
    await page.getByText(/nacre_(5c){32}/).waitFor();
    assert.deepEqual(await violations(page, 'token'), []);
    await button(page, 'Close', 'dialog').click();
    const call = mock.calls.find(([method]) => method === 'web_token_create');
    assert.deepEqual(call[1], { name: 'backup', role: 'viewer', validity_s: 7776000 });
    await page.getByRole('rowheader', { name: 'backup' }).waitFor();
    return { mock, page };
  },

  async 'receivers of alerts: added, changed and removed, with sealed secrets'({ browser }) {
    const mock = await new Mock({ world: busy() }).start();
    const page = await open(browser, mock);
    await signIn(page, mock, '#/settings');
    await page.getByRole('rowheader', { name: 'oncall' }).waitFor();
    assert.equal(await button(page, 'Change: oncall').count(), 0, 'a receiver of the file is not changed here');
    await button(page, 'Add webhook').click();
    await page.getByLabel('Name', { exact: true }).fill('pager');
    await page.getByLabel('URL', { exact: true }).fill('https://hooks.example.org/T0/abc');
    await page.getByText('nacre alert webhook pager --url-key KEY').waitFor();
    await button(page, 'Add', 'dialog').click();
    await page.getByRole('rowheader', { name: 'pager' }).waitFor();
    await page.getByRole('row', { name: /storage-team/ }).getByRole('button', { name: /Change/ }).click();
    await page.getByLabel('Recipients').fill('a@example.com\nb@example.com');
    await button(page, 'Change', 'dialog').click();
    await page.getByText('a@example.com, b@example.com').waitFor();
    await page.getByRole('row', { name: /pager/ }).getByRole('button', { name: /Remove/ }).click();
    await page.locator('dialog[open]').getByRole('textbox').fill('pager');
    await button(page, 'Remove', 'dialog').click();
    await page.getByRole('rowheader', { name: 'pager' }).waitFor({ state: 'detached' });
    const mail = { name: 'storage-team', server: 'mail.example.com:587', tls: 'starttls', from: 'nacre@example.com', to: ['a@example.com', 'b@example.com'], user: 'nacre', categories: ['volume', 'replica'], gather_s: 30, retry_for_s: 3600, password_key: 'alert-storage-team-password', severity: 'error' };
    assert.deepEqual(mock.calls, [
      ['key_import', { name: 'alert-pager-url', kind: 'text', text: 'https://hooks.example.org/T0/abc' }],
      ['alert_set_webhook', { name: 'pager', url_key: 'alert-pager-url', severity: 'warning' }],
      ['alert_set_mail', mail],
      ['alert_remove', { name: 'pager' }],
      ['keyring_file_remove_key', { name: 'alert-pager-url' }],
    ]);
    return { mock, page };
  },

  ...ADMINISTRATION,

  ...SNAPSHOTS,

  async 'only a person prolongs the session: refreshing calls say that they are none'({ browser }) {
    const mock = await new Mock().start();
    const page = await open(browser, mock);
    const kinds = [];
    page.on('request', (request) => request.url().endsWith('/api/rpc') && kinds.push([request.headers()['x-nacre'], request.postDataJSON().method]));
    await signIn(page, mock, '#/volumes');
    await page.getByText('vm-images').waitFor();
    await page.waitForTimeout(1500);
    kinds.length = 0;
    mock.changed();
    await page.waitForTimeout(1500);
    assert.ok(kinds.length > 4, `${kinds.length} calls`);
    assert.deepEqual([...new Set(kinds.map(([kind]) => kind))], ['background']);
    return { mock, page };
  },

  async 'events arrive live, are filtered, and lead to their object'({ browser }) {
    const mock = await new Mock().start();
    const page = await open(browser, mock);
    await signIn(page, mock, '#/events');
    await page.getByText('volume "scratch" is frozen').waitFor();
    mock.event({ category: 'volume', type: 'volume_thaw', ctx: 'scratch', text: 'volume "scratch" serves again' });
    await page.getByText('serves again').waitFor();
    await page.getByLabel('replica').check();
    assert.equal(await page.locator('table.events tbody tr').count(), 2);
    await page.getByText('nacre events --category replica --follow', { exact: true }).waitFor();
    await page.locator('table.events').getByRole('link', { name: 'orders' }).first().click();
    await heading(page, 'orders');
    return { mock, page };
  },

  async 'the keyboard is enough, and the focus follows'({ browser }) {
    const mock = await new Mock().start();
    const page = await open(browser, mock);
    await signIn(page, mock);
    await page.keyboard.press('Tab');
    const focused = () => page.evaluate(() => document.activeElement?.textContent?.trim());
    for (let n = 0; n < 40 && (await focused()) !== 'Skip to the content'; n += 1) await page.keyboard.press('Tab');
    await page.keyboard.press('Enter');
    assert.equal(await focused(), 'Dashboard');
    await page.getByRole('link', { name: 'Pools and lvols' }).focus();
    await page.keyboard.press('Enter');
    await heading(page, 'Pools and lvols');
    await page.waitForFunction(() => document.activeElement?.tagName === 'H1');
    await page.keyboard.press('Tab');
    await page.keyboard.press('Enter');
    await dialog(page).waitFor();
    assert.equal(await page.evaluate(() => document.activeElement?.tagName), 'INPUT');
    await page.keyboard.press('Escape');
    await dialog(page).waitFor({ state: 'hidden' });
    assert.equal(await focused(), 'Create pool');
    return { mock, page };
  },

  async 'the theme is kept, and the menu works on a phone'({ browser }) {
    const mock = await new Mock().start();
    const page = await open(browser, mock, { width: 390, height: 844 });
    await signIn(page, mock);
    await page.getByRole('button', { name: 'Menu' }).click();
    assert.deepEqual(await violations(page, 'menu'), []);
    await page.getByLabel('Theme').selectOption('dark');
    await page.reload();
    assert.equal(await page.evaluate(() => document.documentElement.dataset.theme), 'dark');
    await page.getByRole('button', { name: 'Menu' }).click();
    await page.getByRole('link', { name: 'Doctor' }).click();
    await heading(page, 'Doctor');
    return { mock, page };
  },

  async 'a copied command is the one that is shown'({ browser }) {
    const mock = await new Mock().start();
    const page = await open(browser, mock);
    await page.context().grantPermissions(['clipboard-read', 'clipboard-write']);
    await signIn(page, mock, `#/subsystems/${encodeURIComponent('nqn.2025-01.io.nacre:orders')}`);
    await page.getByRole('button', { name: /^Copy: nvme connect -t rdma -a 10.0.0.4/ }).click();
    await page.getByText('Copied').waitFor();
    assert.equal(await page.evaluate(() => navigator.clipboard.readText()), 'nvme connect -t rdma -a 10.0.0.4 -s 4420 -n nqn.2025-01.io.nacre:orders');
    return { mock, page };
  },

  async 'reports are saved without a request'({ browser }) {
    const mock = await new Mock().start();
    const page = await open(browser, mock);
    await signIn(page, mock, '#/doctor');
    await page.getByText('1 check failed').waitFor();
    const [file] = await Promise.all([page.waitForEvent('download'), page.getByRole('button', { name: 'Download report' }).click()]);
    assert.match(file.suggestedFilename(), /^nacre-doctor-store1-.*\.json$/);
    assert.equal(JSON.parse(readFileSync(await file.path(), 'utf8')).failed, 1);
    return { mock, page };
  },

  async 'every act opens, is accessible, and shows a command that the CLI takes'({ browser }) {
    const mock = await new Mock({ world: busy() }).start();
    const page = await open(browser, mock);
    await signIn(page, mock);
    const commands = new Map();
    const problems = [];
    const seen = new Set();
    for (const [screen, hash] of SCREENS.filter(([name]) => name !== 'setup')) {
      await page.goto(`${mock.url}/${hash}`);
      // The list of snapshots arrives later than the rest of the screen.
      const later = { volumes: '#left', volume: '#snapshots' }[screen.split('-')[0]];
      if (later) await page.locator(later).waitFor();
      await page.waitForFunction(() => !/Loading…|Checking…/.test(document.querySelector('main')?.textContent ?? 'Loading…'));
      for (const one of await page.locator('main button').all()) {
        const name = await one.evaluate((b) => b.getAttribute('aria-label') ?? b.textContent.trim());
        const key = `${screen.split('-')[0]} ${await one.textContent()}`;
        if (/^Copy|^Run again|^Download|^Change password|^Show older|^Search|^Clear(?! reservation)|^Older|^Newer|^Upload/.test(name) || seen.has(key) || (await one.isDisabled())) continue;
        seen.add(key);
        await one.click();
        const box = page.locator('dialog[open]');
        await box.waitFor();
        for (const input of await box.locator('input[type=text], textarea').all()) {
          const field = await input.getAttribute('data-field');
          if (field && (await input.inputValue()) === '') await input.fill({ size: '10 GiB', hosts: HOST, host: HOST, nqn: 'nqn.2026-01.com.example:x', subnqn: 'nqn.2026-01.com.example:x', traddr: name === 'Attach drive' ? '0000:5e:00.0' : '192.0.2.9', filename: '/srv/x y.img', expires: '2100-01-31', types: 'replica_out', addresses: '192.0.2.7/24', gateways: '192.0.2.1', dns: '192.0.2.53', mtu: '9000' }[field] ?? 'x1');
        }
        for (const choice of await box.locator('fieldset input[type=checkbox]').all()) await choice.check();
        for (const text of await box.locator('.command code').allTextContents()) commands.set(text, key);
        problems.push(...(await violations(page, key)));
        await page.keyboard.press('Escape');
        await box.waitFor({ state: 'hidden' });
      }
    }
    assert.deepEqual(problems, []);
    assert.ok(seen.size > 50, `${seen.size} acts`);
    for (const key of ['volume Make snapshot', 'volume Create volume', 'volumes Delete']) assert.ok(seen.has(key), key);
    if (!binary) {
      console.log(NO_BINARY);
      return { mock, page };
    }
    const wrong = [];
    const run = (text) =>
      new Promise((done) => {
        const child = execFile('/bin/sh', ['-c', `exec ${text.replace(/^nacre/, binary)}`], { env: { NACRE_RPC_SOCKET: '/nonexistent/nacre.sock' }, timeout: 20_000 }, (failure, _out, err) => done([failure?.code ?? 0, err]));
        // A command that reads no password may have ended.
        child.stdin.on('error', () => {});
        child.stdin.end('correct horse battery\n');
      });
    const [knowsWeb] = await run('nacre web --help');
    if (knowsWeb !== 0) console.log('      skipped: commands `nacre web`, which this binary does not have');
    for (const [text, key] of commands) {
      const isWeb = text.startsWith('nacre web ');
      if (isWeb && knowsWeb !== 0) continue;
      const [code, error] = await run(text);
      // 3: the words are right, and no daemon runs. Some commands look at files of this machine first.
      if (code === 1 && /this machine is no appliance|this machine has no disk|it does not exist/.test(error)) continue;
      if (code !== 3 && !(code === 0 && /doctor/.test(text))) wrong.push(`${key}: ${text}: exit code ${code}: ${error.split('\n')[0]}`);
    }
    console.log(`      ${commands.size} commands of ${seen.size} acts`);
    assert.deepEqual(wrong, []);
    return { mock, page };
  },
};

/** Cases that run at the same time: they wait more than they compute. */
const AT_ONCE = 2;

export async function behaviour(only) {
  const browser = await launch();
  const waiting = Object.entries(CASES).filter(([name]) => !only || name.includes(only));
  const result = { passed: 0, failed: 0 };
  const one = async ([name, run]) => {
    const from = Date.now();
    try {
      const used = await run({ browser });
      if (used) {
        assert.deepEqual(used.page.problems, []);
        assert.equal(used.mock.unknown, undefined);
        await used.page.context().close();
        await used.mock.stop();
      }
      result.passed += 1;
      console.log(`ok    ${name} (${((Date.now() - from) / 1000).toFixed(1)} s)`);
    } catch (error) {
      result.failed += 1;
      console.log(`FAILED: ${name}\n      ${String(error.message ?? error).split('\n').slice(0, 30).join('\n      ')}`);
    }
  };
  const take = async () => {
    for (let next = waiting.shift(); next; next = waiting.shift()) await one(next);
  };
  await Promise.all(Array.from({ length: AT_ONCE }, take));
  for (const mock of Mock.running) await mock.stop();
  await browser.close();
  return result;
}
