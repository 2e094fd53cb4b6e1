/** Light or dark: as the system has it, unless chosen here. */

export type Theme = 'system' | 'light' | 'dark';

const dark = matchMedia('(prefers-color-scheme: dark)');

class ThemeChoice {
  chosen = $state<Theme>(read());
  /** Counts changes of colours, for what draws its own. */
  version = $state(0);

  constructor() {
    this.show();
    dark.addEventListener('change', () => this.show());
  }

  choose(theme: Theme) {
    this.chosen = theme;
    try {
      localStorage.setItem('theme', theme);
    } catch {
      // Without storage the choice ends with the page.
    }
    this.show();
  }

  private show() {
    const isDark = this.chosen === 'dark' || (this.chosen === 'system' && dark.matches);
    document.documentElement.dataset.theme = isDark ? 'dark' : 'light';
    this.version += 1;
  }
}

function read(): Theme {
  try {
    const kept = localStorage.getItem('theme');
    return kept === 'light' || kept === 'dark' ? kept : 'system';
  } catch {
    return 'system';
  }
}

export const theme = new ThemeChoice();
export const colour = (name: string) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
