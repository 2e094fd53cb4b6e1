//! Values as people write them, read alike in the file, in the environment, on the command line and in calls.

pub mod address;
