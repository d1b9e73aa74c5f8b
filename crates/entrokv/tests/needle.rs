//! The needle protocol: on a random-weight model what it counts, on a real one what it shows.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod support;

use entrokv::gguf::Gguf;
use entrokv::needle::{Case, Contexts, Haystack, Hiding, Plan, Question, Row};
use entrokv::tiny::{TinyArchitecture, TinyModel};
use entrokv::{Message, Model, ModelOptions, RenderOptions, Request, SpecialTokens};
use support::{model_path, open, options};

fn tiny() -> Model {
    let model = TinyModel { head_dim: 32, ..TinyModel::new(TinyArchitecture::Llama) };
    let gguf = Gguf::from_bytes(model.gguf().unwrap()).unwrap();
    Model::from_gguf(&gguf, &options(), &mut |_| ()).unwrap()
}

fn plan(contexts: Contexts, recipes: &str, budgets: &str) -> Plan {
    Plan {
        contexts,
        haystack: Haystack::Generated { seed: 3 },
        texts: 2,
        text_tokens: 300,
        recipes: recipes.split(';').map(|recipe| recipe.parse().unwrap()).collect(),
        budgets: budgets.split(',').map(|budget| budget.parse().unwrap()).collect(),
    }
}

/// What the model says when it is asked the usual way.
fn answer(model: &mut Model, context: &str, question: &str) -> String {
    let message = Message::new("user", format!("{context}\n\n{question}"));
    let text = model.chat_template.as_ref().unwrap().render(&[message], &RenderOptions::default()).unwrap();
    let prompt = model.tokenizer.encode(&text, SpecialTokens::Parse).unwrap();
    model.engine.generate(Request::greedy(prompt, 48), |_| ()).unwrap().text
}

#[test]
fn the_full_cache_is_a_recipe_like_others() {
    let mut model = tiny();
    let context: String = (0..60).map(|n| format!("Line {n} of the sea and none of the west\n")).collect();
    let context = context.trim_end();
    // Of a random model: the questions to which it says a word.
    let asked = ["What", "Which one", "Who was there", "When", "Where to", "Why", "How many", "And then"];
    let questions: Vec<Question> = asked
        .into_iter()
        .filter_map(|question| {
            let said = answer(&mut model, context, question);
            let mut words = said.trim_start().lines().next().unwrap_or("").split(|c: char| !c.is_alphanumeric());
            let answer = words.find(|word| word.chars().count() > 1)?.to_owned();
            Some(Question { question: question.to_owned(), prefix: String::new(), answer, depth: None })
        })
        .take(3)
        .chain([Question {
            question: "How".into(),
            prefix: "It is".into(),
            answer: "zzzzzzzz".into(),
            depth: Some(1.0),
        }])
        .collect();
    let case = Case { context: context.to_owned(), questions };
    let plan = plan(Contexts::Given(vec![case.clone(), case]), "full;f16;tq4;f16/streaming-llm;tq3/knorm", "100%,20%");
    let mut heard = (0, 0);
    let rows = plan.run(&mut model, &mut |done, total| heard = (done, total)).unwrap();
    assert_eq!(heard.0, heard.1, "all of it was told");
    assert!(heard.1 > 0);
    assert_eq!(model.engine.pool().used_bytes(), 0);
    let names: Vec<(&str, Option<&str>)> =
        rows.iter().map(|row| (row.recipe.as_str(), row.budget.as_deref())).collect();
    let expected = [
        ("full", None),
        ("f16", None),
        ("tq4", None),
        ("f16/streaming-llm", Some("100%")),
        ("f16/streaming-llm", Some("20%")),
        ("tq3/knorm", Some("100%")),
        ("tq3/knorm", Some("20%")),
    ];
    assert_eq!(names, expected);
    // Most of what the model says is right: marks encoded beside a question may make other tokens than marks encoded with it.
    let full = rows[0].answered_full;
    assert!(full >= 4, "{:?}", rows[0]);
    for row in &rows {
        assert_eq!((row.questions, row.answered_full), (6, full), "{row:?}");
        assert_eq!((row.depth100.questions, row.depth100.answered_full), (2, 0), "{row:?}");
        assert_eq!(row.bytes_full, rows[0].bytes_held);
        assert!(row.answered <= 6 && row.kl_mean <= row.kl_worst && row.seconds > 0.0, "{row:?}");
    }
    // Those that keep everything as it is differ in nothing.
    for row in [&rows[0], &rows[1], &rows[3]] {
        assert_eq!((row.answered, row.kl_mean, row.kl_worst), (full, Some(0.0), Some(0.0)), "{row:?}");
        assert_eq!(row.bytes_held, row.bytes_full);
    }
    for row in [&rows[2], &rows[4], &rows[5], &rows[6]] {
        assert!(row.kl_mean.unwrap() > 0.0 && row.bytes_held < row.bytes_full, "{row:?}");
    }
    // A fifth of the bytes, of codes too.
    for row in [&rows[4], &rows[6]] {
        assert!(row.bytes_held * 5 <= row.bytes_full, "{row:?}");
    }
    assert!(rows[2].bytes_held * 2 <= rows[2].bytes_full, "{:?}", rows[2]);
    let again: Vec<Row> = plan.run(&mut model, &mut |_, _| ()).unwrap();
    let timeless = |rows: &[Row]| rows.iter().map(|row| Row { seconds: 0.0, ..row.clone() }).collect::<Vec<_>>();
    assert_eq!(timeless(&again), timeless(&rows));
}

#[test]
fn what_cannot_be_measured_is_refused_before_anything_is_read() {
    let mut model = tiny();
    let hidden = |tokens, facts| Contexts::Hidden(Hiding { contexts: 1, tokens, facts });
    let given = |context: &str, answer: &str| {
        let question = Question { question: "?".into(), prefix: String::new(), answer: answer.into(), depth: None };
        Contexts::Given(vec![Case { context: context.into(), questions: vec![question] }])
    };
    let limit = model.engine.context_len();
    let too_long = format!("the model's context holds {limit}");
    let cases = [
        (plan(hidden(limit, 4), "tq4", "20%"), too_long.as_str()),
        (plan(hidden(400, 4), "tq4;knorm", "20%,1page"), "knorm at 1page: a KV budget of 1page is 1 page(s)"),
        (plan(hidden(60, 10), "tq4", "20%"), "a context of 60 tokens has no room beside its facts"),
        (plan(given("", "x"), "tq4", "20%"), "the context is empty"),
        (plan(given("Some text.", " "), "tq4", "20%"), "a question has no answer"),
        (Plan { text_tokens: 7, ..plan(hidden(400, 4), "tq4", "20%") }, "7 tokens; a page of 16 is the least"),
    ];
    for (plan, expected) in cases {
        let error = plan.run(&mut model, &mut |_, _| panic!("something was read")).unwrap_err().to_string();
        assert!(error.contains(expected) && error.lines().count() == 1, "{error}");
    }
    let gguf = Gguf::from_bytes(TinyModel::new(TinyArchitecture::Llama).gguf().unwrap()).unwrap();
    let mut narrow = Model::from_gguf(&gguf, &ModelOptions::default(), &mut |_| ()).unwrap();
    let error = plan(hidden(400, 4), "tq4", "20%").run(&mut narrow, &mut |_, _| ()).unwrap_err().to_string();
    assert!(error.starts_with("tq4: "), "{error}");
}

/// The full cache of a small model answers most of what is hidden, codes as much (its keys want 8 bits), and a cache without the
/// middle of the text nothing of it.
#[test]
fn a_real_model_answers_what_its_cache_still_holds() {
    let Some(path) = model_path(entrokv::pull::DEFAULT_MODEL) else { return };
    let mut model = open(&path, &options());
    let hidden = Contexts::Hidden(Hiding { contexts: 3, tokens: 600, facts: 8 });
    let plan = Plan { texts: 1, text_tokens: 500, ..plan(hidden, "q8_0/tq4;f16/streaming-llm", "20%") };
    let rows = plan.run(&mut model, &mut |_, _| ()).unwrap();
    rows.iter().for_each(|row| println!("{row:?}"));
    let [full, codes, window] = &rows[..] else { panic!("{rows:?}") };
    assert_eq!(full.questions, 21);
    assert!(full.answered_full >= 15, "{full:?}");
    assert!(codes.answered + 2 >= full.answered_full && codes.kl_mean.unwrap() < 0.05, "{codes:?}");
    assert!(window.answered <= 2 && window.kl_mean.unwrap() > codes.kl_mean.unwrap(), "{window:?}");
    assert_eq!(window.depth100.answered, window.depth100.answered_full, "the end is kept: {window:?}");
    assert!(window.bytes_held * 5 <= window.bytes_full && codes.bytes_held * 2 <= codes.bytes_full);
}
