// Every screen at three widths in both themes: pictures to look at, with the rules of browser.mjs at each.
import { mkdirSync } from 'node:fs';
import { fileURLToPath } from 'node:url';
import { launch, open, signIn, violations } from './browser.mjs';
import { busy, empty, healthy } from './fixtures.mjs';
import { Mock } from './mock.mjs';

const folder = fileURLToPath(new URL('pictures/', import.meta.url));
export const SCREENS = [
  ['dashboard', '#/'], ['disks', '#/disks'], ['disk', '#/disks/disk8'], ['disk-used', '#/disks/Nvme1n1'], ['drive', '#/drives/Nvme0'], ['pools', '#/pools'], ['pool', '#/pools/fast'], ['volumes', '#/volumes'],
  ['volume-degraded', '#/volumes/orders'], ['volume-frozen', '#/volumes/scratch'], ['volume-verify', '#/volumes/archive'], ['subsystems', '#/subsystems'],
  ['subsystem', `#/subsystems/${encodeURIComponent('nqn.2025-01.io.nacre:orders')}`], ['network', '#/network'], ['events', '#/events'], ['doctor', '#/doctor'], ['keys', '#/keys'], ['audit', '#/audit'], ['appliance', '#/appliance'], ['settings', '#/settings'], ['setup', '#/setup'],
];
export const WIDTHS = [['phone', 390, 844], ['tablet', 820, 1180], ['desktop', 1440, 900]];

export async function pictures(only) {
  mkdirSync(folder, { recursive: true });
  const problems = [];
  const browser = await launch();
  const shoot = async (page, name) => {
    await page.waitForFunction(() => !/Loading…|Checking…/.test(document.querySelector('main')?.textContent ?? 'Loading…'));
    await page.waitForTimeout(120);
    const wide = await page.evaluate(() => document.documentElement.scrollWidth - document.documentElement.clientWidth);
    if (wide > 0) problems.push(`${name}: the page is ${wide} px wider than the window`);
    await page.screenshot({ path: `${folder}${name}.png`, fullPage: true });
    problems.push(...(await violations(page, name)));
  };
  for (const [device, width, height] of WIDTHS) {
    for (const scheme of ['light', 'dark']) {
      const tail = `${device}-${scheme}`;
      const mock = await new Mock({ world: busy() }).start();
      const page = await open(browser, mock, { width, height, scheme });
      if (!only) {
        await page.goto(mock.url);
        await page.getByLabel('Name', { exact: true }).waitFor();
        await shoot(page, `sign-in-${tail}`);
      }
      await signIn(page, mock);
      for (const [name, hash] of SCREENS) {
        if (only && !name.includes(only)) continue;
        await page.goto(`${mock.url}/${hash}`);
        await shoot(page, `${name}-${tail}`);
      }
      if (!only) {
        await page.goto(`${mock.url}/#/volumes/vm-images`);
        await page.getByRole('button', { name: 'Delete', exact: true }).click();
        await shoot(page, `dialog-delete-${tail}`);
        await page.keyboard.press('Escape');
        await page.getByRole('button', { name: 'Publish', exact: true }).click();
        await shoot(page, `dialog-publish-${tail}`);
        await page.keyboard.press('Escape');
        mock.world = healthy();
        await page.goto(`${mock.url}/#/`);
        await page.reload();
        await page.getByText('Nothing is wrong').waitFor();
        await shoot(page, `dashboard-healthy-${tail}`);
        mock.world = empty();
        await page.reload();
        for (const [name, hash] of [['empty-dashboard', '#/'], ['empty-disks', '#/disks'], ['empty-setup', '#/setup']]) {
          await page.goto(`${mock.url}/${hash}`);
          await shoot(page, `${name}-${tail}`);
        }
      }
      problems.push(...page.problems.map((text) => `${tail}: ${text}`));
      if (mock.unknown) problems.push(`${tail}: unknown parameter ${mock.unknown}`);
      await page.context().close();
      await mock.stop();
    }
  }
  await browser.close();
  return problems;
}

if (process.argv[1] === fileURLToPath(import.meta.url)) {
  const problems = await pictures(process.argv[2]);
  console.log([...new Set(problems)].join('\n') || 'no problem');
}
