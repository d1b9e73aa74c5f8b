//! Scores pooled with those of their neighbours.

/// How neighbouring scores become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolKind {
    /// Their mean, tokens beyond the ends counting 0.
    Average,
    /// The largest.
    Max,
}

/// Spellings.
pub(super) const POOLS: [(&str, PoolKind); 2] = [("avg", PoolKind::Average), ("max", PoolKind::Max)];

/// What a kernel may be, in words.
pub(super) const ODD_KERNEL: &str = "an odd number of tokens from 1 to 255";

/// The kernel a text names.
pub(super) fn odd_kernel(text: &str) -> Option<usize> {
    text.parse().ok().filter(|kernel| kernel % 2 == 1 && *kernel <= 255)
}

impl PoolKind {
    /// `values` (0 or more) pooled along `positions` (ascending) with an odd `kernel`: neighbours are those within half of it, and where
    /// there is none a mean counts 0.
    pub(super) fn along(self, positions: &[u32], values: &[f64], kernel: usize) -> Vec<f64> {
        let reach = (kernel / 2) as u32;
        let (mut start, mut end) = (0, 0);
        positions
            .iter()
            .map(|&position| {
                start += positions[start..].iter().take_while(|&&other| other < position.saturating_sub(reach)).count();
                end += positions[end..].iter().take_while(|&&other| other <= position.saturating_add(reach)).count();
                let near = values[start..end].iter().copied();
                match self {
                    PoolKind::Average => near.sum::<f64>() / kernel as f64,
                    PoolKind::Max => near.fold(0.0, f64::max),
                }
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn averages_count_what_lies_beyond_the_ends_as_nothing() {
        let pool = |values: &[f64], kernel, kind: PoolKind| {
            let positions: Vec<u32> = (0..values.len() as u32).collect();
            kind.along(&positions, values, kernel)
        };
        assert_eq!(pool(&[1.0; 6], 5, PoolKind::Average), [0.6, 0.8, 1.0, 1.0, 0.8, 0.6]);
        assert_eq!(pool(&[0.0, 3.0, 1.0, 0.0, 0.0], 3, PoolKind::Max), [3.0, 3.0, 3.0, 1.0, 0.0]);
        assert_eq!(pool(&[0.5, 0.25], 1, PoolKind::Average), [0.5, 0.25]);
        // After an eviction only neighbours in position are neighbours.
        assert_eq!(PoolKind::Average.along(&[0, 7, 8], &[1.0, 1.0, 1.0], 3), [1.0, 2.0, 2.0].map(|x| x / 3.0));
    }
}
