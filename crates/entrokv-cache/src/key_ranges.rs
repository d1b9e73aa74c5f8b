//! Smallest and largest key elements of pages: what can be known of a page without reading it.

/// The ranges of the keys in the pages of one KV group, channel by channel.
#[derive(Clone, Debug, PartialEq)]
pub struct KeyRanges {
    head_dim: usize,
    /// First positions of the pages, ascending.
    first_positions: Vec<u32>,
    /// `[pages, 2, head_dim]`: smallest, then largest elements.
    ranges: Vec<f32>,
}

impl KeyRanges {
    /// Of no page yet, with keys of `head_dim` elements.
    #[must_use]
    pub fn new(head_dim: usize) -> Self {
        Self { head_dim, first_positions: Vec::new(), ranges: Vec::new() }
    }

    /// Adds the page that begins at `first_position`, behind all others, with its range as [`key_range`] has it.
    ///
    /// # Panics
    /// If the page is not behind the others, or the range is of keys of another length.
    pub fn push(&mut self, first_position: u32, range: &[f32]) {
        assert!(self.first_positions.last().is_none_or(|last| *last < first_position), "pages ascend");
        assert_eq!(range.len(), 2 * self.head_dim, "two numbers a channel");
        self.first_positions.push(first_position);
        self.ranges.extend_from_slice(range);
    }

    /// First positions of the pages, ascending.
    #[must_use]
    pub fn first_positions(&self) -> &[u32] {
        &self.first_positions
    }

    /// Smallest and largest elements `[head_dim]` of the page at `place` of those.
    ///
    /// # Panics
    /// If there are not so many pages.
    #[must_use]
    pub fn at(&self, place: usize) -> (&[f32], &[f32]) {
        self.ranges[2 * place * self.head_dim..2 * (place + 1) * self.head_dim].split_at(self.head_dim)
    }

    /// Forgets the pages that do not begin at one of `held` (ascending).
    pub fn retain(&mut self, held: &[u32]) {
        if self.first_positions.iter().all(|first| held.binary_search(first).is_ok()) {
            return;
        }
        let mut kept = Self::new(self.head_dim);
        for (place, first) in self.first_positions.iter().enumerate() {
            if held.binary_search(first).is_ok() {
                let (low, high) = self.at(place);
                kept.first_positions.push(*first);
                kept.ranges.extend(low.iter().chain(high));
            }
        }
        *self = kept;
    }

    /// Bytes it takes beside itself.
    #[must_use]
    pub fn heap_bytes(&self) -> u64 {
        let bytes = self.first_positions.capacity() * size_of::<u32>() + self.ranges.capacity() * size_of::<f32>();
        bytes as u64
    }
}

/// Smallest, then largest elements of `keys` `[tokens, head_dim]` in each channel: `[2, head_dim]`. What is no number is passed over.
///
/// # Panics
/// If there is no key.
#[must_use]
pub fn key_range(keys: &[f32], head_dim: usize) -> Vec<f32> {
    assert!(!keys.is_empty(), "a page holds a token");
    let (mut low, mut high) = (keys[..head_dim].to_vec(), keys[..head_dim].to_vec());
    for key in keys.chunks_exact(head_dim).skip(1) {
        low.iter_mut().zip(key).for_each(|(low, k)| *low = low.min(*k));
        high.iter_mut().zip(key).for_each(|(high, k)| *high = high.max(*k));
    }
    low.extend_from_slice(&high);
    low
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_keep_their_ranges_when_others_go() {
        assert_eq!(key_range(&[1.0, -2.0, 0.5, 3.0, f32::NAN, 0.0], 2), [0.5, -2.0, 1.0, 3.0]);
        let mut ranges = KeyRanges::new(2);
        for page in 0..4_u32 {
            let first = page as f32;
            ranges.push(16 * page, &key_range(&[first, 1.0, -1.0, first], 2));
        }
        ranges.retain(&[0, 32, 48, 64]);
        assert_eq!(ranges.first_positions(), [0, 32, 48]);
        assert_eq!(ranges.at(1), (&[-1.0, 1.0][..], &[2.0, 2.0][..]));
        let held = ranges.clone();
        ranges.retain(&[0, 16, 32, 48]);
        assert_eq!(ranges, held);
        assert!(ranges.heap_bytes() >= 3 * 20);
    }
}
