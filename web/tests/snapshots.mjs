// Snapshots of volumes, in a cluster and outside of one.
import assert from 'node:assert/strict';
import { button, dialog, heading, open, signIn, violations } from './browser.mjs';
import { busy } from './fixtures.mjs';
import { Mock } from './mock.mjs';

const of = (mock, volume, name) => mock.world.snapshots.find((one) => one.volume_name === volume && one.name === name);
/** True once the table has the row of this name. */
const row = (page, name) => page.getByRole('row').filter({ has: page.getByRole('rowheader', { name, exact: true }) });

export const SNAPSHOTS = {
  async 'a snapshot of a volume: made, the start of a volume, and deleted'({ browser }) {
    const mock = await new Mock().start();
    const page = await open(browser, mock);
    await signIn(page, mock, '#/volumes/vm-images');
    await row(page, 'golden').waitFor();
    assert.equal(await row(page, 'monday').count(), 0, 'those of other volumes are elsewhere');

    await button(page, 'Make snapshot').click();
    assert.match(await page.getByLabel('Name', { exact: true }).inputValue(), /^vm-images@\d{4}-\d\d-\d\d$/);
    await page.getByLabel('Name', { exact: true }).fill('friday');
    await page.getByText('nacre volume snapshot create vm-images friday', { exact: true }).waitFor();
    await button(page, 'Make snapshot', 'dialog').click();
    await row(page, 'friday').getByText('ready').waitFor();
    assert.deepEqual(mock.calls.at(-1), ['volume_snapshot_create', { volume: 'vm-images', name: 'friday' }]);
    assert.deepEqual((await page.locator('section[aria-labelledby=snapshots] tbody th').allTextContents()), ['friday', 'golden'], 'the newest first');

    await button(page, 'Create volume from golden').click();
    await page.getByLabel('Name', { exact: true }).fill('clone');
    await page.getByText('nacre volume create clone --replicas 2 --snapshot golden', { exact: true }).waitFor();
    await page.getByRole('textbox', { name: 'Size' }).fill('749 GiB');
    await button(page, 'Create', 'dialog').click();
    await page.getByText('Write at least 750GiB.').waitFor();
    await page.getByRole('textbox', { name: 'Size' }).fill('800.0001 GiB');
    await dialog(page).getByLabel('Replicas', { exact: true }).selectOption('3');
    await page.getByLabel('Take space as it is written').check();
    await page.getByText('nacre volume create clone --replicas 3 --snapshot golden --size 819201MiB --thin', { exact: true }).waitFor();
    await button(page, 'Create', 'dialog').click();
    await page.getByText('Volume clone was created.').waitFor();
    assert.deepEqual(mock.calls.at(-1), ['volume_create', { name: 'clone', replica_count: 3, snapshot: of(mock, 'vm-images', 'golden').uuid, size_mb: 819201, thin: true }]);

    const uuid = of(mock, 'vm-images', 'golden').uuid;
    await button(page, 'Delete snapshot golden').click();
    await page.getByText('Volumes that began with them keep their contents.').waitFor();
    await page.getByText('nacre volume snapshot delete golden', { exact: true }).waitFor();
    assert.ok(await button(page, 'Delete', 'dialog').isDisabled(), 'the name is wanted first');
    await page.getByLabel('Type golden to confirm').fill('golden');
    await button(page, 'Delete', 'dialog').click();
    await row(page, 'golden').waitFor({ state: 'detached' });
    assert.deepEqual(mock.calls.at(-1), ['volume_snapshot_delete', { snapshot: uuid }]);
    return { mock, page };
  },

  async 'snapshots that are not available say why, and an ambiguous name is not used'({ browser }) {
    const mock = await new Mock().start();
    const page = await open(browser, mock);
    await signIn(page, mock, '#/volumes/orders');
    await row(page, 'monday').getByText('ready').waitFor();
    // One of its nodes is away, which alone does not stop volumes from it.
    await row(page, 'monday').getByText('ant', { exact: true }).waitFor();
    assert.equal(await row(page, 'monday').getByText('not available').count(), 1);
    await row(page, 'monday').getByText('Node cow, which has it, has no lease.').waitFor();
    await row(page, 'before-upgrade').getByText('unavailable').waitFor();
    await row(page, 'today').getByText('not yet').waitFor();
    for (const name of ['before-upgrade', 'today']) assert.equal(await button(page, `Create volume from ${name}`).count(), 0, name);
    const { uuid } = of(mock, 'orders', 'monday');
    await button(page, 'Delete snapshot monday').click();
    await page.getByText('A node that is away deletes its lvol when it returns.').waitFor();
    await page.getByText(`nacre volume snapshot delete ${uuid}`, { exact: true }).waitFor();
    await page.keyboard.press('Escape');
    await dialog(page).waitFor({ state: 'hidden' });
    await button(page, 'Create volume from monday').click();
    await page.getByText(`nacre volume create NAME --replicas 2 --snapshot ${uuid}`, { exact: true }).waitFor();
    await page.keyboard.press('Escape');
    // Another node ends what this one shows: the list follows.
    const today = of(mock, 'orders', 'today');
    Object.assign(today, { state: 'failed', why: 'no replica in sync is on a pool' });
    mock.changed();
    await row(page, 'today').getByText('No replica in sync is on a pool.').waitFor();
    await button(page, 'Delete snapshot today').click();
    await page.getByText('snapshot today of volume orders, which was not made.').waitFor();
    return { mock, page };
  },

  async 'snapshots outlive their volume: the list of volumes has them'({ browser }) {
    const mock = await new Mock().start();
    const page = await open(browser, mock);
    await signIn(page, mock, '#/volumes');
    await row(page, 'last-of-staging').waitFor();
    await row(page, 'old').getByText('deleting').waitFor();
    assert.equal(await button(page, 'Delete snapshot old').count(), 0, 'it is being deleted');
    await page.getByRole('link', { name: 'vm-images', exact: true }).click();
    await heading(page, 'vm-images');
    await row(page, 'golden').waitFor();
    await button(page, 'Delete').click();
    await page.getByText('Its snapshots are not deleted: the list of volumes will show them.').waitFor();
    await page.getByLabel('Type vm-images to confirm').fill('vm-images');
    await button(page, 'Delete', 'dialog').click();
    await heading(page, 'Volumes');
    await row(page, 'golden').waitFor();
    await button(page, 'Create volume from golden').click();
    await page.getByLabel('Name', { exact: true }).fill('again');
    await page.getByText('nacre volume create again --replicas 1 --snapshot golden', { exact: true }).waitFor();
    await button(page, 'Create', 'dialog').click();
    await page.getByRole('rowheader', { name: 'again', exact: true }).waitFor();
    assert.deepEqual(await violations(page, 'volumes'), []);
    return { mock, page };
  },

  async 'a daemon in no cluster: snapshots are on its pools'({ browser }) {
    const world = busy();
    const orders = world.volumes.find((one) => one.name === 'orders');
    const lvol = (pool_name, why = null) => ({ uuid: `5f0c1c3e-8b3a-4c55-9d0b-6b3f3f1c0d0${pool_name.length}`, node: null, pool: '5f0c1c3e-8b3a-4c55-9d0b-6b3f3f1c0e01', pool_name, why });
    const monday = { uuid: '5f0c1c3e-8b3a-4c55-9d0b-6b3f3f1c0c01', name: 'monday', volume: orders.uuid, volume_name: 'orders', size_bytes: orders.num_blocks * 512, created_s: 1_790_000_000, state: 'ready', why: null, lvols: [lvol('fast'), lvol('large')] };
    const mock = await new Mock({ world: { ...world, snapshots: [monday] } }).start();
    const page = await open(browser, mock);
    await signIn(page, mock, '#/volumes/orders');
    await row(page, 'monday').getByText('fast', { exact: true }).waitFor();
    await row(page, 'monday').getByText('large', { exact: true }).waitFor();
    await button(page, 'Create volume from monday').click();
    await page.getByText('It has a replica on each pool of the snapshot.').waitFor();
    assert.equal(await dialog(page).getByLabel('Replicas', { exact: true }).count(), 0);
    await page.getByLabel('Name', { exact: true }).fill('clone');
    await page.getByLabel('Take space as it is written').check();
    await page.getByText('nacre volume create clone --pool fast --pool large --snapshot monday --thin', { exact: true }).waitFor();
    await button(page, 'Create', 'dialog').click();
    await page.getByText('Volume clone was created.').waitFor();
    const replicas = ['fast', 'large'].map((pool) => ({ pool, thin: true }));
    assert.deepEqual(mock.calls.at(-1), ['volume_create', { name: 'clone', replicas, snapshot: monday.uuid }]);
    mock.world.snapshots = [{ ...monday, lvols: [lvol('fast'), lvol('large', 'pool "large" is not open')] }];
    mock.changed();
    await row(page, 'monday').getByText('Pool "large" is not open.').waitFor();
    await button(page, 'Delete snapshot monday').click();
    await page.getByText('A pool that is not open loses its lvol when it is opened.').waitFor();
    return { mock, page };
  },
};
