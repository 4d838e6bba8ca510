//! JSON as Python's `json.dumps` writes it, which is what chat templates were trained with.

use serde_json::Value;

/// Arguments of `json.dumps`.
#[derive(Debug)]
pub(super) struct Style {
    indent: Option<usize>,
    item_separator: String,
    key_separator: String,
    sort_keys: bool,
    ensure_ascii: bool,
}

impl Style {
    /// `separators` are that between items and that after a key; Python's defaults depend on `indent`.
    pub(super) fn new(
        indent: Option<usize>,
        separators: Option<Vec<String>>,
        sort_keys: bool,
        ensure_ascii: bool,
    ) -> Result<Self, &'static str> {
        if indent.is_some_and(|indent| indent > 64) {
            return Err("tojson indents by at most 64");
        }
        let default_item = if indent.is_some() { "," } else { ", " };
        let [item_separator, key_separator] = separators
            .unwrap_or_else(|| vec![default_item.to_owned(), ": ".to_owned()])
            .try_into()
            .map_err(|_| "tojson takes two separators")?;
        Ok(Self { indent, item_separator, key_separator, sort_keys, ensure_ascii })
    }
}

/// Writes `value`.
pub(super) fn dumps(value: &Value, style: &Style) -> String {
    let mut out = String::new();
    write_value(value, style, 0, &mut out);
    out
}

fn write_value(value: &Value, style: &Style, depth: usize, out: &mut String) {
    match value {
        Value::Array(items) => write_items(items.iter().map(|item| (None, item)), ['[', ']'], style, depth, out),
        Value::Object(map) => {
            let mut items: Vec<_> = map.iter().map(|(key, item)| (Some(key.as_str()), item)).collect();
            if style.sort_keys {
                items.sort_by_key(|(key, _)| *key);
            }
            write_items(items.into_iter(), ['{', '}'], style, depth, out);
        }
        Value::String(text) => write_string(text, style, out),
        Value::Number(number) if number.is_f64() => out.push_str(&float(number.as_f64().unwrap_or_default())),
        scalar => out.push_str(&scalar.to_string()),
    }
}

fn write_items<'a>(
    items: impl Iterator<Item = (Option<&'a str>, &'a Value)>,
    [open, close]: [char; 2],
    style: &Style,
    depth: usize,
    out: &mut String,
) {
    out.push(open);
    let mut is_empty = true;
    for (key, item) in items {
        if !is_empty {
            out.push_str(&style.item_separator);
        }
        is_empty = false;
        new_line(style, depth + 1, out);
        if let Some(key) = key {
            write_string(key, style, out);
            out.push_str(&style.key_separator);
        }
        write_value(item, style, depth + 1, out);
    }
    if !is_empty {
        new_line(style, depth, out);
    }
    out.push(close);
}

fn new_line(style: &Style, depth: usize, out: &mut String) {
    if let Some(indent) = style.indent {
        out.push('\n');
        out.extend(std::iter::repeat_n(' ', indent * depth));
    }
}

fn write_string(text: &str, style: &Style, out: &mut String) {
    out.push('"');
    for char in text.chars() {
        match char {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            _ if char < ' ' || (style.ensure_ascii && char > '~') => {
                for unit in char.encode_utf16(&mut [0; 2]) {
                    out.push_str(&format!("\\u{unit:04x}"));
                }
            }
            _ => out.push(char),
        }
    }
    out.push('"');
}

/// Python's `repr` of a float: the shortest digits, with an exponent below 1e-4 and from 1e16 on.
fn float(value: f64) -> String {
    let magnitude = value.abs();
    if magnitude != 0.0 && !(1e-4..1e16).contains(&magnitude) {
        let text = format!("{value:e}");
        let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        let (sign, exponent) = exponent.strip_prefix('-').map_or(('+', exponent), |exponent| ('-', exponent));
        return format!("{digits}e{sign}{exponent:0>2}");
    }
    format!("{value:?}")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn dump(value: &Value, indent: Option<usize>) -> String {
        dumps(value, &Style::new(indent, None, false, false).unwrap())
    }

    #[test]
    fn writes_what_python_writes() {
        let value =
            json!({"b": [1, 2.0, -0.5, 1e16, 1e-7, true, null], "a": {"é\u{1}\u{7f}": "<'\"\\\n/>"}, "c": [], "d": {}});
        assert_eq!(
            dump(&value, None),
            "{\"b\": [1, 2.0, -0.5, 1e+16, 1e-07, true, null], \"a\": {\"é\\u0001\u{7f}\": \"<'\\\"\\\\\\n/>\"}, \"c\": [], \"d\": {}}"
        );
    }

    #[test]
    fn indents_as_python_does() {
        assert_eq!(
            dump(&json!({"a": [1, {}], "b": []}), Some(2)),
            "{\n  \"a\": [\n    1,\n    {}\n  ],\n  \"b\": []\n}"
        );
    }

    #[test]
    fn sorts_keys_and_escapes_when_asked() {
        let style = Style::new(None, Some(vec![",".to_owned(), ":".to_owned()]), true, true).unwrap();
        assert_eq!(dumps(&json!({"b": "😀é", "a": 1}), &style), r#"{"a":1,"b":"\ud83d\ude00\u00e9"}"#);
    }
}
