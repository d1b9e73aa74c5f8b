use super::*;

/// Two layers of two KV heads, the second with a window of 5 tokens; 4-token pages of 128 bytes.
fn shape() -> Arc<CacheShape> {
    Arc::new(CacheShape::new(vec![LayerKind::Global, LayerKind::Window(5)], 2, 3, 8, 4).unwrap())
}

const PAGE_BYTES: u64 = 128;

fn indices(cache: &KvCache, group: KvGroup) -> Vec<u32> {
    cache.table(group).iter().map(|page| page.index.0).collect()
}

#[test]
fn growing_opens_as_many_pages_as_needed() {
    let mut pool = PagePool::new(100 * PAGE_BYTES);
    let mut cache = KvCache::new(shape(), PageKind::F16);
    // Logical length, pages of each group, tokens in the last page.
    for (grown, len, pages, last) in [(3, 3, 1, 3), (1, 4, 1, 4), (0, 4, 1, 4), (14, 18, 5, 2), (1, 19, 5, 3)] {
        let needed = cache.pages_needed(grown);
        let before = cache.footprint().global_pages + cache.footprint().window_pages;
        cache.grow(&mut pool, grown).unwrap();
        assert_eq!(cache.footprint().global_pages + cache.footprint().window_pages, before + needed);
        assert_eq!(cache.logical_len(), len);
        for group in cache.shape().groups() {
            assert_eq!(indices(&cache, group), (0..pages).collect::<Vec<_>>());
            assert_eq!(cache.table(group).last().unwrap().len, last);
            assert_eq!(cache.resident_tokens(group), len);
        }
        assert_eq!(pool.used_bytes(), u64::from(pages) * 4 * PAGE_BYTES);
    }
    assert_eq!(cache.open_page(), Some(PageIndex(4)));
    cache.release(&mut pool);
    assert_eq!(pool.used_bytes(), 0);
}
