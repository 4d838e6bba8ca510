//! The subcommands, one file each; `serve` has its own folder.

pub(crate) mod bench;
pub(crate) mod completions;
pub(crate) mod destination;
pub(crate) mod drain;
pub(crate) mod explain;
pub(crate) mod generate;
pub(crate) mod model;
pub(crate) mod role;
pub(crate) mod simulate;

/// The arguments of one subcommand, as they stand after its name.
#[cfg(test)]
pub(crate) fn parse<A: clap::Args>(line: &[&str]) -> Result<A, clap::Error> {
    #[derive(clap::Parser)]
    struct Line<A: clap::Args> {
        #[command(flatten)]
        args: A,
    }
    clap::Parser::try_parse_from([&["tessera"], line].concat()).map(|Line { args }| args)
}
