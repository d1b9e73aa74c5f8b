//! Python's `json.dumps`, which is what `tojson` means in a chat template.
//!
//! Templates print tool descriptions and calls with it, and models were trained on its exact spaces and escapes; Jinja's
//! own `tojson` escapes for HTML and other JSON writers leave out the spaces.

use std::fmt::Write;

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, Value};

/// The filter `tojson(ensure_ascii=False, indent=None, separators=None, sort_keys=False)`.
pub(super) fn tojson(value: &Value, arguments: Kwargs) -> Result<Value, Error> {
    let style = Style::from_arguments(&arguments)?;
    arguments.assert_all_used()?;
    let mut text = String::new();
    style.write(&mut text, value, 0)?;
    Ok(Value::from(text))
}

/// The arguments of `json.dumps` that change the text.
struct Style {
    escape: Escape,
    /// What one level of indentation adds to a line; `None` writes everything on one line.
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
    order: KeyOrder,
}

enum Escape {
    /// Only what JSON must escape.
    Json,
    /// Everything outside ASCII too.
    NonAscii,
}

enum KeyOrder {
    AsWritten,
    Sorted,
}

impl Style {
    fn from_arguments(arguments: &Kwargs) -> Result<Self, Error> {
        let indent = match arguments.get::<Option<Value>>("indent")? {
            None => None,
            Some(indent) if indent.is_none() => None,
            Some(indent) => Some(match indent.as_str() {
                Some(text) => text.to_owned(),
                None => " ".repeat(usize::try_from(indent)?.min(MAX_INDENT)),
            }),
        };
        let separators = arguments.get::<Option<Vec<String>>>("separators")?;
        let (item_separator, key_separator) = match separators.as_deref() {
            // Python drops the space after the comma where a line break follows it.
            None if indent.is_some() => (",".to_owned(), ": ".to_owned()),
            None => (", ".to_owned(), ": ".to_owned()),
            Some([item, key]) => (item.clone(), key.clone()),
            Some(other) => {
                let message = format!("tojson: separators has {} entries, but must have 2", other.len());
                return Err(Error::new(ErrorKind::InvalidOperation, message));
            }
        };
        let flag = |name| arguments.get::<Option<bool>>(name).map(Option::unwrap_or_default);
        Ok(Self {
            escape: if flag("ensure_ascii")? { Escape::NonAscii } else { Escape::Json },
            indent,
            item_separator,
            key_separator,
            order: if flag("sort_keys")? { KeyOrder::Sorted } else { KeyOrder::AsWritten },
        })
    }

    fn write(&self, text: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            let message = format!("tojson: value nests over {MAX_DEPTH} levels deep");
            return Err(Error::new(ErrorKind::InvalidOperation, message));
        }
        match value.kind() {
            ValueKind::None => text.push_str("null"),
            ValueKind::Bool => text.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number if value.is_integer() => text.push_str(&value.to_string()),
            ValueKind::Number => text.push_str(&float(f64::try_from(value.clone())?)),
            ValueKind::String => self.write_string(text, value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let mut list = self.open(text, '[', depth);
                for item in value.try_iter()? {
                    list.next(text);
                    self.write(text, &item, depth + 1)?;
                }
                list.close(text, ']');
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if let KeyOrder::Sorted = self.order {
                    keys.sort();
                }
                let mut list = self.open(text, '{', depth);
                for key in keys {
                    list.next(text);
                    self.write_key(text, &key)?;
                    text.push_str(&self.key_separator);
                    self.write(text, &value.get_item(&key)?, depth + 1)?;
                }
                list.close(text, '}');
            }
            other => {
                let message = format!("tojson: a value of kind {other} has no JSON form");
                return Err(Error::new(ErrorKind::InvalidOperation, message));
            }
        }
        Ok(())
    }

    /// Keys are strings in JSON; Python writes the JSON form of other simple keys as a string.
    fn write_key(&self, text: &mut String, key: &Value) -> Result<(), Error> {
        match key.as_str() {
            Some(key) => self.write_string(text, key),
            None => {
                let mut simple = String::new();
                self.write(&mut simple, key, MAX_DEPTH)?;
                self.write_string(text, &simple);
            }
        }
        Ok(())
    }

    fn write_string(&self, text: &mut String, string: &str) {
        text.push('"');
        for letter in string.chars() {
            match letter {
                '"' => text.push_str("\\\""),
                '\\' => text.push_str("\\\\"),
                '\n' => text.push_str("\\n"),
                '\r' => text.push_str("\\r"),
                '\t' => text.push_str("\\t"),
                '\u{8}' => text.push_str("\\b"),
                '\u{c}' => text.push_str("\\f"),
                ' '..='~' => text.push(letter),
                '\u{7f}'.. if matches!(self.escape, Escape::Json) => text.push(letter),
                _ => push_escaped(text, letter),
            }
        }
        text.push('"');
    }

    fn open<'a>(&'a self, text: &mut String, bracket: char, depth: usize) -> List<'a> {
        text.push(bracket);
        List { style: self, depth, num_items: 0 }
    }
}

/// A list or map being written: puts separators and line breaks where Python does.
struct List<'a> {
    style: &'a Style,
    depth: usize,
    num_items: usize,
}

impl List<'_> {
    fn next(&mut self, text: &mut String) {
        if self.num_items > 0 {
            text.push_str(&self.style.item_separator);
        }
        self.num_items += 1;
        self.line_break(text, self.depth + 1);
    }

    fn close(&self, text: &mut String, bracket: char) {
        if self.num_items > 0 {
            self.line_break(text, self.depth);
        }
        text.push(bracket);
    }

    fn line_break(&self, text: &mut String, depth: usize) {
        if let Some(indent) = &self.style.indent {
            text.push('\n');
            (0..depth).for_each(|_| text.push_str(indent));
        }
    }
}

/// Deeper values are refused: the writer recurses, and values built in a loop can nest without end.
const MAX_DEPTH: usize = 128;

/// Wider indentation is cut: it is a number in the template's hands.
const MAX_INDENT: usize = 64;

/// Writes the UTF-16 units of a character as JSON escapes.
fn push_escaped(text: &mut String, letter: char) {
    for unit in letter.encode_utf16(&mut [0; 2]) {
        write!(text, "\\u{unit:04x}").expect("a String takes any text");
    }
}

/// Python's `repr` of a float: the shortest digits that read back, an exponent from 1e16 up and under 1e-4.
fn float(number: f64) -> String {
    if number.is_nan() {
        return "NaN".to_owned();
    }
    if number.is_infinite() {
        return if number > 0.0 { "Infinity" } else { "-Infinity" }.to_owned();
    }
    // Debug switches to an exponent at the same places, but spells it `1e-7` and not `1e-07`.
    let digits = format!("{number:?}");
    match digits.split_once('e') {
        None => digits,
        Some((mantissa, exponent)) => {
            let (sign, exponent) = exponent.strip_prefix('-').map_or(('+', exponent), |positive| ('-', positive));
            format!("{mantissa}e{sign}{exponent:0>2}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_are_spelled_as_python_spells_them() {
        let cases = [
            (0.0, "0.0"),
            (-0.0, "-0.0"),
            (1.0, "1.0"),
            (0.1, "0.1"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e300, "1.5e+300"),
            (1e-4, "0.0001"),
            (1e-5, "1e-05"),
            (-2.5e-7, "-2.5e-07"),
            (5e-324, "5e-324"),
            (f64::NAN, "NaN"),
            (f64::INFINITY, "Infinity"),
            (f64::NEG_INFINITY, "-Infinity"),
        ];
        for (number, text) in cases {
            assert_eq!(float(number), text);
        }
    }
}
