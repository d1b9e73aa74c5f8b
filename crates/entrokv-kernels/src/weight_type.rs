//! The tensor types of weights, and how many bytes their rows take.

/// How the weights of one tensor are stored, as GGUF files name it.
///
/// Quantised types store blocks of consecutive columns of one row: 32 of them (`Q*_0`, `Q*_1`) or 256 (`Q*_K`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WeightType {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// The upper half of an [`WeightType::F32`].
    Bf16,
    /// 4-bit codes less 8, one f16 scale per 32.
    Q4_0,
    /// 4-bit codes, one f16 scale and one f16 minimum per 32.
    Q4_1,
    /// 5-bit codes less 16, one f16 scale per 32.
    Q5_0,
    /// 5-bit codes, one f16 scale and one f16 minimum per 32.
    Q5_1,
    /// Signed 8-bit codes, one f16 scale per 32.
    Q8_0,
    /// 2-bit codes, a 4-bit scale and a 4-bit minimum per 16, one f16 scale for each of these per 256.
    Q2K,
    /// 3-bit codes less 4, a 6-bit signed scale per 16, one f16 scale of scales per 256.
    Q3K,
    /// 4-bit codes, a 6-bit scale and a 6-bit minimum per 32, one f16 scale for each of these per 256.
    Q4K,
    /// 5-bit codes, scales and minima as in [`WeightType::Q4K`].
    Q5K,
    /// 6-bit codes less 32, an 8-bit signed scale per 16, one f16 scale of scales per 256.
    Q6K,
}

impl WeightType {
    /// Every type, in the order of the variants.
    pub const ALL: [WeightType; 13] = [
        WeightType::F32,
        WeightType::F16,
        WeightType::Bf16,
        WeightType::Q4_0,
        WeightType::Q4_1,
        WeightType::Q5_0,
        WeightType::Q5_1,
        WeightType::Q8_0,
        WeightType::Q2K,
        WeightType::Q3K,
        WeightType::Q4K,
        WeightType::Q5K,
        WeightType::Q6K,
    ];

    /// The type with this number in a GGUF file's tensor table, if it is one of ours.
    pub fn from_ggml(id: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|ty| ty.ggml_id() == id)
    }

    /// Its number in a GGUF file's tensor table.
    pub fn ggml_id(self) -> u32 {
        match self {
            WeightType::F32 => 0,
            WeightType::F16 => 1,
            WeightType::Q4_0 => 2,
            WeightType::Q4_1 => 3,
            WeightType::Q5_0 => 6,
            WeightType::Q5_1 => 7,
            WeightType::Q8_0 => 8,
            WeightType::Q2K => 10,
            WeightType::Q3K => 11,
            WeightType::Q4K => 12,
            WeightType::Q5K => 13,
            WeightType::Q6K => 14,
            WeightType::Bf16 => 30,
        }
    }

    /// Its name as GGUF tools print it.
    pub fn name(self) -> &'static str {
        match self {
            WeightType::F32 => "F32",
            WeightType::F16 => "F16",
            WeightType::Bf16 => "BF16",
            WeightType::Q4_0 => "Q4_0",
            WeightType::Q4_1 => "Q4_1",
            WeightType::Q5_0 => "Q5_0",
            WeightType::Q5_1 => "Q5_1",
            WeightType::Q8_0 => "Q8_0",
            WeightType::Q2K => "Q2_K",
            WeightType::Q3K => "Q3_K",
            WeightType::Q4K => "Q4_K",
            WeightType::Q5K => "Q5_K",
            WeightType::Q6K => "Q6_K",
        }
    }

    /// Whether its weights are codes that share scales; the others are floats.
    pub fn is_quantised(self) -> bool {
        self.block_len() > 1
    }

    /// Columns that one block holds.
    pub const fn block_len(self) -> usize {
        match self {
            WeightType::F32 | WeightType::F16 | WeightType::Bf16 => 1,
            WeightType::Q4_0 | WeightType::Q4_1 | WeightType::Q5_0 | WeightType::Q5_1 | WeightType::Q8_0 => 32,
            WeightType::Q2K | WeightType::Q3K | WeightType::Q4K | WeightType::Q5K | WeightType::Q6K => 256,
        }
    }

    /// Bytes that one block takes in the file.
    pub const fn block_bytes(self) -> usize {
        match self {
            WeightType::F32 => 4,
            WeightType::F16 | WeightType::Bf16 => 2,
            WeightType::Q4_0 => 2 + 16,
            WeightType::Q4_1 => 2 + 2 + 16,
            WeightType::Q5_0 => 2 + 4 + 16,
            WeightType::Q5_1 => 2 + 2 + 4 + 16,
            WeightType::Q8_0 => 2 + 32,
            WeightType::Q2K => 16 + 64 + 2 + 2,
            WeightType::Q3K => 32 + 64 + 12 + 2,
            WeightType::Q4K => 2 + 2 + 12 + 128,
            WeightType::Q5K => 2 + 2 + 12 + 32 + 128,
            WeightType::Q6K => 128 + 64 + 16 + 2,
        }
    }

    /// Bytes that a row of `cols` columns takes; `None` when `cols` is not a multiple of [`WeightType::block_len`] or the
    /// product overflows.
    pub fn row_bytes(self, cols: usize) -> Option<usize> {
        if !cols.is_multiple_of(self.block_len()) {
            return None;
        }
        (cols / self.block_len()).checked_mul(self.block_bytes())
    }
}

impl std::fmt::Display for WeightType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_is_found_by_its_number() {
        for ty in WeightType::ALL {
            assert_eq!(WeightType::from_ggml(ty.ggml_id()), Some(ty), "{ty}");
        }
        // Q8_1 is for activations only; 99 is no type at all.
        assert_eq!([9, 99].map(WeightType::from_ggml), [None, None]);
    }

    #[test]
    fn a_row_is_a_whole_number_of_blocks() {
        assert_eq!(WeightType::Q4_1.row_bytes(576), Some(360));
        assert_eq!(WeightType::Q6K.row_bytes(512), Some(420));
        assert_eq!(WeightType::Q6K.row_bytes(576), None);
        assert_eq!(WeightType::Bf16.row_bytes(7), Some(14));
        assert_eq!(WeightType::F32.row_bytes(usize::MAX), None);
    }
}
