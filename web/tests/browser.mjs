// A browser with rules: nothing on the console, no request outside of the origin, no accessibility violation.
import { readFileSync } from 'node:fs';
import { mkdirSync, mkdtempSync, rmSync } from 'node:fs';
import { createRequire } from 'node:module';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { chromium } from 'playwright-core';
import { PASSWORD } from './mock.mjs';

const axe = readFileSync(createRequire(import.meta.url).resolve('axe-core/axe.min.js'), 'utf8');
const ARGS = ['--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-background-networking', '--disable-component-update', '--disable-sync', '--force-color-profile=srgb'];

const scratch = mkdtempSync(join(tmpdir(), 'nacre-web-'));
process.on('exit', () => rmSync(scratch, { recursive: true, force: true }));

export const launch = () => chromium.launch({ executablePath: process.env.CHROMIUM ?? '/usr/bin/chromium', headless: true, args: ARGS, downloadsPath: scratch });

export const REFUSED = /Failed to load resource/;
export const button = (page, name, within = 'main') => page.locator(within).getByRole('button', { name, exact: true });
export const dialog = (page) => page.getByRole('dialog');
export const heading = (page, name) => page.getByRole('heading', { name, exact: true, level: 1 }).waitFor();

export async function open(browser, mock, { width = 1440, height = 900, scheme = 'light', allow = [] } = {}) {
  const context = await browser.newContext({ ignoreHTTPSErrors: true, viewport: { width, height }, colorScheme: scheme, reducedMotion: 'reduce', locale: 'en-GB', timezoneId: 'UTC' });
  const page = await context.newPage();
  page.problems = [];
  page.allow = allow;
  page.setDefaultTimeout(60_000);
  const note = (text) => { if (!page.allow.some((pattern) => pattern.test(text))) page.problems.push(text); };
  page.on('console', (message) => note(`console: ${message.text()} (${message.location().url})`));
  page.on('pageerror', (error) => note(`error: ${error.message}`));
  page.on('request', (request) => {
    const url = request.url();
    if (!url.startsWith(mock.url) && !url.startsWith('blob:')) note(`request: ${url}`);
  });
  return page;
}

export async function signIn(page, mock, hash = '') {
  await page.goto(`${mock.url}/${hash}`);
  await page.getByLabel('Name', { exact: true }).fill('admin');
  await page.getByLabel('Password', { exact: true }).fill(PASSWORD);
  await page.getByRole('button', { name: 'Sign in' }).click();
  // The form has a heading, too.
  await page.getByLabel('Password', { exact: true }).waitFor({ state: 'detached' });
  await page.locator('main h1').waitFor();
}

const documents = process.env.PAGE_PICTURES;
const pictures = documents ?? fileURLToPath(new URL('pictures/', import.meta.url));

// A picture of the window. With PAGE_PICTURES it is one for the documents, in that folder.
export async function picture(page, name) {
  mkdirSync(pictures, { recursive: true });
  if (documents) await page.waitForFunction(() => !document.querySelector('p.said')?.textContent);
  await page.evaluate(() => scrollTo(0, 0));
  await page.screenshot({ path: join(pictures, `${name}.png`) });
}

export async function violations(page, where) {
  if (!(await page.evaluate(() => 'axe' in window))) await page.evaluate(axe);
  const found = await page.evaluate(() => window.axe.run(document, { resultTypes: ['violations'] }));
  return found.violations.flatMap((v) => v.nodes.slice(0, 3).map((node) => `${where}: ${v.id}: ${node.target.join(' ')}: ${node.failureSummary.split('\n')[1]?.trim()}`));
}
