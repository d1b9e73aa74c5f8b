//! Page-aligned memory for packed weights, in huge pages where the OS gives them.
//!
//! Decoding reads every weight once per token, so that ordinary pages cost a TLB miss every 4 KiB of it.

use std::io;

use memmap2::MmapMut;

/// Zeroed memory that starts on an OS page, hence on a cache line.
#[derive(Debug)]
pub(crate) struct Memory(MmapMut);

impl Memory {
    /// `bytes` bytes of zeros, `bytes > 0`.
    pub(crate) fn zeroed(bytes: usize) -> io::Result<Memory> {
        let map = MmapMut::map_anon(bytes)?;
        #[cfg(target_os = "linux")]
        {
            // Only advice: a kernel without huge pages answers with an error, and everything works without.
            let _ = map.advise(memmap2::Advice::HugePage);
        }
        Ok(Memory(map))
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}
