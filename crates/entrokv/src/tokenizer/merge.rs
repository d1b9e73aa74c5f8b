//! Greedy merging of neighbouring symbols: the loop that byte-pair encoding and SentencePiece share.
//!
//! Always the cheapest pair merges next, the leftmost one among equals, until no pair is left that may merge.
//! The two models differ only in what a pair costs: its place in the merge list, or its score turned upside down.

use std::{cmp::Reverse, collections::BinaryHeap};

/// A run of the text that has become one symbol.
#[derive(Clone, Copy, Debug)]
pub(super) struct Symbol {
    /// What the model calls this symbol; its own affair.
    pub(super) id: u32,
    /// First byte in the text.
    pub(super) start: u32,
    /// One past the last byte; equal to `start` once the left neighbour has swallowed the symbol.
    pub(super) end: u32,
    previous: u32,
    next: u32,
}

/// What two neighbours would become.
#[derive(Clone, Copy, Debug)]
pub(super) struct Merged {
    /// The lowest cost merges first.
    pub(super) cost: u32,
    /// The symbol that takes the place of the two.
    pub(super) id: u32,
}

/// A pair waiting in the queue. The order of the fields is the order of the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    cost: u32,
    left: u32,
    right: u32,
    /// Where the pair ended when it was queued: it is stale once one of the two has grown since.
    end: u32,
    id: u32,
}

/// No neighbour on this side.
const EDGE: u32 = u32::MAX;

/// The symbols of one piece of text, and the pairs that may merge; reusable from piece to piece.
#[derive(Debug, Default)]
pub(super) struct Merger {
    symbols: Vec<Symbol>,
    queue: BinaryHeap<Reverse<Candidate>>,
}

impl Merger {
    /// Forgets the previous piece, keeping the memory.
    pub(super) fn clear(&mut self) {
        self.symbols.clear();
        self.queue.clear();
    }

    /// Appends a symbol of `len` bytes. The text must be shorter than `u32::MAX` bytes, which the tokenizer checks.
    pub(super) fn push(&mut self, id: u32, len: u32) {
        let index = self.symbols.len() as u32;
        let (start, previous) = match self.symbols.last_mut() {
            Some(last) => {
                last.next = index;
                (last.end, index - 1)
            }
            None => (0, EDGE),
        };
        self.symbols.push(Symbol { id, start, end: start + len, previous, next: EDGE });
    }

    /// Merges until nothing can: `merged` says what two neighbours become, `None` if they stay apart.
    pub(super) fn merge(&mut self, merged: impl Fn(&Symbol, &Symbol) -> Option<Merged>) {
        for right in 1..self.symbols.len() as u32 {
            self.consider(right - 1, right, &merged);
        }
        while let Some(Reverse(pair)) = self.queue.pop() {
            let (left, right) = (self.symbols[pair.left as usize], self.symbols[pair.right as usize]);
            let stale = left.start == left.end || left.next != pair.right || right.end != pair.end;
            if stale {
                continue;
            }
            self.symbols[pair.left as usize] = Symbol { id: pair.id, end: right.end, next: right.next, ..left };
            self.symbols[pair.right as usize].end = right.start;
            if right.next != EDGE {
                self.symbols[right.next as usize].previous = pair.left;
                self.consider(pair.left, right.next, &merged);
            }
            if left.previous != EDGE {
                self.consider(left.previous, pair.left, &merged);
            }
        }
    }

    /// The symbols that remain, in the order of the text.
    pub(super) fn symbols(&self) -> impl Iterator<Item = &Symbol> {
        self.symbols.iter().filter(|symbol| symbol.start < symbol.end)
    }

    fn consider(&mut self, left: u32, right: u32, merged: &impl Fn(&Symbol, &Symbol) -> Option<Merged>) {
        let pair = (&self.symbols[left as usize], &self.symbols[right as usize]);
        if let Some(Merged { cost, id }) = merged(pair.0, pair.1) {
            self.queue.push(Reverse(Candidate { cost, left, right, end: pair.1.end, id }));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Merges the bytes of `text`: a pair may merge if `allowed` holds its text, at the cost of its place there.
    fn merge(text: &str, allowed: &[&str]) -> Vec<String> {
        let mut merger = Merger::default();
        for byte in text.bytes() {
            merger.push(u32::from(byte), 1);
        }
        merger.merge(|left, right| {
            let both = &text[left.start as usize..right.end as usize];
            let cost = allowed.iter().position(|candidate| *candidate == both)? as u32;
            Some(Merged { cost, id: 1000 + cost })
        });
        merger.symbols().map(|symbol| text[symbol.start as usize..symbol.end as usize].to_owned()).collect()
    }

    #[test]
    fn the_cheapest_pair_merges_first_and_the_leftmost_among_equals() {
        struct Case {
            text: &'static str,
            allowed: &'static [&'static str],
            merged: &'static [&'static str],
        }
        let cases = [
            Case { text: "", allowed: &[], merged: &[] },
            Case { text: "a", allowed: &["aa"], merged: &["a"] },
            Case { text: "aaa", allowed: &["aa"], merged: &["aa", "a"] },
            Case { text: "aaaaa", allowed: &["aa", "aaaa"], merged: &["aaaa", "a"] },
            Case { text: "abc", allowed: &["bc", "ab"], merged: &["a", "bc"] },
            Case { text: "abc", allowed: &["ab", "bc"], merged: &["ab", "c"] },
            Case { text: "abcd", allowed: &["bc", "abc", "abcd"], merged: &["abcd"] },
            Case { text: "abab", allowed: &["ba", "ab"], merged: &["a", "ba", "b"] },
        ];
        for Case { text, allowed, merged } in cases {
            assert_eq!(merge(text, allowed), merged, "{text} with {allowed:?}");
        }
    }

    #[test]
    fn a_pair_that_grew_since_it_was_queued_is_not_merged_at_its_old_cost() {
        // "bc" is queued at the start; "cd" merges first, so that the pair (b, cd) is another pair, and may not merge.
        assert_eq!(merge("bcd", &["cd", "bc"]), ["b", "cd"]);
    }

    #[test]
    fn the_buffer_forgets_the_previous_piece() {
        let mut merger = Merger::default();
        merger.push(7, 3);
        merger.clear();
        merger.push(8, 1);
        let symbols: Vec<_> = merger.symbols().map(|symbol| (symbol.id, symbol.start, symbol.end)).collect();
        assert_eq!(symbols, [(8, 0, 1)]);
    }
}
