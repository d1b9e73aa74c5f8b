//! Seeded numbers to compute with.

/// A hash of `i` spread over [-0.5, 0.5).
pub(super) fn noise(i: usize) -> f32 {
    let i = i as u32;
    let z = (i ^ (i >> 16)).wrapping_mul(0x7feb_352d);
    let z = (z ^ (z >> 15)).wrapping_mul(0x846c_a68b);
    (z ^ (z >> 16)) as f32 / 4_294_967_296.0 - 0.5
}

/// `len` of them.
pub(super) fn noises(len: usize) -> Vec<f32> {
    (0..len).map(noise).collect()
}
