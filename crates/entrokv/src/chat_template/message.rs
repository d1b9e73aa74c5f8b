//! What is said in a conversation, as chat interfaces write it.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::TemplateError;

/// One turn of a conversation.
///
/// Fields beyond role and content (`name`, `tool_calls`, `tool_call_id`, `reasoning_content` ..) are kept as they come
/// and given to the template.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `user`, `assistant`, `tool`, or what else the template knows.
    pub role: String,
    /// What is said; absent where a message only calls tools.
    #[serde(default)]
    pub content: Content,
    /// Every other field of the message.
    #[serde(flatten)]
    pub fields: Map<String, Value>,
}

impl Message {
    /// Makes a message of plain text.
    pub fn new(role: impl Into<String>, text: impl Into<String>) -> Self {
        Self { role: role.into(), content: Content::Text(text.into()), fields: Map::new() }
    }
}

/// The content of a message, in the forms that chat interfaces allow.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Content {
    /// Nothing (`null`, or no such field).
    #[default]
    None,
    /// Plain text.
    Text(String),
    /// A list of parts, `{"type": "text", "text": ".."}` each.
    Parts(Vec<Value>),
}

impl Content {
    /// Returns the text of every part.
    ///
    /// # Errors
    /// [`TemplateError::UnsupportedPart`] for a part that is not text.
    fn texts(&self) -> Result<Option<Vec<&str>>, TemplateError> {
        match self {
            Self::None => Ok(None),
            Self::Text(text) => Ok(Some(vec![text])),
            Self::Parts(parts) => parts.iter().map(part_text).collect::<Result<_, _>>().map(Some),
        }
    }

    /// Returns the content in the form that a template reads.
    ///
    /// # Errors
    /// [`TemplateError::UnsupportedPart`] for a part that is not text.
    pub(super) fn in_form(&self, form: ContentForm) -> Result<Value, TemplateError> {
        Ok(match (self.texts()?, form) {
            (None, _) => Value::Null,
            (Some(texts), ContentForm::Text) => Value::String(texts.join("\n")),
            (Some(texts), ContentForm::Parts) => {
                texts.into_iter().map(|text| json!({"type": "text", "text": text})).collect()
            }
        })
    }
}

/// The form in which a template reads the content of messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ContentForm {
    /// A string; parts are joined by line breaks.
    Text,
    /// A list of parts; a string becomes a list of one.
    Parts,
}

fn part_text(part: &Value) -> Result<&str, TemplateError> {
    if let Value::String(text) = part {
        return Ok(text);
    }
    let kind = part.get("type").and_then(Value::as_str);
    match (kind, part.get("text").and_then(Value::as_str)) {
        (Some("text") | None, Some(text)) => Ok(text),
        _ => Err(TemplateError::UnsupportedPart { kind: kind.unwrap_or("unknown").to_owned() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(json: &str) -> Message {
        serde_json::from_str(json).unwrap()
    }

    #[test]
    fn every_form_of_content_is_read_and_written_as_it_came() {
        let cases = [
            r#"{"role":"user","content":"hi"}"#,
            r#"{"role":"user","content":[{"type":"text","text":"hi"},{"type":"text","text":"there"}]}"#,
            r#"{"role":"assistant","content":null,"tool_calls":[{"id":"1","function":{"name":"f","arguments":"{}"}}]}"#,
            r#"{"role":"tool","content":"42","tool_call_id":"1","name":"f"}"#,
        ];
        for case in cases {
            assert_eq!(serde_json::to_string(&parse(case)).unwrap(), case);
        }
        assert_eq!(parse(r#"{"role":"assistant"}"#).content, Content::None);
        assert_eq!(parse(cases[0]), Message::new("user", "hi"));
    }

    #[test]
    fn content_takes_the_form_a_template_reads() {
        let parts = parse(r#"{"role":"user","content":["a",{"type":"text","text":"b"},{"text":"c"}]}"#).content;
        assert_eq!(parts.in_form(ContentForm::Text).unwrap(), json!("a\nb\nc"));
        assert_eq!(
            Content::Text("a".into()).in_form(ContentForm::Parts).unwrap(),
            json!([{"type": "text", "text": "a"}])
        );
        assert_eq!(Content::None.in_form(ContentForm::Parts).unwrap(), Value::Null);
    }

    #[test]
    fn a_part_that_is_not_text_is_refused_by_its_kind() {
        for (part, kind) in [
            (r#"{"type":"image_url","image_url":{"url":"x"}}"#, "image_url"),
            (r#"{"type":"text"}"#, "text"),
            ("7", "unknown"),
        ] {
            let content = parse(&format!(r#"{{"role":"user","content":[{part}]}}"#)).content;
            let error = content.in_form(ContentForm::Text).unwrap_err();
            assert_eq!(error, TemplateError::UnsupportedPart { kind: kind.to_owned() });
        }
    }
}
