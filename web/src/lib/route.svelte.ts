/** The place in the page: `#/volumes/vol0` is `['volumes', 'vol0']`. */

const parse = () =>
  location.hash
    .replace(/^#\/?/, '')
    .split('/')
    .filter(Boolean)
    .map((part) => {
      try {
        return decodeURIComponent(part);
      } catch {
        return part;
      }
    });

class Route {
  path = $state.raw<string[]>(parse());
  constructor() {
    addEventListener('hashchange', () => {
      this.path = parse();
      scrollTo(0, 0);
    });
  }
}

export const route = new Route();
export const href = (...path: string[]) => `#/${path.map(encodeURIComponent).join('/')}`;
