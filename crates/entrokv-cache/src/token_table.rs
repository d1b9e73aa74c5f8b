//! Numbers kept for every resident token of a KV group.

/// Columns of one number a token, ascending by absolute position.
///
/// Position-indexed arrays would grow with the sequence; this grows with what is resident, and shrinks when told to.
#[derive(Clone, Debug)]
pub(crate) struct TokenTable {
    positions: Vec<u32>,
    columns: Vec<Vec<f64>>,
}

impl TokenTable {
    /// An empty table.
    pub(crate) fn new(num_columns: usize) -> Self {
        Self { positions: Vec::new(), columns: vec![Vec::new(); num_columns] }
    }

    /// Positions of the tokens held, ascending.
    pub(crate) fn positions(&self) -> &[u32] {
        &self.positions
    }

    /// One column, `[positions.len()]`.
    pub(crate) fn column(&self, index: usize) -> &[f64] {
        &self.columns[index]
    }

    /// As [`column`](Self::column), to be written.
    pub(crate) fn column_mut(&mut self, index: usize) -> &mut [f64] {
        &mut self.columns[index]
    }

    /// The value of each token at `positions` (ascending) in one column, 0 for one that is not held.
    pub(crate) fn at(&self, index: usize, positions: &[u32]) -> impl Iterator<Item = f64> {
        let mut known = self.positions.iter().zip(&self.columns[index]).peekable();
        positions.iter().map(move |position| {
            while known.next_if(|(known, _)| *known < position).is_some() {}
            known.next_if(|(known, _)| *known == position).map_or(0.0, |(_, value)| *value)
        })
    }

    /// Number of columns.
    pub(crate) fn num_columns(&self) -> usize {
        self.columns.len()
    }

    /// Bytes reserved.
    pub(crate) fn bytes(&self) -> usize {
        let values: usize = self.columns.iter().map(Vec::capacity).sum();
        self.positions.capacity() * size_of::<u32>()
            + values * size_of::<f64>()
            + self.columns.capacity() * size_of::<Vec<f64>>()
    }

    /// Forgets every token and keeps the memory.
    pub(crate) fn clear(&mut self) {
        self.positions.clear();
        self.columns.iter_mut().for_each(Vec::clear);
    }

    /// Gives back the memory of tokens that are gone, but for an eighth that spares a growing table its next moves.
    pub(crate) fn shrink(&mut self) {
        let room = self.positions.len() + self.positions.len() / 8;
        self.positions.shrink_to(room);
        self.columns.iter_mut().for_each(|column| column.shrink_to(room));
    }

    /// Makes the tokens held exactly those at `positions` (ascending): tokens not among them are dropped, tokens new to
    /// the table start at 0. Linear, in place, and without allocation unless the table outgrows what it ever held.
    pub(crate) fn align(&mut self, positions: &[u32]) {
        if !positions.starts_with(&self.positions) {
            self.retain(positions);
            self.spread(positions);
        }
        // Tokens that are new stand at the end, but for the rare case `spread` has dealt with.
        for column in &mut self.columns {
            column.resize(positions.len(), 0.0);
        }
        self.positions.extend_from_slice(&positions[self.positions.len()..]);
    }

    /// Drops the tokens whose position is not in `positions`.
    fn retain(&mut self, positions: &[u32]) {
        let mut wanted = positions.iter().copied().peekable();
        let mut kept = 0;
        for index in 0..self.positions.len() {
            let position = self.positions[index];
            while wanted.next_if(|&next| next < position).is_some() {}
            if wanted.next_if_eq(&position).is_some() {
                self.positions[kept] = position;
                for column in &mut self.columns {
                    column[kept] = column[index];
                }
                kept += 1;
            }
        }
        self.positions.truncate(kept);
        self.columns.iter_mut().for_each(|column| column.truncate(kept));
    }

    /// Moves the tokens held, all of them in `positions`, to their places there, with 0 in the places between.
    fn spread(&mut self, positions: &[u32]) {
        if positions.starts_with(&self.positions) {
            return;
        }
        let mut held = self.positions.len();
        for column in &mut self.columns {
            column.resize(positions.len(), 0.0);
        }
        // From the back, so that no value is overwritten before it has moved.
        for (index, position) in positions.iter().enumerate().rev() {
            let source = held.checked_sub(1).filter(|&last| self.positions[last] == *position);
            for column in &mut self.columns {
                column[index] = source.map_or(0.0, |source| column[source]);
            }
            held -= usize::from(source.is_some());
        }
        self.positions.clear();
        self.positions.extend_from_slice(positions);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(positions: &[u32]) -> TokenTable {
        let mut table = TokenTable::new(2);
        table.align(positions);
        for (index, &position) in positions.iter().enumerate() {
            table.column_mut(0)[index] = f64::from(position);
            table.column_mut(1)[index] = -f64::from(position);
        }
        table
    }

    #[test]
    fn align_keeps_what_stays_drops_what_went_and_starts_what_came_at_zero() {
        let cases: [(&[u32], &[u32]); 10] = [
            (&[], &[]),
            (&[], &[3, 4]),
            (&[3, 4], &[]),
            (&[1, 2, 3], &[1, 2, 3]),
            (&[1, 2, 3], &[1, 2, 3, 4, 5]),
            (&[1, 2, 3, 4, 5], &[1, 5]),
            (&[1, 2, 3, 7], &[1, 3, 8, 9]),
            (&[4, 6, 8], &[1, 4, 5, 6, 7, 8, 9]),
            (&[4, 6, 8], &[5, 7, 8]),
            (&[4, 6, 8], &[1, 2, 3]),
        ];
        for (before, after) in cases {
            let mut table = table(before);
            table.align(after);
            assert_eq!(table.positions(), after);
            let kept = |position: &u32| if before.contains(position) { f64::from(*position) } else { 0.0 };
            let expected: Vec<f64> = after.iter().map(kept).collect();
            assert_eq!(table.column(0), expected, "{before:?} to {after:?}");
            let negated: Vec<f64> = expected.iter().map(|value| -value).collect();
            assert_eq!(table.column(1), negated, "{before:?} to {after:?}");
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
