//! `tessera model list` and `tessera model pull`.

use anyhow::Result;
use clap::Subcommand;

use crate::model::{Cache, Cached, DEMO_NAME, Source, resolve};
use crate::output;

const EXAMPLES: &str = "\
Examples:
  tessera model list                             What is in the cache, with size and path
  tessera model pull                             Fetch the demo model
  tessera model pull hf:Qwen/Qwen3-0.6B          Fetch a hub model
  tessera model pull hf:ORG/NAME/FILE.gguf@REV   One GGUF file at one revision";

/// What `tessera model` takes.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// List the models in the cache
    List,
    /// Fetch a model into the cache
    Pull {
        #[arg(default_value = DEMO_NAME, help = "hf:ORG/NAME[/FILE.gguf][@REVISION], or the demo model's name")]
        name: String,
    },
}

/// Lists or fetches.
pub(crate) async fn run(args: Args) -> Result<()> {
    let cache = Cache::from_environment()?;
    match args.command {
        Command::List => {
            let models = cache.list();
            if models.is_empty() {
                output::error("no models yet; `tessera model pull` fetches the demo model");
            }
            let width = models.iter().map(|model| model.name.len()).max().unwrap_or_default();
            models.iter().try_for_each(|model| output::line(&row(model, width)))
        }
        Command::Pull { name } => {
            let model = resolve(name.parse::<Source>()?, cache).await?;
            output::line(&model.path.display().to_string())
        }
    }
}

fn row(model: &Cached, width: usize) -> String {
    let megabytes = model.n_bytes.div_ceil(1_000_000);
    format!("{:width$}  {megabytes:>7} MB  {}", model.name, model.path.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_line_up() {
        let model = Cached { name: "a".to_owned(), n_bytes: 98_362_432, path: "/m/a.gguf".into() };
        assert_eq!(row(&model, 3), "a         99 MB  /m/a.gguf");
    }
}
