use proptest::prelude::*;

use super::*;
use crate::encoding::Encoding;
use crate::page_kind::PageKind;
use crate::pins::RecentPages;
use crate::shape::LayerKind;

/// SmolLM2-135M with a window layer added: 30 x 3 global groups of 4,096-byte f16 pages.
fn smollm2() -> CacheShape {
    let layers = [vec![LayerKind::Global; 30], vec![LayerKind::Window(512)]].concat();
    CacheShape::new(layers, 3, 3, 64, 16).unwrap()
}

fn ratio(numerator: u64, denominator: u64) -> Budget {
    Budget::Fraction(Ratio::new(numerator, denominator).unwrap())
}

fn evict(numerator: u64, denominator: u64) -> Budget {
    Budget::Evict(Ratio::new(numerator, denominator).unwrap())
}

#[test]
fn bytes_to_share_out_are_counted_to_the_token() {
    let shape = CacheShape::new(vec![LayerKind::Global; 2], 3, 1, 64, 16).unwrap();
    let resolve = |text: &str| {
        let budget: Budget = text.parse().unwrap();
        let resolved = budget.resolve_in_bytes(&shape, PageKind::F16, 1500, &Pins::default()).unwrap();
        (resolved.bytes, resolved.raised)
    };
    // Keys and values of 64 halves in 6 groups: 1,536 bytes a token.
    assert_eq!(resolve("10%"), (150 * 1536, false));
    assert_eq!(resolve("evict:0.9"), (150 * 1536, false));
    assert_eq!(resolve("150tok"), (150 * 1536, false));
    assert_eq!(resolve("9pages"), (144 * 1536, false));
    assert_eq!(resolve("100001B"), (100_001, false));
    assert_eq!(resolve("1%"), (32 * 1536, true));
    assert_eq!(resolve("100%"), (u64::MAX, false));
}

#[test]
fn every_form_parses() {
    let cases = [
        ("64MiB", Budget::Bytes(64 << 20)),
        ("64mib", Budget::Bytes(64 << 20)),
        (" 64 MiB ", Budget::Bytes(64 << 20)),
        ("1.5GB", Budget::Bytes(1_500_000_000)),
        ("1.5GiB", Budget::Bytes(3 << 29)),
        ("100kB", Budget::Bytes(100_000)),
        ("3TiB", Budget::Bytes(3 << 40)),
        ("2TB", Budget::Bytes(2_000_000_000_000)),
        ("4096B", Budget::Bytes(4096)),
        ("512tok", Budget::Tokens(512)),
        ("512 tokens", Budget::Tokens(512)),
        ("1token", Budget::Tokens(1)),
        ("40pages", Budget::Pages(40)),
        ("1page", Budget::Pages(1)),
        ("20%", ratio(1, 5)),
        ("20 %", ratio(1, 5)),
        ("12.5%", ratio(1, 8)),
        ("0.2", ratio(1, 5)),
        (".2", ratio(1, 5)),
        ("0.20", ratio(1, 5)),
        ("1.0", ratio(1, 1)),
        ("1/5", ratio(1, 5)),
        (" 2 / 10 ", ratio(1, 5)),
        ("100%", ratio(1, 1)),
        ("250%", ratio(5, 2)),
        ("18446744073709551615B", Budget::Bytes(u64::MAX)),
        ("evict:0.9", evict(9, 10)),
        ("evict:90%", evict(9, 10)),
        (" Evict: 12.5 % ", evict(1, 8)),
        ("evict: 9 / 10", evict(9, 10)),
        ("evict:0.6666666666666667", evict(6_666_666_666_666_667, 10_000_000_000_000_000)),
        // kvpress's ratio of 0 compresses nothing.
        ("evict:0", ratio(1, 1)),
        ("evict:0.0%", ratio(1, 1)),
        ("evict:0/3", ratio(1, 1)),
    ];
    for (text, budget) in cases {
        assert_eq!(text.parse(), Ok(budget), "{text:?}");
    }
}

#[test]
fn what_is_no_budget_says_why() {
    let zero = |got: &str| BudgetParseError::Zero { got: got.into() };
    let negative = |got: &str| BudgetParseError::Negative { got: got.into() };
    let bare = |got: &str| BudgetParseError::BareInteger { got: got.into() };
    let unknown = |got: &str| BudgetParseError::Unknown { got: got.into() };
    let out_of_range = |got: &str| BudgetParseError::EvictOutOfRange { got: got.into() };
    let unrepresentable = |got: &str| BudgetParseError::Unrepresentable { got: got.into() };
    let cases = [
        zero("0"),
        zero("0%"),
        zero("0.0"),
        zero("0MiB"),
        zero("0tok"),
        zero("0/5"),
        zero("0.1B"),
        zero("0.0tok"),
        negative("-5%"),
        negative("-1tok"),
        negative("-0.5"),
        negative("-1/2"),
        bare("512"),
        bare("1"),
        unknown(""),
        unknown("%"),
        unknown("all"),
        unknown("64M"),
        unknown("64MiBs"),
        unknown("1/0"),
        unknown("1/x"),
        unknown("1/2/3"),
        unknown("1.2.3%"),
        unknown("."),
        unknown("20%%"),
        unknown("+5%"),
        unknown("1e3tok"),
        unknown("0x10tok"),
        unknown("NaN"),
        unknown("inf"),
        unknown("20\u{ff05}"),
        unknown("1.5/2"),
        unknown("99999999999999999999tok"),
        unrepresentable("1.5tok"),
        unrepresentable("2.5 pages"),
        unrepresentable("18446744073709551615KiB"),
        unrepresentable("0.0000000000000000000000001%"),
        out_of_range("evict:1"),
        out_of_range("evict:1.0"),
        out_of_range("evict:100%"),
        out_of_range("evict:9"),
        out_of_range("evict:250%"),
        out_of_range("evict:4/3"),
        out_of_range("evict:-0.1"),
        unknown("evict:"),
        unknown("evict:%"),
        unknown("evict:1/0"),
        unknown("evict:20tok"),
        unknown("evict:0tok"),
        unknown("evict:.9.9"),
        unknown("evict:0.5/1"),
        unknown("evict:evict:0.5"),
        unknown("evict"),
        unrepresentable("evict:0.00000000000000000000000001"),
    ];
    for expected in cases {
        let (BudgetParseError::Zero { got }
        | BudgetParseError::Negative { got }
        | BudgetParseError::BareInteger { got }
        | BudgetParseError::EvictOutOfRange { got }
        | BudgetParseError::Unknown { got }
        | BudgetParseError::Unrepresentable { got }) = expected.clone();
        let error = got.parse::<Budget>().unwrap_err();
        assert_eq!(error, expected);
        assert!(!error.to_string().contains('\n'));
    }
    let message = r#"a KV budget of "512" does not say what it counts: write 512tok, 512pages, 512MiB or 512%"#;
    assert_eq!("512".parse::<Budget>().unwrap_err().to_string(), message);
}

#[test]
fn budgets_resolve_as_the_specification_says() {
    let shape = smollm2();
    let pins = Pins::default();
    // Budget, prompt, pages per group.
    let cases = [
        // floor(0.2 * 1024) = 204 tokens = 12 pages.
        ("20%", 1024, 12),
        ("5%", 1024, 3),
        ("10%", 1024, 6),
        ("99%", 100, 6),
        // 409 tokens stay of 4,096.
        ("evict:0.9", 4096, 25),
        ("evict:90%", 1000, 6),
        ("evict:0.8", 1024, 12),
        ("512tok", 1, 32),
        ("527tok", 1, 32),
        ("40pages", 1, 40),
        // 1 MiB / 90 groups = 11,650 bytes = 2 pages.
        ("1MiB", 1, 2),
        ("64MiB", 1, 182),
    ];
    for (text, prompt_tokens, pages) in cases {
        let resolved = text.parse::<Budget>().unwrap().resolve(&shape, PageKind::F16, prompt_tokens, &pins).unwrap();
        let bytes = pages as u64 * 90 * 4096;
        assert_eq!(
            resolved,
            ResolvedBudget { pages_per_group: pages, bytes, raised: false, unlimited: false },
            "{text}"
        );
    }
}

#[test]
fn fractions_below_the_pins_are_raised() {
    let serving = Pins { sink_tokens: 4, recent_pages: RecentPages::Quarter };
    let wide = Pins { sink_tokens: 40, recent_pages: RecentPages::Count(4) };
    for (text, prompt_tokens, pins, pages, raised) in [
        ("1%", 1000, serving, 2, true),
        ("20%", 10, serving, 2, true),
        ("50%", 0, serving, 2, true),
        ("20%", 160, serving, 2, false),
        ("20%", 159, serving, 2, true),
        ("20%", 500, wide, 7, true),
        ("20%", 1000, wide, 12, false),
        ("evict:0.99", 1000, serving, 2, true),
        ("evict:0.9", 10, serving, 2, true),
        ("evict:0.9", 320, serving, 2, false),
    ] {
        let budget: Budget = text.parse().unwrap();
        assert_eq!(budget.check(&smollm2(), PageKind::F16, &pins), Ok(()));
        let resolved = budget.resolve(&smollm2(), PageKind::F16, prompt_tokens, &pins).unwrap();
        assert_eq!((resolved.pages_per_group, resolved.raised), (pages, raised), "{text} of {prompt_tokens}");
    }
}

#[test]
fn absolute_budgets_below_the_pins_are_refused() {
    let pins = Pins { sink_tokens: 4, recent_pages: RecentPages::Quarter };
    let message = |got: &str, pages: usize, smallest: &str| {
        format!(
            "a KV budget of {got} is {pages} page(s) per KV head, but the sink, recent and open pages need 2: the \
             smallest budget is {smallest}"
        )
    };
    // 2 pages x 90 groups x 4,096 bytes = 720 KiB.
    for (text, pages, smallest) in [
        ("31tok", 1, "32tok"),
        ("1tok", 0, "32tok"),
        ("1page", 1, "2pages"),
        ("719KiB", 1, "720KiB"),
        ("1B", 0, "720KiB"),
    ] {
        let budget: Budget = text.parse().unwrap();
        let error = budget.check(&smollm2(), PageKind::F16, &pins).unwrap_err();
        assert_eq!(error.to_string(), message(text, pages, smallest));
        assert_eq!(budget.resolve(&smollm2(), PageKind::F16, 1000, &pins), Err(error));
        // The budget it names is indeed enough, and holds no page more.
        let enough: Budget = smallest.parse().unwrap();
        assert_eq!(enough.check(&smollm2(), PageKind::F16, &pins), Ok(()));
        assert_eq!(enough.resolve(&smollm2(), PageKind::F16, 1000, &pins).unwrap().pages_per_group, 2);
    }
    // Zero has no text, but is no less refused when built.
    for zero in [Budget::Bytes(0), Budget::Pages(0), Budget::Tokens(0)] {
        assert!(zero.check(&smollm2(), PageKind::F16, &pins).is_err());
    }
}

#[test]
fn a_hundred_percent_is_unlimited() {
    for text in ["100%", "1.0", "7/7", "250%"] {
        let resolved =
            text.parse::<Budget>().unwrap().resolve(&smollm2(), PageKind::F16, 1000, &Pins::default()).unwrap();
        let expected = ResolvedBudget { pages_per_group: usize::MAX, bytes: u64::MAX, raised: false, unlimited: true };
        assert_eq!(resolved, expected);
    }
    let absolute = Budget::Pages(u64::MAX).resolve(&smollm2(), PageKind::F16, 10, &Pins::default()).unwrap();
    assert_eq!((absolute.pages_per_group, absolute.bytes, absolute.unlimited), (usize::MAX, u64::MAX, false));
}

#[test]
fn every_budget_is_a_part_of_a_prompt() {
    let part =
        |text: &str, tokens| text.parse::<Budget>().unwrap().of_prompt(&smollm2(), PageKind::F16, tokens).to_string();
    // A token is 23,040 bytes in 90 groups.
    for (text, expected) in [
        ("200tok", "20%"),
        ("10pages", "16%"),
        ("4608kB", "20%"),
        ("46080kB", "200%"),
        ("20%", "20%"),
        ("evict:0.9", "evict:0.9"),
    ] {
        assert_eq!(part(text, 1000), expected.parse::<Budget>().unwrap().to_string(), "{text}");
    }
    assert_eq!(part("200tok", 0), "200tok");
}

#[test]
fn bytes_without_a_global_layer_have_nothing_to_cap() {
    let windows = CacheShape::new(vec![LayerKind::Window(8); 2], 1, 1, 64, 16).unwrap();
    let error = Budget::Bytes(1 << 20).check(&windows, PageKind::F16, &Pins::default()).unwrap_err();
    assert_eq!(error.to_string(), "a KV budget of 1MiB has nothing to cap: no layer of the model is global");
}

fn any_budget() -> impl Strategy<Value = Budget> {
    prop_oneof![
        any::<u64>().prop_map(Budget::Bytes),
        (0_u64..1 << 24, 0_u32..40).prop_map(|(bytes, shift)| Budget::Bytes(bytes << shift)),
        any::<u64>().prop_map(Budget::Pages),
        any::<u64>().prop_map(Budget::Tokens),
        (1_u64.., 1_u64..).prop_map(|(numerator, denominator)| ratio(numerator, denominator)),
        (1_u64..100_000, 1_u64..100_000).prop_map(|(numerator, denominator)| ratio(numerator, denominator)),
        (1_u64.., 1_u64..).prop_filter("a part", |(a, b)| a != b).prop_map(|(a, b)| evict(a.min(b), a.max(b))),
        (2_u64..100_000).prop_flat_map(|b| (1..b, Just(b))).prop_map(|(a, b)| evict(a, b)),
    ]
}

proptest! {
    #[test]
    fn budgets_print_what_they_parse_from(budget in any_budget()) {
        let text = budget.to_string();
        match budget {
            Budget::Bytes(0) | Budget::Pages(0) | Budget::Tokens(0) => prop_assert!(text.parse::<Budget>().is_err()),
            _ => prop_assert_eq!(text.parse(), Ok(budget), "{}", text),
        }
    }

    #[test]
    fn any_text_is_a_budget_or_an_error(text in ".{0,12}", soup in "(evict:)?[-0-9./% MiBtokpages]{0,10}") {
        for text in [text, soup] {
            if let Ok(budget) = text.parse::<Budget>() {
                prop_assert_eq!(budget.to_string().parse(), Ok(budget));
            }
        }
    }

    #[test]
    fn a_resolved_budget_never_exceeds_what_was_asked(
        budget in any_budget(), prompt_tokens in 0_usize..200_000, page_size in 1_usize..257, num_layers in 1_usize..40,
        num_kv_heads in 1_usize..9, sink_tokens in 0_usize..20,
    ) {
        let shape = CacheShape::new(vec![LayerKind::Global; num_layers], num_kv_heads, 2, 64, page_size).unwrap();
        let pins = Pins { sink_tokens, recent_pages: RecentPages::Quarter };
        let num_groups = (num_layers * num_kv_heads) as u128;
        let page_bytes = u128::from(PageKind::F16.page_bytes(&shape));
        let smallest = pins.smallest_pages(page_size);
        let Ok(resolved) = budget.resolve(&shape, PageKind::F16, prompt_tokens, &pins) else {
            prop_assert!(budget.check(&shape, PageKind::F16, &pins).is_err());
            return Ok(());
        };
        let pages = resolved.pages_per_group as u128;
        prop_assert!(resolved.pages_per_group >= smallest);
        prop_assert_eq!(u128::from(resolved.bytes), (pages * num_groups * page_bytes).min(u128::from(u64::MAX)));
        // One page more in each group would be too many.
        match budget {
            Budget::Bytes(bytes) => {
                prop_assert!(pages * num_groups * page_bytes <= u128::from(bytes));
                prop_assert!((pages + 1) * num_groups * page_bytes > u128::from(bytes));
            }
            Budget::Pages(asked) => prop_assert_eq!(pages, u128::from(asked)),
            Budget::Tokens(tokens) => {
                prop_assert!(pages * page_size as u128 <= u128::from(tokens));
                prop_assert!((pages + 1) * page_size as u128 > u128::from(tokens));
            }
            Budget::Fraction(_) if resolved.unlimited => prop_assert!(!resolved.raised),
            Budget::Fraction(fraction) => {
                let asked = u128::from(fraction.floor_of(prompt_tokens as u64)) / page_size as u128;
                prop_assert_eq!(pages, asked.max(smallest as u128));
                prop_assert_eq!(resolved.raised, asked < smallest as u128);
            }
            Budget::Evict(part) => {
                let asked = u128::from(part.rest_of(prompt_tokens as u64)) / page_size as u128;
                prop_assert_eq!(pages, asked.max(smallest as u128));
                prop_assert_eq!(resolved.raised, asked < smallest as u128);
            }
        }
    }
}

#[test]
fn coded_caches_count_what_their_pages_can_weigh() {
    let (shape, pins) = (smollm2(), Pins::default());
    let stored = PageKind::of(Encoding::Tq4);
    let cost = |max_written| PageCost { written: PageKind::F16, stored, max_written };
    let resolve = |budget: Budget, cost: PageCost| budget.resolve(&shape, cost, 1024, &pins).unwrap();
    // The same 12 pages of a fifth of 1,024 tokens, of which 4 may still be 16-bit floats.
    let fifth = resolve(ratio(1, 5), cost(4));
    assert_eq!((fifth.pages_per_group, fifth.bytes), (12, 90 * (4 * 4096 + 8 * 1088)));
    // The same bytes keep three times as many pages as codes: 4 and the 32 that fit beside them into 48 KiB.
    let bytes = Budget::Bytes(90 * 12 * 4096);
    assert_eq!(resolve(bytes, PageKind::F16.into()).pages_per_group, 12);
    assert_eq!(resolve(bytes, cost(usize::MAX)).pages_per_group, 12, "nothing is encoded yet");
    let coded = resolve(bytes, cost(4));
    assert_eq!(coded.pages_per_group, 4 + (12 - 4) * 4096 / 1088);
    assert!(coded.bytes <= 90 * 12 * 4096 && coded.bytes + 90 * 1088 > 90 * 12 * 4096);
    let refused = Budget::Bytes(90 * 8000).check(&shape, cost(4), &pins).unwrap_err();
    assert!(matches!(refused, BudgetError::BelowPins { smallest: Budget::Bytes(737_280), pages: 1, .. }), "{refused}");
}
