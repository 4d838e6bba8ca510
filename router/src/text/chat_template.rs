//! Renders a conversation to text with the model's chat template, as Hugging Face's `apply_chat_template` does.
//!
//! Templates come with a model and messages from anybody, so a rendering is bounded in instructions, in memory (both by
//! the engine's fuel) and in output.

use std::error::Error as _;
use std::fmt;
use std::io;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, Value};
use minijinja::{Environment, Error, ErrorKind, State};
use serde::{Deserialize, Serialize};

use super::error::TextError;
use super::{python_json, strftime};

const NAME: &str = "chat_template";
/// Largest template that is compiled.
const SOURCE_BYTES_MAX: usize = 1 << 20;
/// Fuel is about one unit per instruction and per 64 bytes of memory.
const FUEL_BASE: u64 = 1_000_000;
const FUEL_PER_MESSAGE: u64 = 20_000;
const FUEL_PER_BYTE: u64 = 1;
const FUEL_MAX: u64 = 50_000_000;
const OUTPUT_BYTES_BASE: usize = 1 << 20;
/// Output bytes allowed for each byte of the messages.
const OUTPUT_GROWTH: usize = 4;

/// One turn of a conversation.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ChatMessage {
    /// Who speaks: `system`, `user`, `assistant`, or what else the template knows.
    pub role: String,
    /// What is said.
    pub content: String,
    /// Tells speakers of one role apart.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Whatever else the template reads of a message.
    #[serde(flatten)]
    pub fields: serde_json::Map<String, serde_json::Value>,
}

impl ChatMessage {
    /// A message with nothing but role and content.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into(), ..Self::default() }
    }
}

/// How a conversation is rendered.
#[derive(Clone, Debug)]
pub struct ChatOptions {
    /// Opens the assistant's turn at the end.
    pub add_generation_prompt: bool,
    /// Milliseconds since 1970 (UTC), for templates that name the date.
    pub now_unix_ms: u64,
    /// Tools by their JSON schema; none is the usual.
    pub tools: Option<Vec<serde_json::Value>>,
    /// Variables of this template alone, such as `enable_thinking`.
    pub variables: serde_json::Map<String, serde_json::Value>,
}

impl Default for ChatOptions {
    fn default() -> Self {
        Self { add_generation_prompt: true, now_unix_ms: 0, tools: None, variables: serde_json::Map::new() }
    }
}

/// A compiled template.
pub(super) struct ChatTemplate {
    environment: Environment<'static>,
    bos_token: Option<String>,
    eos_token: Option<String>,
}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChatTemplate").field("bos_token", &self.bos_token).finish_non_exhaustive()
    }
}

impl ChatTemplate {
    /// Compiles `source`; `bos` and `eos` are what it calls `bos_token` and `eos_token`.
    ///
    /// # Errors
    /// [`TextError::Template`] with the line that does not parse.
    pub(super) fn compile(source: &str, bos: Option<String>, eos: Option<String>) -> Result<Self, TextError> {
        if source.len() > SOURCE_BYTES_MAX {
            let message = format!("it has {} bytes, more than {SOURCE_BYTES_MAX}", source.len());
            return Err(TextError::Template { line: None, message });
        }
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.expect("the default delimiters are valid"));
        environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_filter("tojson", tojson);
        environment.add_function("raise_exception", raise_exception);
        environment
            .add_template_owned(NAME, without_generation_tags(source))
            .map_err(|error| text_error(&error, 0, 0))?;
        Ok(Self { environment, bos_token: bos, eos_token: eos })
    }

    /// Renders `messages`.
    ///
    /// # Errors
    /// [`TextError::MessagesRefused`] when the template raises an exception, [`TextError::TemplateLimit`] when a bound
    /// is passed, [`TextError::Template`] for everything else.
    pub(super) fn render(&self, messages: &[ChatMessage], options: &ChatOptions) -> Result<String, TextError> {
        let n_bytes = messages.iter().map(input_bytes).sum::<usize>()
            + options.tools.iter().flatten().chain(options.variables.values()).map(json_bytes).sum::<usize>();
        let fuel = fuel(messages.len(), n_bytes);
        let output_bytes_max = OUTPUT_BYTES_BASE.saturating_add(n_bytes.saturating_mul(OUTPUT_GROWTH));
        // A clone shares the compiled templates; fuel belongs to an environment.
        let mut environment = self.environment.clone();
        environment.set_fuel(Some(fuel));
        let now_unix_ms = options.now_unix_ms;
        environment.add_function("strftime_now", move |format: &str| strftime::format_utc(format, now_unix_ms));
        let template = environment.get_template(NAME).map_err(|error| text_error(&error, fuel, output_bytes_max))?;
        let mut output = BoundedOutput { bytes: Vec::new(), bytes_max: output_bytes_max };
        template
            .render_captured_to(self.context(messages, options), &mut output)
            .map_err(|error| text_error(&error, fuel, output_bytes_max))?;
        String::from_utf8(output.bytes)
            .map_err(|error| TextError::Template { line: None, message: format!("its output is not text: {error}") })
    }

    fn context(&self, messages: &[ChatMessage], options: &ChatOptions) -> Value {
        let mut variables: Vec<(&str, Value)> =
            options.variables.iter().map(|(name, value)| (name.as_str(), Value::from(Serde(value)))).collect();
        variables.push(("messages", Value::from(Serde(messages))));
        variables.push(("add_generation_prompt", options.add_generation_prompt.into()));
        variables.push(("tools", Value::from(Serde(&options.tools))));
        variables.push(("documents", ().into()));
        // Hugging Face leaves a token that the model lacks undefined.
        variables.extend(self.bos_token.as_deref().map(|token| ("bos_token", token.into())));
        variables.extend(self.eos_token.as_deref().map(|token| ("eos_token", token.into())));
        Value::from_pairs(variables)
    }
}

/// What `raise_exception` was called with.
#[derive(Debug)]
struct Refusal(String);

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Refusal {}

fn raise_exception(message: &str) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, "raised by the template").with_source(Refusal(message.to_owned())))
}

/// `tojson` as transformers redefines it: Python's `json.dumps` with `ensure_ascii=False` and without HTML escapes.
fn tojson(state: &State<'_, '_>, value: &Value, kwargs: Kwargs) -> Result<Value, Error> {
    let indent = kwargs.get::<Option<usize>>("indent")?;
    let sort_keys = kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    let ensure_ascii = kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
    let separators = kwargs.get::<Option<Vec<String>>>("separators")?;
    kwargs.assert_all_used()?;
    let json = serde_json::to_value(value)
        .map_err(|error| Error::new(ErrorKind::BadSerialization, "value has no JSON form").with_source(error))?;
    let style = python_json::Style::new(indent, separators, sort_keys, ensure_ascii)
        .map_err(|message| Error::new(ErrorKind::InvalidOperation, message))?;
    let text = python_json::dumps(&json, &style);
    state.consume_fuel(text.len() as u64 / 64)?;
    Ok(Value::from(text))
}

/// Makes `{% generation %}` blocks, which mark the assistant's words for training, into blocks that always apply.
fn without_generation_tags(source: &str) -> String {
    let mut result = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let Some(length) = rest[start..].find("%}") else { break };
        let inside = &rest[start + 2..start + length];
        let is_control = |char| matches!(char, '-' | '+');
        let word = inside.trim_matches(is_control).trim();
        let replacement = match word {
            "generation" => Some("if true"),
            "endgeneration" => Some("endif"),
            _ => None,
        };
        let end = start + length + 2;
        match replacement {
            Some(replacement) => {
                result.push_str(&rest[..start + 2]);
                result.push_str(&inside.replacen(word, replacement, 1));
                result.push_str("%}");
                rest = &rest[end..];
            }
            None => {
                result.push_str(&rest[..start + 2]);
                rest = &rest[start + 2..];
            }
        }
    }
    result.push_str(rest);
    result
}

fn fuel(n_messages: usize, n_bytes: usize) -> u64 {
    let messages = FUEL_PER_MESSAGE.saturating_mul(n_messages as u64);
    let bytes = FUEL_PER_BYTE.saturating_mul(n_bytes as u64);
    FUEL_BASE.saturating_add(messages).saturating_add(bytes).min(FUEL_MAX)
}

fn input_bytes(message: &ChatMessage) -> usize {
    let name = message.name.as_ref().map_or(0, String::len);
    message.role.len() + message.content.len() + name + message.fields.values().map(json_bytes).sum::<usize>()
}

fn json_bytes(value: &serde_json::Value) -> usize {
    value.to_string().len()
}

fn text_error(error: &Error, fuel: u64, output_bytes_max: usize) -> TextError {
    let mut cause = error.source();
    while let Some(source) = cause {
        if let Some(Refusal(message)) = source.downcast_ref() {
            return TextError::MessagesRefused { line: error.line(), message: message.clone() };
        }
        cause = source.source();
    }
    match error.kind() {
        ErrorKind::OutOfFuel => TextError::TemplateLimit { limit: format!("{fuel} steps") },
        ErrorKind::WriteFailure => TextError::TemplateLimit { limit: format!("{output_bytes_max} bytes of output") },
        kind => {
            let message = error.detail().map_or_else(|| kind.to_string(), |detail| format!("{kind}: {detail}"));
            TextError::Template { line: error.line(), message }
        }
    }
}

struct BoundedOutput {
    bytes: Vec<u8>,
    bytes_max: usize,
}

impl io::Write for BoundedOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + bytes.len() > self.bytes_max {
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, "the output is too long"));
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn render(source: &str, messages: &[ChatMessage]) -> Result<String, TextError> {
        ChatTemplate::compile(source, Some("<s>".to_owned()), None)?.render(messages, &ChatOptions::default())
    }

    fn say(content: &str) -> Vec<ChatMessage> {
        vec![ChatMessage::new("user", content)]
    }

    #[test]
    fn a_syntax_error_names_its_line() {
        let error = ChatTemplate::compile("a\nb {% if %}", None, None).unwrap_err();
        assert!(matches!(error, TextError::Template { line: Some(2), .. }), "{error:?}");
    }

    #[test]
    fn a_failure_while_rendering_names_its_line() {
        let error = render("a\n\n{{ messages[0].content.no_such() }}", &say("x")).unwrap_err();
        assert!(matches!(error, TextError::Template { line: Some(3), .. }), "{error:?}");
    }

    #[test]
    fn raise_exception_is_a_refusal_in_the_templates_words() {
        let error = render("\n{{ raise_exception('roles must alternate') }}", &say("x")).unwrap_err();
        assert_eq!(error, TextError::MessagesRefused { line: Some(2), message: "roles must alternate".to_owned() });
    }

    #[test]
    fn an_endless_template_runs_out_of_fuel() {
        let source = "{% for a in range(9999) %}{% for b in range(9999) %}{% set c = a * b %}{% endfor %}{% endfor %}";
        assert!(matches!(render(source, &say("x")).unwrap_err(), TextError::TemplateLimit { .. }));
    }

    #[test]
    fn memory_that_doubles_is_stopped() {
        let source = "{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}";
        assert!(matches!(render(source, &say("x")).unwrap_err(), TextError::TemplateLimit { .. }));
    }

    #[test]
    fn output_is_bounded() {
        let source = "{% for i in range(9000) %}{{ messages[0].content }}{% endfor %}";
        let error = render(source, &say(&"y".repeat(1000))).unwrap_err();
        assert!(
            matches!(&error, TextError::TemplateLimit { limit } if limit.ends_with("bytes of output")),
            "{error:?}"
        );
    }

    #[test]
    fn a_message_is_data_and_never_template() {
        assert_eq!(render("{{ messages[0].content }}", &say("{{ 1 + 1 }}<b>")).unwrap(), "{{ 1 + 1 }}<b>");
    }

    #[test]
    fn generation_blocks_leave_only_what_they_hold() {
        let source =
            "{% for m in messages %}\n{%- generation -%}\n {{ m.content }} \n{%- endgeneration %}\n{% endfor %}!";
        assert_eq!(render(source, &say("x")).unwrap(), "x!");
    }

    #[test]
    fn unfinished_tags_are_a_syntax_error() {
        assert!(render("{% generation", &say("x")).is_err());
    }
}
