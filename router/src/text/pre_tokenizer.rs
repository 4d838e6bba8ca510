//! How a text is cut before byte-level merges, by the name GGUF files give (`tokenizer.ggml.pre`).
//!
//! GGUF names the cutting but does not hold it. The patterns are those in the `pre_tokenizer` of the tokenizer.json that
//! the models' authors publish: GPT-2, SmolLM2, Llama 3, Qwen2, Mistral Nemo (Tekken), GPT-4o (`o200k`), DeepSeek LLM,
//! Coder and V3.

use tokenizers::normalizers::NFC;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{NormalizerWrapper, PreTokenizerWrapper, SplitDelimiterBehavior};

use super::error::TextError;

/// What one family of byte-level vocabularies does beside merging.
#[derive(Debug)]
pub(super) struct PreTokenizer {
    names: &'static [&'static str],
    cuts: &'static [Cut],
    /// A piece that is a token is that token, whatever the merges say.
    pub(super) ignore_merges: bool,
    normalize_nfc: bool,
}

#[derive(Debug)]
enum Cut {
    /// Every match is a piece of its own.
    Regex(&'static str),
    /// Every numeric character is a piece of its own.
    Digits,
    /// The pattern of GPT-2, built into the byte-level step.
    Gpt2,
}

pub(super) const LLAMA3: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
);
pub(super) const QWEN2: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
);
const TEKKEN: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
const GPT_4O: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
const DEEPSEEK_V3: &str = concat!(
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"##,
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
/// Cased letters as DeepSeek LLM lists them; escaped, because three of them change under normalisation.
const DEEPSEEK_WORDS: &str = concat!(
    r"\s?[",
    r"A-Za-z\u{B5}\u{C0}-\u{D6}\u{D8}-\u{F6}\u{F8}-\u{1BA}\u{1BC}-\u{1BF}\u{1C4}-\u{293}\u{295}-\u{2AF}",
    r"\u{370}-\u{373}\u{376}\u{377}\u{37B}-\u{37D}\u{37F}\u{386}\u{388}-\u{38A}\u{38C}\u{38E}-\u{3A1}",
    r"\u{3A3}-\u{3F5}\u{3F7}-\u{481}\u{48A}-\u{52F}\u{531}-\u{556}\u{10A0}-\u{10C5}\u{13A0}-\u{13F5}",
    r"\u{13F8}-\u{13FD}\u{1C90}-\u{1CBA}\u{1CBD}-\u{1CBF}\u{1D00}-\u{1D2B}\u{1D6B}-\u{1D77}\u{1D79}-\u{1D9A}",
    r"\u{1E00}-\u{1F15}\u{1F18}-\u{1F1D}\u{1F20}-\u{1F45}\u{1F48}-\u{1F4D}\u{1F50}-\u{1F57}\u{1F59}\u{1F5B}",
    r"\u{1F5D}\u{1F5F}-\u{1F7D}\u{1F80}-\u{1FB4}\u{1FB6}-\u{1FBC}\u{1FBE}\u{1FC2}-\u{1FC4}\u{1FC6}-\u{1FCC}",
    r"\u{1FD0}-\u{1FD3}\u{1FD6}-\u{1FDB}\u{1FE0}-\u{1FEC}\u{1FF2}-\u{1FF4}\u{1FF6}-\u{1FFC}\u{2102}\u{2107}",
    r"\u{210A}-\u{2113}\u{2115}\u{2119}-\u{211D}\u{2124}\u{2126}\u{2128}\u{212A}-\u{212D}\u{212F}-\u{2134}",
    r"\u{2139}\u{213C}-\u{213F}\u{2145}-\u{2149}\u{214E}\u{2183}\u{2184}\u{2C00}-\u{2C7B}\u{2C7E}-\u{2CE4}",
    r"\u{2CEB}-\u{2CEE}\u{2CF2}\u{2CF3}\u{A640}-\u{A66D}\u{A680}-\u{A69B}\u{A722}-\u{A76F}\u{A771}-\u{A787}",
    r"\u{A78B}-\u{A78E}\u{AB70}-\u{ABBF}\u{FB00}-\u{FB06}\u{FB13}-\u{FB17}\u{FF21}-\u{FF3A}\u{FF41}-\u{FF5A}",
    r"\u{10400}-\u{1044F}\u{104B0}-\u{104D3}\u{104D8}-\u{104FB}\u{10C80}-\u{10CB2}\u{10CC0}-\u{10CF2}",
    r"\u{118A0}-\u{118DF}\u{1E900}-\u{1E943}",
    r"]+"
);
const DEEPSEEK_PUNCTUATION: &str = r"\s?[!-/:-~\u{FF01}-\u{FF0F}\u{FF1A}-\u{FF5E}\u{2018}-\u{201F}\u{3000}-\u{3002}]+";
const CJK: &str = r"[\u{4E00}-\u{9FA5}\u{0800}-\u{4E00}\u{AC00}-\u{D7FF}]+";
const CJK_V3: &str = r"[\u{4E00}-\u{9FA5}\u{3040}-\u{309F}\u{30A0}-\u{30FF}]+";

const TABLE: &[PreTokenizer] = &[
    PreTokenizer { names: &["gpt-2", "gpt2", "default", "phi-2", "mpt", "olmo"], cuts: &[Cut::Gpt2], ..PLAIN },
    PreTokenizer {
        names: &["smollm", "starcoder", "refact", "command-r", "codeshell"],
        cuts: &[Cut::Digits, Cut::Gpt2],
        ..PLAIN
    },
    PreTokenizer {
        names: &["llama-bpe", "llama3", "llama-v3", "falcon3"],
        cuts: &[Cut::Regex(LLAMA3)],
        ignore_merges: true,
        ..PLAIN
    },
    PreTokenizer { names: &["smaug-bpe"], cuts: &[Cut::Regex(LLAMA3)], ..PLAIN },
    PreTokenizer {
        names: &["qwen2", "deepseek-r1-qwen", "megrez"],
        cuts: &[Cut::Regex(QWEN2)],
        normalize_nfc: true,
        ..PLAIN
    },
    PreTokenizer { names: &["stablelm2"], cuts: &[Cut::Regex(QWEN2)], ..PLAIN },
    PreTokenizer { names: &["tekken"], cuts: &[Cut::Regex(TEKKEN)], ignore_merges: true, ..PLAIN },
    PreTokenizer { names: &["gpt-4o", "llama4"], cuts: &[Cut::Regex(GPT_4O)], ..PLAIN },
    PreTokenizer {
        names: &["deepseek-llm"],
        cuts: &[
            Cut::Regex(r"[\r\n]"),
            Cut::Regex(DEEPSEEK_WORDS),
            Cut::Regex(DEEPSEEK_PUNCTUATION),
            Cut::Regex(r"\s+$"),
            Cut::Regex(CJK),
            Cut::Digits,
        ],
        ..PLAIN
    },
    PreTokenizer {
        names: &["deepseek-coder"],
        cuts: &[
            Cut::Regex(r"[\r\n]"),
            Cut::Regex(r"\s?\p{L}+"),
            Cut::Regex(r"\s?\p{P}+"),
            Cut::Regex(CJK),
            Cut::Digits,
        ],
        ..PLAIN
    },
    PreTokenizer {
        names: &["deepseek-v3"],
        cuts: &[Cut::Regex(r"\p{N}{1,3}"), Cut::Regex(CJK_V3), Cut::Regex(DEEPSEEK_V3)],
        ..PLAIN
    },
];

/// The pattern of the byte-level step, for tokenizers that spell it out.
pub(super) const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

/// Patterns after each of which every run of letters and every number has ended where ASCII of another kind but an
/// apostrophe follows, and which look at what follows a match for white space only.
const WORDS: [&str; 6] = [LLAMA3, QWEN2, TEKKEN, GPT_4O, DEEPSEEK_V3, GPT2];

/// Patterns that match within such a run only, so that they do nothing where it ends.
const WITHIN_WORDS: [&str; 4] =
    [r"\p{N}{1,3}", r"\p{N}", CJK_V3, "[\u{4E00}-\u{9FA5}\u{3040}-\u{309F}\u{30A0}-\u{30FF}]+"];

/// Whether each word and number that `pattern` leaves ends where other ASCII but an apostrophe follows, whatever comes
/// after; none when that is not known.
pub(super) fn ends_words(pattern: &str) -> Option<bool> {
    match pattern {
        _ if WORDS.contains(&pattern) => Some(true),
        _ if WITHIN_WORDS.contains(&pattern) => Some(false),
        _ => None,
    }
}

const PLAIN: PreTokenizer = PreTokenizer { names: &[], cuts: &[], ignore_merges: false, normalize_nfc: false };

impl PreTokenizer {
    /// Looks `name` up.
    ///
    /// # Errors
    /// [`TextError::UnsupportedTokenizer`] names those there are.
    pub(super) fn named(name: &str) -> Result<&'static Self, TextError> {
        TABLE.iter().find(|entry| entry.names.contains(&name)).ok_or_else(|| TextError::UnsupportedTokenizer {
            what: "pre-tokenizer (tokenizer.ggml.pre)",
            found: name.to_owned(),
            supported: TABLE.iter().flat_map(|entry| entry.names).copied().collect::<Vec<_>>().join(", "),
        })
    }

    /// The cuts, and bytes as characters last.
    pub(super) fn build(&self) -> PreTokenizerWrapper {
        let mut steps: Vec<PreTokenizerWrapper> = Vec::new();
        let mut use_gpt2 = false;
        for cut in self.cuts {
            match cut {
                Cut::Regex(pattern) => {
                    let pattern = SplitPattern::Regex((*pattern).to_owned());
                    let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false);
                    steps.push(split.expect("patterns of the table compile").into());
                }
                Cut::Digits => steps.push(Digits::new(true).into()),
                Cut::Gpt2 => use_gpt2 = true,
            }
        }
        steps.push(ByteLevel::new(false, true, use_gpt2).into());
        Sequence::new(steps).into()
    }

    /// What happens to the text before it is cut.
    pub(super) fn normalizer(&self) -> Option<NormalizerWrapper> {
        self.normalize_nfc.then(|| NFC.into())
    }
}

#[cfg(test)]
mod tests {
    use tokenizers::PreTokenizer as _;
    use tokenizers::tokenizer::{OffsetReferential, OffsetType, PreTokenizedString};

    use super::*;

    fn cut(name: &str, text: &str) -> Vec<String> {
        let mut pieces = PreTokenizedString::from(text);
        PreTokenizer::named(name).unwrap().build().pre_tokenize(&mut pieces).unwrap();
        let spans = pieces.get_splits(OffsetReferential::Original, OffsetType::Byte);
        spans.iter().map(|(_, (start, end), _)| text[*start..*end].to_owned()).collect()
    }

    #[test]
    fn every_entry_compiles_and_loses_no_text() {
        let text = "I'LL  cut 12345 日本語, naïve\n\n\tx=y;  ΑΒΓ ½ 한국어 \u{1F7D}\u{1F600} end  ";
        for entry in TABLE {
            for name in entry.names {
                assert_eq!(cut(name, text).concat(), text, "{name}");
            }
        }
    }

    #[test]
    fn numbers_are_cut_as_each_family_does() {
        assert_eq!(cut("gpt-2", "a 12345"), ["a", " 12345"]);
        assert_eq!(cut("smollm", "a 1234"), ["a", " ", "1", "2", "3", "4"]);
        assert_eq!(cut("llama-bpe", "a 12345"), ["a", " ", "123", "45"]);
        assert_eq!(cut("qwen2", "a 123"), ["a", " ", "1", "2", "3"]);
        assert_eq!(cut("deepseek-llm", "a 12"), ["a", " ", "1", "2"]);
        assert_eq!(cut("deepseek-v3", "a 12345"), ["a", " ", "123", "45"]);
    }

    #[test]
    fn an_unknown_name_is_an_error_that_names_it_and_the_known_ones() {
        let error = PreTokenizer::named("porridge").unwrap_err().to_string();
        assert!(error.contains("\"porridge\"") && error.contains("smollm"), "{error}");
    }
}
