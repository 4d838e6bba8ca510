//! What a simulated worker is like: bounds of its engine and the times of its steps.

use std::path::{Path, PathBuf};
use std::time::Duration;

use contract::cost::{CostCoefficients, StepLoad};
use contract::hash::HashKey;
use contract::model::Fingerprint;
use engine::EngineConfig;
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Profiles that every build knows by name.
const NAMED: [(&str, &str); 4] = [
    ("mooncake", include_str!("../../../deploy/config/sim/mooncake.toml")),
    ("ascend-910b", include_str!("../../../deploy/config/sim/ascend-910b.toml")),
    ("cpu", include_str!("../../../deploy/config/sim/cpu.toml")),
    ("instant", include_str!("../../../deploy/config/sim/instant.toml")),
];

/// Longest time in milliseconds, of a step or of what makes it longer, and the slowest and the fastest prefill.
const MS_MAX: f64 = 1e6;
const RATES: std::ops::RangeInclusive<f64> = 1e-3..=1e9;

/// Requests that wait in an engine at most, where nothing else bounds them.
const MAX_WAITING: u32 = 1 << 20;

/// A simulated worker. A key that means nothing is an error: it would be left out of what is simulated.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// Tokens in a KV block.
    pub block_size: u32,
    /// Blocks in the pool.
    pub n_blocks: u32,
    /// Requests that run at once.
    pub max_running: u32,
    /// Prompt tokens in a step; tokens that running requests decode come on top.
    pub prefill_budget: u32,
    /// Longest sequence, prompt and output together.
    pub context_length: u32,
    /// Chance of each token to be one that ends its request, 0 to 1; with 0 `max_tokens` alone ends requests.
    #[serde(default)]
    pub eos_probability: f64,
    /// Times of a step; what is absent takes none.
    #[serde(default)]
    pub timing: Timing,
    /// A device in real time hangs in its step while there is this file; in virtual time it never does.
    #[serde(default)]
    pub hangs_while: Option<PathBuf>,
}

/// What makes up the time of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Timing {
    /// Prompt tokens per second; 0 takes no time for them.
    pub prefill_tokens_per_s: f64,
    /// Milliseconds for a million pairs of a prompt token and a token before it.
    pub prefill_per_million_pairs_ms: f64,
    /// Milliseconds of a step in which any request decodes.
    pub decode_base_ms: f64,
    /// Milliseconds for each request that decodes.
    pub decode_per_sequence_ms: f64,
    /// Milliseconds for each 10,000 tokens of context over requests that decode.
    pub decode_per_10k_context_tokens_ms: f64,
    /// Milliseconds of every step.
    pub step_base_ms: f64,
}

/// Why a profile cannot be used.
#[derive(Debug, Error)]
pub enum ProfileError {
    /// It is neither a name nor a file that can be read.
    #[error("cannot read profile {path}; give a file or one of {names}", path = path.display(), names = names().join(", "))]
    Read {
        /// What was given.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// The text is no profile.
    #[error("cannot parse profile {origin}")]
    Parse {
        /// Where the text came from.
        origin: String,
        /// Where in it and why.
        source: Box<toml::de::Error>,
    },
    /// A value that cannot be simulated.
    #[error("{field} of profile {origin} is {value:?}; give {want}")]
    Value {
        /// Where the profile came from.
        origin: String,
        /// Which value.
        field: &'static str,
        /// What it is.
        value: f64,
        /// What would do.
        want: &'static str,
    },
}

/// Names of the profiles that every build knows.
fn names() -> Vec<&'static str> {
    NAMED.iter().map(|&(name, _)| name).collect()
}

impl Profile {
    /// Reads a profile that every build knows (`mooncake`, `ascend-910b`, `cpu`, `instant`) or a TOML file.
    ///
    /// # Errors
    /// When there is none, or it cannot be simulated.
    pub fn load(path: &Path) -> Result<Self, ProfileError> {
        let origin = path.display().to_string();
        if let Some((_, text)) = NAMED.iter().find(|(name, _)| path == Path::new(name)) {
            return Self::parse(text, &origin);
        }
        let text =
            std::fs::read_to_string(path).map_err(|source| ProfileError::Read { path: path.to_owned(), source })?;
        Self::parse(&text, &origin)
    }

    /// Reads a profile from TOML; `origin` names it in errors.
    ///
    /// # Errors
    /// When it is none, or cannot be simulated.
    pub fn parse(text: &str, origin: &str) -> Result<Self, ProfileError> {
        let profile: Self = toml::from_str(text)
            .map_err(|source| ProfileError::Parse { origin: origin.to_owned(), source: Box::new(source) })?;
        let wrong = |field, value, want| Err(ProfileError::Value { origin: origin.to_owned(), field, value, want });
        let timing = &profile.timing;
        let rate = timing.prefill_tokens_per_s;
        if !(rate == 0.0 || RATES.contains(&rate)) {
            return wrong(
                "timing.prefill_tokens_per_s",
                rate,
                "0.001 to 1000000000, or 0 for prompts that take no time",
            );
        }
        for (field, ms) in [
            ("timing.prefill_per_million_pairs_ms", timing.prefill_per_million_pairs_ms),
            ("timing.decode_base_ms", timing.decode_base_ms),
            ("timing.decode_per_sequence_ms", timing.decode_per_sequence_ms),
            ("timing.decode_per_10k_context_tokens_ms", timing.decode_per_10k_context_tokens_ms),
            ("timing.step_base_ms", timing.step_base_ms),
        ] {
            if !(0.0..=MS_MAX).contains(&ms) {
                return wrong(field, ms, "0 to 1000000");
            }
        }
        if !(0.0..=1.0).contains(&profile.eos_probability) {
            return wrong("eos_probability", profile.eos_probability, "0 to 1");
        }
        Ok(profile)
    }

    /// Bounds of its engine; a hundredth of the pool is left to running requests, and the queue is as good as unbounded.
    #[must_use]
    pub fn engine_config(&self, hash_key: HashKey, model: Fingerprint) -> EngineConfig {
        EngineConfig {
            block_size: self.block_size,
            n_blocks: self.n_blocks,
            max_running: self.max_running,
            max_waiting: MAX_WAITING,
            token_budget: self.prefill_budget.saturating_add(self.max_running),
            prefill_budget: Some(self.prefill_budget),
            max_prefill_chunk: None,
            context_length: self.context_length,
            watermark_blocks: self.n_blocks / 100,
            retry_after_ms: 1_000,
            hash_key,
            model,
        }
    }

    /// Stands for all of it but for what breaks it.
    #[must_use]
    pub fn fingerprint(&self) -> Fingerprint {
        let whole = Self { hangs_while: None, ..self.clone() };
        Fingerprint::of(&[b"simulated profile", format!("{whole:?}").as_bytes()])
    }
}

impl Timing {
    /// Time of a step.
    #[must_use]
    pub fn step(&self, load: &StepLoad) -> Duration {
        let ms = self.step_base_ms + self.cost().step_ms(load);
        // A product of large values may be beyond what a duration holds.
        Duration::try_from_secs_f64(ms / 1e3).unwrap_or(Duration::MAX)
    }

    /// The coefficients that a worker should find in its steps, apart from what every step takes.
    #[must_use]
    pub fn cost(&self) -> CostCoefficients {
        let rate = self.prefill_tokens_per_s;
        CostCoefficients {
            prefill_base_ms: 0.0,
            prefill_per_token_ms: if rate == 0.0 { 0.0 } else { 1e3 / rate },
            prefill_per_token_context_ms: self.prefill_per_million_pairs_ms / 1e6,
            decode_base_ms: self.decode_base_ms,
            decode_per_sequence_ms: self.decode_per_sequence_ms,
            decode_per_context_token_ms: self.decode_per_10k_context_tokens_ms / 1e4,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_named_profile_is_an_engine() {
        for name in names() {
            let profile = Profile::load(Path::new(name)).unwrap();
            profile.engine_config(HashKey([0; 32]), Fingerprint([0; 16])).validate().unwrap();
        }
        let error = Profile::load(Path::new("no such file")).unwrap_err().to_string();
        assert!(error.contains("no such file") && error.contains("ascend-910b"), "{error}");
    }

    #[test]
    fn steps_of_the_placement_benchmark_take_what_it_says() {
        let profile = Profile::load(Path::new("mooncake")).unwrap();
        let engine = profile.engine_config(HashKey([0; 32]), Fingerprint([0; 16]));
        assert_eq!((engine.block_size, engine.n_blocks, engine.prefill_budget), (512, 4_000, Some(2_048)));
        let step = |new, context, batch, decode_context| {
            let mut load = StepLoad::default();
            load.add_prefill(new, context);
            load.add_decode(batch, decode_context);
            profile.timing.step(&load)
        };
        assert_eq!(step(2_048, 90_000, 0, 0), Duration::from_millis(256));
        assert_eq!(step(0, 0, 10, 50_000), Duration::from_millis(20 + 2 + 5));
        assert_eq!(step(800, 0, 1, 0), Duration::from_micros(100_000 + 20_200));
    }

    #[test]
    fn an_instant_worker_takes_no_time() {
        let mut load = StepLoad::default();
        load.add_prefill(10_000, 10_000);
        load.add_decode(100, 1_000_000);
        assert_eq!(Profile::load(Path::new("instant")).unwrap().timing.step(&load), Duration::ZERO);
    }

    #[test]
    fn keys_and_values_that_mean_nothing_are_refused_by_name() {
        let bounds = "block_size = 1\nn_blocks = 9\nmax_running = 1\nprefill_budget = 1\ncontext_length = 9\n";
        let parse = |rest: &str| Profile::parse(&format!("{bounds}{rest}"), "p");
        assert!(parse("").is_ok());
        let error = |rest: &str| parse(rest).unwrap_err();
        assert!(matches!(error("[timing]\ndecode_ms = 1"), ProfileError::Parse { .. }));
        let text = error("[timing]\ndecode_base_ms = -1").to_string();
        assert!(text.contains("decode_base_ms of profile p is -1"), "{text}");
        for (line, shown) in [
            ("step_base_ms = inf", "step_base_ms of profile p is inf; give 0 to 1000000"),
            ("decode_base_ms = 1e308", "decode_base_ms of profile p is 1e308; give 0 to 1000000"),
            ("prefill_tokens_per_s = 1e-308", "prefill_tokens_per_s of profile p is 1e-308; give 0.001 to 1000000000"),
        ] {
            let text = error(&format!("[timing]\n{line}")).to_string();
            assert!(text.contains(shown), "{line}: {text}");
        }
        assert!(error("[timing]\nprefill_tokens_per_s = nan").to_string().contains("prefill_tokens_per_s"));
        assert!(error("eos_probability = 2").to_string().contains("eos_probability"));
    }
}
