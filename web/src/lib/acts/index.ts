/** Every act of the page: its form, its command, and its call. */
export { connectLines, free, usersOf } from './common';
export * from './alert';
export * from './appliance';
export * from './bdev';
export * from './key';
export * from './pool';
export * from './snapshot';
export * from './volume';
export * from './subsystem';
export * from './settings';
