//! Contexts with questions whose answers are in them.

use serde::Deserialize;
use thiserror::Error;

/// A context, and what to ask about it.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Case {
    /// The text that is read.
    pub context: String,
    /// Questions, at least one.
    pub questions: Vec<Question>,
}

/// A question and the only right answer.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Question {
    /// What the user asks.
    pub question: String,
    /// How the answer begins: words put into the model's mouth, so that the answer itself comes first.
    #[serde(default)]
    pub prefix: String,
    /// What it must say.
    pub answer: String,
    /// How deep in the context the answer stands, of 1, where that is known.
    #[serde(skip)]
    pub depth: Option<f64>,
}

/// Cases that are none.
#[derive(Debug, Error)]
pub enum CaseError {
    /// Nothing in the file.
    #[error(
        "there are no cases; each line is one: {{\"context\": .., \"questions\": [{{\"question\": .., \"answer\": ..}}]}}"
    )]
    None,
    /// A line that is no case.
    #[error("line {line}: {source}")]
    Json {
        /// Counted from 1.
        line: usize,
        /// What is wrong.
        source: serde_json::Error,
    },
    /// A text that is missing.
    #[error("line {line}: {what}")]
    Empty {
        /// Counted from 1.
        line: usize,
        /// Which.
        what: &'static str,
    },
}

impl Case {
    /// The cases of a file of JSON lines; empty lines are passed over.
    ///
    /// # Errors
    /// [`CaseError`], which names the line.
    pub fn parse_lines(text: &str) -> Result<Vec<Self>, CaseError> {
        let lines = (1..).zip(text.lines()).filter(|(_, text)| !text.trim().is_empty());
        let cases = lines.map(|(line, text)| {
            let case: Self = serde_json::from_str(text).map_err(|source| CaseError::Json { line, source })?;
            case.check().map_err(|what| CaseError::Empty { line, what })?;
            Ok(case)
        });
        let cases = cases.collect::<Result<Vec<_>, CaseError>>()?;
        if cases.is_empty() { Err(CaseError::None) } else { Ok(cases) }
    }

    /// Whether every text is there.
    ///
    /// # Errors
    /// What is missing.
    pub fn check(&self) -> Result<(), &'static str> {
        let is_empty = |text: &str| text.trim().is_empty();
        if is_empty(&self.context) {
            Err("the context is empty")
        } else if self.questions.is_empty() {
            Err("there is no question")
        } else if self.questions.iter().any(|question| is_empty(&question.question)) {
            Err("a question is empty")
        } else if self.questions.iter().any(|question| is_empty(&question.answer)) {
            Err("a question has no answer")
        } else {
            Ok(())
        }
    }
}

impl Question {
    /// Whether `generated` is right: behind a prefix the answer and nothing else comes first; without one the first line that is
    /// not empty says it somewhere.
    pub fn is_answered_by(&self, generated: &str) -> bool {
        let answer = self.answer.trim();
        let line = generated.trim_start().lines().next().unwrap_or("");
        let mut places = line.match_indices(answer).map(|(at, _)| at);
        // 7391 is no answer where 17391 or 73910 is said.
        let is_whole = |at: usize| {
            let (before, after) = (line[..at].chars().next_back(), line[at + answer.len()..].chars().next());
            !before.is_some_and(char::is_alphanumeric) && !after.is_some_and(char::is_alphanumeric)
        };
        if self.prefix.is_empty() { places.any(is_whole) } else { places.next() == Some(0) && is_whole(0) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_cases() {
        let text = "{\"context\": \"The sea is 7 deep.\", \"questions\": [{\"question\": \"How deep?\", \"answer\": \"7\"}]}\n\n\
                    {\"context\": \"x\", \"questions\": [{\"question\": \"a\", \"prefix\": \"It is\", \"answer\": \"b\"}]}\n";
        let cases = Case::parse_lines(text).unwrap();
        assert_eq!(cases.len(), 2);
        assert_eq!(cases[0].questions[0].question, "How deep?");
        assert_eq!((cases[0].questions[0].prefix.as_str(), cases[1].questions[0].prefix.as_str()), ("", "It is"));
    }

    #[test]
    fn bad_lines_are_named() {
        let good = "{\"context\": \"x\", \"questions\": [{\"question\": \"a\", \"answer\": \"b\"}]}";
        let cases = [
            ("", "there are no cases"),
            (" \n\n", "there are no cases"),
            ("{", "line 1: EOF while parsing"),
            ("{\"context\": \"x\"}", "line 1: missing field `questions`"),
            ("{\"context\": \"x\", \"questions\": []}", "line 1: there is no question"),
            (
                "{\"context\": \" \", \"questions\": [{\"question\": \"a\", \"answer\": \"b\"}]}",
                "line 1: the context is empty",
            ),
            ("{\"context\": \"x\", \"questions\": [{\"question\": \"a\"}]}", "line 1: missing field `answer`"),
            (
                "{\"context\": \"x\", \"questions\": [{\"question\": \"a\", \"answer\": \"\"}]}",
                "line 1: a question has no answer",
            ),
            (
                "{\"context\": \"x\", \"questions\": [{\"question\": \"\", \"answer\": \"b\"}]}",
                "line 1: a question is empty",
            ),
            (
                "{\"context\": \"x\", \"questions\": [{\"question\": \"a\", \"answer\": \"b\", \"depth\": 1}]}",
                "unknown field",
            ),
        ];
        for (bad, expected) in cases {
            let error = Case::parse_lines(bad).unwrap_err().to_string();
            assert!(error.contains(expected), "{bad}: {error}");
        }
        let error = Case::parse_lines(&format!("{good}\n\nnonsense\n")).unwrap_err().to_string();
        assert!(error.starts_with("line 3: expected"), "{error}");
    }

    #[test]
    fn answers_are_right_or_wrong() {
        let question = |prefix: &str, answer: &str| Question {
            question: "?".to_owned(),
            prefix: prefix.to_owned(),
            answer: answer.to_owned(),
            depth: None,
        };
        for (generated, right) in [
            (" 7391-KQ.", true),
            (" 7391-KQ", true),
            ("7391-KQ\n7391", true),
            (" 7391-KQR", false),
            (" 17391-KQ", false),
            (" the 7391-KQ", false),
            (" 7391", false),
            ("", false),
        ] {
            assert_eq!(question("The code is", "7391-KQ").is_answered_by(generated), right, "{generated:?}");
        }
        for (generated, right) in [
            ("The code is 7391-KQ.", true),
            ("\n\n7391-KQ", true),
            ("It is 17391-KQ, or 7391-KQ.", true),
            ("It is 17391-KQ.", false),
            ("I do not know.\n7391-KQ", false),
        ] {
            assert_eq!(question("", "7391-KQ").is_answered_by(generated), right, "{generated:?}");
        }
    }
}
