//! The numbers that weights are made of: the same on every machine, because only integers and additions are used.

/// SplitMix64 (Steele, Lea and Flood, 2014): a counter and a mixing function.
pub(super) struct Random {
    state: u64,
}

impl Random {
    /// The sequence of this seed.
    pub(super) fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A bell-shaped number of mean 0 and this standard deviation: the sum of four uniform ones.
    ///
    /// A true normal one would need logarithms, which libraries round differently.
    pub(super) fn bell(&mut self, deviation: f32) -> f32 {
        let bits = self.next();
        let sum: i32 = [0, 16, 32, 48].map(|shift| i32::from((bits >> shift) as u16)).iter().sum();
        // Four uniform numbers from 0 to 65535 have mean 131070 and variance 4 (65536^2 - 1) / 12.
        let centred = (sum - 131_070) as f32 / 37_837.2;
        centred * deviation
    }
}
