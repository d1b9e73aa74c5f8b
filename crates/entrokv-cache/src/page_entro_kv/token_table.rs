//! Numbers kept for every resident token of a KV group.

/// `width` numbers a token, token-major, ascending by absolute position.
///
/// Position-indexed arrays would grow with the sequence; this grows with what is resident.
#[derive(Clone, Debug)]
pub(super) struct TokenTable {
    width: usize,
    positions: Vec<u32>,
    values: Vec<f64>,
}

impl TokenTable {
    /// An empty table.
    pub(super) fn new(width: usize) -> Self {
        Self { width, positions: Vec::new(), values: Vec::new() }
    }

    /// Positions of the tokens held, ascending.
    pub(super) fn positions(&self) -> &[u32] {
        &self.positions
    }

    /// Values of the tokens held, `[positions.len(), width]`.
    pub(super) fn values(&self) -> &[f64] {
        &self.values
    }

    /// As [`values`](Self::values), to be written.
    pub(super) fn values_mut(&mut self) -> &mut [f64] {
        &mut self.values
    }

    /// Bytes reserved.
    pub(super) fn bytes(&self) -> usize {
        self.positions.capacity() * size_of::<u32>() + self.values.capacity() * size_of::<f64>()
    }

    /// Forgets every token and keeps the memory.
    pub(super) fn clear(&mut self) {
        self.positions.clear();
        self.values.clear();
    }

    /// Makes the tokens held exactly those at `positions` (ascending): tokens not among them are dropped, tokens new to
    /// the table start at 0. Linear, in place, and without allocation unless the table outgrows what it ever held.
    pub(super) fn align(&mut self, positions: &[u32]) {
        if !positions.starts_with(&self.positions) {
            self.retain(positions);
        }
        // From the back, so that no value is overwritten before it has moved to its place.
        let mut held = self.positions.len();
        let width = self.width;
        self.positions.resize(positions.len(), 0);
        self.values.resize(positions.len() * width, 0.0);
        for (index, &position) in positions.iter().enumerate().rev() {
            if index + 1 == held && self.positions[index] == position {
                break; // everything before is in place already
            }
            if held > 0 && self.positions[held - 1] == position {
                held -= 1;
                self.values.copy_within(held * width..(held + 1) * width, index * width);
            } else {
                self.values[index * width..(index + 1) * width].fill(0.0);
            }
        }
        self.positions.copy_from_slice(positions);
    }

    /// Drops the tokens whose position is not in `positions`.
    fn retain(&mut self, positions: &[u32]) {
        let width = self.width;
        let mut wanted = positions.iter().copied().peekable();
        let mut kept = 0;
        for index in 0..self.positions.len() {
            let position = self.positions[index];
            while wanted.next_if(|&next| next < position).is_some() {}
            if wanted.next_if_eq(&position).is_some() {
                self.positions[kept] = position;
                self.values.copy_within(index * width..(index + 1) * width, kept * width);
                kept += 1;
            }
        }
        self.positions.truncate(kept);
        self.values.truncate(kept * width);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(positions: &[u32]) -> TokenTable {
        let mut table = TokenTable::new(2);
        table.align(positions);
        for (pair, &position) in table.values_mut().chunks_exact_mut(2).zip(positions) {
            pair.copy_from_slice(&[f64::from(position), -f64::from(position)]);
        }
        table
    }

    #[test]
    fn align_keeps_what_stays_drops_what_went_and_starts_what_came_at_zero() {
        let cases: [(&[u32], &[u32]); 9] = [
            (&[], &[]),
            (&[], &[3, 4]),
            (&[3, 4], &[]),
            (&[1, 2, 3], &[1, 2, 3]),
            (&[1, 2, 3], &[1, 2, 3, 4, 5]),
            (&[1, 2, 3, 4, 5], &[1, 5]),
            (&[1, 2, 3, 7], &[1, 3, 8, 9]),
            (&[4, 6, 8], &[1, 4, 5, 6, 7, 8, 9]),
            (&[4, 6, 8], &[5, 7, 8]),
        ];
        for (before, after) in cases {
            let mut table = table(before);
            table.align(after);
            assert_eq!(table.positions(), after);
            let expected: Vec<f64> = after
                .iter()
                .map(|position| if before.contains(position) { f64::from(*position) } else { 0.0 })
                .flat_map(|value| [value, if value == 0.0 { 0.0 } else { -value }])
                .collect();
            assert_eq!(table.values(), expected, "{before:?} to {after:?}");
        }
    }

    #[test]
    fn a_sliding_set_of_tokens_reserves_nothing_more() {
        let mut table = table(&(0..64).collect::<Vec<_>>());
        let reserved = table.bytes();
        for step in 0..1000 {
            let positions: Vec<u32> = (0..4).chain(step + 10..step + 70).collect();
            table.align(&positions);
        }
        assert_eq!(table.bytes(), reserved);
    }
}
