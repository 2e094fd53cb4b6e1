//! Tests of the methods of stacked modules.

mod split;
