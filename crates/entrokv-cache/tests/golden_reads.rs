//! What a step reads and which channels of keys go, against an independent numpy implementation (`tools/golden/policies`).

#![allow(clippy::unwrap_used)] // a file that does not read is a failed test

#[path = "golden/layer.rs"]
mod golden_layer;

use entrokv_cache::{BoundHeads, KeyChannels, KeyRanges, PageJudge, PageReads, channel_scores, key_range};
use golden_layer::{GoldenLayer, case, floats, golden, indices};

const PAGE_SIZE: usize = 8;

/// Ranges of the pages of `kv_head`, the last of them partly filled.
fn ranges(layer: &GoldenLayer, kv_head: usize) -> KeyRanges {
    let mut ranges = KeyRanges::new(layer.head_dim);
    for (page, keys) in layer.vectors("k", kv_head).chunks(PAGE_SIZE * layer.head_dim).enumerate() {
        ranges.push((page * PAGE_SIZE) as u32, &key_range(keys, layer.head_dim));
    }
    ranges
}

/// The last query of each head that reads `kv_head`.
fn queries(layer: &GoldenLayer, kv_head: usize) -> Vec<f32> {
    let heads = kv_head * layer.group_size..(kv_head + 1) * layer.group_size;
    heads.flat_map(|head| layer.vectors("q", head).split_off((layer.len - 1) * layer.head_dim)).collect()
}

#[test]
fn pages_are_bounded_and_read_as_by_the_reference() {
    let (layer, file) = (GoldenLayer::read(), golden("quest"));
    let bounds = case(&file, "bounds");
    let mut chosen = 0;
    for (name, heads) in [("group maximum", BoundHeads::Max), ("group sum", BoundHeads::Sum)] {
        let case = case(&file, name);
        for kv_head in 0..layer.num_kv_heads {
            let (ranges, queries) = (ranges(&layer, kv_head), queries(&layer, kv_head));
            for place in 0..ranges.first_positions().len() {
                let (low, high) = ranges.at(place);
                assert_eq!(
                    (low, high),
                    (&floats(&bounds["low"][kv_head][place])[..], &floats(&bounds["high"][kv_head][place])[..])
                );
            }
            let reads = PageReads { tokens: 0, first_layer: 0, by: PageJudge::Bounds(heads) };
            let scores = reads.scores(&queries, layer.head_dim, 0.25, &ranges);
            let expected = floats(&case["scores"][kv_head]);
            assert_eq!(scores.len(), expected.len());
            for (score, expected) in scores.iter().zip(&expected) {
                assert!((score - expected).abs() <= 1e-5 * expected.abs().max(1.0), "{name}: {score} for {expected}");
            }
            let points = case["kept"].as_array().unwrap();
            for point in points.iter().filter(|point| point["force_last"] == true) {
                let pages = point["pages"].as_u64().unwrap() as usize;
                let reads = PageReads { tokens: pages * PAGE_SIZE, ..reads };
                let read = reads.choose(&scores, &ranges, ranges.first_positions(), PAGE_SIZE);
                assert_eq!(read, indices(&point["selected"][kv_head]), "{name}, {pages} pages");
                chosen += 1;
            }
        }
    }
    assert_eq!(chosen, 8);
}

/// Where one query head reads a KV head the group's bound is its own: the official form.
#[test]
fn bounds_of_single_heads_are_those_of_the_reference() {
    let (layer, file) = (GoldenLayer::read(), golden("quest"));
    let expected = &case(&file, "query heads")["scores"];
    let reads = PageReads { tokens: 24, first_layer: 0, by: PageJudge::Bounds(BoundHeads::Max) };
    for kv_head in 0..layer.num_kv_heads {
        let ranges = ranges(&layer, kv_head);
        for (head, query) in queries(&layer, kv_head).chunks(layer.head_dim).enumerate() {
            let scores = reads.scores(query, layer.head_dim, 0.25, &ranges);
            let expected = floats(&expected[kv_head * layer.group_size + head]);
            for (score, expected) in scores.iter().zip(&expected) {
                assert!((score - expected).abs() <= 1e-5 * expected.abs().max(1.0), "{score} for {expected}");
            }
        }
    }
}

#[test]
fn channels_are_weighed_and_dropped_as_by_the_reference() {
    let (layer, file) = (GoldenLayer::read(), golden("think"));
    let case = case(&file, "channels");
    let (d, window) = (layer.head_dim, case["options"]["window"].as_u64().unwrap() as usize);
    for kv_head in 0..layer.num_kv_heads {
        let squares_of = |head: usize| {
            let mut squares = vec![0.0; d];
            for query in layer.vectors("q", head).chunks(d).skip(layer.len - window) {
                squares.iter_mut().zip(query).for_each(|(sum, q)| *sum += f64::from(*q) * f64::from(*q));
            }
            squares
        };
        let heads = kv_head * layer.group_size..(kv_head + 1) * layer.group_size;
        let squares: Vec<f64> = heads.flat_map(squares_of).collect();
        let scores = channel_scores(&squares, window, &layer.vectors("k", kv_head), d);
        let expected = floats(&case["scores"][kv_head]);
        assert_eq!((scores.len(), expected.len()), (d, d));
        for (score, expected) in scores.iter().zip(expected) {
            assert!((score - f64::from(expected)).abs() <= 1e-6 * f64::from(expected), "{score} for {expected}");
        }
        let points = case["kept"].as_array().unwrap();
        assert_eq!(points.len(), 3);
        for point in points {
            let fraction = point["dropped_fraction"].as_f64().unwrap();
            let dropped = KeyChannels { window, fraction, recent: 0 }.dropped(&scores);
            assert_eq!(dropped, indices(&point["dropped"][kv_head]), "{fraction}");
        }
    }
}

/// RocketKV's second stage over pages: fewer channels than there are, and all of them.
#[test]
fn pages_are_weighed_in_few_channels_as_by_the_reference() {
    let (layer, file) = (GoldenLayer::read(), golden("rocket-kv"));
    let mut compared = 0;
    for channels in [4, 16] {
        let case = case(&file, &format!("stage 2, pages of 8, {channels} channels"));
        let reads = PageReads { tokens: 24, first_layer: 0, by: PageJudge::Channels(channels) };
        for kv_head in 0..layer.num_kv_heads {
            let (ranges, queries) = (ranges(&layer, kv_head), queries(&layer, kv_head));
            let scores = reads.scores(&queries, layer.head_dim, 0.25, &ranges);
            let expected = floats(&case["scores"][kv_head]);
            assert_eq!(scores.len(), expected.len());
            for (score, expected) in scores.iter().zip(&expected) {
                assert!((score - expected).abs() <= 1e-5 * expected.abs(), "{channels}: {score} for {expected}");
                compared += 1;
            }
            for point in case["kept"].as_array().unwrap() {
                let reads = PageReads { tokens: point["pages"].as_u64().unwrap() as usize * PAGE_SIZE, ..reads };
                let read = reads.choose(&scores, &ranges, ranges.first_positions(), PAGE_SIZE);
                assert_eq!(read, indices(&point["selected"][kv_head]), "{channels} channels");
            }
        }
    }
    assert_eq!(compared, 24);
}
