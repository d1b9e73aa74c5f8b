//! How sure a count is.

/// The 97.5 % point of the normal distribution.
const Z: f64 = 1.959_963_984_540_054;

/// Wilson's 95 % interval of a share of which `count` of `total` are (Wilson 1927, with the score test inverted); all of it
/// where there is nothing to go by.
pub fn wilson(count: usize, total: usize) -> [f64; 2] {
    if total == 0 {
        return [0.0, 1.0];
    }
    let (n, share) = (total as f64, count as f64 / total as f64);
    let centre = share + Z * Z / (2.0 * n);
    let spread = Z * (share * (1.0 - share) / n + Z * Z / (4.0 * n * n)).sqrt();
    let scale = 1.0 + Z * Z / n;
    // Rounding must not carry it past what a share can be.
    [((centre - spread) / scale).clamp(0.0, share), ((centre + spread) / scale).clamp(share, 1.0)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_intervals() {
        // Newcombe 1998, table I, method 3 (81 of 263, 15 of 148, 0 of 20, 1 of 29), and a mirror image.
        let cases = [
            (81, 263, [0.2553, 0.3662]),
            (15, 148, [0.0624, 0.1605]),
            (0, 20, [0.0, 0.1611]),
            (1, 29, [0.0061, 0.1718]),
            (20, 20, [0.8389, 1.0]),
            (0, 0, [0.0, 1.0]),
        ];
        for (count, total, expected) in cases {
            let got = wilson(count, total);
            let close = got.iter().zip(expected).all(|(got, expected)| (got - expected).abs() < 5e-5);
            assert!(close, "{count} of {total}: {got:?}, not {expected:?}");
        }
    }
}
