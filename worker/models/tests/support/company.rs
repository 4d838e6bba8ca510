//! Whether a token's logits depend on its company: texts computed alone and whole, then in random batches and chunks.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use contract::kv::KvDtype;
use kernels::Ops;
use models::{ModelConfig, ModelFiles};

use super::Random;
use super::device::{Device, Part, Sizes};
use super::mode::{KV_DTYPES, Mode, cpu};
use super::random_model::{self, Length};

/// What one case is about; `seed` decides everything else.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// Format of the weights.
    pub mode: Mode,
    /// How long texts are.
    pub length: Length,
    /// Random batches to try.
    pub n_scenarios: usize,
    /// Sequences of a batch; none draws a number, and which texts they have.
    pub n_sequences: Option<usize>,
    /// Of model, texts and batches.
    pub seed: u64,
}

/// How much a case compared.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    /// Random batches, each on its own number of threads.
    pub scenarios: usize,
    /// Steps of more than one sequence.
    pub shared_steps: usize,
    /// Rows of logits that equal those of the text alone.
    pub rows: usize,
    /// Tokens whose keys and values were another sequence's.
    pub hit_tokens: usize,
    /// Sequences that lost their blocks and began again.
    pub restarts: usize,
}

/// The first logit that differs from the text alone, and all that is needed to see it again.
#[derive(Clone, Debug)]
pub struct Difference(String);

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Makes the operators of a case; a number of threads is given.
pub type MakeOps<'a> = &'a dyn Fn(&Case, usize) -> Arc<dyn Ops>;

/// The CPU as it is.
pub fn plain_cpu(case: &Case, threads: usize) -> Arc<dyn Ops> {
    cpu(case.mode.compute, threads)
}

/// Runs a case on a random model.
pub fn check_random_model(case: &Case, make: MakeOps<'_>) -> Result<Counts, Difference> {
    let mut random = Random(case.seed);
    let config = random_model::config(&mut random, case.mode.stored, case.length);
    let file = tempfile::NamedTempFile::new().expect("a temporary file");
    let gguf = random_model::gguf(&mut random, &config, case.mode.stored);
    std::fs::write(file.path(), gguf.bytes()).expect("room for it");
    let files = ModelFiles::open(file.path()).expect("it is well-formed");
    let texts = texts(&mut random, &config, case.length);
    check(case, make, &files, &texts, &mut random)
}

/// Computes each text alone, whole and on one thread, then all in random company.
pub fn check(
    case: &Case,
    make: MakeOps<'_>,
    files: &ModelFiles,
    texts: &[Vec<u32>],
    random: &mut Random,
) -> Result<Counts, Difference> {
    let kv_dtype = KV_DTYPES[random.below(KV_DTYPES.len())];
    let block_size = [16, 16, 8, 32, 5][random.below(5)];
    let alone = alone(case, make, files, texts, (kv_dtype, block_size));
    let mut counts = Counts::default();
    for _ in 0..case.n_scenarios {
        let most = if texts.len() > 6 { 32 } else { 12 };
        let runs: Vec<Run> = match case.n_sequences {
            Some(n) => (0..n).map(|index| Run::of(index % texts.len())).collect(),
            None => (0..2 + random.below(most - 1)).map(|_| Run::of(random.below(texts.len()))).collect(),
        };
        let threads = [1, 2, 3, 1, 2, 3, 4 + random.below(4)][random.below(7)];
        let sizes = sizes(texts, runs.iter().map(|run| run.text), block_size);
        let mut device = Device::new(files, make(case, threads), kv_dtype, sizes);
        device.poison();
        let model = describe(files.config());
        let setting =
            format!("{}, {threads} threads, {model}, kv {kv_dtype:?}, blocks of {block_size}", device.numerics());
        let scenario = Scenario { case, setting, texts, alone: &alone };
        scenario.run(&mut device, runs, random, &mut counts)?;
    }
    Ok(counts)
}

/// Logits of every token of every text.
type Alone = Vec<Vec<Vec<f32>>>;

fn alone(
    case: &Case,
    make: MakeOps<'_>,
    files: &ModelFiles,
    texts: &[Vec<u32>],
    (kv_dtype, block_size): (KvDtype, usize),
) -> Alone {
    let longest = (0..texts.len()).max_by_key(|&text| texts[text].len());
    let mut device = Device::new(files, make(case, 1), kv_dtype, sizes(texts, longest.into_iter(), block_size));
    let blocks: Vec<u32> = (0..device.sizes().n_blocks as u32).collect();
    texts
        .iter()
        .map(|tokens| {
            device.poison();
            let rows = device.run(&[Part { tokens, position: 0, blocks: &blocks, rows: 0..tokens.len() }]);
            let finite = rows.iter().flatten().all(|logit| logit.is_finite());
            let setting = format!("{}, kv {kv_dtype:?}, blocks of {block_size}", describe(files.config()));
            assert!(finite, "{} alone, {setting}, seed {}: logits that are no numbers", case.mode, case.seed);
            rows
        })
        .collect()
}

/// Room for all runs in one step, and for a few that begin again in other blocks.
fn sizes(texts: &[Vec<u32>], runs: impl Iterator<Item = usize>, block_size: usize) -> Sizes {
    let lengths: Vec<usize> = runs.map(|text| texts[text].len()).collect();
    let positions = lengths.iter().copied().max().unwrap_or(1);
    let own: usize = lengths.iter().map(|length| length.div_ceil(block_size)).sum();
    let n_blocks = own + RESTARTS_MAX * positions.div_ceil(block_size);
    Sizes { tokens: lengths.iter().sum(), sequences: lengths.len(), positions, n_blocks, block_size }
}

/// Sequences of one scenario that may begin again.
const RESTARTS_MAX: usize = 2;

/// Random texts, some of which begin as another does.
fn texts(random: &mut Random, config: &ModelConfig, length: Length) -> Vec<Vec<u32>> {
    let (n, least, most) = match (length, random.below(4)) {
        (Length::Long, _) => (2, 300, 1_100),
        (Length::Short, 0) => (12, 1, 24),
        (Length::Short, _) => (2 + random.below(4), 1, 140),
    };
    let mut texts: Vec<Vec<u32>> = Vec::with_capacity(n);
    for _ in 0..n {
        let len = least + random.below(most - least);
        let shared = match texts.len() {
            0 => Vec::new(),
            n => texts[random.below(n)].clone(),
        };
        let n_shared = if random.below(3) == 0 { 0 } else { random.below(shared.len().min(len) + 1) };
        let rest = (n_shared..len).map(|_| random.below(config.vocab_size) as u32);
        texts.push(shared[..n_shared].iter().copied().chain(rest).collect());
    }
    texts
}

fn describe(config: &ModelConfig) -> String {
    let ModelConfig { architecture, hidden_size, n_heads, n_kv_heads, head_dim, sliding_window, .. } = config;
    let window = sliding_window.map_or(String::new(), |window| format!(" window {window}"));
    format!("{architecture} of {hidden_size}, heads {n_heads}/{n_kv_heads} of {head_dim}{window}")
}

/// One sequence in the batch.
struct Run {
    text: usize,
    /// Tokens whose keys and values are in its blocks.
    position: usize,
    blocks: Vec<u32>,
}

impl Run {
    fn of(text: usize) -> Self {
        Self { text, position: 0, blocks: Vec::new() }
    }
}

/// Runs that share steps, against what each text is alone.
struct Scenario<'a> {
    case: &'a Case,
    /// Operators, model and cache, for messages.
    setting: String,
    texts: &'a [Vec<u32>],
    alone: &'a Alone,
}

impl Scenario<'_> {
    fn run(
        &self,
        device: &mut Device,
        mut runs: Vec<Run>,
        random: &mut Random,
        counts: &mut Counts,
    ) -> Result<(), Difference> {
        let mut free: Vec<u32> = (0..device.sizes().n_blocks as u32).collect();
        random.shuffle(&mut free);
        let mut restarts = 0;
        while runs.iter().any(|run| run.position < self.texts[run.text].len()) {
            let step = self.plan(&mut runs, random, counts, &mut free, device.sizes().block_size);
            self.step(device, &mut runs, &step, counts)?;
            let victim = random.below(runs.len());
            if restarts < RESTARTS_MAX && runs[victim].position > 0 && random.below(20) == 0 {
                restarts += 1;
                runs[victim] = Run::of(runs[victim].text);
            }
        }
        counts.scenarios += 1;
        counts.restarts += restarts;
        Ok(())
    }

    /// Chooses who computes how many tokens and which rows; sees to their blocks.
    fn plan(
        &self,
        runs: &mut [Run],
        random: &mut Random,
        counts: &mut Counts,
        free: &mut Vec<u32>,
        block_size: usize,
    ) -> Vec<(usize, usize, Range<usize>)> {
        let mut order: Vec<usize> = (0..runs.len()).collect();
        random.shuffle(&mut order);
        let share = 1 + random.below(4);
        let mut step = Vec::new();
        for index in order {
            let len = self.texts[runs[index].text].len();
            if runs[index].position == len || random.below(4) >= share {
                continue;
            }
            if runs[index].position == 0 && runs[index].blocks.is_empty() && random.below(4) > 0 {
                counts.hit_tokens += self.reuse(runs, index, block_size);
            }
            let left = len - runs[index].position;
            let n = [1, 1 + random.below(8), 1 + random.below(40), left][random.below(4)].min(left);
            let rows = match random.below(6) {
                0 => 0..0,
                1 => n - 1..n,
                _ => 0..n,
            };
            let Run { position, blocks, .. } = &mut runs[index];
            while blocks.len() * block_size < *position + n {
                blocks.push(free.pop().expect("there are enough"));
            }
            step.push((index, n, rows));
        }
        step
    }

    /// Takes over the full blocks that another run has computed of the same beginning, all but the last token's.
    fn reuse(&self, runs: &mut [Run], index: usize, block_size: usize) -> usize {
        let tokens = &self.texts[runs[index].text];
        let blocks = |other: &Run| {
            let pairs = tokens.iter().zip(&self.texts[other.text]);
            let common = pairs.take_while(|(own, others)| own == others).count();
            common.min(other.position).min(tokens.len() - 1) / block_size
        };
        let Some(donor) = (0..runs.len()).max_by_key(|&other| blocks(&runs[other])) else { return 0 };
        let n = blocks(&runs[donor]);
        runs[index].blocks = runs[donor].blocks[..n].to_vec();
        runs[index].position = n * block_size;
        n * block_size
    }

    fn step(
        &self,
        device: &mut Device,
        runs: &mut [Run],
        step: &[(usize, usize, Range<usize>)],
        counts: &mut Counts,
    ) -> Result<(), Difference> {
        let parts: Vec<Part<'_>> = step
            .iter()
            .map(|(index, n, rows)| {
                let Run { text, position, blocks } = &runs[*index];
                let tokens = &self.texts[*text][*position..*position + n];
                Part { tokens, position: *position, blocks, rows: rows.clone() }
            })
            .collect();
        let logits = device.run(&parts);
        let wanted = step.iter().flat_map(|(index, _, rows)| rows.clone().map(|row| (*index, row)));
        for ((index, row), together) in wanted.zip(&logits) {
            let position = runs[index].position + row;
            let alone = &self.alone[runs[index].text][position];
            if let Some(difference) = self.difference(position, alone, together, &parts) {
                return Err(difference);
            }
            counts.rows += 1;
        }
        counts.shared_steps += usize::from(step.len() > 1);
        step.iter().for_each(|(index, n, _)| runs[*index].position += n);
        Ok(())
    }

    fn difference(&self, position: usize, alone: &[f32], together: &[f32], parts: &[Part<'_>]) -> Option<Difference> {
        let differs = |index: &usize| alone[*index].to_bits() != together[*index].to_bits();
        let logit = (0..alone.len()).find(differs)?;
        let n = (0..alone.len()).filter(differs).count();
        let step: Vec<String> = parts.iter().map(|part| format!("{}+{}", part.position, part.tokens.len())).collect();
        let (alone, together) = (alone[logit], together[logit]);
        Some(Difference(format!(
            "{} on {}: token {position}, logit {logit} (first of {n}) is {alone:e} ({:#010x}) alone, {together:e} \
             ({:#010x}) in the step [{}]; case seed {}",
            self.case.mode,
            self.setting,
            alone.to_bits(),
            together.to_bits(),
            step.join(" "),
            self.case.seed
        )))
    }
}

impl std::ops::AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        self.scenarios += other.scenarios;
        self.shared_steps += other.shared_steps;
        self.rows += other.rows;
        self.hit_tokens += other.hit_tokens;
        self.restarts += other.restarts;
    }
}
