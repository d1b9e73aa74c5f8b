//! Which channels of its keys a KV group can do without.

/// How a policy gives up channels of keys when a prompt has been read.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KeyChannels {
    /// Last queries of the prompt that are asked.
    pub window: usize,
    /// The part of the channels that goes, from 0 to below 1.
    pub fraction: f64,
    /// Newest tokens of the prompt whose keys stay whole.
    pub recent: usize,
}

impl KeyChannels {
    /// How many of `head_dim` channels go: `floor(fraction head_dim)`.
    #[must_use]
    pub fn num_dropped(&self, head_dim: usize) -> usize {
        // No channel is lost to how a fraction is stored.
        (self.fraction * head_dim as f64 + 1e-9) as usize
    }

    /// The channels that go, ascending, by their [`channel_scores`]: the lowest, ties to the lower channel. NaN counts as highest: what
    /// is not known to be small stays.
    #[must_use]
    pub fn dropped(&self, scores: &[f64]) -> Vec<usize> {
        let mut channels: Vec<usize> = (0..scores.len()).collect();
        channels.sort_by(|&a, &b| scores[a].abs().total_cmp(&scores[b].abs()));
        channels.truncate(self.num_dropped(scores.len()));
        channels.sort_unstable();
        channels
    }
}

/// What each channel weighs in the logits, `[head_dim]`: the mean over a group's heads and the queries asked of `q_i^2`, times the mean
/// over keys of `k_i^2` (ThinK, Xu et al. 2024, equation 4 without its pairs of channels). `query_squares` `[group_size, head_dim]` are
/// sums over `num_queries` queries, `keys` `[tokens, head_dim]`, both after RoPE.
#[must_use]
pub fn channel_scores(query_squares: &[f64], num_queries: usize, keys: &[f32], head_dim: usize) -> Vec<f64> {
    let (num_heads, num_keys) = (query_squares.len() / head_dim, keys.len() / head_dim);
    let mut key_squares = vec![0.0; head_dim];
    for key in keys.chunks_exact(head_dim) {
        key_squares.iter_mut().zip(key).for_each(|(sum, k)| *sum += f64::from(*k) * f64::from(*k));
    }
    let of_channel = |(channel, keys): (usize, f64)| {
        let queries: f64 = query_squares.chunks_exact(head_dim).map(|head| head[channel]).sum();
        queries / (num_queries * num_heads).max(1) as f64 * (keys / num_keys.max(1) as f64)
    };
    key_squares.into_iter().enumerate().map(of_channel).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lightest_channels_go() {
        let channels = |fraction| KeyChannels { window: 8, fraction, recent: 0 };
        let scores = [0.3, 0.1, f64::NAN, 0.1, 0.0];
        assert_eq!(channels(0.0).dropped(&scores), [0_usize; 0]);
        assert_eq!(channels(0.4).dropped(&scores), [1, 4]);
        assert_eq!(channels(0.8).dropped(&scores), [0, 1, 3, 4]);
        assert_eq!([0.4, 0.7].map(|part| channels(part).num_dropped(10)), [4, 7]);
        // Two heads, two queries each: means of squares 2.5 and 1, of keys 5 and 0.5.
        let scores = channel_scores(&[4.0, 2.0, 6.0, 2.0], 2, &[1.0, 0.0, 3.0, -1.0], 2);
        assert_eq!(scores, [12.5, 0.5]);
        assert_eq!(channel_scores(&[], 0, &[], 2), [0.0, 0.0]);
    }
}
