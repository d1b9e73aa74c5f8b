//! Stop strings over streamed text: where to end an answer, and what may be shown meanwhile.
//!
//! Text arrives in pieces that know nothing of the stop strings, so a stop string may span any number of pieces.
//! Two invariants hold after every piece:
//!
//! 1. **No stop text escapes.** Nothing of the matched stop string, and nothing after it, is ever emitted.
//! 2. **Nothing else waits.** What is held back is exactly the longest end of the text that is still the beginning of
//!    some stop string; the rest is emitted at once.
//!
//! The answer does not depend on how the text is cut into pieces: a stop string hits at the moment its last byte
//! arrives, so of several matches the one that *ends* first wins (`bc` before `abcd`, which is not complete when `bc`
//! is), and of those that end together the longest. Waiting for a match that would start earlier, but may never
//! complete, would cost tokens nobody asked for.

use thiserror::Error;

/// Watches a stream of text for any of several stop strings.
///
/// Each stop string is matched by its own Knuth-Morris-Pratt automaton: constant work per byte and stop string
/// (amortised), however long or self-similar the stop strings are, as they come from whoever sends the request.
///
/// ```
/// use entrokv::stop::StopStrings;
///
/// let mut stops = StopStrings::new(["\nUser:"]).expect("no stop string is empty");
/// assert_eq!(stops.push("Yes.\nUs").emit, "Yes.");
/// assert_eq!(stops.push("ually").emit, "\nUsually");
/// assert!(stops.push("\nUser: and").hit);
/// ```
#[derive(Debug, Clone)]
pub struct StopStrings {
    patterns: Vec<Pattern>,
    /// The end of the text so far that is still the beginning of some stop string.
    held: String,
    matched: Option<usize>,
}

/// What one piece of text led to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StopOutcome {
    /// Text that may be shown now.
    pub emit: String,
    /// Whether a stop string is complete: generation ends here.
    pub hit: bool,
}

impl StopStrings {
    /// Watches for each of `stops`; an empty list never hits and holds nothing back.
    ///
    /// # Errors
    /// [`StopError::Empty`] for an empty stop string, which would match before the first token.
    pub fn new<S: Into<String>>(stops: impl IntoIterator<Item = S>) -> Result<Self, StopError> {
        let patterns = stops
            .into_iter()
            .enumerate()
            .map(|(index, stop)| match stop.into() {
                stop if stop.is_empty() => Err(StopError::Empty { index }),
                stop => Ok(Pattern::new(stop)),
            })
            .collect::<Result<_, _>>()?;
        Ok(Self { patterns, held: String::new(), matched: None })
    }

    /// Takes the next piece of text and returns what may be shown; after a hit every further piece is swallowed.
    pub fn push(&mut self, text: &str) -> StopOutcome {
        if self.matched.is_some() {
            return StopOutcome { emit: String::new(), hit: true };
        }
        for (offset, byte) in text.bytes().enumerate() {
            self.matched = self.advance(byte);
            if let Some(index) = self.matched {
                let mut emit = std::mem::take(&mut self.held);
                emit.push_str(&text[..=offset]);
                emit.truncate(emit.len() - self.patterns[index].text.len());
                return StopOutcome { emit, hit: true };
            }
        }
        // A beginning of a stop string starts with a whole character and the text ends with one, so the cut lies
        // between two characters.
        let held_len = self.patterns.iter().map(|pattern| pattern.matched_len).max().unwrap_or(0);
        let mut emit = std::mem::take(&mut self.held);
        emit.push_str(text);
        self.held = emit.split_off(emit.len() - held_len);
        StopOutcome { emit, hit: false }
    }

    /// Returns the text still held back, at the end of a generation; empty after a hit.
    ///
    /// The watcher forgets where it was: text pushed afterwards starts a new stream.
    pub fn finish(&mut self) -> String {
        self.matched = None;
        self.patterns.iter_mut().for_each(|pattern| pattern.matched_len = 0);
        std::mem::take(&mut self.held)
    }

    /// Returns the stop string that ended the text, if one did.
    pub fn matched(&self) -> Option<&str> {
        self.matched.map(|index| self.patterns[index].text.as_str())
    }

    /// Feeds one byte to every automaton and returns the longest stop string that it completes.
    fn advance(&mut self, byte: u8) -> Option<usize> {
        let mut complete: Option<(usize, usize)> = None;
        for (index, pattern) in self.patterns.iter_mut().enumerate() {
            if pattern.advance(byte) && complete.is_none_or(|(len, _)| pattern.text.len() > len) {
                complete = Some((pattern.text.len(), index));
            }
        }
        complete.map(|(_, index)| index)
    }
}

/// One stop string and how much of it the text ends with.
#[derive(Debug, Clone)]
struct Pattern {
    text: String,
    /// `borders[n]`: length of the longest proper prefix of `text[..n + 1]` that is also its suffix.
    borders: Vec<usize>,
    /// Length in bytes of the longest prefix of `text` that the stream so far ends with.
    matched_len: usize,
}

impl Pattern {
    fn new(text: String) -> Self {
        let bytes = text.as_bytes();
        let mut borders = vec![0; bytes.len()];
        for end in 1..bytes.len() {
            borders[end] = longer_border(bytes, &borders, borders[end - 1], bytes[end]);
        }
        Self { text, borders, matched_len: 0 }
    }

    /// Returns whether `byte` completes the stop string.
    fn advance(&mut self, byte: u8) -> bool {
        self.matched_len = longer_border(self.text.as_bytes(), &self.borders, self.matched_len, byte);
        self.matched_len == self.text.len()
    }
}

/// Extends by `byte` the longest border of `pattern[..len]` that it can extend; the Knuth-Morris-Pratt step.
///
/// `len` is under the pattern's length: a complete match ends the search.
fn longer_border(pattern: &[u8], borders: &[usize], mut len: usize, byte: u8) -> usize {
    while len > 0 && pattern[len] != byte {
        len = borders[len - 1];
    }
    len + usize::from(pattern[len] == byte)
}

/// Why a list of stop strings is refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum StopError {
    /// An empty stop string, at `index` of the list.
    #[error("stop string {index} is empty, but must have at least 1 byte")]
    Empty {
        /// Place in the list, from 0.
        index: usize,
    },
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The whole stream at once: the text before the match that ends first (the longest of those), or all of it.
    fn naive(stops: &[String], text: &str) -> (String, Option<String>) {
        for end in 1..=text.len() {
            let seen = &text.as_bytes()[..end];
            let longest = stops.iter().filter(|stop| seen.ends_with(stop.as_bytes())).max_by_key(|stop| stop.len());
            if let Some(stop) = longest {
                return (text[..end - stop.len()].to_owned(), Some(stop.clone()));
            }
        }
        (text.to_owned(), None)
    }

    /// Length of the longest suffix of `text` that is a proper prefix of a stop string.
    fn naive_held(stops: &[String], text: &str) -> usize {
        let held = |len: &usize| {
            let suffix = &text.as_bytes()[text.len() - len..];
            stops.iter().any(|stop| stop.len() > *len && stop.as_bytes().starts_with(suffix))
        };
        (0..=text.len()).rev().find(held).unwrap_or(0)
    }

    fn run(stops: &[&str], pieces: &[&str]) -> (Vec<String>, bool, String) {
        let mut watch = StopStrings::new(stops.iter().copied()).unwrap();
        let outcomes: Vec<_> = pieces.iter().map(|piece| watch.push(piece)).collect();
        let hit = outcomes.last().is_some_and(|outcome| outcome.hit);
        (outcomes.into_iter().map(|outcome| outcome.emit).collect(), hit, watch.finish())
    }

    #[test]
    fn table() {
        struct Case {
            stops: &'static [&'static str],
            pieces: &'static [&'static str],
            emits: &'static [&'static str],
            hit: bool,
            rest: &'static str,
        }
        let cases = [
            // No stop strings: a pass-through.
            Case { stops: &[], pieces: &["a", ""], emits: &["a", ""], hit: false, rest: "" },
            // Spanning pieces, the stop text and what follows it swallowed.
            Case {
                stops: &["O P Q"],
                pieces: &["M N", " O", " P", " Q R", "S"],
                emits: &["M N", " ", "", "", ""],
                hit: true,
                rest: "",
            },
            // A beginning that comes to nothing is released in full, at once.
            Case { stops: &["abc"], pieces: &["xab", "d"], emits: &["x", "abd"], hit: false, rest: "" },
            // A beginning of a beginning stays held.
            Case { stops: &["aab"], pieces: &["aa", "a", "b"], emits: &["", "a", ""], hit: true, rest: "" },
            // The end of the text releases what is held.
            Case { stops: &["</s>"], pieces: &["5 <", "/s"], emits: &["5 ", ""], hit: false, rest: "</s" },
            // Overlapping stops: the one complete first wins.
            Case { stops: &["abcd", "bc"], pieces: &["xabcd"], emits: &["xa"], hit: true, rest: "" },
            // Ending together: the longest wins.
            Case { stops: &["c", "abc"], pieces: &["xabc"], emits: &["x"], hit: true, rest: "" },
            // One stop string's failure is another's beginning.
            Case { stops: &["ab!", "bc"], pieces: &["ab", "c"], emits: &["", "a"], hit: true, rest: "" },
            // Characters of several bytes sharing their first bytes with the stop string's.
            Case { stops: &["é"], pieces: &["è", "ê", "é"], emits: &["è", "ê", ""], hit: true, rest: "" },
            Case {
                stops: &["日本"], pieces: &["日", "月日", "本"], emits: &["", "日月", ""], hit: true, rest: ""
            },
            // Nothing to say before the stop.
            Case { stops: &["\n"], pieces: &["\n\n"], emits: &[""], hit: true, rest: "" },
        ];
        let failures: Vec<_> = cases
            .iter()
            .filter_map(|case| {
                let got = run(case.stops, case.pieces);
                let want = (case.emits.iter().map(ToString::to_string).collect(), case.hit, case.rest.to_owned());
                (got != want).then(|| format!("{:?} over {:?}: {got:?}, wanted {want:?}", case.stops, case.pieces))
            })
            .collect();
        assert!(failures.is_empty(), "{failures:#?}");
    }

    #[test]
    fn the_matched_stop_is_named_and_the_watcher_can_start_anew() {
        let mut watch = StopStrings::new(["END", "STOP"]).unwrap();
        assert_eq!(watch.matched(), None);
        assert_eq!(watch.push("a STOP b"), StopOutcome { emit: "a ".into(), hit: true });
        assert_eq!(watch.matched(), Some("STOP"));
        assert_eq!(watch.push("more"), StopOutcome { emit: String::new(), hit: true });
        assert_eq!(watch.finish(), "");
        assert_eq!(watch.push("more"), StopOutcome { emit: "more".into(), hit: false });
    }

    #[test]
    fn an_empty_stop_string_is_refused_by_its_place() {
        assert_eq!(StopStrings::new(["a", ""]).unwrap_err(), StopError::Empty { index: 1 });
    }

    #[test]
    fn a_self_similar_stop_string_costs_linear_time() {
        // 64 KiB of `a` and then `b` against 256 KiB of `a`: quadratic matching would take some 10^10 steps.
        let stop = "a".repeat(1 << 16) + "b";
        let mut watch = StopStrings::new([stop.as_str()]).unwrap();
        let outcome = watch.push(&"a".repeat(1 << 18));
        assert_eq!((outcome.emit.len(), outcome.hit), ((1 << 18) - (1 << 16), false));
        assert!(watch.push("b").hit);
    }

    /// A small alphabet, so that stops overlap and nearly match; two-byte letters share their first byte.
    fn letters(len: std::ops::Range<usize>) -> impl Strategy<Value = String> {
        prop::collection::vec(prop::sample::select(vec!['a', 'b', 'é', 'è', '日']), len).prop_map(String::from_iter)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2_000))]

        #[test]
        fn any_cut_of_the_text_gives_the_answer_of_the_whole_text(
            stops in prop::collection::vec(letters(1..5), 0..4),
            pieces in prop::collection::vec(letters(0..6), 0..8),
        ) {
            let (want, want_stop) = naive(&stops, &pieces.concat());
            let mut watch = StopStrings::new(stops.clone()).unwrap();
            let (mut shown, mut seen) = (String::new(), String::new());
            for piece in &pieces {
                let outcome = watch.push(piece);
                shown += &outcome.emit;
                seen += piece;
                if !outcome.hit {
                    prop_assert_eq!(shown.len(), seen.len() - naive_held(&stops, &seen), "after {:?}", seen);
                }
            }
            prop_assert_eq!(watch.matched().map(str::to_owned), want_stop);
            shown += &watch.finish();
            prop_assert_eq!(shown, want);
        }
    }
}
