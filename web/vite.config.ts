import { existsSync, readdirSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { svelte } from '@sveltejs/vite-plugin-svelte';
import { defineConfig, type Plugin } from 'vite';

/** The bundle carries the licences of the packages whose code is in it. Other licences than these are refused. */
function licences(): Plugin {
  const ALLOWED = ['MIT', 'ISC', 'BSD-2-Clause', 'BSD-3-Clause', 'Apache-2.0'];
  return {
    name: 'licences',
    apply: 'build',
    generateBundle() {
      const folders = new Set<string>();
      for (const id of this.getModuleIds()) {
        const found = /^\0?(.*\/node_modules\/(?:@[^/]+\/)?[^/]+)\//.exec(id);
        if (found) folders.add(found[1]);
      }
      const texts = [...folders].sort().map((folder) => {
        const { name, version, license } = JSON.parse(readFileSync(join(folder, 'package.json'), 'utf8'));
        if (!ALLOWED.includes(license)) throw new Error(`${name} has the licence ${license}`);
        const file = readdirSync(folder).find((one) => /^licen[cs]e/i.test(one));
        const text = file && existsSync(join(folder, file)) ? readFileSync(join(folder, file), 'utf8').trim() : '';
        return `${name} ${version} (${license})\n\n${text}\n`;
      });
      this.emitFile({ type: 'asset', fileName: 'licences.txt', source: `Packages in this page\n\n${texts.join(`\n${'-'.repeat(72)}\n\n`)}` });
    },
  };
}

// File names carry no hash: the server answers with an ETag, and the built files are committed.
export default defineConfig({
  plugins: [svelte(), licences()],
  build: {
    outDir: '../engine/web/dist',
    emptyOutDir: true,
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
    target: 'es2022',
    rollupOptions: {
      output: {
        codeSplitting: false,
        entryFileNames: 'assets/app.js',
        assetFileNames: 'assets/app[extname]',
      },
    },
  },
});
