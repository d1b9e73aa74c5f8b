//! How queries meet keys in a model: RoPE and the scale of logits, for scorers that reckon with queries to come.

/// RoPE of the layers a policy looks after, and what a logit is: `scale * R(t) q . R(s) k`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct AttentionForm<'a> {
    /// Inverse frequencies in radians a position, one a pair of channels; channels beyond the last pair do not turn.
    pub frequencies: &'a [f64],
    /// Which channels are a pair.
    pub pairs: RotaryPairs,
    /// What a dot product is multiplied with.
    pub scale: f32,
}

/// Which two channels RoPE turns together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RotaryPairs {
    /// `i` and `i + n` of `n` pairs.
    #[default]
    Halves,
    /// `2i` and `2i + 1`.
    Neighbours,
}

impl AttentionForm<'_> {
    /// The channels of each pair, in the order of the frequencies.
    pub fn pairs(&self) -> impl Iterator<Item = (usize, usize)> {
        let (kind, num_pairs) = (self.pairs, self.frequencies.len());
        (0..num_pairs).map(move |pair| match kind {
            RotaryPairs::Halves => (pair, pair + num_pairs),
            RotaryPairs::Neighbours => (2 * pair, 2 * pair + 1),
        })
    }
}
