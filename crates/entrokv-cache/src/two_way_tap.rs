//! What a policy may be shown of attention that looks both ways.

/// Column sums of attention inside blocks of a prompt, every query seeing every key of its block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TwoWayTap {
    /// None.
    #[default]
    None,
    /// Of every token but those left out.
    Sums {
        /// Tokens of a block; blocks begin at fixed positions, `first` and every so many tokens after it.
        chunk: usize,
        /// Tokens left out at the beginning of a sequence.
        first: usize,
        /// Tokens left out at the end of a prompt.
        last: usize,
        /// What a dot product is multiplied with.
        scale: LogitScale,
    },
}

/// What a dot product is multiplied with to make it a logit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogitScale {
    /// 1.
    Unscaled,
    /// The model's factor.
    Scaled,
}
