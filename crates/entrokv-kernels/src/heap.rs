//! What the heap keeps of memory that nothing lives in any more.

/// Gives the free parts of the heap back to the operating system, as far as the allocator can: the system's of glibc keeps blocks
/// under its threshold for the next allocation, which after a long prompt may be tens of megabytes that a cache does without from
/// then on. It walks the free blocks: some .1 ms, and milliseconds where there is much to give back. Elsewhere nothing happens.
pub fn give_back_freed() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: the function may be called at any time by any thread and takes no pointer; it only touches blocks that are free.
    // A process with another allocator has little in this heap, and nothing of the other one is touched.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// For a program to call as it starts: has the heap keep at most 2 MiB at the end of what each thread has allocated, instead of
/// twice the largest block that was ever freed, for [`give_back_freed`] cannot reach those of other threads. Blocks of up to 32 MiB
/// still come from the heap, so that a step's buffers cost no page faults. A setting of the whole process, no library's business.
pub fn keep_little() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: the function takes two integers and may be called at any time; values it does not like change nothing.
    unsafe {
        libc::mallopt(libc::M_TRIM_THRESHOLD, 2 << 20);
        libc::mallopt(libc::M_MMAP_THRESHOLD, 32 << 20);
    }
}
