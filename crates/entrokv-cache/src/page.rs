//! Pages: how one is numbered.

/// A page of one KV group: page `p` holds the positions `p * page_size` to `(p + 1) * page_size - 1`.
///
/// The number is the page's for the life of its sequence; evicting other pages does not change it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PageIndex(pub u32);

impl PageIndex {
    /// Absolute position of the page's first token.
    pub fn first_position(self, page_size: usize) -> u32 {
        self.0 * page_size as u32
    }
}
