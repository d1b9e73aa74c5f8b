//! Methods of Python's values that templates call and `minijinja-contrib` lacks.

use minijinja::value::from_args;
use minijinja::{Error, ErrorKind, State, Value};

/// Calls `method` as Python would; falls back on the methods of `minijinja-contrib`.
pub(super) fn unknown_method(
    state: &mut State<'_, '_>,
    value: &Value,
    method: &str,
    arguments: &[Value],
) -> Result<Value, Error> {
    let Some(text) = value.as_str() else {
        return minijinja_contrib::pycompat::unknown_method_callback(state, value, method, arguments);
    };
    match method {
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(arguments)?;
            Ok(text.strip_prefix(prefix).unwrap_or(text).into())
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(arguments)?;
            Ok(text.strip_suffix(suffix).unwrap_or(text).into())
        }
        "partition" => {
            let separator = separator(arguments)?;
            let (before, after) = text.split_once(separator).map_or((text, None), |(a, b)| (a, Some(b)));
            Ok(list([before, after.map_or("", |_| separator), after.unwrap_or("")]))
        }
        "rpartition" => {
            let separator = separator(arguments)?;
            let (before, after) = text.rsplit_once(separator).map_or((None, text), |(a, b)| (Some(a), b));
            Ok(list([before.unwrap_or(""), before.map_or("", |_| separator), after]))
        }
        "rsplit" => rsplit(text, arguments),
        "index" => {
            let (part,): (&str,) = from_args(arguments)?;
            let at = text.find(part).ok_or_else(|| invalid(format!("substring {part:?} not found")))?;
            Ok(Value::from(text[..at].chars().count()))
        }
        _ => minijinja_contrib::pycompat::unknown_method_callback(state, value, method, arguments),
    }
}

fn separator(arguments: &[Value]) -> Result<&str, Error> {
    match from_args(arguments)? {
        ("",) => Err(invalid("empty separator".to_owned())),
        (separator,) => Ok(separator),
    }
}

/// `str.rsplit(separator=None, maxsplit=-1)`: like `split`, counted from the end.
fn rsplit(text: &str, arguments: &[Value]) -> Result<Value, Error> {
    let (separator, max_splits): (Option<&str>, Option<i64>) = from_args(arguments)?;
    // A negative number of splits is any number.
    let max_splits = max_splits.and_then(|max| usize::try_from(max).ok()).unwrap_or(usize::MAX);
    let mut parts = Vec::new();
    let mut rest = text;
    match separator {
        Some("") => return Err(invalid("empty separator".to_owned())),
        Some(separator) => {
            while parts.len() < max_splits
                && let Some((before, last)) = rest.rsplit_once(separator)
            {
                parts.push(last);
                rest = before;
            }
            parts.push(rest);
        }
        None => {
            rest = rest.trim_end();
            while parts.len() < max_splits
                && let Some((before, last)) = rest.rsplit_once(char::is_whitespace)
            {
                parts.push(last);
                rest = before.trim_end();
            }
            if !rest.is_empty() {
                parts.push(rest);
            }
        }
    }
    Ok(list(parts.into_iter().rev()))
}

fn list<'a>(parts: impl IntoIterator<Item = &'a str>) -> Value {
    parts.into_iter().map(Value::from).collect()
}

fn invalid(message: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}
