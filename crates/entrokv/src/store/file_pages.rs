//! Bytes of whole pages on their way into KV files and back.

use entrokv_cache::PagePlace;

use super::Store;

impl Store {
    /// Appends the bytes of a page to `out`, its slots from `len` on being zeros: what another sequence left in the frame is
    /// nobody's business.
    pub fn page_bytes(&self, page: &PagePlace, len: usize, out: &mut Vec<u8>) {
        let frame = self.arena.bytes(page.range.clone());
        if len == self.page_size {
            out.extend_from_slice(frame);
            return;
        }
        // A page that is not full is plain, and plain numbers come back as they were stored.
        let layout = self.layout(page.kind);
        let first = out.len();
        out.resize(first + frame.len(), 0);
        let (mut k, mut v) = (vec![0.0; self.head_dim], vec![0.0; self.head_dim]);
        for slot in 0..len {
            layout.read_token(frame, slot, None, &mut k, &mut v);
            layout.write_token(&mut out[first..], slot, &k, &v);
        }
    }

    /// Makes `bytes` those of a page, which is as long.
    pub fn set_page_bytes(&mut self, page: &PagePlace, bytes: &[u8]) {
        self.arena.bytes_mut(page.range.clone()).copy_from_slice(bytes);
    }
}
