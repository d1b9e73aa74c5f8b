//! Where contexts are cut from: a text of the user's, or one that is made up.

use super::case::{Case, Question};
use super::chat_frame::ChatFrame;
use super::dice::Dice;
use super::error::NeedleError;
use super::facts;
use super::filler::Filler;

/// How deep the last fact but one stands at most; the last one stands at the very end.
const DEEPEST: f64 = 0.9;

/// Streams of a seed: what is drawn for contexts, facts and texts depends on nothing else.
const FACTS: u64 = 1 << 32;
const TEXTS: u64 = 2 << 32;

/// What contexts are made of.
#[derive(Clone, Debug)]
pub enum Haystack {
    /// A text made up, another for each context.
    Generated {
        /// Decides all of it.
        seed: u64,
    },
    /// Stretches of a text that begin at even distances.
    Text {
        /// The text.
        text: String,
        /// Decides which facts are hidden in it.
        seed: u64,
    },
}

/// Contexts, and what is hidden in each.
#[derive(Clone, Copy, Debug)]
pub struct Hiding {
    /// How many.
    pub contexts: usize,
    /// About how many tokens each, without the chat template's.
    pub tokens: usize,
    /// Facts in each: all but the last at even depths, the last at the end.
    pub facts: usize,
}

/// A sentence or a line, and how many tokens it is by itself.
#[derive(Clone)]
pub(super) struct Piece {
    text: String,
    tokens: usize,
}

impl Haystack {
    /// Contexts with facts in them that nobody could guess, and the questions for these.
    pub(super) fn cases(&self, frame: &ChatFrame<'_>, hiding: Hiding) -> Result<Vec<Case>, NeedleError> {
        let Hiding { contexts, tokens, facts } = hiding;
        if facts > facts::MOST {
            return Err(NeedleError::Facts { got: facts, limit: facts::MOST });
        }
        let all = self.pieces(frame)?;
        let case = |nth: usize| {
            let facts = facts::draw(&mut Dice::new(self.seed(), FACTS + nth as u64), facts);
            let depths = depths(facts.len());
            let mut needed = 0;
            for fact in &facts {
                needed += frame.plain(&fact.sentence)?.len() + 1;
            }
            let left = tokens.checked_sub(needed).filter(|left| *left > 0);
            let left = left.ok_or(NeedleError::Crowded { got: tokens, needed })?;
            let pieces = self.stretch(frame, all.as_deref(), nth as u64, (nth, contexts), left)?;
            let sentences: Vec<(f64, &str)> =
                depths.iter().zip(&facts).map(|(&depth, fact)| (depth, fact.sentence.as_str())).collect();
            let context = weave(&pieces, &sentences);
            let questions = depths
                .iter()
                .zip(&facts)
                .map(|(&depth, fact)| Question { depth: Some(depth), ..fact.question.clone() });
            Ok(Case { context, questions: questions.collect() })
        };
        (0..contexts).map(case).collect()
    }

    /// Texts of `tokens` tokens each, to be read on and on.
    pub(super) fn texts(
        &self,
        frame: &ChatFrame<'_>,
        count: usize,
        tokens: usize,
    ) -> Result<Vec<Vec<u32>>, NeedleError> {
        let all = self.pieces(frame)?;
        let text = |nth: usize| {
            // Pieces side by side may be fewer tokens than they are by themselves.
            let pieces = self.stretch(frame, all.as_deref(), TEXTS + nth as u64, (nth, count), tokens + tokens / 8)?;
            let text: String = pieces.iter().map(|piece| piece.text.as_str()).collect();
            let mut text = frame.text(&text)?;
            if text.len() < tokens {
                return Err(NeedleError::Short { got: text.len(), needed: tokens });
            }
            text.truncate(tokens);
            Ok(text)
        };
        (0..count).map(text).collect()
    }

    fn seed(&self) -> u64 {
        match self {
            Self::Generated { seed } | Self::Text { seed, .. } => *seed,
        }
    }

    /// All pieces of a user's text.
    fn pieces(&self, frame: &ChatFrame<'_>) -> Result<Option<Vec<Piece>>, NeedleError> {
        match self {
            Self::Generated { .. } => Ok(None),
            Self::Text { text, .. } => {
                cut(text).map(|text| Piece::new(frame, text)).collect::<Result<_, _>>().map(Some)
            }
        }
    }

    /// Pieces that come to `tokens` tokens and no more than one piece above: number `nth` of `of` stretches of the pieces of a
    /// text, or what stream number `stream` has.
    fn stretch(
        &self,
        frame: &ChatFrame<'_>,
        all: Option<&[Piece]>,
        stream: u64,
        (nth, of): (usize, usize),
        tokens: usize,
    ) -> Result<Vec<Piece>, NeedleError> {
        let mut stretch = Vec::new();
        let mut got = 0;
        let Some(all) = all else {
            let mut filler = Filler::new(Dice::new(self.seed(), stream));
            while got < tokens {
                let paragraph = filler.next().unwrap_or_default();
                for text in cut(&paragraph) {
                    if got >= tokens {
                        break;
                    }
                    let piece = Piece::new(frame, text)?;
                    got += piece.tokens;
                    stretch.push(piece);
                }
            }
            return Ok(stretch);
        };
        let total: usize = all.iter().map(|piece| piece.tokens).sum();
        let room = total.checked_sub(tokens).ok_or(NeedleError::Short { got: total, needed: tokens })?;
        let start = room * nth / (of - 1).max(1);
        let mut before = 0;
        for piece in all {
            // The first whole piece from there on, and back where the text is at its end.
            if before >= start && got < tokens {
                got += piece.tokens;
                stretch.push(piece.clone());
            }
            before += piece.tokens;
        }
        Ok(stretch)
    }
}

impl Piece {
    fn new(frame: &ChatFrame<'_>, text: &str) -> Result<Self, NeedleError> {
        Ok(Self { text: text.to_owned(), tokens: frame.plain(text)?.len() })
    }
}

/// The sentences and lines of a text, with the white space behind them: together they are the text.
fn cut(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        let mut last = ' ';
        let end = rest.char_indices().find_map(|(at, char)| {
            let ends = char == '\n' || char == ' ' && matches!(last, '.' | '!' | '?');
            last = char;
            ends.then_some(at + char.len_utf8())
        });
        let (piece, after) = rest.split_at(end.unwrap_or(rest.len()));
        rest = after;
        (!piece.is_empty()).then_some(piece)
    })
}

/// Depths of so many facts, of 1: even ones down to [`DEEPEST`], and the end; a single one in the middle of these.
fn depths(count: usize) -> Vec<f64> {
    let even = count.saturating_sub(1).max(1);
    (0..count)
        .map(|nth| match (nth, even) {
            (nth, _) if nth > 0 && nth == count - 1 => 1.0,
            (_, 1) => DEEPEST / 2.0,
            (nth, even) => DEEPEST * nth as f64 / (even - 1) as f64,
        })
        .collect()
}

/// The pieces with each sentence before the first piece that begins at its depth or below, by tokens.
fn weave(pieces: &[Piece], sentences: &[(f64, &str)]) -> String {
    let total: usize = pieces.iter().map(|piece| piece.tokens).sum();
    let mut text = String::new();
    let mut left = sentences.iter().peekable();
    let mut before = 0;
    for tokens in pieces.iter().map(Some).chain([None]) {
        while let Some((_, sentence)) =
            left.next_if(|(depth, _)| tokens.is_none() || before as f64 >= depth * total as f64)
        {
            let gap = if text.is_empty() || text.ends_with(char::is_whitespace) { "" } else { " " };
            let end = if text.ends_with('\n') { "\n" } else { " " };
            text.push_str(gap);
            text.push_str(sentence);
            text.push_str(end);
        }
        if let Some(piece) = tokens {
            text.push_str(&piece.text);
            before += piece.tokens;
        }
    }
    text.truncate(text.trim_end().len());
    text
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use crate::gguf::Gguf;
    use crate::tiny::{TinyArchitecture, TinyModel};
    use crate::tokenizer::Tokenizer;

    fn tokenizer() -> Tokenizer {
        let gguf = Gguf::from_bytes(TinyModel::new(TinyArchitecture::Llama).gguf().unwrap()).unwrap();
        Tokenizer::from_metadata(gguf.metadata(), None).unwrap()
    }

    #[test]
    fn facts_stand_where_their_depths_say() {
        assert_eq!(depths(1), [0.45]);
        assert_eq!(depths(2), [0.45, 1.0]);
        assert_eq!(depths(4), [0.0, 0.45, 0.9, 1.0]);
        let ten = depths(10);
        assert_eq!((ten.len(), ten[0], ten[8], ten[9]), (10, 0.0, 0.9, 1.0));

        let pieces: Vec<Piece> = (0..10).map(|n| Piece { text: format!("{n} "), tokens: 2 }).collect();
        assert_eq!(weave(&pieces, &[(0.0, "A."), (0.45, "B."), (1.0, "C.")]), "A. 0 1 2 3 4 B. 5 6 7 8 9 C.");
        // Between lines a sentence is a line.
        let lines: Vec<Piece> = (0..4).map(|n| Piece { text: format!("{n}\n"), tokens: 3 }).collect();
        assert_eq!(weave(&lines, &[(0.5, "A."), (0.5, "B.")]), "0\n1\nA.\nB.\n2\n3");
        // Depths count tokens, not pieces.
        let uneven = [("long. ", 30), ("x. ", 1), ("y. ", 1)].map(|(text, tokens)| Piece { text: text.into(), tokens });
        assert_eq!(weave(&uneven, &[(0.2, "A.")]), "long. A. x. y.");
    }

    #[test]
    fn pieces_are_the_text() {
        let text = "One. Two? \"Three!\" said he.\n\nfn four() {\n    five();\n}\nsix 7.5 eight. ";
        let pieces: Vec<&str> = cut(text).collect();
        assert_eq!(pieces.concat(), text);
        assert_eq!(pieces[..3], ["One. ", "Two? ", "\"Three!\" said he.\n"]);
        assert_eq!(cut("").count(), 0);
    }

    #[test]
    fn generated_contexts_are_as_long_as_asked_and_their_own() {
        let tokenizer = tokenizer();
        let frame = ChatFrame::new(&tokenizer, None).unwrap();
        let hiding = Hiding { contexts: 3, tokens: 6000, facts: 10 };
        let haystack = Haystack::Generated { seed: 5 };
        let cases = haystack.cases(&frame, hiding).unwrap();
        for case in &cases {
            let got = frame.plain(&case.context).unwrap().len();
            assert!(got.abs_diff(6000) < 120, "{got} tokens");
            assert!(case.check().is_ok());
            for question in &case.questions {
                let sentence = format!("{} {}.", question.prefix, question.answer);
                let at = case.context.find(&sentence).unwrap() as f64 / case.context.len() as f64;
                assert!((at - question.depth.unwrap()).abs() < 0.06, "{sentence} at {at}");
                assert_eq!(case.context.matches(&question.answer).count(), 1, "{sentence}");
            }
            let mut counts: HashMap<&str, usize> = HashMap::new();
            cut(&case.context).for_each(|piece| *counts.entry(piece.trim()).or_default() += 1);
            // Lines of code are short and alike.
            let most = counts.iter().filter(|(text, _)| text.len() > 24).max_by_key(|(_, count)| **count);
            assert!(*most.unwrap().1 <= 2, "{most:?}");
        }
        assert_ne!(cases[0].context, cases[1].context);
        assert_eq!(haystack.cases(&frame, hiding).unwrap(), cases);
        assert_ne!(Haystack::Generated { seed: 6 }.cases(&frame, hiding).unwrap(), cases);
        for text in haystack.texts(&frame, 3, 500).unwrap() {
            assert_eq!(text.len(), 500);
        }
    }

    #[test]
    fn stretches_of_a_text_lie_evenly_and_reach_its_end() {
        let tokenizer = tokenizer();
        let frame = ChatFrame::new(&tokenizer, None).unwrap();
        let text: String = (0..400).map(|n| format!("Sentence number {n} is here. ")).collect();
        let haystack = Haystack::Text { text: text.clone(), seed: 1 };
        let cases = haystack.cases(&frame, Hiding { contexts: 3, tokens: 3000, facts: 2 }).unwrap();
        assert!(cases[0].context.starts_with("Sentence number 0 is"));
        assert!(cases[2].context.contains("Sentence number 399 is") && !cases[2].context.contains("number 0 is"));
        assert!(cases[1].context.contains("Sentence number 200 is"));
        let short = haystack.cases(&frame, Hiding { contexts: 1, tokens: 300_000, facts: 2 }).unwrap_err().to_string();
        assert!(short.starts_with("the text has ") && short.ends_with(" are needed"), "{short}");
        let crowded = haystack.cases(&frame, Hiding { contexts: 1, tokens: 50, facts: 20 }).unwrap_err().to_string();
        assert!(crowded.contains("50 tokens"), "{crowded}");
        let many = haystack.cases(&frame, Hiding { contexts: 1, tokens: 500, facts: 21 }).unwrap_err().to_string();
        assert_eq!(many, "21 facts a context were asked for; there are 20");
    }
}
