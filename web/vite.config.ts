import { svelte } from '@sveltejs/vite-plugin-svelte';
import { defineConfig } from 'vite';

// File names carry no hash: the server answers with an ETag, and the built files are committed.
export default defineConfig({
  plugins: [svelte()],
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
