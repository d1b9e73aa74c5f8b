//! Renders of chat templates, against those of Jinja2 itself in Hugging Face's environment.
//!
//! `fixtures/chat_templates` holds templates of our own in the shapes that model families use. The templates of real
//! models are read from the files in the folder that `ENTROKV_MODELS` names; without it their test says so and passes.

use std::{collections::BTreeMap, env, path::Path};

use entrokv::{
    chat_template::{ChatTemplate, Message, RenderOptions, SpecialTokenTexts, TemplateError},
    gguf::Gguf,
    tokenizer::Tokenizer,
};
use serde::Deserialize;
use serde_json::{Map, Value as Json};

/// What Jinja2 itself renders; made by `tools/golden/chat_templates.py`.
#[derive(Deserialize)]
struct Golden {
    special_tokens: BTreeMap<String, String>,
    conversations: BTreeMap<String, Conversation>,
    renders: BTreeMap<String, BTreeMap<String, Render>>,
}

#[derive(Deserialize)]
struct Conversation {
    messages: Vec<Message>,
    #[serde(default)]
    tools: Vec<Json>,
    add_generation_prompt: Option<bool>,
    #[serde(default)]
    variables: Map<String, Json>,
    now: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Render {
    Text(String),
    Refused(String),
    /// Jinja2's words for a mistake of the template; ours differ.
    Fails(String),
}

impl Golden {
    fn load() -> Self {
        serde_json::from_str(include_str!("fixtures/chat_templates.json")).expect("a committed file")
    }

    fn special_tokens(&self) -> SpecialTokenTexts {
        let token = |name: &str| self.special_tokens.get(name).cloned();
        SpecialTokenTexts {
            bos: token("bos_token"),
            eos: token("eos_token"),
            unk: token("unk_token"),
            pad: token("pad_token"),
        }
    }

    /// Renders every conversation and returns a line for each that differs from Jinja2's.
    fn differences(&self, name: &str, template: &ChatTemplate) -> Vec<String> {
        let difference = |(title, want): (&String, &Render)| {
            let conversation = &self.conversations[title];
            let options = RenderOptions {
                add_generation_prompt: conversation.add_generation_prompt.unwrap_or(true),
                tools: conversation.tools.clone(),
                now: conversation.now.as_ref().map(|now| now.parse().expect("a local time")),
                variables: conversation.variables.clone(),
            };
            let got = match template.render(&conversation.messages, &options) {
                Ok(text) => Render::Text(text),
                Err(TemplateError::Refused { message }) => Render::Refused(message),
                Err(error) => Render::Fails(error.to_string()),
            };
            let same = got == *want || matches!((&got, want), (Render::Fails(_), Render::Fails(_)));
            (!same).then(|| format!("{name}, {title}:\n{}", first_difference(&got, want)))
        };
        self.renders[name].iter().filter_map(difference).collect()
    }
}

fn first_difference(got: &Render, want: &Render) -> String {
    let (Render::Text(got), Render::Text(want)) = (got, want) else {
        return format!("got    {got:?}\nwanted {want:?}");
    };
    let lines = got.lines().zip(want.lines()).find(|(got, want)| got != want);
    lines.map_or(format!("got    {got:?}\nwanted {want:?}"), |(g, w)| format!("got    {g:?}\nwanted {w:?}"))
}

const SOURCES: [(&str, &str); 9] = [
    ("chatml", include_str!("fixtures/chat_templates/chatml.jinja")),
    ("generation", include_str!("fixtures/chat_templates/generation.jinja")),
    ("headers", include_str!("fixtures/chat_templates/headers.jinja")),
    ("inst", include_str!("fixtures/chat_templates/inst.jinja")),
    ("parts", include_str!("fixtures/chat_templates/parts.jinja")),
    ("python", include_str!("fixtures/chat_templates/python.jinja")),
    ("thinker", include_str!("fixtures/chat_templates/thinker.jinja")),
    ("turns", include_str!("fixtures/chat_templates/turns.jinja")),
    ("whitespace", include_str!("fixtures/chat_templates/whitespace.jinja")),
];

#[test]
fn renders_equal_those_of_jinja2_to_the_letter() {
    let golden = Golden::load();
    let differences = |(name, source): &(&str, &str)| {
        golden.differences(name, &ChatTemplate::new(source, golden.special_tokens()).unwrap())
    };
    let differences: Vec<_> = SOURCES.iter().flat_map(differences).collect();
    assert!(differences.is_empty(), "{} renders differ:\n{}", differences.len(), differences.join("\n"));
}

#[test]
fn renders_of_the_models_own_templates_equal_those_of_jinja2() {
    let golden = Golden::load();
    let Some(folder) = env::var_os("ENTROKV_MODELS") else {
        return eprintln!("ENTROKV_MODELS is not set: no model's template is checked");
    };
    for (name, num_templates) in [("smollm2-135m", 1), ("qwen2.5-0.5b", 1), ("qwen2.5-1.5b", 1), ("gemma3-270m", 0)] {
        let path = Path::new(&folder).join(format!("{name}.gguf"));
        if !path.exists() {
            eprintln!("{} does not exist: its template is not checked", path.display());
            continue;
        }
        let gguf = Gguf::open(&path).unwrap();
        let tokenizer = Tokenizer::from_metadata(gguf.metadata(), None).unwrap();
        let template = ChatTemplate::from_metadata(gguf.metadata(), &tokenizer).unwrap();
        assert_eq!(template.iter().len(), num_templates, "{name}");
        if let Some(template) = template {
            let differences = golden.differences(&format!("model:{name}"), &template);
            assert!(differences.is_empty(), "{} renders differ:\n{}", differences.len(), differences.join("\n"));
        }
    }
}

#[test]
fn a_very_long_conversation_is_not_taken_for_work_without_end() {
    let text = "word ".repeat(100);
    let roles = ["user", "assistant"].iter().cycle().take(10_000);
    let messages: Vec<_> = roles.map(|role| Message::new(*role, text.as_str())).collect();
    for (name, source) in SOURCES.iter().filter(|(name, _)| !["python", "whitespace"].contains(name)) {
        let template = ChatTemplate::new(source, Golden::load().special_tokens()).unwrap();
        let rendered = template.render(&messages, &RenderOptions::default());
        let num_words = rendered.map(|text| text.matches("word").count());
        assert_eq!(num_words, Ok(1_000_000), "{name}");
    }
}
