//! The subcommands, one file each; `serve` has its own folder.

pub(crate) mod bench;
pub(crate) mod completions;
pub(crate) mod generate;
pub(crate) mod model;
pub(crate) mod role;
