//! What one KV head's list holds, found out in one pass that also checks it: a decode step has tens of thousands of segments.

use super::coded::KeyCodes;
use super::{AttentionParams, Segment};
use crate::codes::KeyConstants;
use crate::simd::LANES;

/// What a call must know of a list.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Contents {
    /// Codes of its keys.
    pub(super) key_codes: KeyCodes,
    /// Whether some of its values are stored rotated.
    pub(super) has_rotated_values: bool,
}

impl Contents {
    /// Those of `list`, to be read with `constants`.
    ///
    /// Panics with what is wrong, so that the kernels' reads are inside what they were given.
    pub(super) fn of(params: &AttentionParams, list: &[Segment<'_>], constants: Option<&KeyConstants>) -> Contents {
        let mut contents = Contents::default();
        let (mut formats, mut frame_bytes, mut any_coded) = (None, 0, false);
        // Bits of positions below 16: all 0 where every page starts at a multiple of it.
        let (mut end, mut low_bits) = (0, 0);
        for segment in list {
            if formats != Some([segment.keys, segment.values]) {
                formats = Some([segment.keys, segment.values]);
                let layout = params.layout(segment);
                assert_eq!(layout.validate(), Ok(()));
                frame_bytes = layout.bytes();
                assert!(
                    !segment.keys.is_rotated() || constants.is_some_and(|c| c.head_dim() == params.head_dim),
                    "rotated keys need constants of {} channels",
                    params.head_dim
                );
                any_coded |= segment.keys.is_coded() || segment.values.is_coded();
                contents.key_codes = contents.key_codes.with(segment.keys);
                contents.has_rotated_values |= segment.values.is_rotated();
            }
            assert_eq!(segment.frame.len(), frame_bytes, "bytes of a frame");
            assert!(segment.len as usize <= params.page_size, "{} tokens in a page", segment.len);
            let position = u64::from(segment.position);
            assert!(position >= end, "segments must be in ascending order and must not overlap");
            end = position + u64::from(segment.len);
            low_bits |= segment.position % LANES as u32;
        }
        assert!(!any_coded || low_bits == 0, "pages beside coded ones start at multiples of {LANES}");
        contents
    }
}
