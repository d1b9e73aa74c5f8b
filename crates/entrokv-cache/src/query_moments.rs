//! What a policy may know of all of a sequence's queries without holding them: their number, sum and second moments.

/// What a policy is shown of queries when it decides, beside their attention rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum QueryTap {
    /// Nothing.
    #[default]
    None,
    /// Moments before RoPE of the queries read so far.
    Moments {
        /// Queries at positions before this one are left out.
        first: usize,
    },
}

/// Sums over the queries of the heads that read one KV group, before RoPE and after the model's norm of queries.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct QueryMoments<'a> {
    /// Queries of each head that were summed.
    pub count: usize,
    /// `[group_size, moments_len(head_dim)]`: of each head the sum of `q`, then the lower triangle of the sum of `q q^T`, row
    /// by row.
    pub sums: &'a [f64],
}

/// Numbers that the moments of one head take: `d` of the sum, `d (d + 1) / 2` of the products.
#[must_use]
pub const fn moments_len(head_dim: usize) -> usize {
    head_dim * (head_dim + 3) / 2
}

impl<'a> QueryMoments<'a> {
    /// The sum `[head_dim]` and the triangle of products of each head.
    pub fn heads(self, head_dim: usize) -> impl Iterator<Item = (&'a [f64], &'a [f64])> {
        self.sums.chunks_exact(moments_len(head_dim).max(1)).map(move |head| head.split_at(head_dim))
    }
}
