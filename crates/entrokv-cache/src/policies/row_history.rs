//! Yes or no for each of the last rows and each token.

/// A bit a row for every token of a KV group, of the last `num_rows` rows.
#[derive(Clone, Debug)]
pub(super) struct RowHistory {
    num_rows: usize,
    /// Rows added so far; the next one takes the place of the one so many before.
    next: usize,
    /// Ascending.
    positions: Vec<u32>,
    /// `[positions, ceil(num_rows / 64)]`: rows by their place modulo `num_rows`.
    words: Vec<u64>,
    /// Rows that saw the token, up to `num_rows`.
    num_seen: Vec<u32>,
}

impl RowHistory {
    pub(super) fn new(num_rows: usize) -> Self {
        Self { num_rows, next: 0, positions: Vec::new(), words: Vec::new(), num_seen: Vec::new() }
    }

    fn words_per_token(&self) -> usize {
        self.num_rows.div_ceil(64)
    }

    /// Adds a row over the tokens at `positions` (ascending), of which its query saw the first `num_seen`; `says` is its answer for
    /// each of those.
    pub(super) fn add(&mut self, positions: &[u32], num_seen: usize, says: impl Fn(usize) -> bool) {
        self.align(positions);
        let slot = self.next % self.num_rows;
        self.next += 1;
        let (word, bit) = (slot / 64, 1_u64 << (slot % 64));
        let words_per_token = self.words_per_token();
        for (token, words) in self.words.chunks_exact_mut(words_per_token).enumerate() {
            words[word] &= !bit;
            if token < num_seen {
                self.num_seen[token] = (self.num_seen[token] + 1).min(self.num_rows as u32);
                if says(token) {
                    words[word] |= bit;
                }
            }
        }
    }

    /// Makes the tokens held exactly those at `positions` (ascending): new ones have been seen by no row.
    pub(super) fn align(&mut self, positions: &[u32]) {
        let words_per_token = self.words_per_token();
        if !positions.starts_with(&self.positions) {
            let before = std::mem::replace(self, Self { next: self.next, ..Self::new(self.num_rows) });
            let mut held = 0;
            for &position in positions {
                held += before.positions[held..].iter().take_while(|&&other| other < position).count();
                let known = before.positions.get(held) == Some(&position);
                let words = &before.words[held * words_per_token..];
                self.words.extend((0..words_per_token).map(|word| if known { words[word] } else { 0 }));
                self.num_seen.push(if known { before.num_seen[held] } else { 0 });
            }
            self.positions.extend_from_slice(positions);
        }
        self.positions.extend_from_slice(&positions[self.positions.len()..]);
        self.words.resize(positions.len() * words_per_token, 0);
        self.num_seen.resize(positions.len(), 0);
    }

    /// Gives back the memory of tokens that are gone.
    pub(super) fn shrink(&mut self) {
        self.positions.shrink_to_fit();
        self.words.shrink_to_fit();
        self.num_seen.shrink_to_fit();
    }

    /// For each token at `positions` (ascending) how many of the last rows saw it, and how many of those said yes; 0 of 0 where none
    /// did.
    pub(super) fn at(&self, positions: &[u32]) -> impl Iterator<Item = (u32, u32)> {
        let words_per_token = self.words_per_token();
        let mut index = 0;
        positions.iter().map(move |&position| {
            index += self.positions[index..].iter().take_while(|&&other| other < position).count();
            if self.positions.get(index) != Some(&position) {
                return (0, 0);
            }
            let words = &self.words[index * words_per_token..(index + 1) * words_per_token];
            (self.num_seen[index], words.iter().map(|word| word.count_ones()).sum())
        })
    }

    pub(super) fn bytes(&self) -> u64 {
        let bytes = self.positions.capacity() * size_of::<u32>()
            + self.words.capacity() * size_of::<u64>()
            + self.num_seen.capacity() * size_of::<u32>();
        bytes as u64
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// However tokens come and go, the counts are those of a list of all rows.
        #[test]
        fn counts_are_those_of_the_last_rows(
            num_rows in 1_usize..70, steps in prop::collection::vec((any::<u32>(), 0_usize..4), 1..150),
        ) {
            let mut history = RowHistory::new(num_rows);
            let mut positions: Vec<u32> = vec![0, 1, 2];
            let mut said: Vec<Vec<(u32, bool)>> = Vec::new();
            for (step, &(noise, gone)) in steps.iter().enumerate() {
                positions.push(step as u32 + 3);
                if gone == 3 {
                    positions.remove(noise as usize % positions.len());
                }
                let says = |token: usize| noise.rotate_left(token as u32 * 7) & 1 == 1;
                history.add(&positions, positions.len(), says);
                said.push(positions.iter().enumerate().map(|(token, &position)| (position, says(token))).collect());
                let recent = &said[said.len().saturating_sub(num_rows)..];
                for (&position, (seen, yes)) in positions.iter().zip(history.at(&positions)) {
                    let of_token = || recent.iter().flatten().filter(|(other, _)| *other == position);
                    prop_assert_eq!(seen as usize, of_token().count());
                    prop_assert_eq!(yes as usize, of_token().filter(|(_, yes)| *yes).count());
                }
            }
        }
    }
}
