//! Chat templates: from a conversation to the prompt text that a model was trained on.
//!
//! A template is a Jinja program that comes with the model and expects the environment that Hugging Face's
//! `apply_chat_template` gives it. That environment is rebuilt here over `minijinja`:
//!
//! - `trim_blocks` and `lstrip_blocks`, `break` and `continue`, no HTML escaping;
//! - an undefined variable prints nothing and is false, but has no attributes;
//! - the methods of Python's strings, lists and maps (`split`, `strip`, `items` ..);
//! - `tojson` is Python's `json.dumps` with its arguments, not Jinja's for HTML;
//! - `raise_exception(message)` refuses the conversation, as [`TemplateError::Refused`];
//! - `strftime_now(format)` tells the time given in [`RenderOptions::now`]. Without one the function is undefined:
//!   templates that ask `strftime_now is defined` then print their fixed date, and rendering never reads a clock;
//! - `{% generation %}` marks are passed over.
//!
//! Templates come from files of unknown origin: rendering has a budget of work and of memory, and can neither read
//! files nor call out. One hole is left, in `minijinja`: it prints and compares values by recursion, so a template that
//! nests a list thousands of levels deep on purpose can end the program by stack overflow.
//!
//! The text contains special tokens by name, mostly the BOS too: tokenize it with special tokens parsed, and never add
//! a second BOS.

mod message;
mod python_json;
mod python_str;
mod source;

use std::fmt;

pub use chrono::NaiveDateTime;
use chrono::format::{Item, StrftimeItems};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Serde, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, UndefinedBehavior, Value, context};
use serde_json::{Map, Value as Json};
use thiserror::Error;

use self::message::ContentForm;
pub use self::message::{Content, Message};
use crate::{
    gguf::{Metadata, MetadataError, OptionalMetadata},
    tokenizer::Tokenizer,
};

/// A compiled chat template and the special tokens it may print.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    special_tokens: SpecialTokenTexts,
    content_form: ContentForm,
}

/// The texts of a model's special tokens, as far as it has them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SpecialTokenTexts {
    /// Begins a text.
    pub bos: Option<String>,
    /// Ends a text.
    pub eos: Option<String>,
    /// Stands for what has no token.
    pub unk: Option<String>,
    /// Fills up a batch.
    pub pad: Option<String>,
}

/// What a template is told beside the messages.
#[derive(Debug, Clone, PartialEq)]
pub struct RenderOptions {
    /// Whether the text ends with the beginning of an answer for the model to go on with; true by default.
    pub add_generation_prompt: bool,
    /// Descriptions of tools, as JSON schemas; none by default.
    pub tools: Vec<Json>,
    /// The local time, for templates that print the date; none by default.
    pub now: Option<NaiveDateTime>,
    /// Further variables by name (`enable_thinking` ..); they go before special tokens, not before the fields above.
    pub variables: Map<String, Json>,
}

impl Default for RenderOptions {
    fn default() -> Self {
        Self { add_generation_prompt: true, tools: Vec::new(), now: None, variables: Map::new() }
    }
}

impl ChatTemplate {
    /// Compiles the template of a model file; `None` when the file has none.
    ///
    /// # Errors
    /// As [`ChatTemplate::new`], and [`TemplateError::Metadata`] for metadata of a wrong type.
    pub fn from_metadata(metadata: &Metadata, tokenizer: &Tokenizer) -> Result<Option<Self>, TemplateError> {
        let Some(source) = metadata.str("tokenizer.chat_template").optional()? else { return Ok(None) };
        // An id past the vocabulary is the tokenizer's to refuse; here it is a token without a text.
        let text = |id: u32| tokenizer.token_bytes(id).ok().map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        let id = |key| metadata.u32(key).optional();
        let special_tokens = SpecialTokenTexts {
            bos: tokenizer.bos().and_then(text),
            eos: tokenizer.eos().and_then(text),
            unk: id("tokenizer.ggml.unknown_token_id")?.and_then(text),
            pad: id("tokenizer.ggml.padding_token_id")?.and_then(text),
        };
        Self::new(source, special_tokens).map(Some)
    }

    /// Compiles a template.
    ///
    /// # Errors
    /// [`TemplateError::Syntax`] with the line that does not compile.
    pub fn new(source: &str, special_tokens: SpecialTokenTexts) -> Result<Self, TemplateError> {
        let mut environment = Environment::new();
        environment.set_syntax(
            SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().expect("the delimiters are Jinja's"),
        );
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment.set_undefined_behavior(UndefinedBehavior::Lenient);
        environment.set_fuel(Some(FUEL));
        environment.set_unknown_method_callback(python_str::unknown_method);
        environment.add_filter("tojson", python_json::tojson);
        environment.add_test("sequence", is_sequence);
        environment.add_function("raise_exception", raise_exception);
        environment.add_template_owned(TEMPLATE, source::prepare(source)).map_err(|error| TemplateError::Syntax {
            line: error.line().unwrap_or(1),
            message: error.detail().map_or_else(|| error.kind().to_string(), str::to_owned),
        })?;
        let mut template = Self { environment, special_tokens, content_form: ContentForm::Text };
        template.content_form = template.probe_content_form();
        Ok(template)
    }

    /// Returns the prompt text of a conversation.
    ///
    /// Text parts are joined by line breaks for templates that read strings, and strings become a list of one part for
    /// templates that only read lists.
    ///
    /// # Errors
    /// [`TemplateError::Refused`] with the template's own words (roles must alternate, no system role ..),
    /// [`TemplateError::UnsupportedPart`] for content that is not text, [`TemplateError::Render`] for what the
    /// template does wrong with these messages.
    pub fn render(&self, messages: &[Message], options: &RenderOptions) -> Result<String, TemplateError> {
        self.render_as(self.content_form, messages, options)
    }

    fn render_as(
        &self,
        form: ContentForm,
        messages: &[Message],
        options: &RenderOptions,
    ) -> Result<String, TemplateError> {
        let messages =
            messages.iter().map(|message| message_variables(message, form)).collect::<Result<Vec<_>, _>>()?;
        let mut variables = self.special_tokens.variables();
        variables.insert("documents".to_owned(), Json::Null);
        variables.extend(options.variables.clone());
        variables.insert("messages".to_owned(), messages.into());
        // Python callers pass no list rather than an empty one, and templates test for either.
        let tools = if options.tools.is_empty() { Json::Null } else { options.tools.clone().into() };
        variables.insert("tools".to_owned(), tools);
        variables.insert("add_generation_prompt".to_owned(), options.add_generation_prompt.into());
        let mut variables = Value::from(Serde(&variables));
        if let Some(now) = options.now {
            let strftime_now = Value::from_function(move |format: &str| strftime(now, format));
            variables = context! { strftime_now, ..variables };
        }
        let template = self.environment.get_template(TEMPLATE).expect("the constructor added it");
        template.render(variables).map_err(TemplateError::from)
    }

    /// Finds the form of content that the template prints: the string, and only if it loses that, the list.
    fn probe_content_form(&self) -> ContentForm {
        const WORD: &str = "probe-of-the-content-form";
        let shows = |form| {
            let rendered = self.render_as(form, &[Message::new("user", WORD)], &RenderOptions::default());
            rendered.is_ok_and(|text| text.contains(WORD))
        };
        if !shows(ContentForm::Text) && shows(ContentForm::Parts) { ContentForm::Parts } else { ContentForm::Text }
    }
}

impl SpecialTokenTexts {
    /// The variables of the tokens that the model has; the others stay undefined.
    fn variables(&self) -> Map<String, Json> {
        let tokens =
            [("bos_token", &self.bos), ("eos_token", &self.eos), ("unk_token", &self.unk), ("pad_token", &self.pad)];
        tokens.into_iter().filter_map(|(name, text)| Some((name.to_owned(), text.as_deref()?.into()))).collect()
    }
}

/// Name of the one template in the environment.
const TEMPLATE: &str = "chat template";

/// Work that one rendering may do: an instruction, or 64 bytes of text, costs about 1.
///
/// This bounds a rendering to about a second and 256 MB, and is enough for conversations of 10,000 messages and 5 MB in
/// every template of `tests/fixtures/chat_templates`.
const FUEL: u64 = 4_000_000;

fn message_variables(message: &Message, form: ContentForm) -> Result<Json, TemplateError> {
    let mut variables = Map::new();
    variables.insert("role".to_owned(), message.role.clone().into());
    variables.insert("content".to_owned(), message.content.in_form(form)?);
    variables.extend(message.fields.clone());
    Ok(variables.into())
}

/// Whether Python could index and measure the value; unlike `minijinja`, that says yes to strings and maps.
fn is_sequence(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::String | ValueKind::Map)
}

fn raise_exception(message: &str) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, "raise_exception").with_source(Raised(message.to_owned())))
}

fn strftime(now: NaiveDateTime, format: &str) -> Result<String, Error> {
    let items: Vec<Item<'_>> = StrftimeItems::new(format).collect();
    if items.contains(&Item::Error) {
        return Err(Error::new(
            ErrorKind::InvalidOperation,
            format!("strftime_now does not know the format {format:?}"),
        ));
    }
    let mut text = String::new();
    fmt::Write::write_fmt(&mut text, format_args!("{}", now.format_with_items(items.into_iter()))).map_err(|_| {
        Error::new(ErrorKind::InvalidOperation, format!("strftime_now cannot tell a local time by {format:?}"))
    })?;
    Ok(text)
}

/// What the template says about messages that it refuses.
#[derive(Debug, Error)]
#[error("{0}")]
struct Raised(String);

/// Why a conversation could not be rendered.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum TemplateError {
    /// The model file's metadata about its template is not what it must be.
    #[error(transparent)]
    Metadata(#[from] MetadataError),
    /// The template is no Jinja program that we can run.
    #[error("the chat template does not compile: {message} (line {line})")]
    Syntax {
        /// Line of the template, from 1.
        line: usize,
        /// What is wrong with it.
        message: String,
    },
    /// The template itself refuses the messages, by `raise_exception`.
    #[error("the chat template refuses these messages: {message}")]
    Refused {
        /// The template's words.
        message: String,
    },
    /// The template fails on these messages.
    #[error("the chat template fails: {message}")]
    Render {
        /// What it did wrong, and where.
        message: String,
    },
    /// A part of a message is not text.
    #[error("a message has a part of type {kind}, but only text is supported")]
    UnsupportedPart {
        /// The part's type, as its message says.
        kind: String,
    },
}

impl From<Error> for TemplateError {
    fn from(error: Error) -> Self {
        let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(&error);
        while let Some(current) = cause {
            if let Some(Raised(message)) = current.downcast_ref() {
                return Self::Refused { message: message.clone() };
            }
            cause = current.source();
        }
        Self::Render { message: error.to_string() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gguf::{Gguf, GgufWriter, OwnedValue};

    fn template(source: &str) -> ChatTemplate {
        ChatTemplate::new(source, SpecialTokenTexts::default()).unwrap()
    }

    fn render(source: &str) -> Result<String, TemplateError> {
        template(source).render(&[Message::new("user", "hi")], &RenderOptions::default())
    }

    /// A model file of five tokens and what `more` adds to its metadata.
    fn model_file(more: impl FnOnce(&mut GgufWriter)) -> Gguf {
        let mut writer = GgufWriter::new();
        writer
            .metadata("tokenizer.ggml.model", "llama")
            .metadata("tokenizer.ggml.tokens", OwnedValue::strings(["<unk>", "<s>", "</s>", "<pad>", "a"]))
            .metadata("tokenizer.ggml.scores", OwnedValue::f32s([0.0; 5]))
            .metadata("tokenizer.ggml.token_type", OwnedValue::i32s([2, 3, 3, 3, 1]))
            .metadata("tokenizer.ggml.padding_token_id", 3u32);
        more(&mut writer);
        Gguf::from_bytes(writer.to_bytes().unwrap()).unwrap()
    }

    fn from_file(file: &Gguf) -> Result<Option<ChatTemplate>, TemplateError> {
        ChatTemplate::from_metadata(file.metadata(), &Tokenizer::from_metadata(file.metadata(), None).unwrap())
    }

    #[test]
    fn a_model_files_template_knows_the_texts_of_the_files_special_tokens() {
        let shows = "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ unk_token is defined }}";
        let file = model_file(|writer| {
            writer.metadata("tokenizer.chat_template", shows);
        });
        let template = from_file(&file).unwrap().unwrap();
        assert_eq!(template.render(&[], &RenderOptions::default()).unwrap(), "<s></s><pad>False");
    }

    #[test]
    fn a_model_file_without_a_template_has_none_and_one_of_a_wrong_type_is_refused() {
        assert!(from_file(&model_file(|_| ())).unwrap().is_none());
        let file = model_file(|writer| {
            writer.metadata("tokenizer.chat_template", 7u32);
        });
        assert!(matches!(from_file(&file), Err(TemplateError::Metadata(MetadataError::WrongType { .. }))));
    }

    #[test]
    fn a_template_that_does_not_compile_is_refused_with_its_line() {
        let error = ChatTemplate::new("one\n{% if %}\n{% endif %}", SpecialTokenTexts::default()).unwrap_err();
        let TemplateError::Syntax { line, .. } = &error else { panic!("{error:?}") };
        assert_eq!(*line, 2);
        assert!(error.to_string().starts_with("the chat template does not compile: "), "{error}");
        assert!(!error.to_string().contains('\n'), "{error}");
    }

    #[test]
    fn an_exception_of_the_template_carries_its_words_even_from_within_a_macro() {
        for source in [
            "{{ raise_exception('no system role') }}",
            "{% macro m() %}{{ raise_exception('no system role') }}{% endmacro %}{{ m() }}",
            "{% if messages[0].content | upper == raise_exception('no system role') %}{% endif %}",
        ] {
            let error = render(source).unwrap_err();
            assert_eq!(error, TemplateError::Refused { message: "no system role".to_owned() });
            assert_eq!(error.to_string(), "the chat template refuses these messages: no system role");
        }
    }

    #[test]
    fn the_mistakes_of_a_template_are_errors_of_one_line() {
        let cases = [
            "{{ messages[0].nothing.at_all }}",
            "{{ 'text' + 1 }}",
            "{{ no_such_function() }}",
            "{{ 'text'.no_such_method() }}",
            "{{ messages | no_such_test('x') }}",
            "{{ missing | tojson }}",
            "{{ [] | tojson(separators=['only one']) }}",
            "{{ [] | tojson(unknown=1) }}",
            "{{ 'text'.rsplit('') }}",
            "{{ 'text'.partition('') }}",
            "{{ 'text'.index('z') }}",
            "{{ strftime_now('%Y') }}",
            "{% include 'another file' %}",
        ];
        for source in cases {
            // Some of these are found when the template is compiled.
            let error = match ChatTemplate::new(source, SpecialTokenTexts::default()) {
                Ok(template) => {
                    template.render(&[Message::new("user", "hi")], &RenderOptions::default()).expect_err(source)
                }
                Err(error) => error,
            };
            let text = error.to_string();
            assert!(text.starts_with("the chat template ") && !text.contains('\n'), "{source}: {text}");
        }
    }

    #[test]
    fn work_without_end_is_stopped() {
        let endless = "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}x{% endfor %}{% endfor %}{% endfor %}";
        let doubling =
            "{% set ns = namespace(x='x') %}{% for a in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}";
        let deep = "{% set ns = namespace(x=[]) %}{% for a in range(9999) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x | tojson }}";
        for source in [endless, doubling, deep] {
            let error = render(source).unwrap_err();
            assert!(matches!(error, TemplateError::Render { .. }), "{error:?}");
        }
    }

    #[test]
    fn the_clock_is_the_one_given_and_without_one_there_is_none() {
        let asks = template("{{ strftime_now('%Y-%m-%d %H:%M') if strftime_now is defined else 'no clock' }}");
        let at = |now: Option<&str>| {
            let options = RenderOptions { now: now.map(|now| now.parse().unwrap()), ..RenderOptions::default() };
            asks.render(&[], &options).unwrap()
        };
        assert_eq!(at(Some("2031-12-24T18:05:00")), "2031-12-24 18:05");
        assert_eq!(at(None), "no clock");
    }

    #[test]
    fn a_format_of_time_that_cannot_be_told_is_an_error() {
        let options = RenderOptions { now: Some("2031-12-24T18:05:00".parse().unwrap()), ..RenderOptions::default() };
        // An unknown letter, and a time zone, which a local time does not have.
        for format in ["%Q", "%z"] {
            let error = template(&format!("{{{{ strftime_now('{format}') }}}}")).render(&[], &options).unwrap_err();
            assert!(error.to_string().contains("strftime_now"), "{error}");
        }
    }

    #[test]
    fn variables_go_before_special_tokens_but_not_before_what_is_rendered() {
        let tokens = SpecialTokenTexts { bos: Some("<s>".into()), eos: Some("</s>".into()), ..Default::default() };
        let shows = "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ messages | length }}{{ add_generation_prompt }}";
        let shows = ChatTemplate::new(shows, tokens).unwrap();
        let Json::Object(variables) =
            serde_json::json!({"eos_token": "<end>", "messages": [], "add_generation_prompt": 7})
        else {
            unreachable!("a map is written above")
        };
        let options = RenderOptions { variables, ..RenderOptions::default() };
        assert_eq!(shows.render(&[Message::new("user", "hi")], &options).unwrap(), "<s><end>1True");
    }

    #[test]
    fn content_arrives_in_the_form_the_template_reads() {
        let parts: Message = serde_json::from_str(
            r#"{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}"#,
        )
        .unwrap();
        let strings = template("{% for m in messages %}{{ m.content + ';' }}{% endfor %}");
        let lists = template("{% for m in messages %}{% for p in m.content %}{{ p.text }},{% endfor %};{% endfor %}");
        let messages = [parts, Message::new("user", "c")];
        assert_eq!(strings.render(&messages, &RenderOptions::default()).unwrap(), "a\nb;c;");
        assert_eq!(lists.render(&messages, &RenderOptions::default()).unwrap(), "a,b,;c,;");
        let image: Message = serde_json::from_str(r#"{"role":"user","content":[{"type":"image_url"}]}"#).unwrap();
        assert_eq!(
            lists.render(&[image], &RenderOptions::default()).unwrap_err().to_string(),
            "a message has a part of type image_url, but only text is supported"
        );
    }
}
